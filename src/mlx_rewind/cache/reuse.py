"""What one request takes from a store and leaves there, and where its prefill pauses for that.

    tokens       t0 ............ tk ................ tn | pending
    reused       └── length ───┘
    chunks                       └───┴──────┴───────┘ ends at multiples of the step, at boundaries,
                                                      and before the last token

Chunks end at multiples of the step counted from token 0, wherever the request starts, so that what
depends on where a chunk ends does not depend on what the store had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.nn as nn
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from ..errors import UnsupportedModelError
from .round import check
from .snapshot import LeafKind, kinds_of
from .store import PromptCacheStore


@dataclass(eq=False)
class Reuse:
    """One request and its store.

    model         whose caches they are
    step          prompt tokens per chunk
    boundaries    tokens of the prompt after which it may be worth starting again
    quantize      (quantized_kv_start, kv_group_size, kv_bits), or None
    length        tokens that were reused, once `start` was called
    left          tokens of the prompt that are still to be fed after the current chunk
    """

    store: PromptCacheStore
    model: nn.Module
    step: int
    boundaries: Sequence[int] = ()
    quantize: tuple[int, int, int] | None = None
    length: int = 0
    left: int = 0
    _total: int = 0
    _limit: int | None = None
    _tokens: list[int] = field(default_factory=list)
    _stops: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.store.model is not self.model:
            raise ValueError("the store was made for another model object: make one for this model")
        if any(position < 1 for position in self.boundaries):
            raise ValueError(f"boundaries must be 1 or more, got {min(self.boundaries)}")
        if self.store.fault is not None:
            raise UnsupportedModelError(
                "what mlx-lm computes for a prompt of this model depends on the chunks that it is "
                f"read in: {self.store.fault}. Generate without a store."
            )

    def start(self, tokens: list[int], cache: list[Any]) -> int:
        """Fills the fresh caches with the longest stored start of the prompt.

        Returns its length. Quantises what a prefill would have quantised there.
        """
        self._tokens, self._total = list(tokens), len(tokens)
        self._limit = check(self.model, cache).draft_end
        kinds = kinds_of(cache)
        self.length = self.store.resume(
            tokens, cache, kinds=self._quantized(kinds), allows=self._allows
        )
        self._stops = self._boundaries(kinds)
        if self.length and self.quantize is not None and self.is_chunk_end(self.length):
            maybe_quantize_kv_cache(cache, *self.quantize)
        return self.length

    def chunk_end(self, done: int) -> int:
        """Where the chunk that starts after `done` tokens ends."""
        ends = [stop for stop in self._stops if stop > done]
        end = min([(done // self.step + 1) * self.step, self._total - 1, *ends[:1]])
        self.left = self._total - 1 - end
        return end

    def reached(self, done: int, cache: list[Any]) -> bool:
        """Keeps the boundary after `done` tokens of the prompt. False if it is none."""
        is_stop = done in self._stops
        if is_stop:
            at = self._quantized_at if _is_quantized(cache) else None
            self.store.insert(self._tokens[:done], cache, quantized_at=at)
        return is_stop

    def is_chunk_end(self, done: int) -> bool:
        """Whether a prefill without a store would end a chunk here: caches are quantised there."""
        return done % self.step == 0 or done == self._total - 1

    def finish(self, tokens: Sequence[int], cache: list[Any]) -> bool:
        """Keeps the end of the reply: `tokens` are what the caches hold. False if there is none."""
        if len(tokens) < self._total or not self._may_keep(len(tokens)):
            return False
        at = None
        if self.quantize is not None and _is_quantized(cache):
            at = self._quantized_at or max(self.quantize[0], 1)
        self.store.insert(tokens, cache, quantized_at=at)
        return True

    # -- where a cold prefill would be the same -------------------------------------------------

    def _cold_end(self, length: int) -> int:
        """Where the chunk with token `length - 1` ends in a prefill without a store."""
        return min(-(-length // self.step) * self.step, self._total - 1)

    def _may_keep(self, length: int) -> bool:
        """Whether tokens so far do not depend on where their chunk ends.

        They do beyond the positions that a dynamic rope was trained for, and beyond a ring with
        tokens that it keeps (`Plan.draft_end`).
        """
        if self._limit is None:
            return True
        prompt = self._cold_end(min(length, self._total - 1))
        return max(length, prompt) <= self._limit

    def _allows(self, length: int) -> bool:
        """Whether to start after so many tokens with caches that are not quantised."""
        at = self._quantized_at
        return self._may_keep(length) and (at is None or length <= at)

    @property
    def _quantized_at(self) -> int | None:
        """Tokens after which a prefill quantises the caches; None if that is not in the prompt."""
        if self.quantize is None:
            return None
        start, last = self.quantize[0], self._total - 1
        first = max(-(-start // self.step), 1) * self.step
        return min(first, last) if last >= max(start, 1) else None

    def _quantized(
        self, kinds: tuple[LeafKind, ...]
    ) -> list[tuple[tuple[LeafKind, ...], int | None]]:
        """The kinds of quantised caches that this request would have come to by itself."""
        at = self._quantized_at
        if self.quantize is None or at is None:
            return []
        _, group_size, bits = self.quantize
        settings = (("group_size", group_size), ("bits", bits))
        quantized = tuple(
            LeafKind(kind.label, QuantizedKVCache.__name__, settings)
            if kind.name == KVCache.__name__ and kind.label.isdigit()
            else kind
            for kind in kinds
        )
        return [(quantized, at)]

    def _boundaries(self, kinds: tuple[LeafKind, ...]) -> list[int]:
        """Where to pause: at the end of the prompt, and where caches that cannot be cut need it."""
        last, stops = self._total - 1, {self._total - 1}
        if not all(kind.is_growing for kind in kinds):
            stops.update(self.boundaries)
            if self.store.interval:
                stops.update(range(self.store.interval, last, self.store.interval))
        return sorted(s for s in stops if self.length < s <= last and self._may_keep(s))


def _is_quantized(cache: list[Any]) -> bool:
    return any(kind.bits is not None for kind in kinds_of(cache))
