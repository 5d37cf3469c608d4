"""What goes wrong for one request touches no other one, and the engine goes on."""

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

import mlx_rewind
import zoo
from mlx_rewind import MTP, DraftModel, Engine, NGram, Request
from mlx_rewind.cache.rows import RowsCache
from mlx_rewind.engine import Handle

PROMPTS = [zoo.PROMPTS[1], zoo.PROMPTS[2], zoo.PROMPTS[1][::-1]]
N = 12


def alone(model: nn.Module, prompt: list[int]) -> list[int]:
    return [token for token, *_ in mlx_rewind.generate_step(prompt, model, max_tokens=N)]


def finish(engine: Engine) -> None:
    for _ in range(60):
        if not engine.is_busy:
            return
        engine.step()
    pytest.fail("the engine does not come to an end")


def spoiled(how: Callable[[mx.array], Any], call: int) -> Callable[[mx.array], Any]:
    """A greedy sampler that goes wrong at its call number `call`."""
    calls = []

    def sample(logprobs: mx.array) -> Any:
        calls.append(1)
        return how(logprobs) if len(calls) == call else mx.argmax(logprobs, axis=-1)

    return sample


def fail(logprobs: mx.array) -> mx.array:
    raise OSError("planned")


@pytest.mark.parametrize("call", [1, 5])
@pytest.mark.parametrize(
    "how", [fail, lambda x: mx.array([1, 2]), lambda x: None, lambda x: mx.zeros((0,), mx.int32)]
)
def test_a_sampler_that_fails_or_draws_no_token(how: Any, call: int) -> None:
    model = zoo.build("qwen3_5")
    engine = Engine(model)
    good = [engine.submit(Request(p, max_tokens=N, drafter=NGram(1, 3))) for p in PROMPTS[:2]]
    bad = engine.submit(Request(PROMPTS[2], max_tokens=N, sampler=spoiled(how, call)))
    finish(engine)
    assert bad.finish_reason == "error"
    assert bad.error is not None
    assert bad.tokens == alone(model, PROMPTS[2])[: call - 1]
    assert [handle.tokens for handle in good] == [alone(model, p) for p in PROMPTS[:2]]


class Detokenizer:
    """Fails once, at its fourth token."""

    last_segment = ""

    def __init__(self, fails: bool) -> None:
        self._left = 4 if fails else -1

    def add_token(self, token: int) -> None:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("planned")

    def finalize(self) -> None: ...


def test_a_detokenizer_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = mlx_rewind.load()
    made: list[Detokenizer] = []

    def detokenizer(self: Any) -> Detokenizer:
        made.append(Detokenizer(fails=len(made) % 3 == 1))
        return made[-1]

    monkeypatch.setattr(type(tokenizer), "detokenizer", property(detokenizer))
    engine = Engine(model, tokenizer)
    handles = [engine.submit(Request(p, max_tokens=N)) for p in PROMPTS]
    finish(engine)
    failed = [handle.finish_reason == "error" for handle in handles]
    assert sum(failed) == 1
    for handle, prompt in zip(handles, PROMPTS, strict=True):
        if handle.finish_reason != "error":
            expected = alone(model, prompt)
            assert handle.tokens == expected[: len(handle.tokens)]
            assert handle.finish_reason in ("length", "stop")


def test_heads_that_read_different_states_stay_apart() -> None:
    model, _ = mlx_rewind.load()
    one = mlx_rewind.load_mtp(None, model)
    other = MTP(one.heads, model, input="raw")
    engine = Engine(model)
    handles = [
        engine.submit(Request(p, max_tokens=N, drafter=drafter))
        for p, drafter in zip(PROMPTS, (one, other, one), strict=True)
    ]
    finish(engine)
    assert [handle.tokens for handle in handles] == [alone(model, p) for p in PROMPTS]


