"""A drafter with a draft length: its rounds, its times, and what they come to.

In units of a plain step, with tau the tokens per round, m the cost of one more verified position
and c that of a draft token, rounds of K draft tokens cannot give more than

    ideal = tau / (1 + K (m + c))

What is missing from it is what rounds cost by themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import speculative_generate_step as stock_speculative_generate_step

from ..draft.auto import Auto
from ..draft.model import DraftModel
from ..draft.protocol import Drafter, Proposer
from ..generate import generate_step
from ..types import SpecStats
from .measure import Stretch, decode, ratio, seconds_per_token
from .record import Clock, Proposal, Recorder, Verify, cut


@dataclass(frozen=True)
class Prompt:
    """Token ids, the kind of text, and what is expected to follow, if that is known."""

    tokens: list[int]
    kind: str
    reference: list[int] | None = None


@dataclass(frozen=True)
class Case:
    """A prompt, and the text that plain decoding with mlx_lm gives it."""

    prompt: Prompt
    text: list[int]


#: A drafter for a case, or None where it has nothing to say to it.
DrafterFor = Callable[[Case], Drafter | Proposer | None]


@dataclass(frozen=True)
class Run:
    """What a drafter with a draft length came to, in units of a plain step of our loop.

    stats       counters, without the first round of each prompt, which is not timed either
    tau         tokens per round
    m, c        cost of one more verified position, and of a draft token
    ideal       tau / (1 + K (m + c)), K the draft tokens that there really were
    speed       tokens per plain step: the speed-up over our own plain decoding
    identical   whether every text is that of mlx_lm's plain decoding
    kinds       kind of text -> its stats and its speed
    """

    draft: str
    num_draft_tokens: int
    stats: SpecStats
    tau: float
    m: float
    c: float
    ideal: float
    speed: float
    identical: bool
    kinds: dict[str, tuple[SpecStats, float]]

    @property
    def achieved_over_ideal(self) -> float:
        return self.speed / self.ideal


class Chosen(NamedTuple):
    """`Auto` over all drafters, at most so many draft tokens: its speed as in `Run`."""

    num_draft_tokens: int
    speed: float
    identical: bool


class Stock(NamedTuple):
    """mlx-lm's own speculative decoding: its speed as in `Run`, or why there is none."""

    draft: str
    num_draft_tokens: int
    speed: float | None
    identical: bool | None
    refusal: str | None


@dataclass
class Trial:
    """A drafter with a draft length, before its figures are known.

    rounds      index of the case -> its rounds but for the first
    proposals   of these rounds

    launches_ahead    1 if a step may start before the token of the one before it is out, else 0
    """

    launches_ahead: ClassVar[int] = 0

    model: nn.Module
    draft: str
    drafter_for: DrafterFor
    num_draft_tokens: int
    rounds: dict[int, list[Verify]] = field(default_factory=dict)
    proposals: list[Proposal] = field(default_factory=list)
    identical: bool = True

    @property
    def says_something(self) -> bool:
        return any(self.rounds.values())

    def watch(self, index: int, case: Case, clock: Clock) -> None:
        """Decodes once to see what is guessed, and what it costs to guess."""
        drafter = self.drafter_for(case)
        if drafter is None:
            return
        recorder = Recorder(drafter, clock)
        steps = list(self._steps(case, recorder, len(case.text)))
        self.identical &= [token for token, *_ in steps] == case.text
        at = len(case.prompt.tokens)
        guesses = {length - at: guess for length, guess in recorder.guesses.items()}
        lengths = {start: guess.drafted for start, guess in guesses.items()}
        _, *self.rounds[index] = cut([drafted for _, _, drafted in steps], lengths)
        self.proposals += [guess for start, guess in guesses.items() if start > 0]

    def timed(self, case: Case, clock: Clock) -> Callable[[], Stretch]:
        """What decodes the case and takes the time of it."""
        count = len(case.text)
        asked = count + self.launches_ahead
        return lambda: decode(self._steps(case, self.drafter_for(case), asked), count, clock)

    def run(
        self,
        plain: Sequence[float],
        verify: Mapping[int, float],
        cases: Sequence[Case],
        times: Mapping[int, list[Stretch]],
    ) -> Run:
        """The figures.

        plain     seconds of a plain step, by turn
        verify    tokens of a window -> cost of its forward
        times     index of the case -> its times by turn
        """
        rounds = [one for found in self.rounds.values() for one in found]
        stats = _count(rounds)
        kinds: dict[str, list[int]] = defaultdict(list)
        for i in self.rounds:
            kinds[cases[i].prompt.kind].append(i)
        guessing = _guessing(self.proposals) / median(plain)
        verifying = sum(verify[one.drafted + 1] - verify[1] for one in rounds)
        drafted = max(1, stats.drafted)
        return Run(
            draft=self.draft,
            num_draft_tokens=self.num_draft_tokens,
            stats=stats,
            tau=stats.emitted / len(rounds),
            m=verifying / drafted,
            c=guessing / drafted,
            ideal=stats.emitted / (len(rounds) + verifying + guessing),
            speed=_speed(plain, times.values()),
            identical=self.identical,
            kinds={
                kind: (
                    _count([one for i in found for one in self.rounds[i]]),
                    _speed(plain, [times[i] for i in found]),
                )
                for kind, found in kinds.items()
            },
        )

    def _steps(
        self, case: Case, drafter: Drafter | Proposer | None, max_tokens: int
    ) -> Iterator[Any]:
        return generate_step(
            case.prompt.tokens,
            self.model,
            drafter=drafter,
            num_draft_tokens=self.num_draft_tokens,
            max_tokens=max_tokens,
        )


