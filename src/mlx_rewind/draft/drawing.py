"""How a model drafter draws its tokens: with the noise that the target will draw with, if it may.

Two argmax over laws p and q with the same Gumbel noise agree with probability at least
(1 - TV) / (1 + TV), TV their total variation distance (Daliri, Musco and Suresh 2024, "Coupling
without Communication and Drafter-Invariant Speculative Decoding").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import mlx.core as mx

from ..sampling import Draw, Draws, draw
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
            picked = self._pick(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        else:
            picked = mx.argmax(logits, axis=-1)
        self._steps.append(picked.astype(mx.uint32))
        return self._steps[-1]

    def _pick(self, logprobs: mx.array) -> mx.array:
        step = len(self._steps)
        draws: list[Draw] = [
            None if own is None else (own, first + step)
            for own, first in zip(self._draws, self._first, strict=True)
        ]

        def key(own: Draws, position: int) -> list[int]:
            if own.acceptance != "match":
                return own.key("draft", position - step - own.start, step)
            purpose = "token" if self._drafting == "coupled" else "draft"
            return own.key(purpose, position - own.start)

        picked, kinds = draw(draws, logprobs, key, self._vocab)
        for members, law in kinds:
            missing = self._vocab - law.shape[-1]
            wide = mx.pad(law, [(0, 0), (0, missing)], constant_values=-mx.inf) if missing else law
            for i, b in enumerate(members):
                own = self._draws[b]
                if own is not None and own.acceptance != "match":
                    self._laws[b].append(wide[i : i + 1])
        return picked

    def guesses(self, limits: Sequence[int]) -> list[Guess]:
        """What was drawn, cut to so many tokens per row."""
        together = mx.stack(self._steps, axis=1)
        guesses = []
        for b, limit in enumerate(limits):
            law = mx.concatenate(self._laws[b][:limit]) if self._laws[b] and limit else None
            guesses.append(Guess(together[b, :limit], law))
        return guesses
