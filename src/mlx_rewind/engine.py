"""Many requests at once: rows that join and leave while others speculate.

    submit     a request waits until there is room for its tokens and for one row more
    prefill    alone, in chunks; a step feeds one chunk's worth of prompt tokens and no more
    decode     with the others: one forward for all rows of a lane. A row whose caches or draft
               caches are still empty runs its first round alone
    leave      at its end, when it is cancelled, or when it fails, which touches no other row

Models whose rows cannot be fed together keep a lane per row.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .batch import Batch, Row, token_ids
from .cache.members import kinds_of
from .cache.ragged import why_row_by_row
from .cache.reuse import Reuse
from .cache.store import PromptCacheStore
from .memory import bytes_for
from .request import Handle, Output, Request
from .sampling import draws_of, top_logprobs
from .speculate import Decoder
from .stops import TextStream, text_stream
from .target import LAW, exactness


@dataclass(eq=False)
class _Job:
    """A request at work: its row, and the decoder that it is in.

    bytes    of cache that it may grow to; 0 where memory has no limit
    """

    handle: Handle
    row: Row
    decoder: Decoder
    prefill: Iterator[None]
    text: TextStream | None
    bytes: int
    reuse: Reuse | None

    def __post_init__(self) -> None:
        #: Prompt tokens that are not fed yet, but for the pending one.
        self.left = self.row.prompt_length - 1


class Engine:
    """Runs requests in rounds, several rows in one forward.

    model                any mlx-lm model
    tokenizer            for text and end tokens; without one, requests end by their budget only
    max_rows             requests under work at once
    memory_limit         bytes that all caches of these may grow to; None for no limit
    prefill_step_size    prompt tokens per chunk and per step: how long prompts delay the others
    max_draft_tokens     most draft tokens of any request
    store                requests start from it and leave entries in it; `store.stats` counts. Its
                         bytes are limited by itself, not by memory_limit

    Not for several threads: one owns it.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        max_rows: int = 8,
        memory_limit: int | None = None,
        prefill_step_size: int = 512,
        max_draft_tokens: int = 16,
        store: PromptCacheStore | None = None,
    ) -> None:
        if max_rows < 1 or prefill_step_size < 1 or max_draft_tokens < 0:
            raise ValueError(
                "max_rows and prefill_step_size must be 1 or more, max_draft_tokens 0 or more, got "
                f"{max_rows}, {prefill_step_size} and {max_draft_tokens}"
            )
        if tokenizer is not None and not isinstance(tokenizer, TokenizerWrapper):
            tokenizer = TokenizerWrapper(tokenizer)
        self.model, self.tokenizer = model, tokenizer
        self.max_rows, self.memory_limit = max_rows, memory_limit
        self.prefill_step_size, self.max_draft_tokens = prefill_step_size, max_draft_tokens
        self.store = store
        self.row_by_row = why_row_by_row(model)
        self._ids = itertools.count()
        self._waiting: deque[_Job] = deque()
        self._prefilling: deque[_Job] = deque()
        self._is_oldest_first = False
        self._jobs: dict[int, _Job] = {}
        self._lanes: list[Decoder] = []
        self._is_stepping = False

    # -- requests -------------------------------------------------------------------------------

    def submit(self, request: Request) -> Handle:
        """Queues a request.

        Raises ValueError for a request that is malformed or can never fit, and what a drafter or
        a cache that does not fit the model raises.
        """
        request = self._frozen(request)
        handle = Handle(next(self._ids), request)
        if request.num_draft_tokens > self.max_draft_tokens:
            raise ValueError(
                f"num_draft_tokens is {request.num_draft_tokens}, the engine allows at most "
                f"{self.max_draft_tokens}"
            )
        need = 0 if self.memory_limit is None else self.bytes_for(request)
        if self.memory_limit is not None and need > self.memory_limit:
            raise ValueError(
                f"the request may need {need:,} bytes of cache, the limit is {self.memory_limit:,}"
            )
        self._waiting.append(self._begin(handle, need))
        return handle

    def _frozen(self, request: Request) -> Request:
        """The request as it is now, whatever the caller does to its lists. Raises ValueError."""
        params = request.sampling
        if (request.stop or (params and params.stop_strings)) and self.tokenizer is None:
            raise ValueError("stop strings need an engine with a tokenizer")
        if params is not None and params.max_tokens is not None:
            request = replace(request, max_tokens=params.max_tokens)
        if not isinstance(request.max_tokens, int):
            raise ValueError(f"max_tokens must be an int, got {request.max_tokens!r}")
        if not callable(request.sampler):
            raise ValueError(f"sampler must be callable, got {request.sampler!r}")
        processors = tuple(request.logits_processors)
        return replace(request, prompt=token_ids(request.prompt), logits_processors=processors)

    def cancel(self, handle: Handle) -> None:
        """Ends a request now, between two steps; without effect on one that is done.

        Raises RuntimeError inside a step, ValueError for a handle of another engine.
        """
        if handle.done:
            return
        if self._is_stepping:
            raise RuntimeError("cancel between two steps, not from inside one")
        known = itertools.chain(self._waiting, self._jobs.values())
        job = next((job for job in known if job.handle is handle), None)
        if job is None:
            raise ValueError(f"request {handle.id} does not belong to this engine")
        handle.finish_reason = "cancelled"
        for queue in (self._waiting, self._prefilling):
            if job in queue:
                queue.remove(job)
                self._end(job)
                return
        self._leave(job.decoder, [job])

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._jobs)

    def bytes_for(self, request: Request) -> int:
        """Bytes of cache that a request may grow to, its draft model's included.

        Raises ValueError for a request without a limit of tokens where memory has one.
        """
        if request.max_tokens < 0:
            if self.memory_limit is not None:
                raise ValueError("max_tokens must be limited where memory_limit is")
            return 0
        length = len(request.prompt) + request.max_tokens + request.num_draft_tokens
        return bytes_for(self.model, request.drafter, length, self.max_draft_tokens + 1)

    # -- steps ----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Output]:
        """Steps until nothing is left to do."""
        while self.is_busy:
            yield from self.step()

    def step(self) -> list[Output]:
        """Admits what fits, feeds prompts for one chunk's worth, runs one round of every row."""
        self._is_stepping = True
        try:
            self._admit()
            outputs = self._prefill()
            self._merge()
            for lane in list(self._lanes):
                outputs += self._round(lane)
        finally:
            self._is_stepping = False
        return outputs

    def _admit(self) -> None:
        while self._waiting and len(self._jobs) < self.max_rows:
            # Rows that share a buffer are all as long as the longest.
            needs = [job.bytes for job in (self._waiting[0], *self._jobs.values())]
            if self.memory_limit is not None and max(needs) * len(needs) > self.memory_limit:
                return
            job = self._waiting.popleft()
            self._jobs[job.handle.id] = job
            self._prefilling.append(job)

    def _begin(self, handle: Handle, need: int) -> _Job:
        request = handle.request
        prompt, params = token_ids(request.prompt), request.sampling
        ends = () if self.tokenizer is None else self.tokenizer.eos_token_ids
        draws = draws_of(params, request.acceptance, len(prompt), ends)
        row = Row(
            prompt,
            max_tokens=request.max_tokens,
            num_draft_tokens=request.num_draft_tokens,
            sampler=request.sampler,
            processors=tuple(request.logits_processors),
            draws=draws,
            stats=handle.stats,
        )
        batch = Batch(self.model, make_prompt_cache(self.model), [row], isolates=True)
        quantize = None
        if request.kv_bits is not None:
            quantize = request.quantized_kv_start, request.kv_group_size, request.kv_bits
        decoder = Decoder(batch, quantize)
        reuse = self._reuse(request, quantize)
        handle.exactness = exactness(self.model, batch.cache, in_chunks=reuse is not None)
        handle.seed = None if draws is None else draws.seed
        if params is not None:
            params.check_vocab(decoder.target.vocab_size)
        if request.drafter is not None:
            decoder.start(request.drafter)
            if draws is not None and draws.acceptance != "match":
                handle.exactness = LAW
        prefill = decoder.prefill(self.prefill_step_size, lambda processed, total: None, reuse)
        text = None
        if self.tokenizer is not None:
            text = text_stream(self.tokenizer, request.stop, params)
        return _Job(handle, row, decoder, prefill, text, need, reuse)

    def _reuse(self, request: Request, quantize: tuple[int, int, int] | None) -> Reuse | None:
        if self.store is None:
            return None
        step = self.prefill_step_size
        return Reuse(self.store, self.model, step, request.boundaries, quantize)

    def _prefill(self) -> list[Output]:
        """A chunk's worth of tokens in all: of the oldest prompts or the shortest, by turns.

        So a short prompt need not wait for a long one, nor a long one for ever.
        """
        outputs: list[Output] = []
        budget = self.prefill_step_size
        self._is_oldest_first = not self._is_oldest_first
        prompts = list(self._prefilling)
        for job in prompts if self._is_oldest_first else sorted(prompts, key=lambda job: job.left):
            budget -= min(job.left, self.prefill_step_size)
            if budget < 0:
                break
            more = False
            with job.decoder.batch.guard(job.row):
                more = next(job.prefill, self) is not self
            if more:
                left = job.left - self.prefill_step_size
                job.left = left if job.reuse is None else job.reuse.left
            else:
                self._prefilling.remove(job)
                outputs += self._begun(job)
        return outputs

    def _begun(self, job: _Job) -> list[Output]:
        """The prompt is read, or failed: to the rounds, or to the end."""
        if job.reuse is not None:
            job.handle.cached_tokens = job.reuse.length
        if job.row.error is not None:
            return [self._fail(job)]
        if job.row.remaining == 0:
            job.handle.finish_reason = "length"
            self._end(job)
            return [Output(job.handle, None, "", None, False, "length")]
        self._lanes.append(job.decoder)
        return []

    def _round(self, lane: Decoder) -> list[Output]:
        outputs: list[Output] = []
        jobs = [self._job_of(row) for row in lane.batch.rows]
        for b, block in enumerate(lane.step()):
            job = jobs[b]
            if block is None:
                continue
            for token, logprobs in zip(block.tokens, block.logprobs, strict=True):
                from_draft = block.from_draft(lane.emitted[b])
                job.row.tokens.append(token)
                lane.emitted[b] += 1
                with lane.batch.guard(job.row):
                    outputs.append(self._emit(job, token, logprobs, from_draft))
                if job.handle.done or job.row.error is not None:
                    break
        lane.commit()
        failed = [job for job in jobs if job.row.error is not None and not job.handle.done]
        outputs += [self._fail(job) for job in failed]
        self._leave(lane, [job for job in jobs if job.handle.done])
        return outputs

    def _emit(self, job: _Job, token: int, logprobs: mx.array, from_draft: bool) -> Output:
        text, reason = "", None
        if job.text is not None:
            text, reason = job.text.take(token, is_last=job.row.remaining == 0)
        elif job.row.remaining == 0:
            reason = "length"
        handle, params = job.handle, job.handle.request.sampling
        if job.text is None and params is not None and token in params.stop_ids:
            reason = "stop"
        best = top_logprobs(logprobs, (params and params.logprobs) or 0)
        handle.tokens.append(token)
        handle.text += text
        handle.finish_reason = reason
        return Output(handle, token, text, logprobs, from_draft, reason, best)

    def _fail(self, job: _Job) -> Output:
        handle, error = job.handle, job.row.error
        assert error is not None
        # Its traceback would keep the caches of the row alive.
        handle.error, handle.finish_reason = error.with_traceback(None), "error"
        job.row.error = handle.error
        self._end(job)
        return Output(handle, None, "", None, False, "error")

    # -- lanes ----------------------------------------------------------------------------------

    def _merge(self) -> None:
        """Puts rows that are ready together, where the model can feed them so."""
        if self.row_by_row is not None:
            return
        together: dict[Any, Decoder] = {}
        for lane in list(self._lanes):
            if not lane.may_join:
                continue
            kind = lane.target.watched, kinds_of(lane.batch.cache)
            first = together.setdefault(kind, lane)
            if first is not lane:
                jobs = [self._job_of(row) for row in lane.batch.rows]
                first.join(lane, self.max_draft_tokens + 1)
                self._lanes.remove(lane)
                for job in jobs:
                    job.decoder = first

    def _leave(self, lane: Decoder, jobs: list[_Job]) -> None:
        rows = [b for b, row in enumerate(lane.batch.rows) if any(row is job.row for job in jobs)]
        for job in jobs:
            if job.reuse is not None and job.row.error is None:
                row = next(b for b in rows if lane.batch.rows[b] is job.row)
                held = job.row.tokens[:-1]
                if job.reuse.finish(held, lane.row_cache(row)):
                    job.row.keep(len(held))
        if rows:
            lane.leave(rows)
        if not lane.batch.rows and lane in self._lanes:
            self._lanes.remove(lane)
        for job in jobs:
            self._end(job)

    def _end(self, job: _Job) -> None:
        job.row.close()
        self._jobs.pop(job.handle.id, None)

    def _job_of(self, row: Row) -> _Job:
        return next(job for job in self._jobs.values() if job.row is row)
