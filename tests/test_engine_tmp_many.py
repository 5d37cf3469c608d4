"""The engine: whatever requests it serves together, each gets what it would get alone."""

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.tokenizer_utils import TokenizerWrapper

import zoo
from mlx_rewind import (
    DraftModel,
    Engine,
    Handle,
    NGram,
    Output,
    Request,
)

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


@functools.cache
def solo(name: str, length: int, salt: int = 0, n: int = 20) -> Solo:
    """`n` greedy tokens after a prompt, by stock `generate_step`."""
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
@settings(max_examples=60, report_multiple_bugs=False, phases=[Phase.generate], deadline=None, derandomize=True)
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
