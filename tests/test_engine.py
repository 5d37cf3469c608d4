"""The engine: whatever requests it serves together, each gets what it would get alone."""

import functools
import gc
import itertools
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

import mlx_rewind
import zoo
from mlx_rewind import (
    BatchResult,
    DraftMismatchError,
    DraftModel,
    Engine,
    Handle,
    NGram,
    Output,
    Prediction,
    Request,
    UnsupportedCacheError,
    batch_generate,
)
from mlx_rewind.cache import retrace
from mlx_rewind.cache.members import extract
from mlx_rewind.cache.ragged import why_row_by_row
from mlx_rewind.cache.rows import RowsCache
from mlx_rewind.draft.protocol import Drafter, Proposer, Session
from mlx_rewind.load import held_out_prompts
from mlx_rewind.target import Target

FAMILIES = [
    "falcon_h1",
    "gemma3_text",
    "gpt_oss",
    "kimi_linear",
    "lfm2",
    "llama",
    "mamba2",
    "qwen3_5",
    "qwen3_next",
]
STEP = 16  # prompt tokens per step of the engine, and per forward of the solo runs


class Solo:
    """Plain decoding by mlx-lm, which judges: tokens, and logprobs [V] of each."""

    def __init__(self, tokens: list[int], logprobs: list[mx.array]) -> None:
        self.tokens, self.logprobs = tokens, logprobs


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(5 * i * i + 11 * i + 3 + 17 * salt) % zoo.VOCAB for i in range(length)]


def solo(name: str, length: int, salt: int = 0, n: int = 20) -> Solo:
    """`n` greedy tokens after a prompt, by stock `generate_step`; remembered."""
    return _solo(name, length, salt, n)


@functools.cache
def _solo(name: str, length: int, salt: int, n: int) -> Solo:
    prompt = mx.array(prompt_of(length, salt))
    steps = generate_step(prompt, zoo.build(name), max_tokens=n, prefill_step_size=STEP)
    tokens, logprobs = zip(*steps, strict=True)
    return Solo(list(tokens), list(logprobs))


def serve(engine: Engine, *requests: Request) -> list[Handle]:
    """Submits all and runs to the end."""
    handles = [engine.submit(request) for request in requests]
    for _ in engine:
        pass
    return handles


def assert_empty(engine: Engine) -> None:
    assert not engine.is_busy
    assert engine.step() == []
    held = (engine._waiting, engine._prefilling, engine._jobs, engine._lanes)
    assert not any(held)


class Letters:
    """A tokenizer with a character for every id of the tiny models."""

    chat_template = eos_token_id = bos_token = None

    def apply_chat_template(self, messages: Any) -> str:
        raise NotImplementedError

    def get_vocab(self) -> dict[str, int]:
        return {chr(33 + i): i for i in range(zoo.VOCAB)}

    def encode(self, text: str, **options: Any) -> list[int]:
        return [ord(c) - 33 for c in text if 33 <= ord(c) < 33 + zoo.VOCAB]

    def decode(self, tokens: Sequence[int], **options: Any) -> str:
        return "".join(chr(33 + token) for token in tokens)


def tokenizer(ends: Sequence[int] = ()) -> TokenizerWrapper:
    return TokenizerWrapper(Letters(), eos_token_ids=list(ends))


# --- any requests, together ------------------------------------------------------------------


class Wanted:
    """A request of the property test.

    at, cancel_at    engine steps at which it is submitted and, maybe, cancelled
    """

    def __init__(self, draw: Callable[..., Any]) -> None:
        self.length = draw(st.integers(1, 60))
        self.salt = draw(st.integers(0, 2))
        self.max_tokens = draw(st.integers(1, 20))
        self.k = draw(st.integers(0, 8))
        self.kind = draw(st.sampled_from(["none", "scripted", "ngram", "same", "other"]))
        self.plan = draw(st.lists(st.none() | st.integers(0, 8), min_size=1, max_size=4))
        self.at = draw(st.integers(0, 8))
        self.cancel_at = draw(st.none() | st.integers(0, 25)) if draw(st.booleans()) else None

    def __repr__(self) -> str:
        return f"Wanted({vars(self)})"

    def request(self, name: str, models: dict[str, DraftModel]) -> Request:
        drafters: dict[str, Any] = {"none": None, "ngram": NGram(1, 3), **models}
        if self.kind == "scripted":
            right = solo(name, self.length, self.salt).tokens
            drafters["scripted"] = zoo.Scripted(right, self.plan, prompt_length=self.length)
        return Request(
            prompt_of(self.length, self.salt),
            max_tokens=self.max_tokens,
            drafter=drafters[self.kind],
            num_draft_tokens=self.k,
        )


def assert_alone(name: str, handle: Handle, outputs: list[Output], ends: Sequence[int]) -> None:
    """A request that was served together with others came out as if it had been alone."""
    request = handle.request
    salt = next(s for s in range(3) if prompt_of(len(request.prompt), s) == request.prompt)
    truth = solo(name, len(request.prompt), salt)
    stop = next((i for i, token in enumerate(truth.tokens) if token in ends), sys.maxsize)
    full = min(request.max_tokens, stop + 1)
    size = len(handle.tokens)
    assert handle.tokens == truth.tokens[:size]
    assert handle.error is None
    if handle.finish_reason == "cancelled":
        assert size < full
    else:
        assert size == full
        assert handle.finish_reason == ("stop" if stop < full else "length")
    check_outputs(handle, outputs)
    for ours, theirs in zip(outputs, truth.logprobs, strict=False):
        assert ours.logprobs is not None
        assert zoo.difference(ours.logprobs, theirs, zoo.round_tolerance(name)) is None
    check_stats(handle, outputs)
    text = "".join(chr(33 + token) for token in handle.tokens if token not in ends)
    if handle.finish_reason != "cancelled":
        assert handle.text == text


