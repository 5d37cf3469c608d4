"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

from .batch import LogitsProcessor, Sampler
from .draft.protocol import Drafter, Proposer
from .sampling import Acceptance, SamplingParams
from .types import SpecStats


@dataclass(frozen=True)
class Request:
    """What to generate, as the options of `stream_generate`.

    prompt              token ids, at least one
    drafter             guesses for this request; None for plain decoding
    sampling, acceptance
                        as in `generate_step`, in place of a sampler
    stop                strings that end the text
    kv_bits             quantise KV caches from `quantized_kv_start` tokens on; until then the
                        request is alone in its forwards
    boundaries          tokens of the prompt after which others may go on differently, such as the
                        ends of messages; kept in the engine's store
    """

    prompt: Sequence[int]
    max_tokens: int = 256
    drafter: Drafter | Proposer | None = None
    num_draft_tokens: int = 4
    sampler: Sampler = greedy_sampler
    logits_processors: Sequence[LogitsProcessor] = ()
    sampling: SamplingParams | None = None
    acceptance: Acceptance = "match"
    stop: str | Sequence[str] = ()
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 0
    boundaries: Sequence[int] = ()


@dataclass(frozen=True)
class Output:
    """One token of a request, or its end without one: by an error, or a budget of nothing.

    logprobs        [V] of the target
    top_logprobs    the best (id, logprob), if `sampling` asks for them
    finish_reason   stop, length or error with the last one, else None
    """

    handle: Handle
    token: int | None
    text: str
    logprobs: mx.array | None
    from_draft: bool
    finish_reason: str | None
    top_logprobs: Sequence[tuple[int, float]] = ()


@dataclass(eq=False)
class Handle:
    """A request in the engine, and what came of it so far.

    seed             the seed of its draws, None without `sampling`
    cached_tokens    prompt tokens that the store had, known once the prompt is read
    """

    id: int
    request: Request
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: Exception | None = None
    stats: SpecStats = field(default_factory=SpecStats)
    exactness: str = "bitwise"
    seed: int | None = None
    cached_tokens: int = 0

    @property
    def done(self) -> bool:
        return self.finish_reason is not None
