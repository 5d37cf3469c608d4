"""The check of batches: rows that speculate together, each against its own plain decoding.

Several rows are summed in yet another order than one. So rounding is measured once more: in a batch
of equal rows whose drafts are all right, so that nothing is taken back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn

from ..engine import Engine
from ..request import Request
from .checks import Checks
from .judge import Judge, Place, apart
from .records import FAULT, Check
from .rounding import Bounds, Noise, change
from .runs import PREFILL, Plain, Planned, accept_lengths

_ROWS = 4

#: A request, and the index of its prompt.
Entry = tuple[Request, int]


def neighbours(check: Check, plains: list[Plain], checks: Checks) -> None:
    """Runs the prompts in one batch. Rows accept different numbers of drafts in the same round,
    leave at different times, and one of them does not speculate."""
    model, bounds = checks.model, checks.judge.bounds
    drafter, num_draft_tokens = checks.drafter, checks.num_draft_tokens
    noise = Noise(bounds.noise.logprobs, bounds.noise.gap)
    even = [_entry(plains, i, [num_draft_tokens], num_draft_tokens) for i in range(_ROWS)]
    if not _measure(check, model, noise, bounds.cap, plains, even):
        return
    judge = Judge(Bounds(noise, bounds.floor, bounds.cap))
    plan, uneven = accept_lengths(num_draft_tokens), []
    for i in range(max(_ROWS, len(plains))):
        turn, quarters = i % len(plan), 4 - i % 3
        planned, prompt = _entry(plains, i, plan[turn:] + plan[:turn], num_draft_tokens, quarters)
        others = [] if drafter is None else [drafter]
        guesses = [planned.drafter, *others, planned.drafter, None]
        request = Request(
            planned.prompt, planned.max_tokens, guesses[i % len(guesses)], num_draft_tokens
        )
        uneven.append((request, prompt))
    ended: set[int] = set()
    for row, position, token, logprobs in _run(model, uneven):
        prompt = uneven[row][1]
        if row not in ended and judge.token(
            Place(check, prompt), plains[prompt], position, token, logprobs
        ):
            ended.add(row)


def _entry(
    plains: list[Plain], index: int, plan: list[int], num_draft_tokens: int, quarters: int = 4
) -> Entry:
    """A request with a planned drafter, for so many quarters of the text."""
    prompt = index % len(plains)
    plain = plains[prompt]
    drafter = Planned(plain.tokens, plan, len(plain.prompt), plain.logits[0].size)
    count = max(1, len(plain.tokens) * quarters // 4)
    return Request(plain.prompt, count, drafter, num_draft_tokens), prompt


def _measure(
    check: Check,
    model: nn.Module,
    noise: Noise,
    cap: float,
    plains: list[Plain],
    entries: list[Entry],
) -> bool:
    """Notes how far rows of a batch are from decoding alone; whether that is within the cap."""
    left: set[int] = set()
    for row, position, token, logprobs in _run(model, entries):
        prompt = entries[row][1]
        plain = plains[prompt]
        if row in left:
            continue
        distance = apart(logprobs, plain, position)
        if distance > cap:
            detail = f"a row that keeps all drafts has logprobs {distance:.1e} away from alone"
            Place(check, prompt).add(FAULT, position, detail)
            return False
        noise.see_logits(distance, change(plain.logits[position], logprobs))
        if token != plain.tokens[position]:
            left.add(row)
    return True


def _run(model: nn.Module, entries: list[Entry]) -> Iterator[tuple[int, int, int, mx.array]]:
    """Runs requests together; yields (row, position, token, logprobs [V]) as they come.

    Raises what a row's drafter raised.
    """
    most = max(request.num_draft_tokens for request, _ in entries)
    engine = Engine(
        model, max_rows=len(entries), prefill_step_size=PREFILL, max_draft_tokens=max(16, most)
    )
    rows = {engine.submit(request).id: row for row, (request, _) in enumerate(entries)}
    emitted: Counter[int] = Counter()
    for output in engine:
        if output.handle.error is not None:
            raise output.handle.error
        if output.token is not None and output.logprobs is not None:
            row = rows[output.handle.id]
            yield row, emitted[row], output.token, output.logprobs
            emitted[row] += 1