def check_outputs(handle: Handle, outputs: list[Output]) -> None:
    assert [output.token for output in outputs] == handle.tokens
    assert "".join(output.text for output in outputs) == handle.text
    reasons = [output.finish_reason for output in outputs]
    assert reasons[:-1] == [None] * len(reasons[:-1])
    if handle.finish_reason in ("stop", "length"):
        assert reasons[-1] == handle.finish_reason


def check_stats(handle: Handle, outputs: list[Output]) -> None:
    stats = handle.stats
    assert stats.emitted == len(handle.tokens)
    assert stats.accepted == sum(output.from_draft for output in outputs)
    assert stats.accepted <= stats.drafted <= stats.rounds * handle.request.num_draft_tokens
    assert sum(stats.accepted_per_position) == stats.accepted
    assert sum(stats.drafted_per_position) == stats.drafted
    assert stats.rounds <= stats.steps
    assert stats.emitted <= stats.steps + stats.accepted


def run(
    engine: Engine, wanted: list[Wanted], request: Callable[[Wanted], Request]
) -> list[tuple[Handle, list[Output]]]:
    """Submits and cancels at the planned steps; returns the handles and what each put out."""
    handles: dict[int, Handle] = {}
    outputs: dict[int, list[Output]] = {i: [] for i in range(len(wanted))}
    for now in itertools.count():
        for i, want in enumerate(wanted):
            if want.at == now:
                handles[i] = engine.submit(request(want))
        for i, want in enumerate(wanted):
            if want.cancel_at == now and i in handles:
                engine.cancel(handles[i])
        if len(handles) == len(wanted) and not engine.is_busy:
            break
        index = {id(handle): i for i, handle in handles.items()}
        for output in engine.step():
            outputs[index[id(output.handle)]].append(output)
        assert now < 500, "the engine does not come to an end"
    return [(handles[i], outputs[i]) for i in range(len(wanted))]


@functools.cache
def draft_models(name: str) -> dict[str, DraftModel]:
    """Draft models that several rows share: with the weights of the target, and others."""
    return {
        "same": DraftModel(zoo.build(name)),
        "other": DraftModel(zoo.build("lfm2", seed=77)),
    }


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_request_is_as_if_alone(name: str, data: st.DataObject) -> None:
    wanted = [Wanted(data.draw) for _ in range(data.draw(st.integers(1, 6)))]
    first = solo(name, wanted[0].length, wanted[0].salt).tokens
    ends = [first[at] for at in data.draw(st.lists(st.integers(0, 19), max_size=2))]
    engine = Engine(
        zoo.build(name),
        tokenizer(ends),
        max_rows=data.draw(st.sampled_from([6, 3, 1])),
        prefill_step_size=STEP,
    )
    models = draft_models(name)
    for handle, outputs in run(engine, wanted, lambda want: want.request(name, models)):
        assert_alone(name, handle, outputs, ends)
    assert_empty(engine)


# --- fixed cases -----------------------------------------------------------------------------


def scripted(
    name: str, length: int, plan: Sequence[int | None], salt: int = 0, n: int = 40
) -> zoo.Scripted:
    return zoo.Scripted(solo(name, length, salt, n).tokens, plan, prompt_length=length)


def held_by(lane: Any) -> list[Any]:
    """The stock caches of every row of a decoder."""
    cache, rows = lane.batch.cache, range(len(lane.batch.rows))
    return [extract(cache, row) for row in rows] if lane._has_rows else [cache]


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
def test_rows_that_accept_differently(name: str) -> None:
    """CASES 35. The caches, looked at every other time, are those of the rows alone."""
    plans = [[3, 3, 3], [0, 1, 2], [2, 0, 3]]
    engine = Engine(zoo.build(name))
    handles = [
        engine.submit(
            Request(
                prompt_of(10 + 3 * row, row),
                max_tokens=40,
                drafter=scripted(name, 10 + 3 * row, plan, row),
                num_draft_tokens=3,
            )
        )
        for row, plan in enumerate(plans)
    ]
    shared = 0
    while engine.is_busy:
        engine.step()
        for lane in engine._lanes:
            shared += len(lane.batch.rows) == 3
            if shared % 2:
                continue
            for row, cache in zip(lane.batch.rows, held_by(lane), strict=True):
                expected = zoo.feed(zoo.build(name), row.tokens[:-1])
                zoo.assert_state_equal(cache, expected, zoo.round_tolerance(name))
    assert shared >= 7
    for row, handle in enumerate(handles):
        assert handle.tokens == solo(name, 10 + 3 * row, row, 40).tokens


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_one_prompt_several_times_at_once(name: str, count: int) -> None:
    """CASES 36."""
    truth, drafter = solo(name, 12, n=40), DraftModel(zoo.build(name))
    request = Request(prompt_of(12), max_tokens=40, drafter=drafter, num_draft_tokens=3)
    (single,) = serve(Engine(zoo.build(name)), request)
    for handle in serve(Engine(zoo.build(name)), *[request] * count):
        assert handle.tokens == truth.tokens
        assert handle.finish_reason == "length"
        assert handle.stats == single.stats


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
def test_four_prompts_of_different_lengths_at_once(name: str) -> None:
    """CASES 36."""
    lengths, drafter = [1, 7, 30, 31], DraftModel(zoo.build(name))
    requests = [
        Request(prompt_of(length), max_tokens=40, drafter=drafter, num_draft_tokens=3)
        for length in lengths
    ]
    singles = [serve(Engine(zoo.build(name)), request)[0] for request in requests]
    handles = serve(Engine(zoo.build(name)), *requests)
    for length, handle, single in zip(lengths, handles, singles, strict=True):
        assert handle.tokens == solo(name, length, n=40).tokens
        assert handle.stats == single.stats


