"""The target model: its forward, its vocabulary, and how exact a verify of it is."""

from __future__ import annotations

import sys
from functools import cache as memoize
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.ssm import ssm_update

from .cache.attach import walk
from .types import TargetOutput

#: The levels of exactness, strictest first; see docs/exactness.md.
BITWISE, TOKEN, NEAR_TIE = "bitwise", "token", "near-tie"


def forward(model: nn.Module, window: mx.array, cache: list[Any]) -> TargetOutput:
    """Feeds `window` [B, S] and returns the logits [B, S, V]. Mutates `cache`."""
    return TargetOutput(model(window, cache=cache))


def vocab_size(model: nn.Module) -> int:
    """Entries of the model's logits. Read off a forward that stays lazy."""
    logits = model(mx.zeros((1, 1), mx.int32), cache=make_prompt_cache(model))
    return int(logits.shape[-1])


def exactness(model: nn.Module, cache: list[Any]) -> str:
    """The level at which speculative and plain decoding of `model` agree on this machine.

    bitwise    tokens, logprobs and caches are equal to the bit
    token      tokens are equal, values agree to 1e-5: a layer whose window formula is not its
               step formula, or a window cache that is read in another order
    near-tie   kernels sum windows in another order; a token may differ only at a near-tie
    """
    if not row_invariant():
        return NEAR_TIE
    windowed = any(type(entry) in (RotatingKVCache, ChunkedKVCache) for _, entry in walk(cache))
    return TOKEN if windowed or _has_window_formula(model) else BITWISE


def _has_window_formula(model: nn.Module) -> bool:
    """Whether a layer computes a window otherwise than single steps.

    These are, in mlx-lm: `ssm_update` (a window as one matrix product), and latent attention, which
    projects the query of a single step but the keys and values of a window (`MultiLinear`).
    """
    files = {type(module).__module__ for module in model.modules()}
    ssm = any(vars(sys.modules[name]).get("ssm_update") is ssm_update for name in files)
    return ssm or any(isinstance(module, MultiLinear) for module in model.modules())


@memoize
def row_invariant() -> bool:
    """Whether this machine's matmul gives a row the same bits alone and in a window.

    Measured once per process, on the CPU only: GPU kernels promise nothing of the kind.
    """
    if mx.default_device() != mx.Device(mx.cpu):
        return False
    x, w = (mx.sin(mx.arange(rows * 512) * 0.7).reshape(rows, 512) for rows in (8, 512))
    alone = mx.concatenate([x[i : i + 1] @ w.T for i in range(8)])
    return bool(mx.array_equal(x @ w.T, alone))
