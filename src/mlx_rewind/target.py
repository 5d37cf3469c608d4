"""The target model: its forward, its vocabulary, and how exact a verify of it is."""

from __future__ import annotations

from functools import cache as memoize
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, RotatingKVCache, make_prompt_cache

from .cache.retrace import attach, walk
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
               step formula (`ssm_update`), or a window cache that is read in another order
    near-tie   kernels sum windows in another order; a token may differ only at a near-tie
    """
    if not row_invariant():
        return NEAR_TIE
    entries = [entry for _, entry in walk(cache)]
    if any(type(entry) in (RotatingKVCache, ChunkedKVCache) for entry in entries):
        return TOKEN
    recurrent = any(type(entry) is ArraysCache for entry in entries)
    return TOKEN if recurrent and attach(model).block_formula else BITWISE


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