HYBRIDS = """falcon_h1 granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 nemotron_h
olmo_hybrid plamo2 qwen3_5 qwen3_next recurrent_gemma rwkv7""".split()


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_long_neighbour_changes_nothing(name: str) -> None:
    """CASES 37."""
    drafters = (None, NGram(1, 3))
    requests = [Request(prompt_of(n), max_tokens=12, drafter=drafters[n == 3]) for n in (15, 3)]
    handles = serve(Engine(zoo.build(name), prefill_step_size=STEP), *requests)
    assert [handle.tokens for handle in handles] == [solo(name, n, n=12).tokens for n in (15, 3)]


@pytest.mark.parametrize("name", ["qwen3_5", "llama"])
@pytest.mark.parametrize("bits", [8, 4])
def test_two_quantised_rows(name: str, bits: int) -> None:
    """CASES 17, in a batch. A row without kv_bits runs beside them."""
    model = zoo.build(name, head_dim=64) if name == "qwen3_5" else zoo.build(name)

    def plain(length: int, **options: Any) -> list[int]:
        steps = generate_step(mx.array(prompt_of(length)), model, max_tokens=32, **options)
        return [token for token, _ in steps]

    quantised = {"kv_bits": bits, "kv_group_size": 32}
    truths = {n: plain(n, **quantised, quantized_kv_start=0) for n in (1, 9, 20)}
    requests = [
        Request(
            prompt_of(length),
            max_tokens=32,
            drafter=zoo.Scripted(truths[length], plan, prompt_length=length),
            **quantised,
        )
        for length, plan in ((1, [0, 1, 2]), (9, [3, 4, None]), (20, [4, 0, 1]))
    ]
    engine = Engine(model)
    handles = [engine.submit(request) for request in (*requests, Request(prompt_of(9), 32))]
    most = 0
    while engine.is_busy:
        engine.step()
        most = max(most, *(len(lane.batch.rows) for lane in engine._lanes), 0)
        kinds = {type(entry).__name__ for lane in engine._lanes for entry in lane.batch.cache}
        assert not ("KVCache" in kinds and "RowsKVCache" in kinds and len(engine._lanes) < 2)
    assert most == 3
    assert [handle.tokens for handle in handles[:3]] == list(truths.values())
    assert handles[3].tokens == plain(9)
    assert all(handle.stats.accepted > 5 for handle in handles[:3])


@pytest.mark.parametrize("start", [5, 14])
def test_rows_that_are_quantised_at_different_times(start: int) -> None:
    """Each at its own length, as alone; rows of one kind go together again after it."""
    model = zoo.build("llama")
    options = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": start}
    truths, requests = [], []
    for length, plan in ((1, [0, 1, 2]), (9, [3, 4, None]), (20, [4, 0, 1])):
        prompt = prompt_of(length)
        steps = generate_step(mx.array(prompt), model, max_tokens=32, **options)
        tokens = [token for token, _ in steps]
        for drafter in (zoo.Scripted(tokens, plan, prompt_length=length), None):
            requests.append(Request(prompt, 32, drafter, **options))
            truths.append(tokens)
    assert [handle.tokens for handle in serve(Engine(model), *requests)] == truths


def test_quantisation_that_cannot_be_is_refused_at_once() -> None:
    engine = Engine(zoo.build("gpt_oss"))
    with pytest.raises(UnsupportedCacheError, match="sliding window"):
        engine.submit(Request([1, 2], kv_bits=8))
    assert_empty(engine)


@pytest.mark.parametrize("name", ["llama4", "baichuan_m1", "gemma2"])
def test_models_that_run_row_by_row(name: str) -> None:
    model = zoo.build(name)
    engine = Engine(model, prefill_step_size=STEP)
    assert engine.row_by_row == why_row_by_row(model)
    assert engine.row_by_row
    lengths = [1, 20, 7]
    drafters = [DraftModel(model), scripted(name, 20, [2, 0, 4]), None]
    handles = [
        engine.submit(Request(prompt_of(length), max_tokens=30, drafter=drafter))
        for length, drafter in zip(lengths, drafters, strict=True)
    ]
    most = 0
    for _ in engine:
        assert all(len(lane.batch.rows) == 1 for lane in engine._lanes)
        most = max(most, len(engine._lanes))
    assert most == 3
    for length, handle in zip(lengths, handles, strict=True):
        assert handle.tokens == solo(name, length, n=30).tokens
    assert_empty(engine)


def test_a_model_whose_rows_go_together_has_no_reason_not_to() -> None:
    assert Engine(zoo.build("qwen3_5")).row_by_row is None


# --- rows that fail, alone -------------------------------------------------------------------


class PlannedError(Exception):
    pass


class Raises:
    """Raises at its n-th call (from 0) and would do what `inner` does."""

    def __init__(self, n: int, inner: Any) -> None:
        self.n, self.inner, self.calls = n, inner, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls > self.n:
            raise PlannedError
        return self.inner(*args)

    propose = __call__


