"""The draft of a round: every row's proposer asked once, rows of one drafter in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .batch import Batch, Row, WindowProcessor
from .draft.auto import AutoSession, Option, choose
from .draft.protocol import Group, Proposer, Session, propose
from .types import Draft, Guess


@dataclass
class _Together:
    """A group that drafts, and how much for which row."""

    group: Group
    limits: dict[int, int] = field(default_factory=dict)


def draft_for(batch: Batch, limits: Sequence[int], vocab: int) -> Draft:
    """Draft tokens for every row, at most so many; none for a row that fails or does not draft.

    vocab    entries of the target's logits
    """
    guesses = [Guess.none()] * len(batch.rows)
    together: dict[int, _Together] = {}
    for b, proposer, limit in _proposers(batch, limits, guesses):
        group = proposer.group if isinstance(proposer, Session) else None
        if group is not None:
            together.setdefault(id(group), _Together(group)).limits[b] = limit
        elif limit:
            with batch.guard(batch.rows[b]):
                guesses[b] = propose(proposer, batch.rows[b].tokens, limit, vocab)
    for one in together.values():
        _draft_together(batch, one, guesses)
    for b, row in enumerate(batch.rows):
        if row.processors and row.has_windows and guesses[b].tokens.size:
            with batch.guard(row):
                read: Any = guesses[b].tokens.tolist()
                guesses[b] = guesses[b].cut(_legal(row, read))
    return Draft.of(guesses)


def _proposers(
    batch: Batch, limits: Sequence[int], guesses: list[Guess]
) -> list[tuple[int, Proposer, int]]:
    """(row, proposer, most tokens); fills in what a row that chooses has already."""
    asked: list[tuple[int, Proposer, int]] = []
    choosing: list[tuple[int, AutoSession, list[Option]]] = []
    for b, row in enumerate(batch.rows):
        if isinstance(row.proposer, AutoSession):
            options: list[Option] = []
            with batch.guard(row):
                options = row.proposer.options(row.tokens, limits[b], len(batch.rows))
            choosing.append((b, row.proposer, options))
        elif row.proposer is not None:
            asked.append((b, row.proposer, limits[b]))
    picks = choose([(session, options) for _, session, options in choosing], len(batch.rows))
    for (b, _, _), pick in zip(choosing, picks, strict=True):
        if pick.proposer is not None:
            asked.append((b, pick.proposer, pick.limit))
        elif pick.tokens:
            guesses[b] = Guess(mx.array(pick.tokens, mx.uint32))
    return asked


def _draft_together(batch: Batch, together: _Together, guesses: list[Guess]) -> None:
    """Lets the rows of a group draft in one forward. A drafter that fails fails them all."""
    rows, members = batch.rows, together.group.members
    owner = {id(session): b for b, row in enumerate(rows) for session in _sessions(row)}
    at = [owner[id(member)] for member in members]
    limits = [together.limits.get(b, 0) for b in at]
    if not any(limits):
        return
    drafts = None
    with batch.guard(rows[at[0]]):
        drafts = together.group.propose([rows[b].tokens for b in at], limits)
    for i, b in enumerate(at):
        if drafts is None:
            rows[b].error = rows[at[0]].error
        elif limits[i]:
            guesses[b] = drafts[i]


def _sessions(row: Row) -> list[Session]:
    if isinstance(row.proposer, AutoSession):
        return row.proposer.sessions
    return [row.proposer] if isinstance(row.proposer, Session) else []


def _legal(row: Row, guesses: Sequence[int]) -> int:
    """How many leading draft tokens the row's processors allow to be verified."""
    count = len(guesses)
    for processor in row.processors:
        if isinstance(processor, WindowProcessor):
            count = min(count, processor.legal(row.tokens, list(guesses[:count])))
    return count