class Flaky(nn.Module):
    """A model that fails once, at its call number `call`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.left = inner, 0

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("planned")
        return self.inner(inputs, cache=cache)

    def make_cache(self) -> list[Any]:
        return self.inner.make_cache() if hasattr(self.inner, "make_cache") else [KVCache()] * 0


@pytest.mark.parametrize("call", [20, 23])
def test_a_draft_model_that_fails_ends_the_rows_that_it_drafts_for(call: int) -> None:
    model, draft = zoo.build("llama"), Flaky(zoo.build("qwen3_5"))
    drafter = DraftModel(draft)
    engine = Engine(model)
    fed = [engine.submit(Request(p, max_tokens=N, drafter=drafter)) for p in PROMPTS[:2]]
    other = engine.submit(Request(PROMPTS[2], max_tokens=N))
    draft.left = call
    finish(engine)
    assert other.tokens == alone(model, PROMPTS[2])
    for handle, prompt in zip(fed, PROMPTS, strict=False):
        assert handle.finish_reason in ("error", "length")
        assert handle.tokens == alone(model, prompt)[: len(handle.tokens)]


@pytest.mark.parametrize("drafted", [False, True])
def test_after_an_exception_of_the_model_the_next_step_goes_on(drafted: bool) -> None:
    inner = zoo.build("qwen3_5")
    expected = [alone(inner, p) for p in PROMPTS[:2]]
    drafter = DraftModel(zoo.build("lfm2")) if drafted else None
    engine = Engine(inner)
    handles = [engine.submit(Request(p, max_tokens=N, drafter=drafter)) for p in PROMPTS[:2]]
    for _ in range(4):
        engine.step()
    stock, left = type(inner).__call__, [1]

    def once(self: Any, *args: Any, **kwargs: Any) -> Any:
        if left.pop() if left else 0:
            raise RuntimeError("planned")
        return stock(self, *args, **kwargs)

    type(inner).__call__ = once
    try:
        with pytest.raises(RuntimeError, match="planned"):
            engine.step()
        finish(engine)
    finally:
        type(inner).__call__ = stock
    assert [handle.tokens for handle in handles] == expected


def test_cancel_from_inside_a_step_and_of_another_engine() -> None:
    model = zoo.build("llama")
    engine, other = Engine(model), Engine(model)
    stranger = other.submit(Request(PROMPTS[0], max_tokens=N))
    handles: list[Handle] = []

    def cancelling(history: mx.array, logits: mx.array) -> mx.array:
        engine.cancel(handles[0])
        return logits

    handles.append(engine.submit(Request(PROMPTS[0], max_tokens=N)))
    request = Request(PROMPTS[1], max_tokens=N, logits_processors=[cancelling])
    handles.append(engine.submit(request))
    with pytest.raises(ValueError, match="does not belong"):
        engine.cancel(stranger)
    finish(engine)
    assert handles[0].tokens == alone(model, PROMPTS[0])
    assert isinstance(handles[1].error, RuntimeError)
    finish(other)
    assert stranger.tokens == handles[0].tokens


def test_a_request_is_frozen_when_it_is_submitted() -> None:
    model = zoo.build("llama")
    engine = Engine(model)
    prompt, seen = list(PROMPTS[0]), []

    def watch(history: mx.array, logits: mx.array) -> mx.array:
        seen.append(history.size)
        return logits

    request = Request(prompt, max_tokens=3, logits_processors=(p for p in (watch,)))  # type: ignore[arg-type]
    handle = engine.submit(request)
    prompt.append(3)
    finish(engine)
    assert handle.tokens == alone(model, PROMPTS[0])[:3]
    assert seen == [len(PROMPTS[0]) + i for i in range(3)]


def test_an_error_keeps_no_cache_alive() -> None:
    engine = Engine(zoo.build("qwen3_5"))
    handles = [engine.submit(Request(p, max_tokens=N, sampler=spoiled(fail, 4))) for p in PROMPTS]
    finish(engine)
    gc.collect()
    assert all(handle.error is not None for handle in handles)
    kinds = (KVCache, ArraysCache, RowsCache)
    assert not [x for x in gc.get_objects() if isinstance(x, kinds) and not x.empty()]
