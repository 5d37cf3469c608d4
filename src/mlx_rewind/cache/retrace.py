"""Recurrent layers: record a window, then call the layer's own forward again on its kept part.

A recurrent layer keeps its past in a few slots of an `ArraysCache` and re-binds them in every
forward. To keep m of S fed tokens, the old slots are put back and the layer runs once more on its
first m inputs. The outputs of its Linear children were recorded and are handed back. MLX is lazy
and only the slots are read afterwards, so what really runs is the convolution and the recurrence.
No formula is written here and no model is named.

Where a layer computes a window by another formula than single steps (`ssm_update` does), a recorded
window is taken token by token, so that it has the bits of plain decoding.

The recorder travels on the thread, and only inside a layer's call: two threads can share a model.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache

from .undo import Undo

Slots = list[Any]
Stock = Callable[..., Any]

_local = threading.local()
_tapes: dict[int, Tape] = {}


def window_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Tokens in a layer call: the second axis of its first array of two or more axes."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, mx.array) and value.ndim >= 2:
            return int(value.shape[1])
    return 0


def recorded_call(stock: Stock, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a layer that writes slots: onto the tape of its cache where a round is open."""
    cache = next((a for a in (*args, *kwargs.values()) if isinstance(a, ArraysCache)), None)
    if cache is None:
        return stock(layer, *args, **kwargs)
    known = position(cache)
    tape = _tapes.get(id(cache))
    if tape is None:
        output = stock(layer, *args, **kwargs)
    else:
        output = tape.record(stock, layer, args, kwargs)
    if known is not None:
        counts = "_rewind_counts" in vars(layer)
        note_position(cache, known + counts * window_of(args, kwargs))
    return output


def linear_call(stock: Stock, linear: nn.Module, x: mx.array) -> mx.array:
    """Calls a Linear child of such a layer: recorded, or handed back in a replay."""
    linears: _Linears | _Steps | None = getattr(_local, "linears", None)
    return stock(linear, x) if linears is None else linears(stock, linear, x)


