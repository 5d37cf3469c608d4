"""Acceptance: pure functions over tokens and laws. They know nothing of models or caches.

    match        keep draft tokens while they equal what the target draws; exact for every sampler
    rejection    Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"
    block        Sun et al. 2024, "Block Verification Accelerates Speculative Decoding"

The last two keep the target's law and not its draws. A deterministic draft has a one-hot law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

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


def rejection(
    target: mx.array,
    guesses: mx.array,
    lots: mx.array,
    noise: mx.array,
    draft: mx.array | None = None,
) -> mx.array:
    """Accepts each draft token with probability min(1, p/q), up to the first that is rejected.

    target      [K + 1, V] log-laws of the target, normalised or not
    guesses     [K]
    lots        [K] uniform numbers in [0, 1)
    noise       [K + 1, V] Gumbel noise
    draft       [K, V] log-laws that the guesses were drawn from; None for a deterministic draft

    Returns [K + 2] int32: the count of accepted tokens, then for each count the token that follows.
    """
    p, q = _laws(target, draft, guesses)
    agreed = lots < _ratios(p, q, guesses)
    accepted = mx.cumprod(agreed.astype(mx.int32)).sum()
    return _result(accepted, mx.maximum(p - q, 0), p, noise)


def block(
    target: mx.array,
    guesses: mx.array,
    lots: mx.array,
    noise: mx.array,
    draft: mx.array | None = None,
) -> mx.array:
    """Accepts the longest prefix by its joint ratio; in expectation never less than `rejection`.

    Arguments and result as of `rejection`.
    """
    p, q = _laws(target, draft, guesses)
    count, weights = guesses.size, [mx.array(1.0)]
    for ratio in _ratios(p, q, guesses):
        weights.append(mx.minimum(weights[-1] * ratio, 1))
    weight = mx.stack(weights)
    rest = mx.maximum(weight[:, None] * p - q, 0)
    mass = rest.sum(axis=-1)
    # Where nothing is left, p equals q and the next position is accepted for certain.
    share = mx.where(mass > 0, mass / (mass + 1 - weight), 0)
    share = mx.concatenate([share[1:count], weight[count:]])
    accepted = mx.max(mx.where(lots < share, mx.arange(1, count + 1), 0))
    return _result(accepted, rest, p, noise)


def _laws(target: mx.array, draft: mx.array | None, guesses: mx.array) -> tuple[mx.array, mx.array]:
    """Probabilities [K + 1, V] of target and draft; the draft has none at the last position."""
    p = mx.softmax(target.astype(mx.float32), axis=-1)
    if draft is None:
        q = (mx.arange(p.shape[-1]) == guesses[:, None]).astype(mx.float32)
    else:
        q = mx.softmax(draft.astype(mx.float32), axis=-1)
    return p, mx.concatenate([q, mx.zeros_like(p[:1])])


def _ratios(p: mx.array, q: mx.array, guesses: mx.array) -> mx.array:
    at = guesses[:, None].astype(mx.int32)
    ours, theirs = (mx.take_along_axis(x[: guesses.size], at, axis=-1)[:, 0] for x in (p, q))
    return ours / theirs


def _result(accepted: mx.array, rest: mx.array, p: mx.array, noise: mx.array) -> mx.array:
    """Draws the next token for every count; where rounding left nothing of a law, from p."""
    nothing = rest.sum(axis=-1, keepdims=True) == 0
    tokens = mx.argmax(mx.log(mx.where(nothing, p, rest)) + noise, axis=-1)
    return mx.concatenate([accepted[None].astype(mx.int32), tokens.astype(mx.int32)])