class Absorbing(Drafter):
    """A drafter that reads the target's states, and raises at the n-th block of them."""

    kind = "absorbing"

    def __init__(self, n: int) -> None:
        self.n, self.closed = n, 0

    def start(self, target: Target) -> Proposer:
        target.watch("normed")
        return _AbsorbingSession(self)


class _AbsorbingSession(Session):
    def __init__(self, drafter: Absorbing) -> None:
        self.drafter, self.calls = drafter, 0

    def absorb(self, tokens: Sequence[int], hidden: mx.array) -> None:
        assert hidden.shape[0] == len(tokens)
        self.calls += 1
        if self.calls > self.drafter.n:
            raise PlannedError

    def propose(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
        return [1] * num_draft_tokens

    def close(self) -> None:
        self.drafter.closed += 1


def failing(kind: str, n: int) -> Request:
    prompt = prompt_of(20, 1)
    if kind == "processor":
        raises = Raises(n, lambda tokens, logits: logits)
        return Request(prompt, max_tokens=12, logits_processors=[raises])
    if kind == "sampler":
        return Request(prompt, max_tokens=12, sampler=Raises(n, lambda x: mx.argmax(x, axis=-1)))
    if kind == "drafter":
        return Request(prompt, max_tokens=12, drafter=Raises(n, lambda tokens, k: [1] * k))
    return Request(prompt, max_tokens=12, drafter=Absorbing(n))


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
@pytest.mark.parametrize("n", [0, 1, 4])
@pytest.mark.parametrize("kind", ["processor", "sampler", "drafter", "states"])
def test_a_row_fails_alone(name: str, kind: str, n: int) -> None:
    engine = Engine(zoo.build(name), prefill_step_size=STEP)
    drafter = DraftModel(zoo.build(name))
    neighbours = [
        engine.submit(Request(prompt_of(9), max_tokens=16, drafter=scripted(name, 9, [1, 0, 3]))),
        engine.submit(Request(prompt_of(5), max_tokens=16, drafter=drafter)),
    ]
    for _ in range(3):
        engine.step()
    bad = engine.submit(failing(kind, n))
    neighbours.append(engine.submit(Request(prompt_of(5), max_tokens=16)))
    outputs = list(engine)
    assert isinstance(bad.error, PlannedError)
    assert bad.finish_reason == "error"
    assert bad.tokens == solo(name, 20, 1).tokens[: len(bad.tokens)]
    assert len(bad.tokens) == bad.stats.emitted < 12
    last = [output for output in outputs if output.handle is bad][-1]
    assert (last.token, last.text, last.logprobs, last.finish_reason) == (None, "", None, "error")
    for length, handle in zip((9, 5, 5), neighbours, strict=True):
        assert handle.tokens == solo(name, length).tokens[:16]
        assert handle.finish_reason == "length"
        assert handle.error is None
    if kind == "states":
        assert bad.request.drafter.closed
    assert_empty(engine)


def test_a_drafter_of_nonsense_fails_alone() -> None:
    nonsense: list[Any] = [[zoo.VOCAB], [-1], [1] * 9, None, ["a"]]
    requests = [Request(prompt_of(5), drafter=Raises(9, lambda t, k, x=x: x)) for x in nonsense]
    engine = Engine(zoo.build("qwen3_5"))
    *bad, good = serve(engine, *requests, Request(prompt_of(9), max_tokens=20))
    assert [type(handle.error) for handle in bad] == [DraftMismatchError] * len(nonsense)
    assert good.tokens == solo("qwen3_5", 9).tokens
    assert_empty(engine)


def test_what_is_no_error_of_a_row_is_raised() -> None:
    def interrupt(logprobs: mx.array) -> mx.array:
        raise KeyboardInterrupt

    engine = Engine(zoo.build("qwen3_5"))
    engine.submit(Request([1, 2, 3], sampler=interrupt))
    with pytest.raises(KeyboardInterrupt):
        list(engine)


# --- samplers and processors -----------------------------------------------------------------


class Recorder:
    """Keeps the history of every call."""

    def __init__(self) -> None:
        self.histories: list[list[int]] = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        read: Any = tokens.tolist()
        self.histories.append(read)
        return logits


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
def test_a_processor_sees_what_it_would_see_alone(name: str) -> None:
    """CASES 32, for each row: prompt and emitted tokens, each position once and in order."""
    recorders = [Recorder() for _ in range(4)]
    engine = Engine(zoo.build(name), prefill_step_size=STEP)
    plans: list[Any] = [[2, 0, 3], None, [0, 1], [4, None]]
    lengths = [5, 9, 12, 1]
    handles = []
    for length, plan, recorder in zip(lengths, plans, recorders, strict=True):
        handles.append(
            engine.submit(
                Request(
                    prompt_of(length),
                    max_tokens=9 + length,
                    drafter=scripted(name, length, plan) if plan else None,
                    logits_processors=[recorder],
                )
            )
        )
        engine.step()  # so that rows join one after the other
    list(engine)
    for handle, recorder in zip(handles, recorders, strict=True):
        prompt, tokens = handle.request.prompt, handle.tokens
        assert tokens == solo(name, len(prompt), n=9 + len(prompt)).tokens
        expected = [[*prompt, *tokens[:i]] for i in range(len(tokens))]
        assert recorder.histories[: len(tokens)] == expected
        assert len(recorder.histories) == len(tokens)


class Walk:
    """A sampler with a state of its own: takes the next of a row's ranks at each call."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def __call__(self, logprobs: mx.array) -> mx.array:
        rank = self.draw.choice([0, 0, 1, 2])
        return mx.argsort(-logprobs, axis=-1)[..., rank]


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
@pytest.mark.parametrize("drafting", [False, True])
def test_a_sampler_with_a_state_draws_what_it_would_draw_alone(name: str, drafting: bool) -> None:
    model, lengths = zoo.build(name), [5, 9, 12]
    truths = []
    for length in lengths:
        steps = generate_step(
            mx.array(prompt_of(length)), model, max_tokens=10 + length, sampler=Walk(length)
        )
        truths.append([token for token, _ in steps])
    engine = Engine(model)
    handles = []
    for length, truth in zip(lengths, truths, strict=True):
        drafter = zoo.Scripted(truth, [1, 0, 3], prompt_length=length) if drafting else None
        request = Request(
            prompt_of(length), max_tokens=10 + length, drafter=drafter, sampler=Walk(length)
        )
        handles.append(engine.submit(request))
        engine.step()
        engine.step()
    list(engine)
    assert [handle.tokens for handle in handles] == truths


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
def test_each_row_has_processors_of_its_own(name: str) -> None:
    model = zoo.build(name)
    settings_of = [{"repetition_penalty": 1.4}, {"logit_bias": {5: 30.0, 9: 29.0}}, {}]
    requests, truths = [], []
    for row, options in enumerate(settings_of):
        processors = make_logits_processors(**options)
        steps = generate_step(
            mx.array(prompt_of(6 + row)), model, max_tokens=14, logits_processors=processors
        )
        truths.append([token for token, _ in steps])
        requests.append(
            Request(
                prompt_of(6 + row),
                max_tokens=14,
                drafter=(NGram(1, 3), DraftModel(model), None)[row],
                logits_processors=make_logits_processors(**options),
            )
        )
    handles = serve(Engine(model), *requests)
    assert [handle.tokens for handle in handles] == truths
    assert len({tuple(truth[:6]) for truth in truths}) == 3


# --- memory ----------------------------------------------------------------------------------


def live_caches() -> int:
    kinds = (RowsCache, KVCache, ArraysCache, RotatingKVCache, QuantizedKVCache)
    return sum(isinstance(x, kinds) for x in gc.get_objects())


def active_memory() -> int:
    gc.collect()
    mx.clear_cache()
    return int(mx.get_active_memory())


def serve_some(engine: Engine, name: str, count: int) -> None:
    """Requests of 20 tokens, a third of them cancelled in the middle."""
    models = draft_models(name)
    handles = []
    for number in range(count):
        drafter = (None, NGram(1, 3), models["same"], models["other"])[number % 4]
        handles.append(
            engine.submit(Request(prompt_of(1 + number % 23), max_tokens=20, drafter=drafter))
        )
    for _ in engine:
        for handle in handles[::3]:
            if len(handle.tokens) > handle.id % 12:
                engine.cancel(handle)
    assert {handle.finish_reason for handle in handles[::3]} == {"cancelled"}
    assert {handle.finish_reason for handle in handles[1::3]} == {"length"}


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
def test_fifty_requests_leave_nothing(name: str) -> None:
    """CASES 39."""
    engine = Engine(zoo.build(name), max_rows=4)
    serve_some(engine, name, 8)  # what is made once
    before, caches = active_memory(), live_caches()
    serve_some(engine, name, 50)
    assert_empty(engine)
    assert active_memory() <= before
    assert live_caches() <= caches
    assert not retrace._tapes


def test_two_hundred_requests_of_any_shape() -> None:
    """A long run through four rows."""
    name, draw = "qwen3_5", random.Random(5)
    engine = Engine(zoo.build(name), max_rows=4, prefill_step_size=STEP)
    models = draft_models(name)
    shapes = [(draw.randint(1, 40), draw.randint(1, 16), draw.randrange(6)) for _ in range(200)]

    def request(shape: tuple[int, int, int]) -> Request:
        length, n, kind = shape
        drafters = (None, NGram(1, 3), models["same"], models["other"])
        planned = [draw.randint(0, 5) for _ in range(3)]
        drafter: Any = drafters[kind] if kind < 4 else scripted(name, length, planned, n=20)
        k = draw.randint(0, 6)
        return Request(prompt_of(length), max_tokens=n, drafter=drafter, num_draft_tokens=k)

    truths = [solo(name, length).tokens[:n] for length, n, _ in shapes]
    serve_some(engine, name, 8)
    before = active_memory()
    handles: list[Handle] = []
    most = 0
    while engine.is_busy or len(handles) < len(shapes):
        for _ in range(min(draw.choice([0, 0, 1, 3]), len(shapes) - len(handles))):
            handles.append(engine.submit(request(shapes[len(handles)])))
        engine.step()
        most = max(most, len(engine._jobs))
        assert most <= 4
    assert most == 4
    for truth, handle in zip(truths, handles, strict=True):
        assert handle.tokens == truth
        assert handle.finish_reason == "length"
        assert handle.stats.emitted == len(truth)
        assert handle.stats.accepted <= handle.stats.drafted
    assert_empty(engine)
    kinds = {bool(handle.stats.accepted) for handle in handles}
    assert kinds == {True, False}
    assert active_memory() <= before


# --- admission -------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_no_more_rows_than_allowed(rows: int) -> None:
    engine = Engine(zoo.build("qwen3_5"), max_rows=rows)
    handles = [engine.submit(Request(prompt_of(3 + i), max_tokens=8)) for i in range(6)]
    most = 0
    while engine.is_busy:
        engine.step()
        assert len(engine._jobs) <= rows
        most = max(most, sum(len(lane.batch.rows) for lane in engine._lanes))
    assert most == rows
    for i, handle in enumerate(handles):
        assert handle.tokens == solo("qwen3_5", 3 + i, n=8).tokens


def cache_bytes(engine: Engine) -> int:
    """Bytes of all caches under work, those of draft models included."""
    entries: dict[int, Any] = {}
    for job in engine._jobs.values():
        drafts = getattr(job.row.proposer, "cache", [])
        entries.update((id(entry), entry) for entry in [*job.decoder.batch.cache, *drafts])
    return sum(entry.nbytes for entry in entries.values())


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss", "llama"])
@pytest.mark.parametrize("drafting", [False, True])
def test_memory_is_reserved_before_a_request_starts(name: str, drafting: bool) -> None:
    """What the caches really take stays within it, however long a row's neighbour is."""
    model = zoo.build(name)
    shapes = [(5, 12), (600, 4), (12, 20), (1, 20), (60, 7), (9, 20), (2, 20), (7, 20)]
    draft = DraftModel(model)
    drafters = itertools.cycle([draft, None, None] if drafting else [None])
    requests = [
        Request(prompt_of(length), max_tokens=n, drafter=next(drafters)) for length, n in shapes
    ]
    sizes = sorted(Engine(model).bytes_for(request) for request in requests)
    limit = 2 * sizes[-1] + sizes[0]
    engine = Engine(model, memory_limit=limit)
    handles = [engine.submit(request) for request in requests]
    most = highest = 0
    while engine.is_busy:
        engine.step()
        jobs = engine._jobs.values()
        assert sum(engine.bytes_for(job.handle.request) for job in jobs) <= limit
        highest = max(highest, cache_bytes(engine))
        most = max(most, len(jobs))
    assert 1 < most < len(shapes)
    for (length, n), handle in zip(shapes, handles, strict=True):
        assert handle.tokens == solo(name, length).tokens[:n]
    assert highest <= limit


def test_a_request_that_can_never_fit_is_refused() -> None:
    engine = Engine(zoo.build("llama"), memory_limit=100_000)
    for request, message in (
        (Request(prompt_of(2000), max_tokens=10), "may need"),
        (Request([1], max_tokens=10**6), "may need"),
        (Request([1], max_tokens=-1), "max_tokens must be limited"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(request)
    assert_empty(engine)


def test_bytes_count_the_draft_model_too() -> None:
    model = zoo.build("llama")
    engine = Engine(model)
    plain = engine.bytes_for(Request(prompt_of(10), max_tokens=10))
    drafted = engine.bytes_for(Request(prompt_of(10), max_tokens=10, drafter=DraftModel(model)))
    assert drafted == 2 * plain
    assert engine.bytes_for(Request(prompt_of(1000), max_tokens=20)) == 4 * plain  # by 256 slots


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [1, -2]}, "negative"),
        ({"prompt": [[1, 2]]}, "flat"),
        ({"prompt": [1], "num_draft_tokens": 17}, "at most 16"),
        ({"prompt": [1], "num_draft_tokens": -1}, "0 or more"),
        ({"prompt": [1], "kv_bits": 3}, "kv_bits"),
        ({"prompt": [1], "stop": ""}, "stop"),
    ],
)
def test_a_malformed_request_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    engine = Engine(zoo.build("llama"), tokenizer())
    with pytest.raises(ValueError, match=message):
        engine.submit(Request(**options))
    assert_empty(engine)


