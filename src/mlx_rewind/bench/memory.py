"""Bytes that decoding keeps: those of plain decoding, and the records of the current round."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import mlx.nn as nn

from ..draft.protocol import Drafter, Proposer
from ..generate import generate_step
from .measure import Windows, active_memory
from .models import Scripted

#: The few small arrays of a step in flight come and go.
_IN_FLIGHT = 1024


@dataclass(frozen=True)
class Memory:
    """Active memory beyond what was there before the first token, in bytes.

    tokens         how many had been emitted
    plain          without a drafter, after each of these
    speculative    with drafts of which some were rejected
    records        what a round adds until it ends, the growth of caches included
    """

    tokens: tuple[int, ...]
    plain: tuple[int, ...]
    speculative: tuple[int, ...]
    records: int

    @property
    def flat(self) -> bool:
        """Whether speculation holds a round's records beyond plain decoding, however long."""
        extra = [s - p for s, p in zip(self.speculative, self.plain, strict=True)]
        return max(extra) <= self.records + _IN_FLIGHT


def held(
    model: nn.Module,
    prompt: Sequence[int],
    at: Sequence[int],
    drafter: Drafter | Proposer | None,
    num_draft_tokens: int,
) -> tuple[list[int], list[int]]:
    """The text up to max(at) tokens, and the bytes that its generation held after each of `at`."""
    before, text, found = active_memory(), [], []
    steps = generate_step(
        prompt,
        model,
        drafter=drafter,
        num_draft_tokens=num_draft_tokens,
        max_tokens=max(at) + num_draft_tokens + 1,
    )
    with closing(steps):  # type: ignore[type-var]
        for token, _, _ in steps:
            text.append(token)
            if len(text) in at:
                found.append(active_memory() - before)
            if len(text) == max(at):
                break
    return text, found


def compare(model: nn.Module, prompt: Sequence[int], tokens: int, num_draft_tokens: int) -> Memory:
    """Decodes `tokens` plainly, and again with drafts half of which are wrong."""
    at = sorted({max(1, tokens // 4), tokens})
    held(model, prompt, [min(8, tokens)], None, 0)  # what is made once
    text, plain = held(model, prompt, at, None, 0)
    drafter = Scripted(prompt, text, 0.5)
    _, speculative = held(model, prompt, at, drafter, num_draft_tokens)
    windows = Windows(model, prompt, text, clock=lambda: 0.0)
    records = windows.records(num_draft_tokens + 1)
    return Memory(tuple(at), tuple(plain), tuple(speculative), records)
