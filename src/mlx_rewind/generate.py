"""Generation for one prompt: the functions of mlx-lm, with a drafter."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .batch import Batch, LogitsProcessor, Row, Sampler, token_ids
from .cache.reuse import Reuse
from .cache.store import PromptCacheStore
from .draft.auto import check_drafter
from .draft.model import DraftModel
from .draft.protocol import Drafter, Proposer, kind_of
from .response import GenerationResponse
from .sampling import Acceptance, SamplingParams, draws_of, top_logprobs
from .speculate import Decoder
from .stops import TextStream, text_stream
from .target import LAW, exactness
from .types import SpecStats

Progress = Callable[[int, int], None]
Emission = tuple[int, mx.array, bool]


@dataclass(frozen=True)
class _Options:
    """The options of `generate_step`, where they are explained."""

    num_draft_tokens: int = 4
    max_tokens: int = 256
    sampler: Sampler | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    sampling: SamplingParams | None = None
    acceptance: Acceptance = "match"
    recheck: float = 0.0
    max_kv_size: int | None = None
    prompt_cache: list[Any] | None = None
    prefill_step_size: int = 2048
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 5000
    prompt_progress_callback: Progress | None = None
    store: PromptCacheStore | None = None
    boundaries: Sequence[int] = ()

    @property
    def budget(self) -> int:
        """Tokens to generate; negative for no limit."""
        own = None if self.sampling is None else self.sampling.max_tokens
        return self.max_tokens if own is None else own

    @property
    def quantize(self) -> tuple[int, int, int] | None:
        start, size, bits = self.quantized_kv_start, self.kv_group_size, self.kv_bits
        return None if bits is None else (start, size, bits)


class _Generation:
    """One prompt under decode: its row, its decoder, and the loop that emits tokens."""

    def __init__(
        self,
        prompt: mx.array | Sequence[int],
        model: nn.Module,
        drafter: Drafter | Proposer | None,
        options: _Options,
        ends: Iterable[int] = (),
    ) -> None:
        tokens = token_ids(prompt)
        if options.prefill_step_size < 1:
            raise ValueError(f"prefill_step_size must be positive, got {options.prefill_step_size}")
        self.prompt_length = len(tokens)
        self.kind = kind_of(drafter)
        self._options = options
        self._progress = options.prompt_progress_callback or (lambda processed, total: None)
        cache = options.prompt_cache
        if cache is None:
            cache = _make_cache(model, options.max_kv_size)
        self.sampling = options.sampling
        draws = draws_of(options.sampling, options.acceptance, len(tokens), ends)
        self.row = Row(
            tokens,
            max_tokens=options.budget,
            num_draft_tokens=options.num_draft_tokens,
            sampler=options.sampler or greedy_sampler,
            processors=tuple(options.logits_processors or ()),
            draws=draws,
            recheck=options.recheck,
        )
        batch = Batch(model, cache, [self.row])
        self._decoder = Decoder(batch, options.quantize)
        self._reuse = _reuse(model, options)
        self._is_whole = True
        self.exactness = exactness(model, cache, in_chunks=self._reuse is not None)
        if options.sampling is not None:
            options.sampling.check_vocab(self._decoder.target.vocab_size)
        if drafter is not None:
            self._decoder.start(drafter)
            if draws is not None and draws.acceptance != "match":
                self.exactness = LAW

    @property
    def stats(self) -> SpecStats:
        return self.row.stats

    def tokens(self) -> Generator[Emission, None, None]:
        """Emits (token, logprobs [V], from_draft) until the budget is spent or it is closed."""
        decoder = self._decoder
        stop_ids = () if self.sampling is None else self.sampling.stop_ids
        try:
            step_size = self._options.prefill_step_size
            for _ in decoder.prefill(step_size, self._progress, self._reuse):
                pass
            while self.row.remaining > 0:
                self._is_whole = False
                (output,) = decoder.step()
                self._is_whole = True
                assert output is not None
                if not self.stats.steps:
                    self._progress(self.prompt_length, self.prompt_length)
                for token, logprobs in zip(output.tokens, output.logprobs, strict=True):
                    emission = token, logprobs, output.from_draft(decoder.emitted[0])
                    if self._options.prompt_cache is not None:
                        decoder.show(decoder.emitted[0] + 1)
                    self.row.tokens.append(token)
                    decoder.emitted[0] += 1  # nothing can interrupt between this and the yield
                    yield emission
                    if token in stop_ids:
                        return
                decoder.commit()
        finally:
            try:
                decoder.close()
                self._keep()
            finally:
                self.row.close()

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the store had."""
        return 0 if self._reuse is None else self._reuse.length

    def _keep(self) -> None:
        """Keeps the end of the reply, up to the pending token. Nothing after a failure."""
        if self._reuse is None or not self._is_whole or not self.stats.emitted:
            return
        held = self.row.tokens[:-1]
        if self._reuse.finish(held, self._decoder.batch.cache):
            self.row.keep(len(held))


