"""Rows: one object per sequence under decode, and the batch that shares one prompt cache."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.sample_utils import greedy_sampler

from .draft.protocol import Proposer
from .types import SpecStats

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


@dataclass
class Row:
    """One sequence.

        tokens   p0 ... pn | e0 e1 ... ek          prompt, then what was emitted
        cache    └─ tokens[:-1] ─────┘  ^ pending

    proposer      guesses for this row, None for plain decoding
    max_tokens    how many tokens may be emitted, negative for no limit
    """

    tokens: list[int]
    max_tokens: int = 256
    proposer: Proposer | None = None
    sampler: Sampler = greedy_sampler
    processors: Sequence[LogitsProcessor] = ()
    stats: SpecStats = field(default_factory=SpecStats)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        emitted = len(self.tokens) - self.prompt_length
        return sys.maxsize if self.max_tokens < 0 else self.max_tokens - emitted

    @property
    def is_greedy(self) -> bool:
        return self.sampler is greedy_sampler and not self.processors

    def choose(self, logits: mx.array, history: mx.array | None) -> tuple[mx.array, mx.array]:
        """Draws one token as mlx-lm does: processors, log-softmax, sampler.

        logits [1, V], history [n]: prompt, emitted tokens and the draft tokens before the position,
        None for a row without processors. Returns the token [1] and the logprobs [V].
        """
        if history is not None:
            for processor in self.processors:
                logits = processor(history, logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        return self.sampler(logprobs), logprobs.squeeze(0)


@dataclass
class Batch:
    """The rows that one forward serves, and their model and prompt cache. Today: one row."""

    model: nn.Module
    cache: list[Any]
    rows: list[Row]

    @property
    def pending(self) -> mx.array:
        """The last token of every row, which no cache holds yet, [B, 1]."""
        return mx.array([[row.tokens[-1]] for row in self.rows], mx.uint32)
