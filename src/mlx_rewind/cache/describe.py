"""What a model keeps between tokens, and how mlx-rewind takes it back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, RotatingKVCache, make_prompt_cache

from .retrace import RetraceUndo
from .round import check
from .undo import UNDOS


@dataclass(frozen=True)
class CacheRecord:
    """One cache of a model.

    layer       index in the prompt cache; "3[0]" is the first child of a CacheList at 3
    cache       class name
    mechanism   trim, cut, ring, chunk or retrace
    slots       arrays it holds
    bytes       per token for growing caches, in all for recurrent slots and full rings
    growth      "per token" or "fixed"
    """

    layer: str
    cache: str
    mechanism: str
    slots: int
    bytes: int
    growth: str


def inspect(model: nn.Module) -> list[CacheRecord]:
    """Describes every cache of `model`, in order. Computes nothing: one forward stays lazy.

    Raises `UnsupportedCacheError` or `UnsupportedModelError` where a round would.
    """
    cache = make_prompt_cache(model)
    leaves = check(model, cache)
    model(mx.zeros((1, 2), mx.int32), cache=cache)
    return [_record(label, entry) for label, entry in leaves]


def _record(label: str, entry: Any) -> CacheRecord:
    name = type(entry).__name__
    if type(entry) is ArraysCache:
        size = entry.nbytes
        return CacheRecord(label, name, RetraceUndo.mechanism, len(entry.cache), size, "fixed")
    mechanism = UNDOS[type(entry)].mechanism  # type: ignore[attr-defined]
    if entry.keys is None:
        return CacheRecord(label, name, mechanism, 2, 0, "fixed")
    per_token = sum(x.nbytes // x.shape[2] for x in (entry.keys, entry.values))
    if type(entry) is RotatingKVCache:
        return CacheRecord(label, name, mechanism, 2, per_token * entry.max_size, "fixed")
    return CacheRecord(label, name, mechanism, 2, per_token, "per token")