def generate_step(
    prompt: mx.array | Sequence[int],
    model: nn.Module,
    *,
    drafter: Drafter | Proposer | None = None,
    num_draft_tokens: int = 4,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    sampling: SamplingParams | None = None,
    acceptance: Acceptance = "match",
    recheck: float = 0.0,
    max_kv_size: int | None = None,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    prompt_progress_callback: Progress | None = None,
    store: PromptCacheStore | None = None,
    boundaries: Sequence[int] = (),
) -> Iterator[Emission]:
    """Generates tokens as `mlx_lm.generate_step` does, token for token, faster with a good drafter.

    prompt              token ids, at least one
    drafter             DraftModel, NGram, Prediction, any object with `propose`, or None
    num_draft_tokens    most draft tokens per round, K
    max_tokens          tokens to generate, negative for no limit
    sampler             mlx-lm sampler, called once per emitted position; default argmax
    logits_processors   mlx-lm processors; they see prompt, emitted tokens and the draft before
    sampling            in place of a sampler: draws that depend on nothing but seed and position
    acceptance          with `sampling`: match; rejection or block: the same law, other draws
    recheck             positions with a smaller gap in last places become single steps, see `ties`
    prompt_cache        the target's caches, with history or none, updated in place: at every yield
                        and after close history + prompt + emitted[:-1]; as before if prefill fails
    kv_bits             quantise KV caches from `quantized_kv_start` tokens on, as mlx-lm does
    store               starts from the longest beginning of the prompt that it has, and keeps there
                        what comes of this one; not together with `prompt_cache`
    boundaries          tokens of the prompt after which others may go on differently, such as the
                        ends of messages (`message_ends`); kept in the store as well

    Yields (token, logprobs [V] of the target, from_draft).

    Raises, at the call and before any token, ValueError for a bad option, `UnsupportedCacheError`
    or `UnsupportedModelError` for what cannot be rolled back, `DraftMismatchError` for a drafter
    that does not fit; while running, whatever model, drafter, sampler or processor raise.
    """
    given = locals()
    options = _Options(**{option.name: given[option.name] for option in fields(_Options)})
    if sampling is not None and sampling.stop_strings:
        raise ValueError("stop strings need a tokenizer: use stream_generate")
    return _Generation(prompt, model, drafter, options).tokens()


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    max_tokens: int = 256,
    draft_model: nn.Module | None = None,
    *,
    drafter: Drafter | Proposer | None = None,
    stop: str | Sequence[str] = (),
    **kwargs: Any,
) -> Iterator[GenerationResponse]:
    """Generates text as `mlx_lm.stream_generate` does: the same segments, tokens and finish reason.

    tokenizer      mlx-lm's TokenizerWrapper or a Hugging Face tokenizer
    prompt         text or token ids
    drafter        see `generate_step`; `draft_model` is short for DraftModel(draft_model)
    stop           strings that end the text; they are not part of it
    kwargs         the other options of `generate_step`

    Raises as `generate_step` does, at the call.
    """
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    if draft_model is not None:
        if drafter is not None:
            raise ValueError("give either drafter or draft_model, not both")
        drafter = DraftModel(draft_model)
    check_drafter(tokenizer, drafter)
    unknown = kwargs.keys() - {known.name for known in fields(_Options)}
    if unknown:
        raise TypeError(f"stream_generate() got unexpected options {sorted(unknown)}")
    options = _Options(max_tokens=max_tokens, **kwargs)
    if options.budget == 0:
        raise ValueError("max_tokens must not be 0 (use -1 for no limit)")
    ends = tokenizer.eos_token_ids
    generation = _Generation(encode(tokenizer, prompt), model, drafter, options, ends)
    return _stream(generation, model, text_stream(tokenizer, stop, options.sampling))


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int],
    *,
    verbose: bool = False,
    **kwargs: Any,
) -> str:
    """Generates a whole text; options as in `stream_generate`. `verbose` prints it as it comes."""
    pieces = []
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        pieces.append(response.text)
        if verbose:
            print(response.text, end="", flush=True)
    if verbose:
        print(
            f"\n{response.generation_tokens} tokens, {response.generation_tps:.1f} tokens/s, "
            f"{response.mean_acceptance_length:.2f} tokens per step ({response.draft_kind})"
        )
    return "".join(pieces)


