"""What rounding explains, and what it does not.

A window of several tokens may be summed in another order than single steps. How far that goes on
this machine is measured: the model is fed its own text in windows of which nothing is taken back,
so that no rollback is involved, and compared with single steps. A speculative run that is further
from plain decoding than some multiple of this is at fault.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..cache.probe import walk
from ..cache.slots import is_own_class
from ..cache.undo import stock_class
from ..target import BITWISE, TOKEN
from ..ties import ulp
from .state import Part

#: A run may be this many times as far from plain decoding as undisturbed windows were seen to be.
SLACK = 8
#: The smallest bound on the gap of two candidates, in units in the last place of the logits.
LEAST_GAP = 2.0


def number(x: mx.array) -> float:
    """A scalar on the host."""
    value: Any = x.item()
    return float(value)


def gap(logits: mx.array, first: int, second: int) -> float:
    """How far apart two candidates are in logits [V], in units in the last place of the larger."""
    pair = mx.stack([logits[first], logits[second]]).astype(mx.float32)
    return number(mx.abs(pair[0] - pair[1]) / ulp(mx.abs(pair).max(), logits.dtype))


def change(logits: mx.array, others: mx.array) -> float:
    """How much the gap of the two best candidates of logits [V] is different in others [V], which
    are logits or logprobs, in units in the last place of the logits."""
    best = mx.argpartition(-logits, 1)[:2]
    ours, theirs = logits[best].astype(mx.float32), others[best].astype(mx.float32)
    moved = mx.abs((ours[0] - ours[1]) - (theirs[0] - theirs[1]))
    return number(moved / ulp(mx.abs(ours).max(), logits.dtype))


@dataclass
class Noise:
    """How far undisturbed windows are from single steps, the largest seen.

    logprobs    difference of a logprob, over the largest logit of its row
    gap         change of the gap of the two best candidates, in units in the last place
    states      difference of a number in an array of a cache, over the largest in the array
    """

    logprobs: float = 0.0
    gap: float = 0.0
    states: dict[Part, float] = field(default_factory=dict)

    @property
    def state(self) -> float:
        return max(self.states.values(), default=0.0)

    def see_logits(self, distance: float, change: float) -> None:
        self.logprobs, self.gap = max(self.logprobs, distance), max(self.gap, change)

    def see_state(self, distances: dict[Part, float]) -> None:
        for part, distance in distances.items():
            self.states[part] = max(distance, self.states.get(part, 0.0))


@dataclass
class Bounds:
    """The largest differences that rounding explains.

    floor    allowed whatever was measured: what the level of exactness says
    cap      never allowed, however far windows are from single steps
    """

    noise: Noise
    floor: float
    cap: float

    @classmethod
    def of(cls, model: nn.Module, cache: list[Any], level: str) -> Bounds:
        eps = _precision(model, cache)
        floor = {BITWISE: 0.0, TOKEN: 1e-5}.get(level, 64 * eps)
        return cls(Noise(), floor, cap=1e-3 if eps < 1e-6 else 0.25)

    @property
    def logprobs(self) -> float:
        return self._bound(self.noise.logprobs)

    @property
    def gap(self) -> float:
        return max(LEAST_GAP, 2 * self.noise.gap)

    def state(self, part: Part) -> float:
        measured = self.noise.states.get(part, 0.0)
        if self.noise.state:  # windows do round here, if not in this very array
            measured = max(measured, self.noise.state / SLACK)
        return self._bound(measured)

    def _bound(self, measured: float) -> float:
        return min(self.cap, max(self.floor, SLACK * measured))


def _precision(model: nn.Module, cache: list[Any]) -> float:
    """Relative spacing of the coarsest numbers that the model or its caches keep."""
    if any(is_own_class(stock_class(entry)) for _, entry in walk(cache)):
        return 0.125  # of fp8
    weights: Any = tree_flatten(model.parameters())
    floats = {x.dtype for _, x in weights if mx.issubdtype(x.dtype, mx.floating)}
    return max((float(mx.finfo(dtype).eps) for dtype in floats), default=0.0)
