"""One layer call of a window: recorded, and made again on the part that is kept.

`Call` runs the layer's own forward. Its Linear children go through `linear_call`, which records
their outputs in the first run and hands them back in a replay. The recorder travels on the thread,
and only inside a layer's call: two threads can share a model.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import CacheList

from .pick import Picks, is_trusted, judge
from .recurrence import DeltaStates, may_keep
from .slots import Slots, leaves_of, set_slots, slots_of
from .undo import UNDOS, stock_class

Stock = Callable[..., Any]

_local = threading.local()
_AGAIN = object()


def window_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Tokens in a layer call: the second axis of its first array of two or more axes."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, mx.array) and value.ndim >= 2:
            return int(value.shape[1])
    return 0


def linear_call(stock: Stock, linear: nn.Module, x: mx.array) -> mx.array:
    """Calls a Linear child of such a layer: recorded, or handed back in a replay."""
    linears: _Linears | _Steps | None = getattr(_local, "linears", None)
    return stock(linear, x) if linears is None else linears(stock, linear, x)


def conv_call(stock: Stock, conv: nn.Module, x: mx.array) -> mx.array:
    """Calls a Conv1d child of such a layer: its input is noted in a window."""
    picks: Picks | None = getattr(_local, "picks", None)
    if picks is not None:
        picks.note(x)
    return stock(conv, x)


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
class Call:
    """One recorded call of a layer that writes the slots of `cache`, and the slots before it.

    window          tokens that it is given
    keep_linears    whether the outputs of Linear children are handed back in a replay
    keep_states     whether its states are, where it takes the window token by token (`_Steps`,
                    `cache.recurrence`) and the window is short
    is_prompt       whether plain decoding feeds these tokens as one window too
    """

    stock: Stock
    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cache: Any
    before: Slots
    window: int
    keep_linears: bool = True
    keep_states: bool = True
    is_prompt: bool = False

    def __post_init__(self) -> None:
        takes_steps = self.window > 1 and not self.is_prompt
        self._by_steps = takes_steps and "_rewind_steps" in vars(self.layer)
        self._steps, self._linears = _Steps(), _Linears(self.window)
        self._after: list[Slots] = []
        given = (*self.args, *self.kwargs.values())
        self._dicts = {id(value): dict(value) for value in given if isinstance(value, dict)}
        self._states = DeltaStates() if self.keep_states and not self._by_steps else None
        self._forward = self._states.watch(self.stock) if self._states else self.stock
        self._picks: Picks | None = None
        trusted = is_trusted(self.layer)
        if self._states and not self._dicts and trusted is not False:
            self._picks = Picks(self.window, self._states)
            self.keep_linears = self.keep_linears and not trusted

    @cached_property
    def _attends(self) -> bool:
        """Whether the layer is given attention caches."""
        given = (*self.args, *self.kwargs.values())
        return any(stock_class(leaf) in UNDOS for value in given for leaf in leaves_of(value))

    def run(self) -> Any:
        if self._by_steps:
            outputs, after = self._step(self.window, self.args, self.kwargs)
            if self.keep_states and may_keep(outputs[0].shape[0], self.window):
                self._after = after
            return self._steps.join(outputs)
        output = self._stock(self._recorder(self.window), self.args, self.kwargs, self._picks)
        if self._picks is not None:
            self._picks.assign(slots_of(self.cache))
        return output

    def replay(self, kept: int) -> None:
        """Runs the layer on its first `kept` inputs; what counts is what it does to the slots.

        The slots after the last input are not handed back: the window did not need them, so they
        may still be lazy, and belong to the thread that fed it.
        Attention caches among the arguments must be as they were before the call; they stay so.
        """
        if self._after and kept < self.window:
            set_slots(self.cache, slots_of(self.cache) | self._after[kept - 1])
            return
        trusted = is_trusted(self.layer)
        picked = None
        if self._picks and trusted is not False and kept < self.window:
            picked = self._picks.after(kept)
        if picked is not None and trusted:
            set_slots(self.cache, picked)
            return
        args = [self._again(value, kept) for value in self.args]
        kwargs = {name: self._again(value, kept) for name, value in self.kwargs.items()}
        if self._by_steps:
            self._step(kept, args, kwargs)
        else:
            self._linears.replay(kept)
            if self._states is not None:
                self._states.replay(kept)
            self._stock(self._recorder(kept), args, kwargs)
        if picked is not None:
            judge(self.layer, picked, slots_of(self.cache))

    def _recorder(self, tokens: int) -> _Linears | None:
        """None where nothing of a run may be recorded: a compiled step is traced once for all."""
        traced = tokens == 1 and "_rewind_compiled" in vars(self.layer)
        return None if traced or not self.keep_linears else self._linears

    def _again(self, value: Any, kept: int) -> Any:
        """An argument for a replay of `kept` tokens. Steps are cut from the whole window."""
        if isinstance(value, dict):
            return self._shared(value, kept)
        if isinstance(value, CacheList):
            return CacheList(*(self._again(child, kept) for child in value.caches))
        if stock_class(value) in UNDOS:
            return _twin(value)
        return value if self._by_steps else tree_map(partial(self._cut, kept=kept), value)

    def _shared(self, value: dict[Any, Any], kept: int) -> dict[Any, Any]:
        """Stands in for a dict that the layers of one forward share: the same one for all.

        The first of them starts it from what it was given, also when all are run once more.
        """
        again: dict[int, tuple[set[int], dict[Any, Any]]] = value.setdefault(_AGAIN, {})
        users, stand_in = again.get(kept, ({id(self)}, {}))
        if id(self) in users:
            users.clear()
            before = self._dicts[id(value)].items()
            stand_in = {key: self._cut(x, kept) for key, x in before if key is not _AGAIN}
            again[kept] = users, stand_in
        users.add(id(self))
        return stand_in

    def _cut(self, value: Any, kept: int) -> Any:
        """The part of an array that belongs to the first `kept` tokens; other values as they are.

        Inputs are [B, S, ...]. Of a mask [..., S, T], the last columns are the window's too.
        """
        if not isinstance(value, mx.array) or value.ndim < 2:
            return value
        if self._attends and value.ndim != 3 and value.shape[-2] == self.window:
            return value[..., :kept, : value.shape[-1] - self.window + kept]
        return value[:, :kept] if value.shape[1] == self.window else value

    def _step(self, count: int, args: Any, kwargs: Any) -> tuple[list[mx.array], list[Slots]]:
        """The outputs of `count` steps, and the slots that are bound anew after each."""
        outputs, after = [], []
        before = slots_of(self.cache)
        for step in range(count):
            cut_args, cut_kwargs = self._steps.at(step, [list(args), kwargs], self.window)
            outputs.append(self._stock(self._steps, cut_args, cut_kwargs))
            now = slots_of(self.cache)
            after.append({name: slot for name, slot in now.items() if slot is not before[name]})
        return outputs, after

    def _stock(
        self,
        linears: _Linears | _Steps | None,
        args: Any,
        kwargs: dict[str, Any],
        picks: Picks | None = None,
    ) -> Any:
        _local.linears, _local.picks = linears, picks
        try:
            return self._forward(self.layer, *args, **kwargs)
        finally:
            _local.linears = _local.picks = None


def _twin(entry: Any) -> Any:
    """A copy of an attention cache. What is appended to it does not touch the cache."""
    twin = copy.copy(entry)
    if entry.keys is not None:
        twin.keys, twin.values = tree_map(lambda x: x[...], (entry.keys, entry.values))
    return twin


@dataclass
class OwnCall:
    """A window of a recurrence that brings its own undo, see `record_rollback`."""

    cache: Any
    window: int
    slots_after: Callable[[int], list[Any]]
    before: Slots

    def replay(self, kept: int) -> None:
        slots = self.slots_after(kept)
        if len(slots) != len(self.before):
            raise ValueError(
                f"the fn of record_rollback must return {len(self.before)} slots, got {len(slots)}"
            )
        set_slots(self.cache, dict(enumerate(slots)))