def _make_cache(model: nn.Module, max_kv_size: int | None) -> list[Any]:
    cache: list[Any] = make_prompt_cache(model, max_kv_size)
    sizes = [entry.max_size for entry in cache if type(entry) is RotatingKVCache]
    if max_kv_size is not None and max_kv_size not in sizes:
        raise ValueError(
            f"max_kv_size {max_kv_size} has no effect: the model makes its own caches; leave it out"
        )
    return cache


def _reuse(model: nn.Module, options: _Options) -> Reuse | None:
    if options.store is None:
        return None
    if options.prompt_cache is not None:
        raise ValueError("a store fills fresh caches: give either store or prompt_cache")
    return Reuse(
        options.store, model, options.prefill_step_size, options.boundaries, options.quantize
    )


def encode(tokenizer: Any, prompt: str | mx.array | Sequence[int]) -> mx.array | Sequence[int]:
    if not isinstance(prompt, str):
        return prompt
    # A prompt that a chat template made has its special tokens already.
    bos = tokenizer.bos_token
    special = bos is None or not prompt.startswith(bos)
    tokens: list[int] = tokenizer.encode(prompt, add_special_tokens=special)
    return tokens


def _stream(
    generation: _Generation, model: nn.Module, text_stream: TextStream
) -> Iterator[GenerationResponse]:
    stream: Any = generation_stream
    clock = _Clock(generation)
    with wired_limit(model, [stream]), contextlib.closing(generation.tokens()) as tokens:
        for token, logprobs, from_draft in tokens:
            clock.tick()
            text, reason = text_stream.take(token, is_last=generation.row.remaining == 0)
            if reason is not None:
                break
            yield clock.response(text, token, logprobs, from_draft)
    yield clock.response(text, token, logprobs, from_draft, reason)


class _Clock:
    """Times prefill and generation, and fills in responses."""

    def __init__(self, generation: _Generation) -> None:
        self._generation = generation
        self._start = time.perf_counter()
        self._count = 0

    def tick(self) -> None:
        if not self._count:
            now = time.perf_counter()
            read = self._generation.prompt_length - self._generation.cached_tokens
            self._prompt_tps = read / (now - self._start)
            self._start = now
        self._count += 1

    def response(
        self,
        text: str,
        token: int,
        logprobs: mx.array,
        from_draft: bool,
        finish_reason: str | None = None,
    ) -> GenerationResponse:
        stats, params = self._generation.stats, self._generation.sampling
        draws = self._generation.row.draws
        return GenerationResponse(
            text=text,
            token=token,
            logprobs=logprobs,
            from_draft=from_draft,
            prompt_tokens=self._generation.prompt_length,
            prompt_tps=self._prompt_tps,
            generation_tokens=self._count,
            generation_tps=self._count / (time.perf_counter() - self._start),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finish_reason,
            draft_kind=self._generation.kind,
            draft_rounds=stats.rounds,
            draft_n=stats.drafted,
            draft_n_accepted=stats.accepted,
            mean_acceptance_length=stats.mean_acceptance_length,
            draft_n_per_position=list(stats.drafted_per_position),
            draft_n_accepted_per_position=list(stats.accepted_per_position),
            exactness=self._generation.exactness,
            cached_tokens=self._generation.cached_tokens,
            draft_reason=stats.reason,
            draft_rechecks=stats.rechecks,
            seed=None if draws is None else draws.seed,
            top_logprobs=top_logprobs(logprobs, (params and params.logprobs) or 0),
        )
