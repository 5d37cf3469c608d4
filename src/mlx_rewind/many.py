"""Generation for many prompts at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.sample_utils import greedy_sampler

from .batch import LogitsProcessor, Sampler
from .cache.store import PromptCacheStore
from .draft.auto import check_drafter
from .draft.protocol import Drafter, Proposer
from .engine import Engine
from .generate import encode
from .request import Handle, Request
from .sampling import Acceptance, SamplingParams
from .types import SpecStats

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class BatchResult:
    """What came of the prompts, in their order.

    texts, tokens      the generated text and token ids of each
    finish_reasons     stop, length, or error
    stats              what speculation did for each
    errors             what a sampler, processor or drafter of that prompt raised, else None
    seeds              the seed of each one's draws, None without `sampling`
    """

    texts: list[str]
    tokens: list[list[int]]
    finish_reasons: list[str]
    stats: list[SpecStats]
    errors: list[Exception | None]
    seeds: list[int | None]

    @classmethod
    def of(cls, handles: Sequence[Handle]) -> BatchResult:
        return cls(
            [handle.text for handle in handles],
            [handle.tokens for handle in handles],
            [str(handle.finish_reason) for handle in handles],
            [handle.stats for handle in handles],
            [handle.error for handle in handles],
            [handle.seed for handle in handles],
        )


def batch_generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int] | mx.array],
    *,
    drafter: Drafter | Proposer | Sequence[Drafter | Proposer | None] | None = None,
    num_draft_tokens: int | Sequence[int] = 4,
    max_tokens: int | Sequence[int] = 256,
    sampler: Sampler | Sequence[Sampler | None] | None = None,
    logits_processors: Sequence[LogitsProcessor] | Sequence[Sequence[LogitsProcessor]] = (),
    sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
    acceptance: Acceptance | Sequence[Acceptance] = "match",
    stop: str | Sequence[str] = (),
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    max_rows: int = 8,
    memory_limit: int | None = None,
    prefill_step_size: int = 512,
    store: PromptCacheStore | None = None,
    progress: Progress | None = None,
) -> BatchResult:
    """Generates from all prompts, several in one forward; each as if it were alone.

    prompts              texts or token ids
    drafter, num_draft_tokens, max_tokens, sampler, sampling, acceptance
                         one for all prompts, or a list with one for each; see `generate_step`
    logits_processors    a list for all prompts, or a list of lists with one for each
    max_rows             prompts under work at once
    memory_limit         bytes that the caches of these may grow to
    store                where prompts find their beginnings, and leave theirs for others
    progress             progress(done, total), in prompts

    Raises ValueError for a list of another length, and as `Engine.submit` does, before any token.
    """
    columns: dict[str, Any] = {
        "max_tokens": max_tokens,
        "drafter": drafter,
        "num_draft_tokens": num_draft_tokens,
        "sampler": sampler,
        "sampling": sampling,
        "acceptance": acceptance,
        "logits_processors": logits_processors,
    }
    shared = {"stop": stop, "kv_bits": kv_bits, "kv_group_size": kv_group_size}
    shared["quantized_kv_start"] = quantized_kv_start
    requests = _requests(tokenizer, prompts, columns, shared)
    engine = Engine(
        model,
        tokenizer,
        max_rows=max_rows,
        memory_limit=memory_limit,
        prefill_step_size=prefill_step_size,
        store=store,
        max_draft_tokens=max([16, *(request.num_draft_tokens for request in requests)]),
    )
    handles = [engine.submit(request) for request in requests]
    _run(engine, handles, progress or (lambda done, total: None))
    return BatchResult.of(handles)


def _requests(
    tokenizer: Any, prompts: Sequence[Any], columns: dict[str, Any], shared: dict[str, Any]
) -> list[Request]:
    """One request per prompt; a column is one value for all of them, or a list."""
    if isinstance(prompts, str):
        raise ValueError("prompts must be a list of prompts, got one string")
    count, processors = len(prompts), columns["logits_processors"]
    if not processors or callable(processors[0]):
        columns = {**columns, "logits_processors": [tuple(processors)] * count}
    each = {name: _each(value, count, name) for name, value in columns.items()}
    each["sampler"] = [given or greedy_sampler for given in each["sampler"]]
    for drafter in each["drafter"]:
        check_drafter(tokenizer, drafter)
    ids: list[Any] = [encode(tokenizer, prompt) for prompt in prompts]
    return [
        Request(
            ids[i],
            **shared,
            **{name: values[i] for name, values in each.items()},
        )
        for i in range(count)
    ]


def _run(engine: Engine, handles: list[Handle], progress: Progress) -> None:
    progress(0, len(handles))
    for output in engine:
        if output.finish_reason is not None:
            progress(sum(handle.done for handle in handles), len(handles))


def _each(value: Any, count: int, name: str) -> list[Any]:
    """One value per prompt."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts")
    return list(value)