def test_a_drafter_that_cannot_propose_is_refused_at_once() -> None:
    engine = Engine(zoo.build("llama"))
    for drafter in (object(), NGram):
        with pytest.raises(DraftMismatchError):
            engine.submit(Request([1], drafter=drafter))  # type: ignore[arg-type]
    assert_empty(engine)


@pytest.mark.parametrize(
    "options", [{"max_rows": 0}, {"prefill_step_size": 0}, {"max_draft_tokens": -1}]
)
def test_an_engine_of_nothing_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Engine(zoo.build("llama"), **options)


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
def test_a_long_prompt_stalls_nobody(name: str) -> None:
    engine = Engine(zoo.build(name), prefill_step_size=8)
    running = engine.submit(Request(prompt_of(5), max_tokens=40, drafter=scripted(name, 5, [1, 0])))
    while not running.tokens:
        engine.step()
    late = engine.submit(Request(prompt_of(60), max_tokens=5))
    steps = 0
    while not late.tokens:
        before = len(running.tokens)
        engine.step()
        steps += 1
        assert len(running.tokens) > before
    assert steps == 8
    list(engine)
    assert running.tokens == solo(name, 5, n=40).tokens
    assert late.tokens == solo(name, 60, n=5).tokens


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
def test_a_short_prompt_does_not_wait_for_a_long_one(name: str) -> None:
    engine = Engine(zoo.build(name), prefill_step_size=8)
    long = engine.submit(Request(prompt_of(60), max_tokens=5))
    engine.step()
    for i in range(6):
        short = engine.submit(Request(prompt_of(5 + i % 3), max_tokens=3))
        steps = 0
        while not short.tokens:
            engine.step()
            steps += 1
        assert steps <= 2
        assert short.tokens == solo(name, 5 + i % 3, n=3).tokens[: len(short.tokens)]
    list(engine)
    assert long.tokens == solo(name, 60, n=5).tokens


