"""Drafting that pays: which drafter and how many tokens, row by row and round by round.

    gain of K draft tokens = (1 + a1 + a1 a2 + ... + a1 .. aK) / (1 + K s)

ai is the estimated share of draft tokens that are right at position i, once those before are; s is
the measured cost of one more position, drafted and verified, in plain steps. Rows of a batch share
the cost and add their tokens. A row whose drafts do not pay rests, and is tried again at growing
intervals. None of this can change the output.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median, median_low
from typing import Any, ClassVar

import mlx.core as mx

from ..cache.store import PromptCacheStore
from ..sampling import Draws
from ..target import Target
from .model import DraftModel, check_tokenizers
from .protocol import Drafter, Proposer, Session, checked, start

#: A gain that is worth the trouble.
_WORTH = 1.02
#: How fast what was seen fades, per round.
_FADE = 0.9
#: The share of right draft tokens before any is seen.
_GUESS = 0.7
#: Rounds that seen acceptance counts for, at the start.
_PRIOR_WEIGHT = 2.0
#: Rounds of rest: the first, and the most.
_REST, _LONGEST_REST = 8, 128
#: Draft tokens of a trial.
_TRIAL = 2
#: Plain rounds that are timed before the first draft.
_TIMED = 2


@dataclass
class Costs:
    """What rounds take. Shared by all requests of one `Auto`.

    fixed    s, if the choice is to depend on counts only; None to measure
    """

    fixed: float | None = None
    _plain: dict[int, deque[float]] = field(default_factory=dict)
    _slopes: dict[tuple[str, int], deque[float]] = field(default_factory=dict)

    #: Guesses of s, before anything is measured.
    guesses: ClassVar[dict[str, float]] = {"model": 0.4, "mtp": 0.25}

    def note(self, kind: str | None, rows: int, longest: int, seconds: float) -> None:
        """Takes the time of a round: its drafter, if it was one, and the most draft tokens."""
        if self.fixed is not None:
            return
        if not longest:
            self._plain.setdefault(rows, deque(maxlen=9)).append(seconds)
        elif kind is not None and rows in self._plain:
            slope = (seconds / median_low(self._plain[rows]) - 1) / longest
            self._slopes.setdefault((kind, rows), deque(maxlen=9)).append(max(0.0, slope))

    def is_timed(self, rows: int) -> bool:
        """Whether a plain round of so many rows is known well enough."""
        return self.fixed is not None or len(self._plain.get(rows, ())) >= _TIMED

    def slope(self, kind: str, rows: int) -> float:
        """s, the cost of one more position in plain steps."""
        if self.fixed is not None:
            return self.fixed
        known = self._slopes.get((kind, rows))
        if known:
            return median(known)
        others = [(abs(rows - r), median(x)) for (k, r), x in self._slopes.items() if k == kind]
        return min(others)[1] if others else self.guesses.get(kind, 0.15)


class Acceptance:
    """Shares of right draft tokens by position, of one drafter; older rounds fade.

    prior    what new rows start from

    A position that was not seen for long counts for as good as the one before, and is tried again.
    """

    def __init__(self, prior: Acceptance | None = None) -> None:
        self._prior = prior
        self._weight = _PRIOR_WEIGHT
        self._seen: list[float] = []
        self._right: list[float] = []

    def note(self, drafted: int, accepted: int) -> None:
        """Takes a round: position i was reached if those before were right."""
        self._weight *= _FADE
        missing = [0.0] * (drafted - len(self._seen))
        self._seen = [x * _FADE for x in self._seen + missing]
        self._right = [x * _FADE for x in self._right + missing]
        for i in range(min(accepted + 1, drafted)):
            self._seen[i] += 1
            self._right[i] += i < accepted

    def shares(self, count: int) -> list[float]:
        """The estimates at the first `count` positions, each if those before are right."""
        prior = None if self._prior is None else self._prior.shares(count)
        shares: list[float] = []
        for i in range(count):
            guess = prior[i] if prior else shares[-1] if shares else _GUESS
            weight = 1.0 if i else self._weight
            seen, right = (x[i] if i < len(x) else 0.0 for x in (self._seen, self._right))
            shares.append((right + weight * guess) / (seen + weight))
        return shares

    def expected(self, longest: int) -> list[float]:
        """[k]: how often the first k + 1 draft tokens are all right."""
        return list(accumulate(self.shares(longest), operator.mul))


class Auto(Drafter):
    """Chooses between drafters, and how much of each is worth it.

    drafters    tried in this order where they promise the same
    costs       measured by default; `Costs(fixed=s)` makes the choice depend on counts only
    """

    kind: ClassVar[str] = "auto"

    def __init__(self, *drafters: Drafter | Proposer, costs: Costs | None = None) -> None:
        if not drafters:
            raise ValueError("Auto needs at least one drafter")
        self.drafters = drafters
        self.costs = Costs() if costs is None else costs
        self.seen = [Acceptance() for _ in drafters]

    def start(self, target: Target) -> AutoSession:
        return AutoSession(self, target)


@dataclass
class Pick:
    """What one row drafts in a round: at most `limit` tokens of a proposer, or tokens it has."""

    proposer: Proposer | None = None
    limit: int = 0
    tokens: list[int] = field(default_factory=list)


@dataclass
class Option:
    """A proposer that could draft for a row.

    index     which of the row's
    shares    [k]: estimated share of rounds in which the first k + 1 draft tokens are right
    slope     cost of one more position in plain steps
    tokens    what it proposed, if asking cost nothing
    """

    index: int
    shares: list[float]
    slope: float
    tokens: list[int] | None = None

    @property
    def gain(self) -> float:
        return _best_gain([self.shares], self.slope, 1)[0]


class AutoSession(Session):
    """One row: its proposers, what they were worth, and when to try again.

    reason    why it does what it does
    """

    def __init__(self, auto: Auto, target: Target) -> None:
        self.auto = auto
        self.proposers = [start(drafter, target) for drafter in auto.drafters]
        self.kinds = [d.kind if isinstance(d, Drafter) else "custom" for d in auto.drafters]
        self.seen = [Acceptance(prior) for prior in auto.seen]
        self.reason = "not started"
        self._vocab = target.vocab_size
        self._rounds = 0
        self._is_resting = False
        self._resumes = 0  # the round of the next trial
        self._rest = _REST
        self._used: int | None = None
        self._slope = 0.0

    # -- what the loop uses ---------------------------------------------------------------------

    @property
    def sessions(self) -> list[Session]:
        return [proposer for proposer in self.proposers if isinstance(proposer, Session)]

    def propose(self, tokens: list[int], num_draft_tokens: int) -> Sequence[int] | mx.array:
        (pick,) = choose([(self, self.options(tokens, num_draft_tokens, 1))], 1)
        return pick.tokens if pick.proposer is None else pick.proposer.propose(tokens, pick.limit)

    def absorb(self, tokens: Sequence[int], hidden: mx.array) -> None:
        for session in self.sessions:
            session.is_idle = self.rests_after(0)
            session.absorb(tokens, hidden)

    @property
    def may_join(self) -> bool:
        return all(session.may_join for session in self.sessions)

    def join(self, other: Session, slack: int) -> None:
        theirs = other.sessions if isinstance(other, AutoSession) else [other]
        for session in self.sessions:
            for one in theirs:
                session.join(one, slack)

    def use_store(
        self, store: PromptCacheStore, prompt: Sequence[int], reused: int, boundaries: Sequence[int]
    ) -> None:
        for session in self.sessions:
            session.use_store(store, prompt, reused, boundaries)

    def keep(self, tokens: Sequence[int]) -> None:
        for session in self.sessions:
            session.keep(tokens)

    def close(self) -> None:
        for session in self.sessions:
            session.close()

    def draw_with(self, draws: Draws | None) -> None:
        for session in self.sessions:
            session.draw_with(draws)

    def rests_after(self, rounds: int) -> bool:
        """Whether the round after so many more is known to have no draft."""
        return self._is_resting and self._rounds + rounds < self._resumes

    @property
    def used(self) -> str | None:
        """The kind of the drafter of the current round."""
        return None if self._used is None else self.kinds[self._used]

    def learn(self, drafted: int, accepted: int) -> None:
        """Takes what became of the row's part of a round."""
        self._rounds += 1
        used, self._used = self._used, None
        if not drafted or used is None:
            return
        for seen in (self.seen[used], self.auto.seen[used]):
            seen.note(drafted, accepted)
        if accepted and self._slope * _WORTH < 1:  # right drafts can pay: try again at once
            self._rest = _REST
            self._resumes = self._rounds
        elif self._is_resting:
            self.reason = f"stopped: acceptance too low ({self.kinds[used]} was tried again)"

    # -- parts of the choice --------------------------------------------------------------------

    def options(self, tokens: list[int], limit: int, rows: int) -> list[Option]:
        """What could draft at most `limit` tokens in a round that so many rows share."""
        if limit < 1 or self.rests_after(0):
            return []
        if not self.auto.costs.is_timed(rows):
            self.reason = "plain: timing a step"
            return []
        found: list[Option] = []
        for i, proposer in enumerate(self.proposers):
            guess, most = None, limit
            if not isinstance(proposer, Session):
                given = tokens if isinstance(proposer, Drafter) else list(tokens)
                guess = checked(proposer.propose(given, limit), limit, self._vocab)
                most = len(guess)
            if most:
                slope = self.auto.costs.slope(self.kinds[i], rows)
                found.append(Option(i, self.seen[i].expected(most), slope, guess))
        if not found:
            self.reason = "plain: nothing to propose"
        return found

    def rest(self, reason: str, rows: int) -> None:
        """Parks until a trial that the other rows of the round pay for too, so the rarer."""
        self.reason, self._is_resting = reason, True
        self._resumes = self._rounds + self._rest * rows
        self._rest = min(2 * self._rest, _LONGEST_REST)

    @property
    def is_trial(self) -> bool:
        """Whether a rest is over."""
        return self._is_resting and self._rounds >= self._resumes

    def use(self, option: Option, limit: int) -> Pick:
        self._used, self._slope = option.index, option.slope
        if option.tokens is not None:
            return Pick(tokens=option.tokens[:limit])
        return Pick(self.proposers[option.index], limit)

    def draft(self, option: Option, limit: int, reason: str) -> Pick:
        self.reason, self._is_resting = reason, False
        return self.use(option, limit)


