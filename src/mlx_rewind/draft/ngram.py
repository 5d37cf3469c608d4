"""Drafting without a model: what followed the same words before, or what the caller expects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ..target import Target
from .protocol import Drafter, Proposer, checked


class SuffixIndex:
    """Where each n-gram of a growing token list was last followed by something.

    Adding a token and finding the longest known suffix cost O(longest n-gram), whatever the length.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                f"n-gram sizes must satisfy 1 <= min <= max, got min {min_ngram}, max {max_ngram}"
            )
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self.tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            for suffix in self._suffixes(self.tokens):
                self._next[suffix] = len(self.tokens)
            self.tokens.append(token)

    def find(self, context: Sequence[int]) -> int | None:
        """Index after the latest occurrence of the longest known suffix of `context`."""
        for suffix in self._suffixes(context):
            if suffix in self._next:
                return self._next[suffix]
        return None

    def _suffixes(self, context: Sequence[int]) -> list[tuple[int, ...]]:
        tail = tuple(context[-self._sizes[0] :])
        return [tail[-size:] for size in self._sizes if size <= len(tail)]


class NGram(Drafter):
    """Prompt lookup: continues as the row did after the latest occurrence of its longest suffix.

    min_ngram, max_ngram   suffix lengths in tokens; the longest that occurred before wins
    """

    kind: ClassVar[str] = "ngram"

    def __init__(self, min_ngram: int = 2, max_ngram: int = 5) -> None:
        self._index = SuffixIndex(min_ngram, max_ngram)
        self.min_ngram, self.max_ngram = min_ngram, max_ngram

    def start(self, target: Target) -> Proposer:
        return NGram(self.min_ngram, self.max_ngram)

    def propose(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
        known = len(self._index.tokens)
        if self._index.tokens[-self.max_ngram :] != tokens[max(0, known - self.max_ngram) : known]:
            self._index = SuffixIndex(self.min_ngram, self.max_ngram)
            known = 0
        self._index.extend(tokens[known:])
        found = self._index.find(self._index.tokens)
        if found is None:
            return []
        # A match that reaches the end of the row goes on with its own beginning: a loop repeats.
        span = len(tokens) - found
        return [tokens[found + i % span] for i in range(num_draft_tokens)]


class Prediction(Drafter):
    """Text that the caller expects, such as a file before an edit.

    Follows `tokens` while the row agrees; after a divergence it finds the row's last tokens in the
    prediction again and goes on from there.

    tokens       the predicted continuation, without the prompt
    min_ngram    tokens that must agree before it goes on after a divergence
    """

    kind: ClassVar[str] = "prediction"

    def __init__(self, tokens: Sequence[int], min_ngram: int = 2, max_ngram: int = 8) -> None:
        self.tokens = [int(token) for token in tokens]
        self.min_ngram, self.max_ngram = min_ngram, max_ngram
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                f"n-gram sizes must satisfy 1 <= min <= max, got min {min_ngram}, max {max_ngram}"
            )
        self._places: dict[tuple[int, ...], list[int]] = {}
        for size in range(min_ngram, max_ngram + 1):
            for end in range(size, len(self.tokens)):
                self._places.setdefault(tuple(self.tokens[end - size : end]), []).append(end)
        self._next = 0
        self._aligned = True
        self._seen: int | None = None

    def start(self, target: Target) -> Proposer:
        """Returns a proposer at the start of the prediction.

        Raises `DraftMismatchError` for a predicted token that the target does not have.
        """
        checked(self.tokens, len(self.tokens), target.vocab_size)
        return Prediction(self.tokens, self.min_ngram, self.max_ngram)

    def propose(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
        seen = len(tokens) if self._seen is None else self._seen
        for end in range(seen + 1, len(tokens) + 1):
            self._follow(tokens[max(0, end - self.max_ngram) : end])
        self._seen = len(tokens)
        return self.tokens[self._next : self._next + num_draft_tokens] if self._aligned else []

    def _follow(self, tail: list[int]) -> None:
        """Moves on to the token after the row's last one, or looks for the row's place anew."""
        if self._aligned and self.tokens[self._next : self._next + 1] == tail[-1:]:
            self._next += 1
            return
        place = self._find(tail)
        self._aligned = place is not None
        if place is not None:
            self._next = place

    def _find(self, tail: list[int]) -> int | None:
        """Where the longest known suffix of the row ends in the prediction, nearest to here."""
        for size in range(min(len(tail), self.max_ngram), self.min_ngram - 1, -1):
            places = self._places.get(tuple(tail[-size:]))
            if places:
                return min(places, key=lambda place: abs(place - self._next))
        return None
