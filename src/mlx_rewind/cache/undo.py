"""One undo per cache class, chosen by the class of the object. Unknown classes are refused.

An undo is made when a round opens and watches its cache through any number of forwards:

    start()        begins to watch, once every cache of the round has its undo
    seal()         ends the recording, returns the tokens fed since
    rewind(kept)   sets the cache to what it is after the first `kept` of them; repeatable,
                   in any order, for every 0 <= kept <= fed

Buffers beyond the valid length are never part of a cache's state, so an undo may leave them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache as memoize
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models.cache import (
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

#: Where a cache object keeps who wants to see what is appended to it.
WATCH = "_rewind_watch"


def stock_class(cache: Any) -> type:
    """The class of a cache object, under the one that it has while it is watched."""
    kind: Any = type(cache)
    return stock_of(kind)


@memoize
def stock_of(kind: type) -> type:
    """The same for a class."""
    base: type = vars(kind).get("_rewind_base", kind)
    return base


def as_stock(cache: Any, protocol: int) -> Any:
    """The `__reduce_ex__` of watched caches: a copy is stock, and nobody watches it."""
    attributes = {k: v for k, v in vars(cache).items() if not k.startswith("_rewind")}
    return _remade, (stock_class(cache), attributes)


def _remade(kind: Any, attributes: dict[str, Any]) -> Any:
    entry = kind.__new__(kind)
    vars(entry).update(attributes)
    return entry


@memoize
def _watched(base: Any) -> type:
    """A subclass of a stock cache class that shows what is appended to its instances."""

    def update_and_fetch(self: Any, keys: mx.array, values: mx.array) -> Any:
        vars(self)[WATCH].see(keys, values)
        return base.update_and_fetch(self, keys, values)

    methods = {"update_and_fetch": update_and_fetch, "__reduce_ex__": as_stock}
    return type(base.__name__, (base,), {**methods, "_rewind_base": base})


class Undo(ABC):
    """Watches one cache while a round is open, and takes it back."""

    mechanism: ClassVar[str]

    #: Whether the cache was written by something that was not recorded; known once sealed.
    missed: bool = False

    #: Copies of what a forward overwrites, to be computed before it runs.
    saved: Sequence[mx.array] = ()

    @abstractmethod
    def __init__(self, cache: Any, single_steps: int | None = None) -> None: ...

    def start(self) -> None:  # noqa: B027
        """Begins to watch; an undo that only compares before and after needs nothing."""

    @abstractmethod
    def seal(self) -> int:
        """Ends the recording, also one that was not started; returns the tokens fed."""

    @abstractmethod
    def rewind(self, kept: int) -> None:
        """Sets the cache to what it is after the first `kept` tokens."""

    def rewind_rows(self, kept: Sequence[int]) -> None:
        """The same with a count for each row; rows of a stock cache keep the same."""
        if len(set(kept)) != 1:
            raise ValueError(f"the rows of a stock cache cannot keep {list(kept)}")
        self.rewind(kept[0])

    def renew(self) -> None:  # noqa: B027
        """Lets go of what only the thread that fed the tokens can compute."""

    # -- one of many in a row, see `cache.log` ----------------------------------------------------

    @property
    def stands_alone(self) -> bool:
        """Whether it needs no other undo to rewind."""
        return True

    def settle(self) -> None:  # noqa: B027
        """Lets go of the state after: another forward was fed."""

    def chain(self, previous: Undo, kept: int) -> None:  # noqa: B027
        """Lets go of the state before: it is that after `kept` tokens of `previous`."""


class TrimUndo(Undo):
    """KVCache and QuantizedKVCache: append-only, the offset alone decides what is valid."""

    mechanism: ClassVar[str] = "trim"

    def __init__(self, cache: Any, single_steps: int | None = None) -> None:
        self._cache = cache
        self._empty, self._start = cache.keys is None, cache.offset

    def seal(self) -> int:
        if self._empty:
            self._after = (self._cache.keys, self._cache.values)
        return int(self._cache.offset - self._start)

    def rewind(self, kept: int) -> None:
        cache = self._cache
        if self._empty and kept == 0:
            cache.keys, cache.values = None, None
        elif cache.keys is None and kept:
            cache.keys, cache.values = self._after
        cache.offset = self._start + kept

    def follow(self, cache: Any) -> None:
        """Goes on with another object that holds the same tokens: the quantised cache."""
        self._cache, self._after = cache, (cache.keys, cache.values)


class CutUndo(Undo):
    """ConcatenateKVCache: its arrays are its length, so they are cut."""

    mechanism: ClassVar[str] = "cut"

    def __init__(self, cache: Any, single_steps: int | None = None) -> None:
        self._cache = cache
        self._empty, self._start = cache.keys is None, cache.offset
        self._after: tuple[Any, Any] | None = None

    def seal(self) -> int:
        self._after = (self._cache.keys, self._cache.values)
        return int(self._cache.offset - self._start)

    def rewind(self, kept: int) -> None:
        cache, length = self._cache, self._start + kept
        keys, values = self._after or (cache.keys, cache.values)
        if length == 0 and self._empty:
            keys, values = None, None
        elif keys.shape[2] != length:
            keys, values = (x[..., :length, :] for x in (keys, values))
        cache.keys, cache.values, cache.offset = keys, values, length

    def settle(self) -> None:
        self._after = None


@dataclass(frozen=True)
class _Append:
    """Keys and values that one forward appended, and where the cache started then."""

    keys: mx.array
    values: mx.array
    start: int

    @property
    def length(self) -> int:
        return int(self.keys.shape[2])


class _AppendLog:
    """Notes what `update_and_fetch` of one cache object is given, while a round is open."""

    def __init__(self, cache: Any, guard: Callable[[int], None]) -> None:
        self.appends: list[_Append] = []
        self._cache, self._guard = cache, guard
        self._stock: Any = stock_class(cache)

    def see(self, keys: mx.array, values: mx.array) -> None:
        self._guard(keys.shape[2])
        start = vars(self._cache).get("start_position", 0)
        # Handles of our own: an empty ring keeps what it is given, and writes into it later.
        self.appends.append(_Append(keys[...], values[...], start))

    def start(self) -> None:
        if WATCH in vars(self._cache):
            raise RuntimeError("this prompt cache is already inside an open Round")
        self._kind = type(self._cache)
        vars(self._cache)[WATCH] = self
        self._cache.__class__ = _watched(self._stock)

    def stop(self) -> int:
        if vars(self._cache).get(WATCH) is self:
            del vars(self._cache)[WATCH]
            self._cache.__class__ = self._kind
        return sum(append.length for append in self.appends)

    def replay(self, kept: int) -> None:
        """Appends the first `kept` tokens again, forward by forward, as the model did."""
        for append in self.appends:
            if kept <= 0:
                return
            if append.start != vars(self._cache).get("start_position", 0):
                self._stock.maybe_trim_front(self._cache)
            length = min(kept, append.length)
            keys, values = (x[:, :, :length] for x in (append.keys, append.values))
            self._stock.update_and_fetch(self._cache, keys, values)
            kept -= length


class _ReplayUndo(Undo):
    """Notes what is appended, so that it can be appended again to the cache as it was.

    link    (an undo, tokens kept): the state before is that undo's after so many tokens
    """

    _fields: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        cache: Any,
        single_steps: int | None = None,
        *,
        link: tuple[Undo, int] | None = None,
    ) -> None:
        self._cache, self._link = cache, link
        self._before: Any = None if link else self._state()
        self._after: Any = None
        self._log = _AppendLog(cache, self._guard)
        self._hold(single_steps)

    def _hold(self, single_steps: int | None) -> None:
        """Keeps what a forward would overwrite; appends overwrite nothing."""

    def start(self) -> None:
        self._log.start()

    def seal(self) -> int:
        self._fed = self._log.stop()
        self._after = self._state()
        return self._fed

    def _guard(self, length: int) -> None:
        """Refuses a forward that the undo was not made for."""

    def _state(self) -> Any:
        return tuple(vars(self._cache)[field] for field in self._fields)

    def _set_state(self, state: Any) -> None:
        vars(self._cache).update(zip(self._fields, state, strict=True))

    def _append_again(self, kept: int) -> None:
        if self._link is not None:
            previous, held = self._link
            previous.rewind(held)
        else:
            self._set_state(self._before)
        self._log.replay(kept)

    @property
    def stands_alone(self) -> bool:
        return self._link is None

    def settle(self) -> None:
        self._after = None

    def chain(self, previous: Undo, kept: int) -> None:
        self._link, self._before = (previous, kept), None


class RingUndo(_ReplayUndo):
    """RotatingKVCache. A window leaves the buffer in time order; a single step overwrites a slot.

        window of S     [ ... max_size - 1 older entries ... | d0 d1 ... d(S-1) ]   cut at the end
        single step     [ keep | d1 d2 | oldest ... newest ]                        slot lost

    One window is cut. Otherwise the ring as it was is put back and the kept tokens are appended
    again. "As it was" is a second handle on the buffer: a single step then copies the ring before
    it writes. With `single_steps`, only the slots that so many steps will overwrite are saved.
    """

    mechanism: ClassVar[str] = "ring"
    _fields: ClassVar[tuple[str, ...]] = ("keys", "values", "offset", "_idx")

    def _hold(self, single_steps: int | None) -> None:
        ring = self._cache
        self._steps = single_steps if self._fits(single_steps) else None
        if self._steps is not None:
            self._save_slots(self._steps)
        elif self._link is None and ring.keys is not None:
            ring.keys, ring.values = ring.keys[...], ring.values[...]

    def _fits(self, steps: int | None) -> bool:
        ring = self._cache
        if steps is None or ring.keys is None or steps > ring.max_size - ring.keep:
            return False
        return bool(ring.keys.shape[2] <= ring.max_size)

    def _save_slots(self, steps: int) -> None:
        ring, index, lost = self._cache, self._cache._idx, []
        for position in range(ring.offset, ring.offset + steps):
            index = ring.keep if index == ring.max_size else index
            if position >= ring.max_size:
                lost.append(index)
            index += 1
        self._lost = mx.array(lost, mx.int32)
        if lost:
            self.saved = [mx.take(x, self._lost, axis=2) for x in (ring.keys, ring.values)]

    def _guard(self, length: int) -> None:
        if self._steps is None:
            return
        if length > 1 or len(self._log.appends) >= self._steps:
            raise RuntimeError(f"the Round was opened for {self._steps} single-token steps")

    def rewind(self, kept: int) -> None:
        ring = self._cache
        if self._steps is not None:
            self._put_slots_back()
            self._log.replay(kept)
        elif kept == self._fed and self._after is not None:
            self._set_state(self._after)
        elif kept and len(self._log.appends) == 1 and self._after is not None:
            rejected = self._fed - kept
            length = self._after[0].shape[2] - rejected
            ring.keys, ring.values = (x[..., :length, :] for x in self._after[:2])
            ring.offset, ring._idx = self._after[2] - rejected, length
        else:
            self._append_again(kept)

    def _set_state(self, state: Any) -> None:
        """The stored buffer is never written in place: the ring gets handles of its own."""
        keys, values, *rest = state
        super()._set_state((*(x if x is None else x[...] for x in (keys, values)), *rest))

    def _put_slots_back(self) -> None:
        ring = self._cache
        if self.saved:
            ring.keys[..., self._lost, :], ring.values[..., self._lost, :] = self.saved
        ring.offset, ring._idx = self._before[2:]


class ChunkUndo(_ReplayUndo):
    """ChunkedKVCache: append-only, but the model may cut its front before a forward.

    While the front stays, or one forward was fed, the offset decides. Otherwise the buffer as it
    was, which appends never overwrite, is put back and the kept tokens are appended again.
    """

    mechanism: ClassVar[str] = "chunk"
    _fields: ClassVar[tuple[str, ...]] = ("keys", "values", "offset", "start_position")

    def rewind(self, kept: int) -> None:
        after = self._after
        one_front = len(self._log.appends) == 1 or (
            after is not None and self._before is not None and after[3] == self._before[3]
        )
        if after is not None and (kept == self._fed or (kept > 0 and one_front)):
            self._set_state(after)
            self._cache.offset = after[2] - self._fed + kept
        else:
            self._append_again(kept)


UNDOS: dict[type, type[Undo]] = {
    KVCache: TrimUndo,
    QuantizedKVCache: TrimUndo,
    ConcatenateKVCache: CutUndo,
    ChunkedKVCache: ChunkUndo,
    RotatingKVCache: RingUndo,
}
