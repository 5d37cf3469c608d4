"""Sorts differences: what rounding explains, and faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..ties import ulp
from .records import FAULT, NEAR_TIE, Check, Difference
from .rounding import Bounds, gap, number
from .runs import Plain
from .state import Part, distances, parts, relative


@dataclass(frozen=True)
class Place:
    """Where a comparison is made: in which check, and in the text of which prompt."""

    check: Check
    prompt: int

    def add(self, kind: str, position: int, detail: str, **more: Any) -> Difference:
        found = Difference(kind, self.check.name, self.prompt, position, detail, **more)
        self.check.differences.append(found)
        return found


class Judge:
    """Compares tokens, logprobs and caches. Each method returns what it added to the check, or
    None. A run is compared up to its first difference: what follows is another text."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds

    def token(
        self, at: Place, plain: Plain, position: int, token: int, logprobs: mx.array
    ) -> Difference | None:
        """Compares a token that was chosen greedily, and its logprobs [V]."""
        distance = self._logprobs(at, plain, position, logprobs)
        expected = plain.tokens[position]
        if token == expected:
            return self._numbers(at, position, distance)
        apart = gap(plain.logits[position], expected, token)
        tied = 0 < distance <= self.bounds.logprobs and apart <= self.bounds.gap
        return at.add(
            NEAR_TIE if tied else FAULT,
            position,
            f"token {token} instead of {expected}, logprobs {distance:.1e} apart",
            plain=expected,
            speculative=token,
            gap=apart,
            bound=self.bounds.gap,
        )

    def draw(
        self,
        at: Place,
        plain: Plain,
        position: int,
        token: int,
        logprobs: mx.array,
        scores: Callable[[mx.array, int], mx.array] | None,
    ) -> Difference | None:
        """Compares a token that was drawn, with the same random numbers, and its logprobs [V].

        Where the logprobs differ by rounding, a draw between two candidates may tip over: if these
        are no further apart than the rounding of both, with the noise of the draw added.

        scores    scores(logprobs, position) adds that noise, at temperature 1; None if not known
        """
        distance = self._logprobs(at, plain, position, logprobs)
        expected = plain.tokens[position]
        if token == expected:
            return self._numbers(at, position, distance)
        apart, bound = None, None
        if scores is not None:
            logits = plain.logits[position]
            unit = number(ulp(largest(logits), logits.dtype))
            noisy = scores(plain.logprobs[position], position)
            apart = number(mx.abs(noisy[expected] - noisy[token])) / unit
            bound = 2 * distance * number(largest(logits)) / unit + 1
        tied = 0 < distance <= self.bounds.logprobs
        tied = tied and (apart is None or bound is None or apart <= bound)
        return at.add(
            NEAR_TIE if tied else FAULT,
            position,
            f"drew token {token} instead of {expected}, logprobs {distance:.1e} apart",
            plain=expected,
            speculative=token,
            gap=apart,
            bound=bound,
        )

    def state(
        self, at: Place, position: int, ours: list[Any], theirs: list[Any]
    ) -> Difference | None:
        """Compares two prompt caches; theirs never held a rejected token."""
        found = distances(parts(ours), parts(theirs))
        return self.distances(at, position, found, "never fed a rejected token")

    def distances(
        self, at: Place, position: int, found: dict[Part, float], reference: str
    ) -> Difference | None:
        at.check.states += 1
        beyond = {p: x for p, x in found.items() if x > self.bounds.state(p)}
        at.check.state = max([at.check.state, *(x for p, x in found.items() if p not in beyond)])
        return self.stray(at, position, beyond, reference)

    def stray(
        self, at: Place, position: int, beyond: dict[Part, float], reference: str
    ) -> Difference | None:
        """Reports the first of the arrays that are further off than rounding explains."""
        if not beyond:
            return None
        part, distance = next(iter(beyond.items()))
        more = f", and {len(beyond) - 1} more arrays" if len(beyond) > 1 else ""
        detail = (
            f"layer {part.layer}, {part.slot}: {distance:.1e} of its largest number away from a "
            f"cache that was {reference}, rounding explains {self.bounds.state(part):.1e}{more}"
        )
        return at.add(FAULT, position, detail, layer=part.layer, slot=part.slot)

    def _logprobs(self, at: Place, plain: Plain, position: int, logprobs: mx.array) -> float:
        at.check.tokens += 1
        distance = apart(logprobs, plain, position)
        if distance <= self.bounds.logprobs:
            at.check.logprobs = max(at.check.logprobs, distance)
        return distance

    def _numbers(self, at: Place, position: int, distance: float) -> Difference | None:
        if distance <= self.bounds.logprobs:
            return None
        detail = (
            f"the same token, but logprobs {distance:.1e} of the largest logit apart, rounding "
            f"explains {self.bounds.logprobs:.1e}"
        )
        return at.add(FAULT, position, detail)


def apart(logprobs: mx.array, plain: Plain, position: int) -> float:
    """Largest difference of logprobs [V] from those of plain decoding, over the largest logit."""
    expected = plain.logprobs[position]
    if logprobs.dtype != expected.dtype or logprobs.shape != expected.shape:
        return float("inf")
    if mx.array_equal(logprobs, expected):
        return 0.0
    scale = largest(expected) / largest(plain.logits[position])
    distance = number(relative(logprobs, expected) * scale)
    return distance if distance == distance else float("inf")


def largest(x: mx.array) -> mx.array:
    """The largest finite magnitude, as a lazy scalar."""
    x = mx.abs(x.astype(mx.float32))
    return mx.maximum(mx.where(x < mx.inf, x, 0).max(), 1e-30)
