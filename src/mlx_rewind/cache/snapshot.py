"""What a store keeps of a prompt cache, in memory of its own.

    growing caches    pages: keys and values of a range of tokens, cut from any length
    all others        a state: what the cache holds at one boundary; it cannot be cut

    boundary k    pages of tokens 0..k-1 of every growing cache, and the state of every other one

Rings and chunks are kept in time order, as a prefill would leave them, and no longer than any query
can see.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from ..errors import UnsupportedCacheError
from .probe import walk
from .retrace import LOG, is_recorded
from .slots import is_own_class, is_recurrent, note_position, position, set_slots, slots_of
from .undo import stock_class

#: The classes whose contents can be cut at any token, and the settings that tell two of them apart.
_GROWING: dict[type, tuple[str, ...]] = {
    KVCache: (),
    ConcatenateKVCache: (),
    QuantizedKVCache: ("group_size", "bits"),
}
_WINDOWS: dict[type, tuple[str, ...]] = {
    RotatingKVCache: ("max_size", "keep"),
    ChunkedKVCache: ("chunk_size",),
}

#: Arrays below this size are copied by a gather: `mx.contiguous` may keep 16 KiB more alive.
_SMALL = 1 << 16

#: Keys and values of a range of tokens, [1, heads, tokens, size] each; () for an unused cache.
Pages = tuple[mx.array, ...]


@dataclass(frozen=True)
class LeafKind:
    """Class and settings of one cache object: snapshots fit only the same.

    label       its place, as `probe.walk` names it
    settings    names and values, in order
    """

    label: str
    name: str
    settings: tuple[tuple[str, int], ...] = ()

    @property
    def is_growing(self) -> bool:
        return any(self.name == kind.__name__ for kind in _GROWING)

    @property
    def bits(self) -> int | None:
        return dict(self.settings).get("bits")


@dataclass(frozen=True)
class State:
    """What a cache that cannot be cut holds at a boundary: arrays, and its other attributes."""

    arrays: dict[str, mx.array] = field(default_factory=dict)
    numbers: dict[str, int | None] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.arrays.values())


def kinds_of(cache: list[Any]) -> tuple[LeafKind, ...]:
    """The kinds of all caches, children of a `CacheList` in its place.

    Raises `UnsupportedCacheError` for a class of which no snapshot can be taken.
    """
    return tuple(_kind(label, entry) for label, entry in walk(cache))


def _kind(label: str, entry: Any) -> LeafKind:
    kind = stock_class(entry)
    settings = _GROWING.get(kind, _WINDOWS.get(kind))
    if settings is not None:
        pairs = tuple((name, int(vars(entry)[name])) for name in settings)
        return LeafKind(label, kind.__name__, pairs)
    if kind is ArraysCache:
        return LeafKind(label, kind.__name__, (("slots", len(entry.cache)),))
    if is_own_class(kind):
        return LeafKind(label, f"{kind.__module__}.{kind.__qualname__}")
    raise UnsupportedCacheError(f"cache {label} is a {kind.__name__}, which cannot be stored")


def check_whole(cache: list[Any], tokens: int) -> None:
    """Refuses a prompt cache that is not one row of `tokens` tokens, or not between two rounds.

    Raises `UnsupportedCacheError` that names the cache and both numbers.
    """
    for label, entry in walk(cache):
        name = stock_class(entry).__name__
        if is_recorded(entry) or LOG in vars(entry):
            raise UnsupportedCacheError(
                f"cache {label} ({name}) is in an open Round or speculating: end that first"
            )
        if isinstance(entry, ArraysCache) and (
            entry.left_padding is not None or entry.lengths is not None
        ):
            raise UnsupportedCacheError(f"cache {label} ({name}) belongs to a batch: one row only")
        held = position(entry) if is_recurrent(entry) else entry.offset
        is_unused = entry.empty() and not is_recurrent(entry)
        if held is not None and held != tokens and not is_unused:
            raise UnsupportedCacheError(
                f"cache {label} ({name}) holds {held} tokens, the key has {tokens}"
            )
        rows = {int(x.shape[0]) for x in _arrays(entry)}
        if rows - {1}:
            raise UnsupportedCacheError(f"cache {label} ({name}) has {max(rows)} rows, expected 1")


def _arrays(entry: Any) -> list[mx.array]:
    values = slots_of(entry).values() if is_recurrent(entry) else (entry.keys, entry.values)
    return [x for _, x in _flat(list(values)) if isinstance(x, mx.array)]


def _flat(tree: Any) -> list[tuple[str, Any]]:
    pairs: Any = tree_flatten(tree)
    return list(pairs)


# -- taking ---------------------------------------------------------------------------------------


def take_pages(entry: Any, start: int, stop: int) -> Pages:
    """A copy of tokens `start` to `stop` of a growing cache."""
    if entry.keys is None:
        return ()
    return tuple(owned(x[..., start:stop, :]) for _, x in _flat([entry.keys, entry.values]))


def take_state(entry: Any) -> State:
    """A copy of what a cache that cannot be cut holds now."""
    if isinstance(entry, ArraysCache):
        slots: Any = enumerate(entry.cache)
        return State({str(i): owned(slot) for i, slot in slots if slot is not None})
    if is_recurrent(entry):
        slots_by_name = slots_of(entry).items()
        arrays = {name: owned(x) for name, x in slots_by_name if isinstance(x, mx.array)}
        return State(arrays, {name: x for name, x in slots_by_name if name not in arrays})
    if entry.keys is None:
        return State({}, {"offset": int(entry.offset)})
    visible = _of_ring if stock_class(entry) is RotatingKVCache else _of_chunk
    sides = {"keys": entry.keys, "values": entry.values}
    arrays = {name: owned(visible(entry, side)) for name, side in sides.items()}
    return State(arrays, {"offset": int(entry.offset)})


def _of_ring(ring: RotatingKVCache, side: mx.array) -> mx.array:
    """What a ring shows to queries, oldest first, after the tokens that it keeps for ever."""
    ordered = ring._temporal_order(side)
    held = min(ring.offset, ring.max_size)
    excess = ordered.shape[2] - held
    if excess <= 0:
        return ordered
    parts = [ordered[..., : ring.keep, :], ordered[..., ring.keep + excess :, :]]
    return mx.concatenate(parts, axis=2)


def _of_chunk(cache: ChunkedKVCache, side: mx.array) -> mx.array:
    end = cache.offset - cache.start_position
    return side[..., max(0, end - cache.chunk_size) : end, :]


def owned(x: mx.array) -> mx.array:
    """The same numbers in memory that nobody else holds, and no more memory than they need."""
    if x.size == 0:
        return mx.zeros(x.shape, x.dtype)
    if x.nbytes < _SMALL:
        return mx.take(x, mx.arange(x.shape[0]), axis=0)
    return mx.contiguous(x)


# -- giving back ----------------------------------------------------------------------------------


def cut(pages: Pages, start: int, stop: int) -> Pages:
    """A copy of a part of some pages."""
    return tuple(owned(x[..., start:stop, :]) for x in pages)


def fill(entry: Any, parts: Sequence[Pages], tokens: int) -> None:
    """Gives a fresh growing cache the pages of its first `tokens` tokens."""
    used = [pages for pages in parts if pages]
    if not used:
        return
    slots = tokens
    if stock_class(entry) is not ConcatenateKVCache:  # its length is that of its arrays
        slots = -(-tokens // KVCache.step) * KVCache.step
    sides = [_joined(arrays, slots) for arrays in zip(*used, strict=True)]
    half = len(sides) // 2
    is_quantized = stock_class(entry) is QuantizedKVCache
    entry.keys, entry.values = (tuple(sides[:half]), tuple(sides[half:])) if is_quantized else sides
    entry.offset = tokens


def _joined(parts: Iterable[mx.array], slots: int) -> mx.array:
    arrays = list(parts)
    first = arrays[0]
    empty = slots - sum(x.shape[2] for x in arrays)
    if empty:
        arrays.append(mx.zeros((*first.shape[:2], empty, first.shape[3]), first.dtype))
    return mx.concatenate(arrays, axis=2) if len(arrays) > 1 else first[...]


def put_state(entry: Any, state: State, tokens: int) -> None:
    """Gives a fresh cache the state of a boundary. What is written to it later is its own."""
    arrays = {name: x[...] for name, x in state.arrays.items()}
    if isinstance(entry, ArraysCache):
        entry.cache = [arrays.get(str(i)) for i in range(len(entry.cache))]  # type: ignore[misc]
        note_position(entry, tokens)
    elif is_recurrent(entry):
        set_slots(entry, {**state.numbers, **arrays})
    elif arrays:
        entry.keys, entry.values = arrays["keys"], arrays["values"]
        entry.offset = tokens
        held = entry.keys.shape[2]
        if stock_class(entry) is RotatingKVCache:
            entry._idx = held
        else:
            entry.start_position = tokens - held


def make_like(kinds: Sequence[LeafKind], cache: list[Any]) -> None:
    """Makes the fresh caches of a model quantised where the kinds say so.

    Raises `UnsupportedCacheError` if they are still of other kinds than asked for.
    """
    for i, entry in enumerate(cache):
        kind = next((kind for kind in kinds if kind.label == str(i)), None)
        if kind is not None and kind.bits is not None and type(entry) is KVCache:
            cache[i] = QuantizedKVCache(**dict(kind.settings))
    if kinds_of(cache) != tuple(kinds):
        raise UnsupportedCacheError("the prompt cache has other parts than the stored one")


def shortened(cache: list[Any], tokens: int) -> list[Any]:
    """Twins of growing caches that show their first tokens only."""

    def twin(entry: Any) -> Any:
        if type(entry) is CacheList:
            return CacheList(*(twin(child) for child in entry.caches))
        short = copy.copy(entry)
        short.offset = min(tokens, int(entry.offset))
        return short

    return [twin(entry) for entry in cache]


def leaves(cache: list[Any]) -> list[Any]:
    """The cache objects themselves, in the order of `kinds_of`."""
    return [entry for _, entry in walk(cache)]