class _Linears:
    """The Linear outputs of one layer call: recorded first, handed back in a replay."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.outputs: dict[int, list[mx.array]] = {}
        self._replay: dict[int, deque[mx.array]] | None = None
        self._kept = 0

    def replay(self, kept: int) -> None:
        self._replay = {key: deque(outputs) for key, outputs in self.outputs.items()}
        self._kept = kept

    def __call__(self, stock: Stock, linear: nn.Module, x: mx.array) -> mx.array:
        windowed = x.ndim >= 3 and x.shape[1] == (self._kept or self.window)
        recorded = self._replay.get(id(linear)) if self._replay else None
        if windowed and recorded:
            return recorded.popleft()[:, : self._kept]
        output: mx.array = stock(linear, x)
        if windowed and self._replay is None:
            self.outputs.setdefault(id(linear), []).append(output)
        return output


class _Steps:
    """One layer call over a window, taken token by token.

    A Linear child that is given the layer's own input computes the whole window once. So does the
    one whose output the layer returns. What lies between them sees single tokens.
    """

    def __init__(self) -> None:
        self._whole: dict[tuple[int, int], mx.array] = {}
        self._inputs: dict[int, mx.array] = {}
        self._last: list[tuple[Stock, nn.Module, mx.array, mx.array]] = []
        self._step = 0

    def at(self, step: int, args: Any, window: int) -> Any:
        """Cuts the arguments to one token, and remembers what they were cut from."""
        self._step, self._inputs = step, {}

        def cut(value: Any) -> Any:
            if not (isinstance(value, mx.array) and value.ndim >= 2 and value.shape[1] == window):
                return value
            token = value[:, step : step + 1]
            self._inputs[id(token)] = value
            return token

        return tree_map(cut, args)

    def __call__(self, stock: Stock, linear: nn.Module, x: mx.array) -> mx.array:
        source = self._inputs.get(id(x))
        if source is None:
            output = stock(linear, x)
            self._last[self._step :] = [(stock, linear, x, output)]
            return output
        key = (id(linear), id(source))
        if key not in self._whole:
            self._whole[key] = stock(linear, source)
        return self._whole[key][:, self._step : self._step + 1]

    def join(self, outputs: list[mx.array]) -> mx.array:
        last = self._last if len(self._last) == len(outputs) else []
        if last and all(out is given for out, (*_, given) in zip(outputs, last, strict=True)):
            stock, linear, *_ = last[0]
            return stock(linear, mx.concatenate([x for *_, x, _ in last], axis=1))
        return mx.concatenate(outputs, axis=1)


@dataclass
class _Call:
    """One recorded call of a layer, and the slots before it."""

    stock: Stock
    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: Slots

    def __post_init__(self) -> None:
        self.window = window_of(self.args, self.kwargs)
        self._by_steps = self.window > 1 and "_rewind_steps" in vars(self.layer)
        self._steps, self._linears = _Steps(), _Linears(self.window)

    def run(self) -> Any:
        if self._by_steps:
            return self._steps.join(self._step(self.window))
        return self._stock(self._linears if self.window > 1 else None, self.args, self.kwargs)

    def replay(self, kept: int) -> None:
        """Runs the layer on its first `kept` inputs; what counts is what it does to the slots."""
        if self._by_steps:
            self._step(kept)
            return

        def cut(value: Any) -> Any:
            windowed = isinstance(value, mx.array) and value.ndim >= 2
            return value[:, :kept] if windowed and value.shape[1] == self.window else value

        args, kwargs = tree_map(cut, [list(self.args), self.kwargs])
        self._linears.replay(kept)
        self._stock(self._linears, args, kwargs)

    def _step(self, count: int) -> list[mx.array]:
        outputs = []
        for step in range(count):
            args, kwargs = self._steps.at(step, [list(self.args), self.kwargs], self.window)
            outputs.append(self._stock(self._steps, args, kwargs))
        return outputs

    def _stock(self, linears: _Linears | _Steps | None, args: Any, kwargs: dict[str, Any]) -> Any:
        _local.linears = linears
        try:
            return self.stock(self.layer, *args, **kwargs)
        finally:
            _local.linears = None


@dataclass
class Tape:
    """What one `ArraysCache` went through in one round.

    calls_per_forward   layer calls that write it in one forward
    """

    cache: Any
    calls_per_forward: int
    calls: list[_Call] = field(default_factory=list)

    def start(self) -> None:
        if id(self.cache) in _tapes:
            raise RuntimeError("this prompt cache is already inside an open Round")
        _tapes[id(self.cache)] = self

    def stop(self) -> None:
        if _tapes.get(id(self.cache)) is self:
            del _tapes[id(self.cache)]

    def record(self, stock: Stock, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        call = _Call(stock, layer, args, kwargs, list(self.cache.cache))
        self.calls.append(call)
        return call.run()

    @property
    def fed(self) -> int:
        return sum(call.window for call in self.calls) // self.calls_per_forward

    def seek(self, kept: int) -> None:
        """Sets the slots to what they are after `kept` of the recorded tokens, one or more."""
        first = 0
        while kept > self.calls[first].window:
            kept -= self.calls[first].window
            first += self.calls_per_forward
        forward = self.calls[first : first + self.calls_per_forward]
        following = self.calls[first + self.calls_per_forward :]
        if kept == forward[0].window and following:
            self.cache.cache = list(following[0].before)
            return
        self.cache.cache = list(forward[0].before)
        for call in forward:
            call.replay(kept)


class RetraceUndo(Undo):
    """The undo of an `ArraysCache`: old slots, and the layer's own forward over the kept part."""

    mechanism: ClassVar[str] = "retrace"

    def __init__(
        self, cache: Any, single_steps: int | None = None, *, calls_per_forward: int = 1
    ) -> None:
        self._cache = cache
        self._tape = Tape(cache, calls_per_forward)
        self._before = (list(cache.cache), position(cache))

    def start(self) -> None:
        self._tape.start()

    def seal(self) -> int:
        self._tape.stop()
        self._fed = self._tape.fed
        self._after = list(self._cache.cache)
        return self._fed

    def rewind(self, kept: int) -> None:
        slots, start = self._before
        if kept == 0:
            self._cache.cache = list(slots)
        elif kept == self._fed:
            self._cache.cache = list(self._after)
        else:
            self._tape.seek(kept)
        if start is not None:
            note_position(self._cache, start + kept)


# -- positions ------------------------------------------------------------------------------------


#: Tokens in each recurrent cache, and the last slot that they were counted for.
_positions: weakref.WeakKeyDictionary[Any, tuple[int, Callable[[], mx.array | None]]] = (
    weakref.WeakKeyDictionary()
)


def position(cache: Any) -> int | None:
    """Tokens in an `ArraysCache`, None if unknown: slots do not tell, attached layers count.

    The count holds only for the very array it was noted for, so a restored or edited cache is
    unknown rather than wrong.
    """
    last = cache.cache[-1]
    if last is None:
        return 0
    tokens, slot = _positions.get(cache, (None, None))
    return tokens if slot is not None and slot() is last else None


def note_position(cache: Any, tokens: int) -> None:
    last = cache.cache[-1]
    if last is not None:
        _positions[cache] = tokens, weakref.ref(last)
