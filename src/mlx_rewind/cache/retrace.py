"""Recurrent layers: record a window, then call the layer's own forward again on its kept part.

A recurrent layer keeps its past in a few slots of a cache and re-binds them in every forward. To
keep m of S fed tokens, the old slots are put back and the layer runs once more on its first m
inputs (`calls`). The outputs of its Linear children were recorded and are handed back. MLX is lazy
and only the slots are read afterwards, so what really runs is the convolution and the recurrence.
No formula is written here and no model is named.

Where a layer computes a window by another formula than single steps (`ssm_update` does), a recorded
window is taken token by token, so that it has the bits of plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from .calls import Call, OwnCall, Stock, window_of
from .slots import (
    Slots,
    holds,
    is_recurrent,
    leaves_of,
    note_position,
    position,
    set_slots,
    slots_of,
)
from .undo import WATCH, Undo

#: Where a cache object keeps the recorder that it has while it speculates (`cache.log`).
LOG = "_rewind_log"

#: fn(m) returns the slots after the first m tokens of a forward.
OwnUndo = Callable[[int], list[Any]]


class Recorder(Protocol):
    """Is told of every forward that writes the slots of a cache."""

    def record(self, stock: Stock, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any: ...

    def record_own(self, window: int, fn: OwnUndo, before: list[Any]) -> None: ...


_tapes: dict[int, Recorder] = {}


def recorder_of(cache: Any) -> Recorder | None:
    return _tapes.get(id(cache)) or vars(cache).get(LOG)


def is_recorded(entry: Any) -> bool:
    """Whether an open Round watches a cache object."""
    return id(entry) in _tapes or WATCH in vars(entry)


def recorded_call(stock: Stock, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a layer that writes slots: onto the tape of its cache where a round is open."""
    cache = _recurrent_among(*args, *kwargs.values())
    if cache is None:
        return stock(layer, *args, **kwargs)
    known = position(cache)
    recorder = recorder_of(cache)
    if recorder is None:
        output = stock(layer, *args, **kwargs)
    else:
        output = recorder.record(stock, layer, args, kwargs)
    if known is not None:
        counts = "_rewind_counts" in vars(layer)
        note_position(cache, known + counts * window_of(args, kwargs))
    return output


def _recurrent_among(*given: Any) -> Any:
    """The first recurrent cache among the arguments of a call."""
    for value in given:
        for leaf in leaves_of(value):
            if is_recurrent(leaf):
                return leaf
    return None


def record_rollback(cache: Any, num_tokens: int, fn: OwnUndo, snapshot: list[Any]) -> None:
    """For model files: how to take back the forward that writes the slots of `cache`.

    A recurrence that is written outside any layer, or that knows a cheaper undo than to run again,
    calls this once per forward. Without an open Round or `start_speculation` it has no effect.

    cache         the `ArraysCache` that the forward writes
    num_tokens    tokens that the forward feeds, S
    fn            fn(m) returns all slots after the first m of them, 1 <= m <= S
    snapshot      all slots as they were before it, taken before they are bound anew; they are kept
                  by reference and must not be written in place

    Raises TypeError for another cache, ValueError for fewer or more slots than it has.
    """
    if not isinstance(cache, ArraysCache):
        raise TypeError(f"record_rollback takes an ArraysCache, got a {type(cache).__name__}")
    if num_tokens < 1 or len(snapshot) != len(cache.cache):
        raise ValueError(
            f"record_rollback takes 1 or more tokens and a snapshot of all {len(cache.cache)} "
            f"slots, got {num_tokens} and {len(snapshot)}"
        )
    recorder = recorder_of(cache)
    if recorder is not None:
        recorder.record_own(num_tokens, fn, list(snapshot))