def test_a_long_prompt_does_not_wait_for_ever() -> None:
    engine = Engine(zoo.build("qwen3_5"), max_rows=8, prefill_step_size=8)
    long = engine.submit(Request(prompt_of(60), max_tokens=2))
    for _ in range(16):  # a short one with every step
        engine.submit(Request(prompt_of(9), max_tokens=1))
        engine.step()
    assert long.tokens
    list(engine)
    assert long.tokens == solo("qwen3_5", 60, n=2).tokens


# --- cancelling ------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["waiting", "prefilling", "first", "together", "done"])
def test_cancelling_ends_one_request_only(when: str) -> None:
    name = "qwen3_5"
    engine = Engine(zoo.build(name), max_rows=2, prefill_step_size=8)
    neighbour = engine.submit(Request(prompt_of(5), max_tokens=20))
    handle = engine.submit(Request(prompt_of(30), max_tokens=9, drafter=scripted(name, 30, [1])))
    waiting = engine.submit(Request(prompt_of(7), max_tokens=6))
    steps = {"waiting": 2, "prefilling": 3, "first": 6, "together": 7, "done": 30}[when]
    for _ in range(steps):
        engine.step()
    victim = waiting if when == "waiting" else handle
    if when == "prefilling":
        assert any(job.handle is victim for job in engine._prefilling)
    tokens = list(victim.tokens)
    assert bool(tokens) == (when in ("first", "together", "done"))
    engine.cancel(victim)
    engine.cancel(victim)
    assert victim.finish_reason == ("length" if when == "done" else "cancelled")
    rest = list(engine)
    assert not [output for output in rest if output.handle is victim]
    assert victim.tokens == tokens
    for other, n in (
        (neighbour, 20),
        (waiting if victim is handle else handle, 9 if victim is waiting else 6),
    ):
        assert other.tokens == solo(name, len(other.request.prompt), n=20).tokens[:n]
        assert other.finish_reason == "length"
    assert_empty(engine)


