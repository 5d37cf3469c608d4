"""Rows: one object per sequence under decode, and the batch that shares one prompt cache."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.sample_utils import greedy_sampler

from .cache.members import join, keep, rows_of
from .draft.protocol import Proposer, Session
from .sampling import Draws, draw
from .types import SpecStats

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


@runtime_checkable
class WindowProcessor(Protocol):
    """A logits processor with a state of its own that follows whole windows of draft tokens.

    It gets no feedback: `tokens`, prompt and emitted, tell it what became of the last draft, and it
    takes its state back by itself. The first call's `tokens` are the prompt.
    """

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """As mlx-lm calls processors: logits [1, V] of the position after `tokens` [n]."""
        ...

    def legal(self, tokens: list[int], draft: list[int]) -> int:
        """How many leading draft tokens may be verified; the others are not."""
        ...

    def window(self, tokens: list[int], draft: list[int], logits: mx.array) -> mx.array:
        """Processes logits [K + 1, V]: position i follows `tokens` and the first i of `draft`."""
        ...


def token_ids(prompt: Sequence[int] | mx.array) -> list[int]:
    """The prompt on the host. Raises ValueError for what is not a sequence of token ids."""
    ids: Any = prompt.tolist() if isinstance(prompt, mx.array) else prompt
    try:
        tokens = [operator.index(token) for token in ids]
    except TypeError:
        raise ValueError("the prompt must be one flat sequence of token ids") from None
    if not tokens or min(tokens) < 0:
        what = "empty" if not tokens else f"not made of token ids: {min(tokens)} is negative"
        raise ValueError(f"the prompt is {what}; at least one token id of 0 or more is needed")
    return tokens


@dataclass
class Row:
    """One sequence.

        tokens   p0 ... pn | e0 e1 ... ek          prompt, then what was emitted
        cache    └─ tokens[:-1] ─────┘  ^ pending

    max_tokens          how many tokens may be emitted, negative for no limit
    proposer            guesses for this row, None for plain decoding
    num_draft_tokens    most draft tokens per round
    sampler             draws the tokens where `draws` does not
    draws               draws by seed and position
    recheck             a position whose two best logits are closer than this, in units in the last
                        place, is left to a round without drafts; 0: none is
    error               what the row's own sampler, processor or proposer raised; see `Batch`
    """

    tokens: list[int]
    max_tokens: int = 256
    proposer: Proposer | None = None
    num_draft_tokens: int = 4
    sampler: Sampler = greedy_sampler
    processors: Sequence[LogitsProcessor] = ()
    draws: Draws | None = None
    recheck: float = 0.0
    stats: SpecStats = field(default_factory=SpecStats)
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)
        #: Whether the processors follow windows, and whether these can be drawn at once.
        self.has_windows = all(isinstance(p, WindowProcessor) for p in self.processors)
        self.is_eager = self.has_windows and self.sampler is greedy_sampler
        #: Whether the last round was cut, so that the next one has no drafts.
        self.is_cut = False
        if self.recheck < 0:
            raise ValueError(f"recheck must be 0 or more, got {self.recheck}")
        if self.recheck and not self.is_greedy:
            raise ValueError("recheck needs greedy decoding without processors and penalties")
        if self.num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens must be 0 or more, got {self.num_draft_tokens}")
        if self.draws is not None and self.sampler is not greedy_sampler:
            raise ValueError("give either sampling or sampler, not both")
        if self.draws is not None and self.draws.acceptance != "match" and not self.is_eager:
            raise ValueError(
                f"acceptance {self.draws.acceptance} needs the target's law at every position: "
                "give penalties in SamplingParams, other processors as a WindowProcessor"
            )

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        emitted = len(self.tokens) - self.prompt_length
        return sys.maxsize if self.max_tokens < 0 else self.max_tokens - emitted

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the one with the largest logit of the model."""
        if self.processors or self.sampler is not greedy_sampler:
            return False
        params = None if self.draws is None else self.draws.params
        return params is None or (
            params.is_greedy and not params.penalties and not params.min_tokens
        )

    def absorb(self, hidden: mx.array | None, tokens: Sequence[int]) -> None:
        """Hands the states [>= n, H] before n committed tokens to the proposer."""
        if hidden is not None and tokens and isinstance(self.proposer, Session):
            self.proposer.absorb(tokens, hidden[: len(tokens)])

    def keep(self, cached: int) -> None:
        """Lets the proposer leave in a store what it has of the first `cached` tokens."""
        if isinstance(self.proposer, Session):
            self.proposer.keep(self.tokens[:cached])

    def close(self) -> None:
        """Ends the proposer's part, whatever the row's end."""
        if isinstance(self.proposer, Session):
            self.proposer.close()

    def choose(
        self, logits: mx.array, history: mx.array | None, position: int
    ) -> tuple[mx.array, mx.array]:
        """Draws one token as mlx-lm does: processors, log-softmax, sampler.

        logits [1, V], history [n]: prompt, emitted tokens and the draft tokens before the position,
        None for a row without processors. Returns the token [1] and the logprobs [V].
        """
        raw = logits[...]  # processors may write into theirs
        if history is not None:
            if self.draws is not None:
                logits = self.draws.penalised(logits, history)
            for processor in self.processors:
                logits = processor(history, logits)
        if self.draws is not None and self.draws.bans(position):
            logits = self.draws.without_ends(logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        if self.draws is not None:
            token = draw([(self.draws, position)], logprobs)[0]
            if self.draws.params.raw_logprobs:
                logprobs = raw - mx.logsumexp(raw, keepdims=True)
            return token, logprobs.squeeze(0)
        token = self.sampler(logprobs)
        if not isinstance(token, mx.array) or token.size != 1:
            got = token.shape if isinstance(token, mx.array) else token
            raise ValueError(f"the sampler must return one token id, [1], got {got}")
        return token.reshape(1), logprobs.squeeze(0)


@dataclass
class Batch:
    """The rows that one forward serves, and their model and prompt cache.

    cache       stock caches for one row, caches of rows (`cache.rows`) for several
    isolates    whether a row that fails does so alone: the exception ends up in `row.error`,
                and what it said of its tokens is lost. Otherwise it is raised.
    """

    model: nn.Module
    cache: list[Any]
    rows: list[Row]
    isolates: bool = False

    def guard(self, row: Row) -> _Guard:
        return _Guard(row, self.isolates)

    def open(self, slack: int) -> None:
        """Makes the stock caches of the one row caches that other rows may join.

        slack    the longest window that will be verified, for sliding windows
        """
        self.cache = [rows_of(entry, slack) for entry in self.cache]

    def join(self, other: Batch) -> None:
        """Takes the rows of another opened batch of the same model."""
        join(self.cache, other.cache)
        self.rows += other.rows

    def keep(self, rows: Sequence[int]) -> None:
        """Lets go of all rows but these."""
        keep(self.cache, rows)
        self.rows = [self.rows[row] for row in rows]

    @property
    def pending(self) -> mx.array:
        """The last token of every row, which no cache holds yet, [B, 1]."""
        return mx.array([[row.tokens[-1]] for row in self.rows], mx.uint32)


@dataclass
class _Guard:
    """Keeps to a row what its own callables raise. They are the user's, and may raise anything."""

    row: Row
    isolates: bool

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not self.isolates or not isinstance(error, Exception):
            return False
        self.row.error = error
        return True
