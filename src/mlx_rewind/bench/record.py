"""A drafter under observation, and the rounds that came of its guesses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import mlx.core as mx

from ..draft.protocol import Drafter, Proposer, Session, start
from ..target import Target

Clock = Callable[[], float]


class Proposal(NamedTuple):
    """One call of a drafter: tokens proposed, and seconds until they were computed."""

    drafted: int
    seconds: float


class Verify(NamedTuple):
    """One verify: draft tokens proposed, draft tokens emitted, tokens emitted."""

    drafted: int
    accepted: int
    emitted: int


@dataclass
class Recorder(Drafter):
    """A drafter for one row that notes its guesses.

    guesses    length of the row -> what was guessed there
    """

    kind: ClassVar[str] = "recorded"
    drafter: Drafter | Proposer
    clock: Clock
    guesses: dict[int, Proposal] = field(default_factory=dict)

    def start(self, target: Target) -> Proposer:
        return _Recorded(start(self.drafter, target), self)


@dataclass
class _Recorded(Session):
    """Passes everything on to a proposer and back, the guesses computed."""

    proposer: Proposer
    recorder: Recorder

    def propose(self, tokens: list[int], num_draft_tokens: int) -> Sequence[int] | mx.array:
        begun = self.recorder.clock()
        guesses = self.proposer.propose(tokens, num_draft_tokens)
        mx.eval(guesses)
        seconds = self.recorder.clock() - begun
        self.recorder.guesses[len(tokens)] = Proposal(len(guesses), seconds)
        return guesses

    def absorb(self, tokens: Sequence[int], hidden: mx.array) -> None:
        if isinstance(self.proposer, Session):
            self.proposer.absorb(tokens, hidden)

    def close(self) -> None:
        if isinstance(self.proposer, Session):
            self.proposer.close()


def cut(from_draft: Sequence[bool], drafted: Mapping[int, int]) -> Iterator[Verify]:
    """Cuts emitted tokens into rounds: accepted draft tokens, then one token of the target.

    from_draft    for each emitted token, whether it was a draft token
    drafted       index of a round's first token -> draft tokens proposed for it; 0 where absent
    """
    at = 0
    while at < len(from_draft):
        proposed = drafted.get(at, 0)
        block = list(from_draft[at : at + proposed + 1])
        accepted = block.index(False) if False in block else len(block)
        emitted = min(accepted + 1, len(block))
        yield Verify(proposed, accepted, emitted)
        at += emitted
