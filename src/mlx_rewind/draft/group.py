"""Sessions whose rows draft in one forward: how they come together and part again."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..cache.members import join, keep, rows_of
from ..cache.ragged import why_row_by_row
from ..cache.round import Round
from .drawing import Drawing
from .protocol import Drafter, Group, Session


class Member(Session):
    """One row of a group that draft caches are kept for."""

    group: CachedGroup

    def propose(self, tokens: list[int], num_draft_tokens: int) -> mx.array:
        return self.group.propose([tokens], [num_draft_tokens])[0].tokens

    def join(self, other: Session, slack: int) -> None:
        if isinstance(other, Member) and other.group.fits(self.group):
            self.group.join(other.group, slack)

    def close(self) -> None:
        self.group.leave(self)


class CachedGroup(Group):
    """Rows with draft caches of their own: stock ones for one row, caches of rows for more."""

    def __init__(self, drafter: Drafter, member: Session, vocab: int) -> None:
        self.members: list[Session] = [member]
        self._vocab = vocab  # of the target
        self._drafter: Any = drafter
        self._round: Round | None = None
        self._has_rows = False
        self._longest = sys.maxsize  # the longest window that the caches take

    @property
    @abstractmethod
    def _model(self) -> nn.Module:
        """The model whose file tells whether rows can be fed together."""

    @property
    @abstractmethod
    def _prompt_caches(self) -> list[list[Any]]:
        """Every prompt cache of the group."""

    @abstractmethod
    def _abort(self) -> None:
        """Takes back the draft tokens of an unfinished round."""

    @abstractmethod
    def _take(self, other: Any) -> None:
        """Appends what is kept of each row beside the caches."""

    @abstractmethod
    def _keep(self, rows: Sequence[int]) -> None:
        """Leaves only what is kept of these rows."""

    def _drawing(self, tokens: Sequence[list[int]]) -> Drawing:
        draws = [member.draws for member in self.members]
        return Drawing(draws, tokens, self._vocab, self._drafter.drafting)

    def fits(self, other: CachedGroup) -> bool:
        """Whether both may draft together."""
        if other is self or other._drafter is not self._drafter:
            return False
        return why_row_by_row(self._model) is None

    def join(self, other: CachedGroup, slack: int) -> None:
        self._longest = slack + 1
        for group in (self, other):
            group._abort()
            if not group._has_rows:
                for cache in group._prompt_caches:
                    cache[:] = [rows_of(entry, slack) for entry in cache]
                group._has_rows = True
        for ours, theirs in zip(self._prompt_caches, other._prompt_caches, strict=True):
            join(ours, theirs)
        self._take(other)
        self.members += other.members
        for member in other.members:
            member.group = self

    def leave(self, member: Session) -> None:
        stay = [b for b, known in enumerate(self.members) if known is not member]
        if len(stay) == len(self.members):
            return
        self._abort()
        if stay:
            for cache in self._prompt_caches:
                keep(cache, stay)
            self._keep(stay)
            self.members = [self.members[b] for b in stay]
