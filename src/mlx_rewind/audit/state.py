"""What a prompt cache holds, as labelled arrays, and how far two of them are apart.

Only what a later query can see counts: buffers may hold more, in an order of their own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ChunkedKVCache, QuantizedKVCache, RotatingKVCache

from ..cache.probe import walk
from ..cache.slots import is_recurrent, slots_of


class Part(NamedTuple):
    """One array of a cache: a slot of a recurrent one; keys, values or offset of an other."""

    layer: str
    slot: str


def clone(cache: list[Any]) -> list[Any]:
    """A copy of a prompt cache that shares no array object with it."""
    return copy.deepcopy(cache)


def parts(cache: list[Any]) -> dict[Part, mx.array]:
    """All that is visible in a prompt cache, in time order."""
    return {
        Part(layer, f"{type(entry).__name__} {slot}"): array
        for layer, entry in walk(cache)
        for slot, array in _slots(entry)
    }


def _slots(entry: Any) -> Iterator[tuple[str, mx.array]]:
    if is_recurrent(entry):
        for name, value in slots_of(entry).items():
            yield f"slot {name}", mx.zeros((0,)) if value is None else mx.array(value)
        return
    yield "offset", mx.array(entry.offset)
    if entry.keys is not None:
        for side in ("keys", "values"):
            yield from _flat(side, _valid(entry, vars(entry)[side]))


def _flat(side: str, value: Any) -> list[tuple[str, mx.array]]:
    flat: Any = tree_flatten({side: value})
    return flat


def _valid(entry: Any, side: Any) -> Any:
    """The entries of one side that queries see, oldest first."""
    if isinstance(entry, RotatingKVCache):
        ordered: mx.array = entry._temporal_order(side)
        size, keep = ordered.shape[2], entry.keep
        excess = size - min(entry.offset, entry.max_size)
        if excess <= 0:
            return ordered
        return mx.concatenate([ordered[..., :keep, :], ordered[..., keep + excess :, :]], axis=2)
    if isinstance(entry, QuantizedKVCache):
        codes, scales, biases = (x[..., : entry.offset, :] for x in side)
        size, bits = entry.group_size, entry.bits
        return mx.dequantize(codes, scales, biases, group_size=size, bits=bits)
    if isinstance(entry, ChunkedKVCache):
        end = entry.offset - entry.start_position
        return side[..., max(0, end - entry.chunk_size) : end, :]
    return side[..., : entry.offset, :]


def distances(ours: dict[Part, mx.array], theirs: dict[Part, mx.array]) -> dict[Part, float]:
    """Largest difference in each array, over the largest magnitude in it; infinite for arrays of
    other shapes or dtypes, for whole numbers that differ, and for nan against a number."""
    lazy = {
        part: _distance(ours[part], theirs[part])
        for part in theirs
        if part in ours and ours[part].shape == theirs[part].shape
    }
    mx.eval(list(lazy.values()))
    values: dict[Part, Any] = {part: value.item() for part, value in lazy.items()}
    found = {part: float(value) for part, value in values.items()}
    missing = {part: math.inf for part in ours.keys() | theirs.keys() if part not in lazy}
    return {part: math.inf if math.isnan(x) else x for part, x in (found | missing).items()}


def _distance(x: mx.array, y: mx.array) -> mx.array:
    if x.size == 0:
        return mx.array(0.0)
    if x.dtype != y.dtype:
        return mx.array(mx.inf)
    if not mx.issubdtype(x.dtype, mx.floating):
        return mx.where(mx.array_equal(x, y), 0.0, mx.inf)
    return relative(x, y)


def relative(x: mx.array, y: mx.array) -> mx.array:
    """max |x - y| / max |y|, as a lazy scalar; equal infinities and nans count as equal."""
    x, y = x.astype(mx.float32), y.astype(mx.float32)
    same = mx.logical_or(x == y, mx.logical_and(mx.isnan(x), mx.isnan(y)))
    largest = mx.where(mx.abs(y) < mx.inf, mx.abs(y), 0).max()
    return mx.where(same, 0, mx.abs(x - y)).max() / mx.maximum(largest, 1e-30)
