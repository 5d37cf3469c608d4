"""Bytes that the caches of a request may grow to, known before it starts."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from .cache.describe import CacheRecord, describe, inspect
from .cache.probe import walk
from .draft.auto import parts
from .draft.model import DraftModel
from .draft.mtp import MTP


def bytes_for(model: nn.Module, drafter: Any, length: int, slack: int) -> int:
    """Bytes of a row of `length` tokens, those of its draft model or heads included.

    slack    slots that a ring of a batch has beyond its window
    """
    total = _of_model(model, length, slack)
    for part in parts(drafter):
        if isinstance(part, DraftModel):
            total += _of_model(part.model, length, slack)
        for head in part.heads if isinstance(part, MTP) else ():
            cache = head.trial_cache()
            total += sum(_of(*pair, length, slack) for pair in _pairs(cache, describe(cache)))
    return total


def _of_model(model: nn.Module, length: int, slack: int) -> int:
    pairs = _pairs(make_prompt_cache(model), inspect(model))
    return sum(_of(entry, record, length, slack) for entry, record in pairs)


def _pairs(cache: list[Any], records: list[CacheRecord]) -> list[tuple[Any, CacheRecord]]:
    return [(entry, record) for (_, entry), record in zip(walk(cache), records, strict=True)]


def _of(entry: Any, record: CacheRecord, length: int, slack: int) -> int:
    if record.growth == "per token":  # buffers grow by steps
        return record.bytes * -(-length // KVCache.step) * KVCache.step
    if isinstance(entry, RotatingKVCache):
        return record.bytes * (entry.max_size + slack) // entry.max_size
    return record.bytes