def test_cancelling_is_for_between_two_steps() -> None:
    engine, other = Engine(zoo.build("qwen3_5")), Engine(zoo.build("qwen3_5"))

    def sampler(logprobs: mx.array) -> mx.array:
        with pytest.raises(RuntimeError, match="between two steps"):
            engine.cancel(handle)
        return mx.argmax(logprobs, axis=-1)

    handle = engine.submit(Request(prompt_of(5), max_tokens=3, sampler=sampler))
    with pytest.raises(ValueError, match="does not belong"):
        other.cancel(handle)
    list(engine)
    assert handle.tokens == solo("qwen3_5", 5).tokens[:3]


def test_a_request_is_what_it_was_when_it_was_submitted() -> None:
    engine = Engine(zoo.build("qwen3_5"))
    prompt = prompt_of(5)
    handle = engine.submit(Request(prompt, max_tokens=3))
    prompt.append(1)
    list(engine)
    assert handle.tokens == solo("qwen3_5", 5).tokens[:3]


def test_a_budget_of_nothing_gives_nothing() -> None:
    engine = Engine(zoo.build("qwen3_5"))
    none, some = serve(engine, Request(prompt_of(5), max_tokens=0), Request(prompt_of(5), 3))
    assert (none.tokens, none.finish_reason) == ([], "length")
    assert some.tokens == solo("qwen3_5", 5).tokens[:3]
    assert_empty(engine)


def test_the_levels_of_exactness() -> None:
    for name, level in (("qwen3_5", "bitwise"), ("gpt_oss", "token")):
        (handle,) = serve(Engine(zoo.build(name)), Request(prompt_of(3), max_tokens=2))
        assert handle.exactness == level


# --- drafters together, and texts ------------------------------------------------------------


@functools.cache
def shipped() -> tuple[nn.Module, Any]:
    return mlx_rewind.load()


