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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models.cache import (
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)


def stock_class(cache: Any) -> type:
    """The class of a cache object, under the one that it has while it speculates (`cache.trim`)."""
    kind = type(cache)
    base: type = vars(kind).get("_rewind_base", kind)
    return base


class Undo(ABC):
    """Watches one cache while a round is open, and takes it back."""

    mechanism: ClassVar[str]

    @abstractmethod
    def __init__(self, cache: Any, single_steps: int | None = None) -> None: ...

    @property
    def stands_alone(self) -> bool:
        """Whether it needs no other undo to rewind."""
        return True

    def start(self) -> None:  # noqa: B027
        """Begins to watch; an undo that only compares before and after needs nothing."""

    @abstractmethod
    def seal(self) -> int:
        """Ends the recording, also one that was not started; returns the tokens fed."""

    @abstractmethod
    def rewind(self, kept: int) -> None:
        """Sets the cache to what it is after the first `kept` tokens."""

    def renew(self) -> None:  # noqa: B027
        """Lets go of what only the thread that fed the tokens can compute."""


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
        if self._empty:
            self._cache.keys, self._cache.values = self._after if kept else (None, None)
        self._cache.offset = self._start + kept

    def follow(self, cache: Any) -> None:
        """Goes on with another object that holds the same tokens: the quantised cache."""
        self._cache, self._after = cache, (cache.keys, cache.values)


class CutUndo(Undo):
    """ConcatenateKVCache: its arrays are its length, so they are cut."""

    mechanism: ClassVar[str] = "cut"

    def __init__(self, cache: Any, single_steps: int | None = None) -> None:
        self._cache = cache
        self._before = (cache.keys, cache.values, cache.offset)

    def seal(self) -> int:
        self._after = (self._cache.keys, self._cache.values, self._cache.offset)
        return int(self._cache.offset - self._before[2])

    def rewind(self, kept: int) -> None:
        length = self._before[2] + kept
        if kept == 0:
            keys, values = self._before[:2]
        elif length == self._after[2]:
            keys, values = self._after[:2]
        else:
            keys, values = (x[..., :length, :] for x in self._after[:2])
        self._cache.keys, self._cache.values, self._cache.offset = keys, values, length


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
        self._cache = cache
        self._stock: Any = stock_class(cache)

        def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
            guard(keys.shape[2])
            start = vars(cache).get("start_position", 0)
            self.appends.append(_Append(keys, values, start))
            return self._stock.update_and_fetch(cache, keys, values)

        self._hook = update_and_fetch

    def start(self) -> None:
        if "update_and_fetch" in vars(self._cache):
            raise RuntimeError("this prompt cache is already inside an open Round")
        self._cache.update_and_fetch = self._hook

    def stop(self) -> int:
        if vars(self._cache).get("update_and_fetch") is self._hook:
            del self._cache.update_and_fetch
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


class RingUndo(Undo):
    """RotatingKVCache. A window leaves the buffer in time order; a single step overwrites a slot.

        window of S     [ ... max_size - 1 older entries ... | d0 d1 ... d(S-1) ]   cut at the end
        single step     [ keep | d1 d2 | oldest ... newest ]                        slot lost

    One window is cut. Otherwise the ring as it was is put back and the kept tokens are appended
    again. "As it was" is a second handle on the buffer: a single step then copies the ring before
    it writes. With `single_steps`, only the slots that so many steps will overwrite are saved.
    """

    mechanism: ClassVar[str] = "ring"

    def __init__(self, cache: Any, single_steps: int | None = None) -> None:
        self._cache = cache
        self._steps = single_steps if self._fits(single_steps) else None
        self._before = (cache.keys, cache.values, cache.offset, cache._idx)
        self.saved: list[mx.array] = []
        if self._steps is not None:
            self._save_slots(self._steps)
        elif cache.keys is not None:
            cache.keys, cache.values = cache.keys[...], cache.values[...]
        self._log = _AppendLog(cache, self._guard)

    def start(self) -> None:
        self._log.start()

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

    def seal(self) -> int:
        self._fed = self._log.stop()
        ring = self._cache
        self._after = (ring.keys, ring.values, ring.offset, ring._idx)
        return self._fed

    def rewind(self, kept: int) -> None:
        ring, appends = self._cache, self._log.appends
        if self._steps is not None:
            self._put_slots_back()
            self._log.replay(kept)
        elif kept == self._fed:
            ring.keys, ring.values, ring.offset, ring._idx = self._after
        elif kept and len(appends) == 1:
            rejected = self._fed - kept
            length = self._after[0].shape[2] - rejected
            ring.keys, ring.values = (x[..., :length, :] for x in self._after[:2])
            ring.offset, ring._idx = self._after[2] - rejected, length
        else:
            keys, values, ring.offset, ring._idx = self._before
            ring.keys, ring.values = (x if x is None else x[...] for x in (keys, values))
            self._log.replay(kept)

    def _put_slots_back(self) -> None:
        ring = self._cache
        if self.saved:
            ring.keys[..., self._lost, :], ring.values[..., self._lost, :] = self.saved
        ring.offset, ring._idx = self._before[2:]


class ChunkUndo(Undo):
    """ChunkedKVCache: append-only, but the model may cut its front before a forward.

    While the front stays, or one forward was fed, the offset decides. Otherwise the buffer as it
    was, which appends never overwrite, is put back and the kept tokens are appended again.
    """

    mechanism: ClassVar[str] = "chunk"

    def __init__(self, cache: Any, single_steps: int | None = None) -> None:
        self._cache = cache
        self._before = (cache.keys, cache.values, cache.offset, cache.start_position)
        self._log = _AppendLog(cache, lambda length: None)

    def start(self) -> None:
        self._log.start()

    def seal(self) -> int:
        chunk = self._cache
        self._after = (chunk.keys, chunk.values, chunk.offset, chunk.start_position)
        self._fed = self._log.stop()
        return self._fed

    def rewind(self, kept: int) -> None:
        chunk = self._cache
        front_stayed = self._after[3] == self._before[3] or len(self._log.appends) == 1
        in_place = kept == self._fed or (kept > 0 and front_stayed)
        state = self._after if in_place else self._before
        chunk.keys, chunk.values, chunk.offset, chunk.start_position = state
        if in_place:
            chunk.offset = self._before[2] + kept
        else:
            self._log.replay(kept)


UNDOS: dict[type, type[Undo]] = {
    KVCache: TrimUndo,
    QuantizedKVCache: TrimUndo,
    ConcatenateKVCache: CutUndo,
    ChunkedKVCache: ChunkUndo,
    RotatingKVCache: RingUndo,
}
