"""Records that pass between the parts. B rows, K draft tokens per row, V vocabulary entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class Guess:
    """Draft tokens [n] uint32 for one row, maybe none, and the log-law [n, V] they were drawn from.

    law    None for a deterministic draft
    """

    tokens: mx.array
    law: mx.array | None = None

    @classmethod
    def none(cls) -> Guess:
        return cls(mx.zeros((0,), mx.uint32))

    def cut(self, count: int) -> Guess:
        """The first `count` of it."""
        if count >= self.tokens.size:
            return self
        return Guess(self.tokens[:count], None if self.law is None else self.law[:count])


@dataclass(frozen=True)
class Draft:
    """Guessed continuations, one per row.

    row 0   d1 d2 d3      tokens   [B, K] uint32, may still be lazy; K = 0 is plain decoding
    row 1   d1 .  .       lengths  draft tokens of each row; what lies beyond is padding

    laws    [n, V] log-laws that a row's tokens were drawn from; None for a deterministic draft
    """

    tokens: mx.array
    lengths: tuple[int, ...]
    laws: tuple[mx.array | None, ...]

    @property
    def num_tokens(self) -> int:
        """K, the draft tokens of the longest row."""
        return self.tokens.shape[1]

    @classmethod
    def of(cls, guesses: Sequence[Guess]) -> Draft:
        """From the guess for each row."""
        rows = [guess.tokens for guess in guesses]
        lengths, laws = tuple(row.size for row in rows), tuple(guess.law for guess in guesses)
        longest = max(lengths)
        if len(rows) == 1:
            return cls(rows[0][None], lengths, laws)
        padded = [mx.pad(row, (0, longest - row.size)) if longest else row for row in rows]
        return cls(mx.stack(padded), lengths, laws)

    @classmethod
    def empty(cls, rows: int = 1) -> Draft:
        return cls(mx.zeros((rows, 0), mx.uint32), (0,) * rows, (None,) * rows)

    def read(self) -> list[list[int]]:
        """The tokens on the host. An empty draft must not wait for the device."""
        if not self.num_tokens:
            return [[] for _ in self.lengths]
        rows: Any = self.tokens.tolist()
        return [row[:length] for row, length in zip(rows, self.lengths, strict=True)]


@dataclass(frozen=True)
class TargetOutput:
    """What the target says about a window.

    logits  [B, K + 1, V], target's dtype: position i follows the pending token and i draft tokens
    hidden  [B, K + 1, H], the hidden states of the same positions, if a drafter reads them
    """

    logits: mx.array
    hidden: mx.array | None = None


@dataclass(frozen=True)
class Verdict:
    """The end of one row's round.

        window    pending  d1   d2   d3
        tokens             d1   d2   t          accepted = 2, t is the target's own token
        kept      └───── 3 ─────┘               window positions that stay in the caches

    tokens    the accepted draft tokens, then one token of the target: the recovered token at the
              first rejection, the bonus token after a fully accepted draft
    """

    tokens: tuple[int, ...]

    @property
    def accepted(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True)
class StepOutput:
    """What a round offers one row for emission.

    tokens      accepted draft tokens and the target's one
    logprobs    one [V] array per token, the target's, after the processors
    is_cut      whether the target's one is missing: it is left to the next round
    """

    tokens: tuple[int, ...]
    logprobs: tuple[mx.array, ...]
    is_cut: bool = False

    def from_draft(self, index: int) -> bool:
        return self.is_cut or index < len(self.tokens) - 1

    def before(self, index: int) -> StepOutput:
        """Without the tokens from `index` on."""
        return StepOutput(self.tokens[:index], self.logprobs[:index], is_cut=True)


@dataclass
class SpecStats:
    """Counters of one row. Only emitted tokens count as accepted.

    rounds                  verifies that had at least one draft token
    drafted, accepted       draft tokens proposed and emitted
    accepted_per_position   [i]: rounds in which the draft token at position i was emitted
    drafted_per_position    [i]: rounds in which there was one
    steps                   all forwards of the target after prefill, plain ones included
    emitted                 tokens handed to the caller
    reason                  why `Auto` does what it does, empty for another drafter
    rechecks                rounds that were cut before a near-tie; each costs one more step
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    emitted: int = 0
    rechecks: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)
    reason: str = ""

    def count(self, drafted: int, accepted: int, emitted: int, is_cut: bool = False) -> None:
        """Adds a round of `drafted` proposals, `accepted` of them right, that emitted `emitted`."""
        if not emitted and not is_cut:
            return
        self.rechecks += is_cut
        self.steps += 1
        self.emitted += emitted
        if not drafted:
            return
        accepted = min(accepted, emitted)
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self._extend(drafted)
        for i in range(drafted):
            self.drafted_per_position[i] += 1
            self.accepted_per_position[i] += i < accepted

    def _extend(self, length: int) -> None:
        for counts in (self.accepted_per_position, self.drafted_per_position):
            counts.extend([0] * (length - len(counts)))

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per target forward, the bonus or recovered token included."""
        return self.emitted / self.steps if self.steps else 0.0
