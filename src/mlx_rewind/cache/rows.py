"""Caches of a batch whose rows hold different numbers of tokens.

    row 0   [ a0 a1 a2 a3 a4 .  .  ]     every row begins in slot 0 and is as long as it is;
    row 1   [ b0 b1 .  .  .  .  .  ]     what lies beyond is masked, never read, and overwritten
    row 2   [ c0 c1 c2 .  .  .  .  ]

Models use them as they use mlx-lm's own batch caches: `offset` is an array, one entry per row, and
masks are arrays. A row takes tokens back by a smaller length: O(1) in the context, whatever its
neighbours do. Rows come from stock one-row caches and go back to them without loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

#: Slots by which a buffer grows.
_STEP = 256


class RowsCache(ABC):
    """Keys and values of B rows, [B, heads, slots, size], and the number of tokens in each.

    keys, values    one array, or (packed, scales, biases) if quantised; None before the first token
    lengths         tokens in each row
    """

    stock: ClassVar[type]

    keys: Any = None
    values: Any = None
    _lengths: list[int]
    _offset: mx.array

    # -- what models use --------------------------------------------------------------------------

    @property
    def offset(self) -> mx.array:
        """Tokens in each row, [B]."""
        return self._offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Appends [B, heads, S, size] to every row; returns all slots in use, for `make_mask`."""
        fed = keys.shape[2]
        new = self._stored(keys), self._stored(values)
        self._reserve(new, fed)
        positions = [self._slots(length, fed) for length in self._lengths]
        used = self._used(fed)
        self.keys = _write(self.keys, new[0], positions)
        self.values = _write(self.values, new[1], positions)
        self.lengths = [length + fed for length in self._lengths]
        return _used(self.keys, used), _used(self.values, used)

    def keys_and_values(self) -> Any:
        """All slots in use."""
        used = self._used(0)
        return _used(self.keys, used), _used(self.values, used)

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Which slots each of the next `n` tokens of each row sees, [B, 1, n, slots in use]."""
        slots = mx.arange(self._used(n))
        queries = self._offset[:, None, None, None] + mx.arange(n)[:, None]
        held = self._positions(slots, n)
        mask = (held <= queries) & (held >= 0)
        window = self._window(window_size)
        return mask if window is None else mask & (held > queries - window)

    # -- rows -------------------------------------------------------------------------------------

    @property
    def lengths(self) -> list[int]:
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)
        self._offset = mx.array(self._lengths, mx.int32)

    @property
    def state(self) -> Any:
        return [] if self.keys is None else [self.keys, self.values]

    @property
    def nbytes(self) -> int:
        arrays = (x for side in self.state for x in (side if isinstance(side, tuple) else [side]))
        return sum(x.nbytes for x in arrays)

    def empty(self) -> bool:
        return self.keys is None

    def keep(self, rows: Sequence[int]) -> None:
        """Leaves only these rows, in this order, in a buffer no longer than they need."""
        index = mx.array(list(rows), mx.int32)
        self.lengths = [self._lengths[row] for row in rows]
        slots = self._capacity(max(self._lengths))
        self.keys, self.values = (
            side if side is None else tree_map(lambda x: x[:, :, :slots][index], side)
            for side in (self.keys, self.values)
        )

    def join(self, other: RowsCache) -> None:
        """Appends the rows of another cache."""
        most = max(_slots_of(self.keys), _slots_of(other.keys))
        counts = len(self._lengths), len(other._lengths)
        self.keys = _stack(self.keys, other.keys, counts, most)
        self.values = _stack(self.values, other.values, counts, most)
        self.lengths = [*self._lengths, *other._lengths]

    @abstractmethod
    def extract(self, row: int) -> Any:
        """A stock one-row cache with the tokens of a row."""

    # -- how slots are used -----------------------------------------------------------------------

    def _stored(self, x: mx.array) -> Any:
        return x

    def _reserve(self, new: tuple[Any, Any], fed: int) -> None:
        """Makes room for `fed` more tokens."""
        needed = self._capacity(max(self._lengths) + fed)
        have = _slots_of(self.keys)
        if needed > have:
            self.keys, self.values = (
                _grow(side, like, needed - have)
                for side, like in zip((self.keys, self.values), new, strict=True)
            )

    def _capacity(self, length: int) -> int:
        return -(-length // _STEP) * _STEP

    def _used(self, fed: int) -> int:
        """Slots in use after `fed` more tokens."""
        return max(self._lengths) + fed

    def _slots(self, length: int, fed: int) -> list[int]:
        """The slots of the next `fed` tokens of a row."""
        return list(range(length, length + fed))

    def _positions(self, slots: mx.array, fed: int) -> mx.array:
        """The token that each slot holds once `fed` more are appended; negative for none."""
        return slots

    def _window(self, asked: int | None) -> int | None:
        return asked


class RowsKVCache(RowsCache):
    """Rows of `KVCache`."""

    stock = KVCache

    def __init__(self, cache: KVCache) -> None:
        self.keys, self.values = _own(cache.keys), _own(cache.values)
        self.lengths = [cache.offset]

    def extract(self, row: int) -> KVCache:
        cache = KVCache()
        cache.offset = self._lengths[row]
        if self.keys is not None:
            cache.keys, cache.values = _row(self, row, cache.offset)
        return cache


class RowsQuantizedKVCache(RowsCache):
    """Rows of `QuantizedKVCache`."""

    stock = QuantizedKVCache

    def __init__(self, cache: QuantizedKVCache) -> None:
        self.group_size, self.bits = cache.group_size, cache.bits
        self.keys, self.values = _own(cache.keys), _own(cache.values)
        self.lengths = [cache.offset]

    def _stored(self, x: mx.array) -> Any:
        return tuple(mx.quantize(x, group_size=self.group_size, bits=self.bits))

    def extract(self, row: int) -> QuantizedKVCache:
        cache = QuantizedKVCache(group_size=self.group_size, bits=self.bits)
        cache.offset = self._lengths[row]
        if self.keys is not None:
            cache.keys, cache.values = _row(self, row, cache.offset)
        return cache


class RowsRingCache(RowsCache):
    """Rows of `RotatingKVCache`: a ring of window + slack slots, token p in slot p modulo its size.

    The mask applies the window. A rejected token only ever overwrote one that was out of every
    window already, as long as no verify is longer than the slack.
    """

    stock = RotatingKVCache

    def __init__(self, ring: RotatingKVCache, slack: int) -> None:
        self.max_size, self._slack = ring.max_size, slack
        self.lengths = [ring.offset]
        if ring.keys is None:
            return
        held = min(ring.offset, ring.keys.shape[2], self.size)
        slots = [[p % self.size for p in range(ring.offset - held, ring.offset)]]

        def placed(side: Any) -> Any:
            empty = mx.zeros((*side.shape[:2], self.size, side.shape[3]), side.dtype)
            return _write(empty, _in_time(ring, side)[..., -held:, :], slots)

        self.keys, self.values = placed(ring.keys), placed(ring.values)

    @property
    def size(self) -> int:
        return int(self.max_size) + self._slack

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        if keys.shape[2] > self._slack + 1:
            raise ValueError(
                f"a window of {keys.shape[2]} tokens is longer than the {self._slack + 1} that the "
                "rows of a sliding window were made for"
            )
        return super().update_and_fetch(keys, values)

    def extract(self, row: int) -> RotatingKVCache:
        ring = RotatingKVCache(max_size=self.max_size)
        ring.offset = self._lengths[row]
        if self.keys is not None:
            held = min(ring.offset, self.max_size)
            slots = mx.array([p % self.size for p in range(ring.offset - held, ring.offset)])
            ring.keys, ring.values = (
                mx.take(x[row : row + 1], slots, axis=2) for x in (self.keys, self.values)
            )
            ring._idx = held
        return ring

    def _capacity(self, length: int) -> int:
        return self.size

    def _used(self, fed: int) -> int:
        return min(super()._used(fed), self.size)

    def _slots(self, length: int, fed: int) -> list[int]:
        return [p % self.size for p in range(length, length + fed)]

    def _positions(self, slots: mx.array, fed: int) -> mx.array:
        last = self._offset[:, None, None, None] + (fed - 1)
        return last - (last - slots) % self.size

    def _window(self, asked: int | None) -> int:
        return int(self.max_size) if asked is None else min(asked, int(self.max_size))


# -- buffers --------------------------------------------------------------------------------------


def _own(side: Any) -> Any:
    """Handles of our own on the buffer of a stock cache: what we write does not show in it."""
    if isinstance(side, (tuple, list)):
        return tuple(_own(x) for x in side)
    return None if side is None else side[...]


def _slots_of(side: Any) -> int:
    if side is None:
        return 0
    first = side[0] if isinstance(side, tuple) else side
    return int(first.shape[2])


def _used(side: Any, slots: int) -> Any:
    return tree_map(lambda x: x[..., :slots, :], side)


def _grow(side: Any, like: Any, slots: int) -> Any:
    """`side` with empty slots added, as wide as `like`."""

    def more(x: mx.array, new: mx.array) -> mx.array:
        empty = mx.zeros((*new.shape[:2], slots, new.shape[3]), new.dtype)
        return empty if x is None else mx.concatenate([x, empty], axis=2)

    if isinstance(like, tuple):
        olds = side or [None] * len(like)
        return tuple(more(x, new) for x, new in zip(olds, like, strict=True))
    return more(side, like)


def _write(side: Any, new: Any, slots: list[list[int]]) -> Any:
    """Writes [B, heads, S, size] into the given slots of each row, in place where that is free."""
    start = slots[0][0]
    together = all(row == slots[0] for row in slots) and slots[0][-1] - start == len(slots[0]) - 1

    def put(x: mx.array, values: mx.array) -> mx.array:
        if together:
            x[..., start : start + values.shape[2], :] = values
        else:
            rows = mx.arange(x.shape[0])[:, None]
            x[rows, :, mx.array(slots)] = values.transpose(0, 2, 1, 3)
        return x

    if isinstance(side, tuple):
        return tuple(put(x, values) for x, values in zip(side, new, strict=True))
    return put(side, new)


def _stack(a: Any, b: Any, rows: tuple[int, int], slots: int) -> Any:
    """Rows of `a`, then rows of `b`, both with room for `slots` tokens; None has no token yet."""
    if a is None and b is None:
        return None
    if isinstance(a, tuple) or isinstance(b, tuple):
        pairs = zip(a or [None] * len(b), b or [None] * len(a), strict=True)
        return tuple(_stack(x, y, rows, slots) for x, y in pairs)

    def padded(x: mx.array | None, like: mx.array, count: int) -> mx.array:
        if x is None:
            return mx.zeros((count, like.shape[1], slots, like.shape[3]), like.dtype)
        return mx.pad(x, [(0, 0), (0, 0), (0, slots - x.shape[2]), (0, 0)])

    like = b if a is None else a
    return mx.concatenate([padded(a, like, rows[0]), padded(b, like, rows[1])])


def _row(cache: RowsCache, row: int, length: int) -> tuple[Any, Any]:
    """Keys and values of one row, [1, heads, length, size], in buffers of their own."""

    def cut(x: mx.array) -> mx.array:
        return mx.contiguous(x[row : row + 1, :, :length])

    keys, values = (tree_map(cut, side) for side in (cache.keys, cache.values))
    return keys, values


def _in_time(ring: RotatingKVCache, side: mx.array) -> mx.array:
    """The buffer of a stock ring without `keep`, oldest token first."""
    index = ring._idx
    if index in (side.shape[2], ring.offset):
        return side[..., :index, :]
    return mx.concatenate([side[..., index:, :], side[..., :index, :]], axis=2)
