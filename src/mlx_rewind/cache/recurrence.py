"""The gated delta rule of a layer: its state after every token of a window.

mlx-lm computes the rule token by token wherever its Metal kernel does not run, so the states of a
window's tokens are there anyway. `DeltaStates` notes them. Elsewhere it notes the arguments, and
the kernel runs once more on the kept part of them. A replay of the layer gets its states from here
too (see `calls`), and so does who needs nothing else of the layer (see `pick`).

    forward of the layer    gated_delta_update    gated_delta_ops    _gated_delta_step_ops
                            `-- handed back in a replay              `-- noted in a window

These stock functions are bound to other globals for one call. No module is changed, and the rule
is written nowhere here. Where a name of them is gone, nothing is noted and the replay computes.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as memoize
from types import FunctionType
from typing import Any

import mlx.core as mx
from mlx_lm.models import gated_delta

_UPDATE, _LOOP, _STEP = "gated_delta_update", "gated_delta_ops", "_gated_delta_step_ops"

#: Most states that are kept of a layer's window, rows times tokens. Longer ones are computed again.
MOST_STATES = 64

#: The arguments of `gated_delta_update` that have a token axis, the second one.
_BY_TOKEN = frozenset({"q", "k", "v", "a", "b", "mask"})


def may_keep(rows: int, tokens: int) -> bool:
    """Whether the states of all tokens of a window may be kept."""
    return rows * tokens <= MOST_STATES


@dataclass
class Noted:
    """One `gated_delta_update` of a window.

    output    y, [B, S, Hv, Dv]
    state     the state after the window, [B, Hv, Dv, Dk]
    states    those after each of its tokens; none if they were not computed, or are too many
    given     the arguments, if there are no states
    """

    output: mx.array
    state: mx.array
    states: list[mx.array]
    given: tuple[tuple[Any, ...], dict[str, Any]]

    def state_after(self, kept: int) -> mx.array:
        """The state after the first `kept` tokens."""
        if self.states:
            return self.states[kept - 1]
        args, kwargs = self.given
        bound = _signature().bind(*args, **kwargs)
        for name in _BY_TOKEN & bound.arguments.keys():
            value = bound.arguments[name]
            bound.arguments[name] = None if value is None else value[:, :kept]
        state: mx.array = gated_delta.gated_delta_update(*bound.args, **bound.kwargs)[1]
        return state


@memoize
def _signature() -> inspect.Signature:
    return inspect.signature(gated_delta.gated_delta_update)


class DeltaStates:
    """What the calls of `gated_delta_update` in one layer call went through."""

    def __init__(self) -> None:
        self.calls: list[Noted] = []
        self._states: list[mx.array] = []
        self._replay: deque[Noted] = deque()
        self._kept = 0

    def watch(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's forward whose `gated_delta_update` is this one's; itself if it has none."""
        update, loop, step = (vars(gated_delta).get(name) for name in (_UPDATE, _LOOP, _STEP))
        is_stock = isinstance(forward, FunctionType) and forward.__globals__.get(_UPDATE) is update
        if not (is_stock and isinstance(update, FunctionType) and isinstance(loop, FunctionType)):
            return forward
        noting = _bind(update, {_LOOP: _bind(loop, {_STEP: self._noting(step)})})
        return _bind(forward, {_UPDATE: self._updating(noting)})

    def replay(self, kept: int) -> None:
        """From here on the layer runs on its first `kept` tokens, from the start."""
        self._replay, self._kept = deque(self.calls), kept

    def _noting(self, step: Any) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            output, state = step(*args, **kwargs)
            self._states.append(state)
            return output, state

        return noting

    def _updating(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def updating(q: mx.array, *args: Any, **kwargs: Any) -> Any:
            rows, tokens = q.shape[:2]
            if self._replay:
                noted = self._replay.popleft()
                # The last state was no input of the window: see `Call.replay`.
                if tokens == self._kept < len(noted.states):
                    return noted.output[:, : self._kept], noted.states[self._kept - 1]
            self._states = []
            output, state = update(q, *args, **kwargs)
            states, self._states = self._states, []
            if not self._kept:
                is_whole = len(states) == tokens and states[-1] is state
                if is_whole and may_keep(rows, tokens):
                    self.calls.append(Noted(output, state, states, ((), {})))
                else:
                    self.calls.append(Noted(output, state, [], ((q, *args), kwargs)))
            return output, state

        return updating


def _bind(function: Any, names: dict[str, Any]) -> FunctionType:
    """The same function, reading some of its global names elsewhere."""
    bound = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound
