"""The target model: its forward, its vocabulary, and how exact a verify of it is."""

from __future__ import annotations

from functools import cache as memoize
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.mla import MultiLinear

from .cache.probe import walk
from .cache.slots import is_own_class
from .cache.undo import stock_class
from .errors import UnsupportedCacheError
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


def check_quantizable(model: nn.Module, cache: list[Any], group_size: int, bits: int) -> None:
    """Refuses what would fail only when the cache is due to be quantised, tokens later.

    Raises `UnsupportedCacheError` for a sliding window and for a model whose attention cannot read
    a quantised cache, ValueError for sizes that MLX lacks or that do not divide the model's heads.
    """
    if any(type(entry) is RotatingKVCache for entry in cache):
        raise UnsupportedCacheError(
            "kv_bits needs caches that can be quantised; a RotatingKVCache (sliding window) "
            "cannot be. Leave kv_bits out for this model."
        )
    if bits not in (2, 4, 8) or group_size not in (32, 64, 128):
        raise ValueError(
            f"kv_bits must be 2, 4 or 8 and kv_group_size 32, 64 or 128, "
            f"got {bits} and {group_size}"
        )
    probe = make_prompt_cache(model)
    model(mx.zeros((1, 1), mx.int32), cache=probe)
    for entry in probe:
        if type(entry) is KVCache and entry.keys is not None:
            heads = (entry.keys.shape[-1], entry.values.shape[-1])  # type: ignore[union-attr]
            odd = next((size for size in heads if size % group_size), None)
            if odd is not None:
                raise ValueError(f"kv_group_size {group_size} does not divide the head size {odd}")
    maybe_quantize_kv_cache(probe, 0, group_size, bits)
    try:
        model(mx.zeros((1, 2), mx.int32), cache=probe)
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise UnsupportedCacheError(
            f"this model cannot read a quantised cache in mlx-lm ({error}). Leave kv_bits out."
        ) from error


def exactness(model: nn.Module, cache: list[Any]) -> str:
    """The level at which speculative and plain decoding of `model` agree on this machine.

    bitwise    tokens, logprobs and caches are equal to the bit
    token      tokens are equal, values agree to 1e-5: a layer whose window formula is not its
               step formula, or a sliding window that is read in another order
    near-tie   windows round differently, by the precision of the kernels or of the weights, or
               before a cache rounds what it stores (deepseek_v41): a token may differ where the
               two best logits are within that rounding
    """
    if not row_invariant():
        return NEAR_TIE
    kinds = {stock_class(entry) for _, entry in walk(cache)}
    if any(is_own_class(kind) for kind in kinds):
        return NEAR_TIE
    if RotatingKVCache not in kinds and not _has_window_formula(model):
        return BITWISE
    return TOKEN if _is_float32(model) else NEAR_TIE


def _is_float32(model: nn.Module) -> bool:
    weights: Any = tree_flatten(model.parameters())
    floats = {x.dtype for _, x in weights if mx.issubdtype(x.dtype, mx.floating)}
    return floats == {mx.float32}


def _has_window_formula(model: nn.Module) -> bool:
    """Whether a layer computes a window otherwise than single steps.

    That is latent attention (`MultiLinear`): it projects the query of a single step, but the keys
    and values of a window. Recurrent layers of that kind are recorded by steps (`cache.retrace`).
    """
    return any(isinstance(module, MultiLinear) for module in model.modules())


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