@dataclass
class AutoTrial(Trial):
    """`Auto` over all drafters, which goes on with what it has learnt of a case."""

    launches_ahead: ClassVar[int] = 1

    @property
    def says_something(self) -> bool:
        return bool(self.rounds)

    def watch(self, index: int, case: Case, clock: Clock) -> None:
        drafter = self.drafter_for(case)
        if drafter is not None:
            steps = self._steps(case, drafter, len(case.text))
            self.identical &= [token for token, *_ in steps] == case.text
            self.rounds[index] = []

    def outcome(self, plain: Sequence[float], times: Mapping[int, list[Stretch]]) -> Chosen:
        return Chosen(self.num_draft_tokens, _speed(plain, times.values()), self.identical)


def auto_of(drafters: Iterable[DrafterFor]) -> DrafterFor:
    """One `Auto` for each case, over all drafters that have something to say to it."""
    known: dict[int, Auto | None] = {}

    def auto_for(case: Case) -> Auto | None:
        if id(case) not in known:
            given = [drafter for drafter in (one(case) for one in drafters) if drafter is not None]
            known[id(case)] = Auto(*given) if given else None
        return known[id(case)]

    return auto_for


@dataclass
class StockTrial(Trial):
    """The same with mlx-lm's own speculative decoding, which may refuse."""

    refusal: str | None = None

    @property
    def says_something(self) -> bool:
        return self.refusal is not None or bool(self.rounds)

    def watch(self, index: int, case: Case, clock: Clock) -> None:
        drafter = self.drafter_for(case)
        if not isinstance(drafter, DraftModel):
            self.refusal = "mlx_lm knows no drafter of this kind"
        if self.refusal is not None:
            return
        try:
            tokens = [int(token) for token, *_ in self._steps(case, drafter, len(case.text))]
        except ValueError as refusal:
            self.refusal = str(refusal)
            return
        self.identical &= tokens == case.text
        self.rounds[index] = []

    def outcome(self, plain: Sequence[float], times: Mapping[int, list[Stretch]]) -> Stock:
        if self.refusal is not None:
            return Stock(self.draft, self.num_draft_tokens, None, None, self.refusal)
        speed = _speed(plain, times.values())
        return Stock(self.draft, self.num_draft_tokens, speed, self.identical, None)

    def _steps(
        self, case: Case, drafter: Drafter | Proposer | None, max_tokens: int
    ) -> Iterator[Any]:
        assert isinstance(drafter, DraftModel)
        return stock_speculative_generate_step(
            mx.array(case.prompt.tokens),
            self.model,
            drafter.model,
            num_draft_tokens=self.num_draft_tokens,
            max_tokens=max_tokens,
        )


def _count(rounds: Sequence[Verify]) -> SpecStats:
    stats = SpecStats()
    for one in rounds:
        stats.count(*one)
    return stats


def _guessing(proposals: Sequence[Proposal]) -> float:
    """Seconds of all proposals, each as long as the median of those with as many tokens."""
    seconds: dict[int, list[float]] = defaultdict(list)
    for one in proposals:
        seconds[one.drafted].append(one.seconds)
    return sum(len(found) * median(found) for found in seconds.values())


def _speed(plain: Sequence[float], stretches: Iterable[list[Stretch]]) -> float:
    return ratio(plain, seconds_per_token(list(stretches)))