def choose(rows: Sequence[tuple[AutoSession, list[Option]]], count: int) -> list[Pick]:
    """What each of some rows drafts in a round that `count` rows share."""
    picks = [Pick() for _ in rows]
    best = {
        b: max(options, key=lambda option: (option.gain, -option.index))
        for b, (_, options) in enumerate(rows)
        if options
    }
    slope = max((option.slope for option in best.values()), default=0.0)
    gain, longest = _best_gain([option.shares for option in best.values()], slope, count)
    for b, option in best.items():
        session = rows[b][0]
        kind = session.kinds[option.index]
        worth = sum(share >= _WORTH - 1 for share in option.shares[:longest])
        if worth:
            told = f"{worth} by {kind}: gain {gain:.2f}, {slope:.2f} steps a position"
            picks[b] = session.draft(option, worth, told)
        elif session.is_trial:
            session.rest(f"trying {kind}", count)
            picks[b] = session.use(option, min(_TRIAL, len(option.shares)))
        else:
            told = f"{option.shares[0]:.2f} right, {slope:.2f} steps a position"
            session.rest(f"stopped: acceptance too low ({kind}: {told})", count)
    return picks


def note_round(sessions: Sequence[AutoSession], rows: int, longest: int, seconds: float) -> None:
    """Takes the time of a round of `rows` rows, before they learn what became of it."""
    kinds = {session.used for session in sessions} - {None}
    if sessions and len(kinds) <= 1:
        sessions[0].auto.costs.note(next(iter(kinds), None), rows, longest, seconds)


