"""What the loop asks of a drafter. A drafter holds weights or settings, a proposer one row's state.

A proposer needs no feedback: the row's committed tokens tell it what became of its last proposal.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import mlx.core as mx

from ..cache.store import PromptCacheStore
from ..errors import DraftMismatchError
from ..sampling import Draws
from ..target import Target
from ..types import Guess


@runtime_checkable
class Proposer(Protocol):
    """Guesses what follows `tokens`. Custom drafters need this one method."""

    def propose(self, tokens: list[int], num_draft_tokens: int) -> Sequence[int] | mx.array:
        """Returns at most `num_draft_tokens` ids that may follow; fewer or none is fine.

        tokens    prompt and emitted tokens of the row, the pending one last
        """
        ...


class Drafter(ABC):
    """A built-in drafter: starts one proposer per row."""

    kind: ClassVar[str]

    @abstractmethod
    def start(self, target: Target) -> Proposer:
        """Returns a proposer for a new row of `target`."""


class Group(ABC):
    """Sessions of one drafter whose rows draft in one forward.

    members    the sessions, in the order of the rows of its caches
    """

    members: list[Session]

    @abstractmethod
    def propose(self, tokens: Sequence[list[int]], limits: Sequence[int]) -> list[Guess]:
        """For each member's row: at most so many draft tokens after its tokens."""


class Session(ABC):
    """A proposer that keeps state of its own for one row, and gives it back when the row ends.

    group    the sessions that it drafts together with, itself included; None for one that cannot
    draws    how the row draws its tokens by seed and position; None for any other way
    is_idle  whether the row is not about to draft, so that reading along may wait
    """

    group: Group | None = None
    draws: Draws | None = None
    is_idle: bool = False

    def draw_with(self, draws: Draws | None) -> None:
        """Sets `draws`, before the first proposal."""
        self.draws = draws

    @property
    def may_join(self) -> bool:
        """Whether its caches hold something, without which it cannot draft together."""
        return True

    @abstractmethod
    def propose(self, tokens: list[int], num_draft_tokens: int) -> Sequence[int] | mx.array:
        """See `Proposer.propose`."""

    def absorb(self, tokens: Sequence[int], hidden: mx.array) -> None:  # noqa: B027
        """Takes the target's states of positions that are committed, if the target is watched.

        hidden    [n, H]: the states of the next n positions of the row, in order
        tokens    n ids: the token after each of them
        """

    def join(self, other: Session, slack: int) -> None:  # noqa: B027
        """Drafts together with `other` and its group from here on, if it can. Between two rounds.

        slack    the longest window that will be fed, for sliding windows
        """

    def use_store(  # noqa: B027
        self, store: PromptCacheStore, prompt: Sequence[int], reused: int, boundaries: Sequence[int]
    ) -> None:
        """Starts from draft caches that a store has, if it keeps any.

        reused        tokens of the prompt that are not fed to the target
        boundaries    tokens of the prompt after which others may go on differently
        """

    def keep(self, tokens: Sequence[int]) -> None:  # noqa: B027
        """Leaves its draft caches in the store; the target's hold exactly these tokens."""

    @abstractmethod
    def close(self) -> None:
        """Takes back the draft tokens of an unfinished round, and leaves its group."""


def kind_of(drafter: Drafter | Proposer | None) -> str:
    """The drafter's name in statistics."""
    if drafter is None:
        return "none"
    return drafter.kind if isinstance(drafter, Drafter) else "custom"


def start(drafter: Drafter | Proposer, target: Target, draws: Draws | None = None) -> Proposer:
    """Returns the proposer of a new row; a custom drafter is its own.

    draws    how the row draws its tokens, for drafters that draw with the same noise

    Raises `DraftMismatchError` for an object that cannot propose, or not for this target.
    """
    if isinstance(drafter, type):
        raise DraftMismatchError(f"drafter is the class {drafter.__name__}; give an instance")
    if isinstance(drafter, Drafter):
        proposer = drafter.start(target)
        if isinstance(proposer, Session):
            proposer.draw_with(draws)
        return proposer
    if not isinstance(drafter, Proposer):
        raise DraftMismatchError(
            f"a drafter needs propose(tokens, num_draft_tokens), {type(drafter).__name__} has none"
        )
    return drafter


def propose(proposer: Proposer, tokens: list[int], limit: int, vocab_size: int) -> Guess:
    """Asks for at most `limit` draft tokens. A session's stay on the device, unread."""
    ours = isinstance(proposer, (Drafter, Session))
    proposal = proposer.propose(tokens if ours else list(tokens), limit)
    if isinstance(proposer, Session) and isinstance(proposal, mx.array):
        return Guess(proposal.astype(mx.uint32))
    return Guess(mx.array(checked(proposal, limit, vocab_size), mx.uint32))


def checked(proposal: Iterable[int] | mx.array | None, limit: int, vocab_size: int) -> list[int]:
    """Returns the ids of a proposal.

    Raises `DraftMismatchError` for too many tokens or one that the target does not have.
    """
    if not isinstance(proposal, Iterable):
        raise DraftMismatchError(f"the drafter proposed {proposal!r}, not a list of token ids")
    given: Any = proposal.tolist() if isinstance(proposal, mx.array) else proposal
    ids = list(given)
    if len(ids) > limit:
        raise DraftMismatchError(
            f"the drafter proposed {len(ids)} tokens, at most {limit} were asked for"
        )
    return [_checked_token(token, vocab_size) for token in ids]


def _checked_token(token: Any, vocab_size: int) -> int:
    try:
        index = operator.index(token)
    except TypeError:
        index = -1
    if not 0 <= index < vocab_size:
        raise DraftMismatchError(
            f"the drafter proposed token {token!r}; the target's ids are 0..{vocab_size - 1}"
        )
    return index
