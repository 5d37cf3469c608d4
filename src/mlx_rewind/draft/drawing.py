"""How a model drafter draws its tokens: with the noise that the target will draw with, if it may.

Two argmax over laws p and q with the same Gumbel noise agree with probability at least
(1 - TV) / (1 + TV), TV their total variation distance (Daliri, Musco and Suresh 2024, "Coupling
without Communication and Drafter-Invariant Speculative Decoding").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import mlx.core as mx

from ..sampling import Draws, gumbel, laws
from ..types import Guess

#: How draft tokens are drawn for a row that samples: with the target's noise, with noise of their
#: own, or the most likely ones. Under `rejection` and `block` the noise is always their own.
Drafting = Literal["coupled", "independent", "greedy"]


def check_drafting(drafting: str) -> None:
    if drafting not in ("coupled", "independent", "greedy"):
        raise ValueError(f"drafting must be coupled, independent or greedy, got {drafting!r}")


class Drawing:
    """The draft tokens of one round, drawn step by step for all rows of a group.

    draws       of each row, None for one that does not draw by position
    tokens      of each row; its draft follows
    vocab       entries of the target's logits, over which the noise goes
    """

    def __init__(
        self,
        draws: Sequence[Draws | None],
        tokens: Sequence[list[int]],
        vocab: int,
        drafting: Drafting,
    ) -> None:
        self._draws: list[Draws | None] = [
            None if own is None or own.params.is_greedy or drafting == "greedy" else own
            for own in draws
        ]
        self._first = [len(row) for row in tokens]
        self._vocab, self._drafting = vocab, drafting
        self._steps: list[mx.array] = []
        self._laws: list[list[mx.array]] = [[] for _ in draws]

    def pick(self, logits: mx.array) -> mx.array:
        """Draws the next draft token of every row from logits [B, V]; returns [B] uint32."""
        if any(self._draws):
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            each = [self._pick(b, logprobs[b : b + 1]) for b in range(len(self._draws))]
            picked = mx.concatenate(each)
        else:
            picked = mx.argmax(logits, axis=-1)
        self._steps.append(picked.astype(mx.uint32))
        return self._steps[-1]

    def guesses(self, limits: Sequence[int]) -> list[Guess]:
        """What was drawn, cut to so many tokens per row."""
        together = mx.stack(self._steps, axis=1)
        guesses = []
        for b, limit in enumerate(limits):
            law = mx.concatenate(self._laws[b][:limit]) if self._laws[b] and limit else None
            guesses.append(Guess(together[b, :limit], law))
        return guesses

    def _pick(self, b: int, logprobs: mx.array) -> mx.array:
        own = self._draws[b]
        if own is None:
            return mx.argmax(logprobs, axis=-1)
        step, at = len(self._steps), self._first[b] + len(self._steps)
        law = laws([(own, at)], logprobs)
        if own.acceptance != "match":
            key: Any = own.key("draft", self._first[b] - own.start, step)
            missing = self._vocab - law.shape[-1]
            wide = mx.pad(law, [(0, 0), (0, missing)], constant_values=-mx.inf) if missing else law
            self._laws[b].append(wide)
        else:
            key = own.key("token" if self._drafting == "coupled" else "draft", at - own.start)
        noise = gumbel([key], self._vocab)[:, : law.shape[-1]]
        return mx.argmax(law + noise, axis=-1)