def choice_of(reason: str) -> str:
    """What a row does, without the figures in `reason`, for counting rows that do the same."""
    said = reason.partition(":")[0]
    _, drafts, kind = said.partition(" by ")
    return f"drafting by {kind}" if drafts else said or "not started"


def parts(drafter: Drafter | Proposer | None) -> Sequence[Drafter | Proposer]:
    """The drafters that a drafter is made of: those of an `Auto`, itself, or none."""
    if isinstance(drafter, Auto):
        return drafter.drafters
    return [] if drafter is None else [drafter]


def check_drafter(tokenizer: Any, drafter: Drafter | Proposer | None) -> None:
    """Compares the tokenizers of draft models with the target's; see `check_tokenizers`."""
    for part in parts(drafter):
        if isinstance(part, DraftModel) and part.tokenizer is not None:
            check_tokenizers(tokenizer, part.tokenizer)


def _best_gain(rows: list[list[float]], slope: float, count: int) -> tuple[float, int]:
    """The best gain of rows that draft, and its K, where `count` rows share the round."""
    best, total = (1.0, 0), float(count)
    for k in range(1, max(map(len, rows), default=0) + 1):
        total += sum(shares[k - 1] for shares in rows if len(shares) >= k)
        gain = total / count / (1 + k * slope)
        if gain > max(best[0], _WORTH):
            best = gain, k
    return best
