"""The gated delta rule of a layer: its state after every token of a window, kept and handed back.

mlx-lm computes the rule token by token wherever its Metal kernel does not run, so the states of a
window's tokens are there anyway. `DeltaStates` notes them, and a replay of the layer gets them back
instead of computing them again.

    forward of the layer    gated_delta_update    gated_delta_ops    _gated_delta_step_ops
                            `-- handed back in a replay              `-- noted in a window

These stock functions are bound to other globals for one call. No module is changed, and the rule
is written nowhere here. Where a name of them is gone, nothing is noted and the replay computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import FunctionType
from typing import Any

import mlx.core as mx
from mlx_lm.models import gated_delta

_UPDATE, _LOOP, _STEP = "gated_delta_update", "gated_delta_ops", "_gated_delta_step_ops"

#: Most states that are kept of a layer's window, rows times tokens. Longer ones are computed again.
MOST_STATES = 64

#: y and state of a `gated_delta_update`, and the states after each of its tokens.
_Noted = tuple[mx.array, list[mx.array]]


def may_keep(rows: int, tokens: int) -> bool:
    """Whether the states of all tokens of a window may be kept."""
    return rows * tokens <= MOST_STATES


class DeltaStates:
    """What the calls of `gated_delta_update` in one layer call went through."""

    def __init__(self) -> None:
        self._calls: list[_Noted | None] = []
        self._states: list[mx.array] = []
        self._replay: deque[_Noted | None] = deque()
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
        self._replay, self._kept = deque(self._calls), kept

    def _noting(self, step: Any) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            output, state = step(*args, **kwargs)
            self._states.append(state)
            return output, state

        return noting

    def _updating(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def updating(q: mx.array, *args: Any, **kwargs: Any) -> Any:
            if self._replay:
                noted = self._replay.popleft()
                output, states = noted or (q, [])
                # The last state was no input of the window: see `Call.replay`.
                if q.shape[1] == self._kept < len(states):
                    return output[:, : self._kept], states[self._kept - 1]
            self._states = []
            output, state = update(q, *args, **kwargs)
            states, self._states = self._states, []
            if not self._kept:
                rows, tokens = q.shape[:2]
                is_whole = len(states) == tokens and states[-1] is state
                is_kept = is_whole and may_keep(rows, tokens)
                self._calls.append((output, states) if is_kept else None)
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