def shipped_prompts(count: int) -> list[str]:
    entries = held_out_prompts(shipped()[1])
    return [entry["prompt"] for entry in entries[:: len(entries) // count]][:count]


@functools.cache
def text_alone(prompt: str, n: int, stop: tuple[str, ...] = ()) -> str:
    return mlx_rewind.generate(*shipped(), prompt, max_tokens=n, stop=stop)


class Habit:
    """A custom drafter that serves several rows: always proposes the row's last tokens again."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def propose(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
        self.lengths.append(len(tokens))
        return tokens[-2:][:num_draft_tokens]


def test_every_kind_of_drafter_in_one_engine() -> None:
    model, tok = shipped()
    mtp = mlx_rewind.load_mtp(None, model)
    draft = mlx_rewind.load_draft(None, tok)
    habit = Habit()
    prompts = shipped_prompts(5)
    expected = tok.encode(text_alone(prompts[0], 16), add_special_tokens=False)
    drafters: list[Any] = [None, NGram(), mtp, draft, habit, mtp, draft, habit, mtp]
    drafters.append(Prediction(expected))
    which = [0, 1, 2, 3, 4, 3, 4, 0, 1, 0]
    engine = Engine(model, tok, max_rows=7)
    handles = [
        engine.submit(
            Request(tok.encode(prompts[at]), max_tokens=16, drafter=drafter, num_draft_tokens=3)
        )
        for at, drafter in zip(which, drafters, strict=True)
    ]
    list(engine)
    for at, handle in zip(which, handles, strict=True):
        assert handle.text == text_alone(prompts[at], 16)
        assert handle.error is None
    for handle, drafter in zip(handles, drafters, strict=True):
        assert bool(handle.stats.drafted) == (drafter is not None) or drafter is handles[1]
    assert sum(handle.stats.accepted for handle in handles) > 25
    assert_empty(engine)


def test_an_mtp_head_drafts_as_well_in_company() -> None:
    model, tok = shipped()
    mtp = mlx_rewind.load_mtp(None, model)
    requests = [
        Request(tok.encode(prompt), max_tokens=20, drafter=mtp, num_draft_tokens=3)
        for prompt in shipped_prompts(3)
    ]
    singles = [serve(Engine(model, tok), request)[0] for request in requests]
    for single, handle in zip(singles, serve(Engine(model, tok), *requests), strict=True):
        assert handle.text == single.text
        assert handle.stats == single.stats


def test_texts_end_as_those_of_generate() -> None:
    """End tokens, stop strings and budgets, also inside a block."""
    model, tok = shipped()
    draft = mlx_rewind.load_draft(None, tok)
    prompts = shipped_prompts(4)
    whole = [text_alone(prompt, 24) for prompt in prompts]
    result = batch_generate(model, tok, prompts, drafter=draft, max_tokens=24)
    assert result.texts == whole
    assert result.finish_reasons == [
        "length" if len(tokens) == 24 else "stop" for tokens in result.tokens
    ]
    for text in whole[:2]:
        stop = (text[len(text) // 2 :][:3], text[len(text) // 3 :][:2])
        result = batch_generate(
            model,
            tok,
            prompts[:3],
            drafter=[draft, None, NGram()],
            max_tokens=[24, 7, 24],
            stop=stop,
        )
        alone = [text_alone(p, n, stop) for p, n in zip(prompts, (24, 7, 24), strict=False)]
        assert result.texts == alone
        assert "stop" in result.finish_reasons


@pytest.mark.parametrize("j", [1, 2, 3, 5, 8])
def test_an_end_token_inside_a_block(j: int) -> None:
    """CASES 25, per row."""
    name = "qwen3_5"
    truth = solo(name, 9, n=40).tokens
    end = next(token for i, token in enumerate(truth) if i >= j and token not in truth[:i])
    cut = truth[: truth.index(end) + 1]
    engine = Engine(zoo.build(name), tokenizer([end]))
    drafters = [scripted(name, 9, [4]), None, DraftModel(zoo.build(name)), scripted(name, 9, [1])]
    handles = serve(engine, *(Request(prompt_of(9), 30, drafter) for drafter in drafters))
    for handle in handles:
        assert handle.tokens == cut
        assert handle.finish_reason == "stop"
        assert handle.text == Letters().decode(cut[:-1])
        assert handle.stats.emitted == len(cut)
    assert_empty(engine)


# --- batch_generate --------------------------------------------------------------------------


def batch(**options: Any) -> BatchResult:
    prompts = [prompt_of(length) for length in (3, 20, 8)]
    return batch_generate(zoo.build("qwen3_5"), tokenizer(), prompts, **options)


def test_a_batch_is_its_prompts_alone() -> None:
    result = batch(max_tokens=12, drafter=NGram(1, 3))
    truths = [solo("qwen3_5", length, n=12).tokens for length in (3, 20, 8)]
    assert result.tokens == truths
    assert result.texts == [Letters().decode(tokens) for tokens in truths]
    assert result.finish_reasons == ["length"] * 3
    assert result.errors == [None] * 3
    assert [stats.emitted for stats in result.stats] == [12] * 3


def test_everything_may_be_given_per_prompt() -> None:
    model, lengths = zoo.build("qwen3_5"), (3, 20, 8)
    low = make_sampler(temp=0.0)
    bias = make_logits_processors(logit_bias={5: 30.0, 9: 29.0})
    result = batch(
        max_tokens=[4, 9, 6],
        drafter=[None, scripted("qwen3_5", 20, [2, 0]), NGram(1, 3)],
        num_draft_tokens=[0, 2, 8],
        sampler=[None, low, Walk(1)],
        logits_processors=[[], [], bias],
    )
    assert result.tokens[0] == solo("qwen3_5", 3).tokens[:4]
    assert result.tokens[1] == solo("qwen3_5", 20).tokens[:9]
    assert result.stats[1].accepted_per_position[0] == result.stats[1].accepted / 2 > 0
    options = {"sampler": Walk(1), "logits_processors": make_logits_processors({5: 30.0, 9: 29.0})}
    steps = generate_step(mx.array(prompt_of(8)), model, max_tokens=6, **options)
    assert result.tokens[2] == [token for token, _ in steps]
    assert lengths == (3, 20, 8)


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": [1, 2]},
        {"drafter": [None]},
        {"num_draft_tokens": [1, 2, 3, 4]},
        {"sampler": [None, None]},
        {"logits_processors": [[], []]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_list_of_another_length_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(options))} has \d entries for 3 prompts"):
        batch(**options)


def test_progress_is_told_by_prompts() -> None:
    told: list[tuple[int, int]] = []
    batch(max_tokens=[2, 9, 5], progress=lambda done, total: told.append((done, total)))
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_one_prompt_of_a_batch_fails() -> None:
    result = batch(max_tokens=6, sampler=[None, Raises(3, lambda x: mx.argmax(x, axis=-1)), None])
    assert result.finish_reasons == ["length", "error", "length"]
    assert [type(error) for error in result.errors] == [type(None), PlannedError, type(None)]
    assert result.tokens[0] == solo("qwen3_5", 3).tokens[:6]
    assert result.tokens[1] == solo("qwen3_5", 20).tokens[: len(result.tokens[1])]
    assert result.tokens[2] == solo("qwen3_5", 8).tokens[:6]


def test_a_batch_of_nothing() -> None:
    result = batch_generate(zoo.build("qwen3_5"), tokenizer(), [])
    assert result.texts == result.tokens == result.finish_reasons == []
