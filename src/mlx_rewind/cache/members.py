"""Rows of a batch: from stock one-row caches, together, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from ..errors import UnsupportedCacheError
from .rows import RowsCache, RowsKVCache, RowsQuantizedKVCache, RowsRingCache
from .undo import Undo


class RowsUndo(Undo):
    """The lengths alone decide what is valid."""

    mechanism: ClassVar[str] = "rows"

    def __init__(self, cache: RowsCache, single_steps: int | None = None) -> None:
        self._cache, self._start = cache, cache.lengths

    def seal(self) -> int:
        return self._cache.lengths[0] - self._start[0]

    def rewind(self, kept: int) -> None:
        self.rewind_rows([kept] * len(self._start))

    def rewind_rows(self, kept: Sequence[int]) -> None:
        self._cache.lengths = [n + k for n, k in zip(self._start, kept, strict=True)]


#: The classes of caches of rows.
ROWS: tuple[type[RowsCache], ...] = (RowsKVCache, RowsQuantizedKVCache, RowsRingCache)


def num_rows(entry: Any) -> int | None:
    """Rows in a cache of rows or in a recurrent cache; None if it does not tell."""
    if isinstance(entry, RowsCache):
        return len(entry.lengths)
    slots = getattr(entry, "cache", None)
    return next((slot.shape[0] for slot in slots or [] if slot is not None), None)


def rows_of(cache: Any, slack: int) -> Any:
    """A cache of one row that others may join, from a stock one-row cache.

    slack    the longest window that will be verified, for sliding windows

    Raises `UnsupportedCacheError` for a class that has no rows.
    """
    kind = type(cache)
    if kind is KVCache:
        return RowsKVCache(cache)
    if kind is QuantizedKVCache:
        return RowsQuantizedKVCache(cache)
    if kind is RotatingKVCache and cache.keep == 0:
        return RowsRingCache(cache, slack)
    if kind is CacheList:
        return CacheList(*(rows_of(child, slack) for child in cache.caches))
    if kind is ArraysCache:
        rows = ArraysCache(len(cache.cache))
        rows.cache = list(cache.cache)
        return rows
    what = "a RotatingKVCache with keep" if kind is RotatingKVCache else f"a {kind.__name__}"
    raise UnsupportedCacheError(f"{what} cannot be a row of a batch")


def kinds_of(cache: Sequence[Any]) -> tuple[Any, ...]:
    """What a prompt cache is made of; rows can join where that is the same."""
    kinds: list[Any] = []
    for entry in cache:
        if isinstance(entry, CacheList):
            kinds.append(kinds_of(entry.caches))
        else:
            kind = type(entry).stock if isinstance(entry, RowsCache) else type(entry)
            kinds.append((kind, getattr(entry, "bits", None), getattr(entry, "group_size", None)))
    return tuple(kinds)


def join(cache: Sequence[Any], other: Sequence[Any]) -> None:
    """Appends the rows of another prompt cache of rows.

    Raises ValueError for recurrent rows of which only some hold a token.
    """
    for ours, theirs in zip(cache, other, strict=True):
        if isinstance(ours, CacheList):
            join(ours.caches, theirs.caches)
        elif isinstance(ours, ArraysCache):
            slots: Any = [_stack(a, b) for a, b in zip(ours.cache, theirs.cache, strict=True)]
            ours.cache = slots
        else:
            ours.join(theirs)


def _stack(a: mx.array | None, b: mx.array | None) -> mx.array | None:
    """One slot of both. What an empty one stands for is known to the layer only."""
    if (a is None) != (b is None):
        raise ValueError("rows without a token cannot join rows with some: feed them first")
    return None if a is None or b is None else mx.concatenate([a, b])


def keep(cache: Sequence[Any], rows: Sequence[int]) -> None:
    """Leaves only these rows in a prompt cache of rows."""
    for entry in cache:
        if isinstance(entry, CacheList):
            keep(entry.caches, rows)
        elif isinstance(entry, ArraysCache):
            index = mx.array(list(rows), mx.int32)
            entry.cache = [slot if slot is None else slot[index] for slot in entry.cache]
        else:
            entry.keep(rows)


def extract(cache: Sequence[Any], row: int) -> list[Any]:
    """A stock one-row prompt cache with the tokens of a row."""
    return [_extract(entry, row) for entry in cache]


def _extract(entry: Any, row: int) -> Any:
    if isinstance(entry, CacheList):
        return CacheList(*extract(entry.caches, row))
    if isinstance(entry, ArraysCache):
        one = ArraysCache(len(entry.cache))
        one.cache = [slot if slot is None else slot[row : row + 1] for slot in entry.cache]
        return one
    return entry.extract(row)
