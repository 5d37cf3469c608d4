"""Slots after a part of a window, picked from what the layer went through, without running it.

A convolution over time is given the slot before the window and then its tokens, and the slot after
n of them is what such a call would leave behind:

    input of the convolution    [ slot before | x1 x2 x3 x4 x5 ]
    slot after x1 x2                    [- - -]

The state of the gated delta rule after n tokens is known too (`recurrence`). Where all slots of a
layer are of these two kinds, undoing is a slice per slot instead of the layer's own forward. That
they are is not taken for granted: the first time, the layer itself runs too (`calls`) and both
results are compared to the bit. A layer that differs is never picked from.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .recurrence import DeltaStates
from .slots import Slots

#: Where a layer keeps whether picked slots are its own, once that is known.
_TRUSTED = "_rewind_picks"


def is_trusted(layer: nn.Module) -> bool | None:
    """Whether the picked slots of a layer were compared and are right; None before that."""
    known: bool | None = vars(layer).get(_TRUSTED)
    return known


def judge(layer: nn.Module, picked: Slots, slots: Slots) -> None:
    """Compares picked slots with those that the layer made."""
    same = [
        picked[name].dtype == slot.dtype and mx.array_equal(picked[name], slot, equal_nan=True)
        for name, slot in slots.items()
    ]
    vars(layer)[_TRUSTED] = all(bool(one) for one in same)


class Picks:
    """Notes what a layer call gives to its convolutions over time, [B, W + S, C] each."""

    def __init__(self, window: int, states: DeltaStates) -> None:
        self._window, self._states = window, states
        self._inputs: list[mx.array] = []
        self._sources: dict[Any, mx.array | None] = {}

    def note(self, x: mx.array) -> None:
        self._inputs.append(x)

    def assign(self, slots: Slots) -> None:
        """Finds what each of the slots after the window came from, in the order of the calls."""
        states, inputs = [noted.state for noted in self._states.calls], list(self._inputs)
        found: dict[Any, mx.array | None] = {}
        for name, slot in slots.items():
            if len(states) == 1 and slot is states[0]:
                found[name] = None
                states = []
            elif slot is None or not inputs or not self._fits(slot, inputs[0]):
                return
            else:
                found[name] = inputs.pop(0)
        if not inputs and not states:
            self._sources = found

    def _fits(self, slot: mx.array, x: mx.array) -> bool:
        rows, length, channels = x.shape
        return slot.shape == (rows, length - self._window, channels)

    def after(self, kept: int) -> Slots | None:
        """The slots after the first `kept` tokens; None where they cannot be picked."""
        return {name: self._pick(x, kept) for name, x in self._sources.items()} or None

    def _pick(self, x: mx.array | None, kept: int) -> mx.array:
        if x is None:
            return self._states.calls[0].state_after(kept)
        return mx.contiguous(x[:, kept : kept + x.shape[1] - self._window])