@dataclass
class Tape:
    """What one recurrent cache went through in one round.

    calls_per_forward   layer calls that write it in one forward
    replays_steps       whether forwards of one token may have to run again too
    is_prompt           whether plain decoding feeds these tokens as one window too
    """

    cache: Any
    calls_per_forward: int
    replays_steps: bool = False
    is_prompt: bool = False
    calls: list[Call | OwnCall] = field(default_factory=list)

    def __post_init__(self) -> None:
        #: The slots after the last call, None if the model binds them by itself.
        self.last: Slots | None = slots_of(self.cache)

    @property
    def missed(self) -> bool:
        """Whether the slots were bound by something that was not recorded."""
        return self.last is not None and not holds(self.cache, self.last)

    def start(self) -> None:
        if id(self.cache) in _tapes:
            raise RuntimeError("this prompt cache is already inside an open Round")
        _tapes[id(self.cache)] = self

    def stop(self) -> None:
        if _tapes.get(id(self.cache)) is self:
            del _tapes[id(self.cache)]

    def record(self, stock: Stock, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        before = slots_of(self.cache)
        window = window_of(args, kwargs)
        call = Call(
            stock,
            layer,
            args,
            kwargs,
            self.cache,
            before,
            window,
            keep_linears=self.replays_steps or window > 1,
            keep_states=not self.replays_steps and window > 1,
            is_prompt=self.is_prompt,
        )
        self.calls.append(call)
        output = call.run()
        self.last = slots_of(self.cache)
        if not self.replays_steps:
            # The device starts here, while the host still builds the layers that follow.
            mx.async_eval([slot for slot in self.last.values() if slot is not None])
        return output

    def record_own(self, window: int, fn: OwnUndo, before: list[Any]) -> None:
        self.calls.append(OwnCall(self.cache, window, fn, dict(enumerate(before))))
        self.last = None

    @property
    def fed(self) -> int:
        return sum(call.window for call in self.calls) // self.calls_per_forward

    def forward_of(self, kept: int) -> tuple[int, int]:
        """Index of the first call of the forward that fed token `kept` (from 1), tokens before."""
        first = before = 0
        while kept - before > self.calls[first].window:
            before += self.calls[first].window
            first += self.calls_per_forward
        return first, before

    def seek(self, kept: int) -> None:
        """Sets the slots to what they are after `kept` of the recorded tokens, one or more."""
        first, before = self.forward_of(kept)
        forward = self.calls[first : first + self.calls_per_forward]
        following = self.calls[first + self.calls_per_forward :]
        if kept - before == forward[0].window and following:
            set_slots(self.cache, following[0].before)
            return
        set_slots(self.cache, forward[0].before)
        for call in forward:
            call.replay(kept - before)


class SlotsUndo(Undo):
    """The undo of a recurrent cache for one token that is kept or not: old slots and new ones."""

    mechanism: ClassVar[str] = "retrace"

    def __init__(self, cache: Any, single_steps: int | None = None) -> None:
        self._cache = cache
        self._before, self._start = slots_of(cache), position(cache)
        self._after: Slots | None = None

    def seal(self) -> int:
        self._after = slots_of(self._cache)
        self._fed = int(not holds(self._cache, self._before))
        return self._fed

    def rewind(self, kept: int) -> None:
        if kept == 0:
            set_slots(self._cache, self._before)
        elif kept == self._fed and self._after is not None:
            set_slots(self._cache, self._after)
        else:
            self._seek(kept)
        if self._start is not None:
            note_position(self._cache, self._start + kept)

    def _seek(self, kept: int) -> None:
        raise RuntimeError(f"one token is kept or not, got {kept}")

    def rewind_rows(self, kept: Sequence[int]) -> None:
        """Rewinds all rows to every count that one of them has, and takes each row's own."""
        slots: dict[int, Slots] = {}
        for count in sorted(set(kept)):
            self.rewind(count)
            slots[count] = slots_of(self._cache)
        merged = slots_of(self._cache)
        for name, slot in merged.items():
            if slot is None:
                continue
            if any(slots[count][name] is None for count in kept):
                raise ValueError("of rows without a token before, all keep some or none does")
            rows = [slots[count][name][b : b + 1] for b, count in enumerate(kept)]
            merged[name] = mx.concatenate(rows)
        set_slots(self._cache, merged)


class RetraceUndo(SlotsUndo):
    """The undo of a recurrent cache: old slots, and the layer's own forward over the kept part.

    With `chained` it is one of many in a row (`cache.log`), and may give up its slots.
    """

    def __init__(
        self,
        cache: Any,
        single_steps: int | None = None,
        *,
        calls_per_forward: int = 1,
        chained: bool = False,
        is_prompt: bool = False,
    ) -> None:
        super().__init__(cache)
        self.tape = Tape(cache, calls_per_forward, replays_steps=chained, is_prompt=is_prompt)
        self._chained = chained
        self._link: tuple[Undo, int] | None = None

    def start(self) -> None:
        self.tape.start()

    def record_own(self, window: int, fn: OwnUndo, before: list[Any]) -> None:
        """Records a forward whose slots before it may be bound already."""
        self.tape.record_own(window, fn, before)
        self._before = self.tape.calls[0].before

    def seal(self) -> int:
        self.tape.stop()
        self.missed = self.tape.missed
        self._fed = self.tape.fed
        if not self._chained:
            self._after = slots_of(self._cache)
        return self._fed

    def rewind(self, kept: int) -> None:
        self._unchain()
        super().rewind(kept)

    def _seek(self, kept: int) -> None:
        self.tape.seek(kept)

    def renew(self) -> None:
        self._after = None

    # -- a chain of forwards: only some of them hold slots ----------------------------------------

    @property
    def stands_alone(self) -> bool:
        return self._link is None

    def chain(self, previous: Undo, kept: int) -> None:
        self._link = (previous, kept)
        self._before = self.tape.calls[0].before = {}

    def _unchain(self) -> None:
        if self._link is not None:
            previous, kept = self._link
            previous.rewind(kept)
            self._before = self.tape.calls[0].before = slots_of(self._cache)
            self._link = None
