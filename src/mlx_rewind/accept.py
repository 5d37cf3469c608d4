"""Acceptance: pure functions over tokens. They know nothing of models, caches or samplers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .types import Verdict


def match(draft: Sequence[int], draw: Callable[[int], int]) -> Verdict:
    """Keeps draft tokens while they equal what the target draws; exact for every sampler.

    draft   the row's draft tokens d1..dK
    draw    draw(i) is the target's token after the pending token and d1..di. It is asked in order,
            once per position that will be emitted, so a sampler with a state of its own advances
            exactly as in plain decoding.
    """
    tokens: list[int] = []
    for guess in (*draft, None):
        tokens.append(draw(len(tokens)))
        if tokens[-1] != guess:
            break
    return Verdict(tuple(tokens))
