"""What a model keeps between tokens, and how mlx-rewind takes it back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, RotatingKVCache, make_prompt_cache

from .ragged import why_row_by_row
from .retrace import RetraceUndo
from .round import check
from .slots import is_recurrent, slots_of
from .undo import UNDOS


@dataclass(frozen=True)
class CacheRecord:
    """One cache of a model.

    layer       index in the prompt cache
    child       index in a CacheList, None for a cache that is not in one
    cache       class name
    mechanism   trim, cut, ring, chunk or retrace
    slots       arrays it holds
    bytes       per token for growing caches, in all for recurrent slots and full rings
    growth      "per token" or "fixed"
    batched     "together": rows of a batch share a forward; "row by row": they cannot
    """

    layer: int
    cache: str
    mechanism: str
    slots: int
    bytes: int
    growth: str
    child: int | None = None
    batched: str = "together"


def inspect(model: nn.Module) -> list[CacheRecord]:
    """Describes every cache of `model`, in order. Computes nothing: one forward stays lazy.

    Raises `UnsupportedCacheError` or `UnsupportedModelError` where a round would.
    """
    cache = make_prompt_cache(model)
    check(model, cache)
    model(mx.zeros((1, 2), mx.int32), cache=cache)
    batched = "together" if why_row_by_row(model) is None else "row by row"
    return [replace(record, batched=batched) for record in describe(cache)]


def describe(cache: list[Any]) -> list[CacheRecord]:
    """One record per cache object, after a forward that gave them their shapes."""
    records = []
    for layer, entry in enumerate(cache):
        if type(entry) is CacheList:
            records += [_record(layer, leaf, child) for child, leaf in enumerate(entry.caches)]
        else:
            records.append(_record(layer, entry))
    return records


def _record(layer: int, entry: Any, child: int | None = None) -> CacheRecord:
    name = type(entry).__name__
    if is_recurrent(entry):
        mechanism, slots = RetraceUndo.mechanism, len(slots_of(entry))
        return CacheRecord(layer, name, mechanism, slots, entry.nbytes, "fixed", child)
    mechanism = UNDOS[type(entry)].mechanism
    if entry.keys is None:
        return CacheRecord(layer, name, mechanism, 2, 0, "fixed", child)
    per_token = sum(x.nbytes // x.shape[2] for x in (entry.keys, entry.values))
    if type(entry) is RotatingKVCache:
        size = per_token * entry.max_size
        return CacheRecord(layer, name, mechanism, 2, size, "fixed", child)
    return CacheRecord(layer, name, mechanism, 2, per_token, "per token", child)
