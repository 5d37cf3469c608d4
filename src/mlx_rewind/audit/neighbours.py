"""The check of batches: rows that speculate together, each against its own plain decoding."""

from __future__ import annotations

from collections import Counter

import mlx.nn as nn

from ..draft.protocol import Drafter, Proposer
from ..engine import Engine, Handle, Request
from .judge import Judge, Place
from .records import Check
from .runs import Plain, Planned, accept_lengths

_PREFILL = 2048
_ROWS = 4


def neighbours(
    check: Check,
    model: nn.Module,
    judge: Judge,
    plains: list[Plain],
    drafters: list[Drafter | Proposer],
    num_draft_tokens: int,
) -> None:
    """Runs the prompts in one batch. Rows accept different numbers of drafts in the same round,
    leave at different times, and one of them does not speculate.

    drafters    of the user's own: the second row takes the first, and so on
    """
    engine = Engine(
        model,
        max_rows=_ROWS,
        prefill_step_size=_PREFILL,
        max_draft_tokens=max(16, num_draft_tokens),
    )
    plan, rows = accept_lengths(num_draft_tokens), {}
    vocab_size = plains[0].logits[0].shape[-1]
    for i in range(max(_ROWS, len(plains))):
        plain = plains[i % len(plains)]
        turn = i % len(plan)
        planned = Planned(plain.tokens, plan[turn:] + plan[:turn], len(plain.prompt), vocab_size)
        choices: list[Drafter | Proposer | None] = [planned, *drafters, planned, None]
        request = Request(
            plain.prompt,
            max_tokens=max(1, len(plain.tokens) * (4 - i % 3) // 4),
            drafter=choices[i % len(choices)],
            num_draft_tokens=num_draft_tokens,
        )
        rows[engine.submit(request).id] = i % len(plains)
    compare(check, judge, engine, plains, rows)


def compare(
    check: Check, judge: Judge, engine: Engine, plains: list[Plain], rows: dict[int, int]
) -> None:
    """Runs an engine to its end; rows: request -> prompt. Raises what a row's drafter raised."""
    ended: set[int] = set()
    emitted: Counter[int] = Counter()
    for output in engine:
        handle: Handle = output.handle
        if handle.error is not None:
            raise handle.error
        if output.token is None or output.logprobs is None or handle.id in ended:
            continue
        prompt, position = rows[handle.id], emitted[handle.id]
        emitted[handle.id] += 1
        at = Place(check, prompt)
        if judge.token(at, plains[prompt], position, output.token, output.logprobs):
            ended.add(handle.id)
