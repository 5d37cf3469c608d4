"""Threads and instances: models are shared, classes are left alone."""

import gc
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.models.cache import (
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

import mlx_rewind
import zoo
from mlx_rewind import NGram, UnsupportedModelError, generate_step
from mlx_rewind.cache import attach as attaching
from mlx_rewind.cache import retrace

THREADED = ("qwen3_5", "gpt_oss", "lfm2", "mamba2", "falcon_h1", "llama4")
PROMPT = zoo.PROMPTS[1]
PLAN = [2, 0, 3, None, 1]


def in_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def speculate(model: nn.Module, prompt: list[int], cache: list[Any] | None = None) -> list[int]:
    expected = zoo.reference(model, prompt, 40).tokens
    drafter = zoo.Scripted(expected, PLAN, prompt_length=len(prompt))
    steps = generate_step(prompt, model, drafter=drafter, max_tokens=40, prompt_cache=cache)
    return [token for token, *_ in steps]


def plain(model: nn.Module, prompt: list[int]) -> list[int]:
    steps = stock_generate_step(mx.array(prompt), model, max_tokens=40)
    return [token for token, _ in steps]


# --- threads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", THREADED)
def test_two_threads_share_a_model(name: str) -> None:
    """At the same time, each with its own cache; one of them decodes plainly."""
    model = zoo.build(name, fresh=True)
    prompts = zoo.PROMPTS[1:]
    expected = [zoo.reference(model, prompt, 40).tokens for prompt in prompts]
    caches = [make_prompt_cache(model) for _ in prompts]
    start = threading.Barrier(3)

    def decode(prompt: list[int], cache: list[Any]) -> list[int]:
        start.wait()
        return speculate(model, prompt, cache)

    def decode_plainly() -> list[int]:
        start.wait()
        return plain(model, prompts[0])

    with ThreadPoolExecutor(3) as pool:
        others = pool.submit(decode_plainly)
        texts = list(pool.map(decode, prompts, caches))
    assert texts == expected
    assert others.result() == expected[0]
    for prompt, text, cache in zip(prompts, texts, caches, strict=True):
        alone = make_prompt_cache(model)
        speculate(model, prompt, alone)
        zoo.assert_state_equal(cache, alone)
        assert len(text) == 40


@pytest.mark.parametrize("name", THREADED)
def test_load_here_decode_there_close_elsewhere(name: str) -> None:
    model = in_thread(lambda: zoo.build(name, fresh=True))
    cache = make_prompt_cache(model)
    expected = zoo.reference(model, PROMPT, 24).tokens
    drafter = zoo.Scripted(expected, PLAN, prompt_length=len(PROMPT))
    steps = generate_step(PROMPT, model, drafter=drafter, max_tokens=24, prompt_cache=cache)
    tokens = in_thread(lambda: [next(steps)[0] for _ in range(9)])
    in_thread(steps.close)
    assert tokens == expected[:9]
    rest = in_thread(lambda: speculate_from(model, cache, expected, 9))
    assert tokens + rest == expected


def speculate_from(model: nn.Module, cache: list[Any], text: list[int], at: int) -> list[int]:
    drafter = zoo.Scripted(text[at:], PLAN, prompt_length=1)
    last = [text[at - 1]]
    left = len(text) - at
    steps = generate_step(last, model, drafter=drafter, max_tokens=left, prompt_cache=cache)
    return [token for token, *_ in steps]


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss", "lfm2"])
def test_a_saved_cache_goes_from_worker_to_worker(name: str, tmp_path: Path) -> None:
    """Each with a stream of its own."""
    model, path = zoo.build(name), str(tmp_path / "cache.safetensors")
    expected = zoo.reference(model, PROMPT, 24).tokens

    def first() -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            cache = make_prompt_cache(model)
            drafter = zoo.Scripted(expected, PLAN, prompt_length=len(PROMPT))
            steps = generate_step(PROMPT, model, drafter=drafter, max_tokens=11, prompt_cache=cache)
            assert [token for token, *_ in steps] == expected[:11]
            save_prompt_cache(path, cache)

    def second() -> list[int]:
        with mx.stream(mx.new_stream(mx.cpu)):
            return speculate_from(model, load_prompt_cache(path), expected, 11)

    in_thread(first)
    assert in_thread(second) == expected[11:]


@pytest.mark.parametrize("name", [*THREADED, "baichuan_m1"])
def test_one_thread_feeds_and_another_trims(name: str) -> None:
    model = zoo.build(name)
    cache, text = make_prompt_cache(model), zoo.PROMPTS[2]
    mlx_rewind.start_speculation(model, cache, window=16)

    def feed(tokens: list[int], size: int) -> None:
        for start in range(0, len(tokens), size):
            logits = model(mx.array([tokens[start : start + size]]), cache=cache)
            mx.eval(logits, [entry.state for entry in cache])

    def trim(n: int) -> None:
        trim_prompt_cache(cache, n)
        mx.eval([entry.state for entry in cache])  # what is lazy belongs to its thread

    in_thread(lambda: feed(text[:30], 30))
    in_thread(lambda: feed(text[30:34], 1))
    in_thread(lambda: trim(2))
    in_thread(lambda: feed([1, 2, 3, 4, 5], 5))
    in_thread(lambda: trim(6))
    in_thread(lambda: feed(text[31:36], 1))
    expected = make_prompt_cache(model)
    model(mx.array([text[:30]]), cache=expected)
    for token in text[30:36]:
        model(mx.array([[token]]), cache=expected)
    zoo.assert_state_equal(cache, expected)


def test_attaching_while_another_thread_decodes() -> None:
    """Its text stays what it is, through probes, attachments and detachments."""
    model = zoo.build("qwen3_5", fresh=True)
    expected = zoo.reference(model, PROMPT, 40).tokens
    done = threading.Event()

    def attach_and_detach() -> int:
        rounds = 0
        while not done.is_set():
            mlx_rewind.attach(model)
            mlx_rewind.detach(model)
            rounds += 1
        return rounds

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(attach_and_detach)
        texts = [plain(model, PROMPT) for _ in range(3)]
        done.set()
    assert texts == [expected] * 3
    assert other.result() > 0


def test_a_model_that_is_detached_inside_a_round_is_noticed() -> None:
    model = zoo.build("qwen3_5", fresh=True)
    cache = zoo.feed(model, PROMPT)
    with (
        pytest.raises(RuntimeError, match="not recorded"),
        mlx_rewind.Round(model, cache) as r,
    ):
        mlx_rewind.detach(model)
        model(mx.array([[1, 2]]), cache=cache)
        r.commit(1)


# --- instances and classes -------------------------------------------------------------------


def test_models_of_one_class_do_not_know_each_other() -> None:
    """One speculates, one of its class decodes plainly; others come, fail to load, and go."""
    names = ("qwen3_5", "qwen3_5", "gpt_oss", "llama")
    models = [
        zoo.build(name, seed, fresh=True) for name, seed in zip(names, (0, 5, 8, 3), strict=True)
    ]
    kinds = [[type(module) for module in model.modules()] for model in models]
    calls = {kind: kind.__call__ for known in kinds for kind in known}
    expected = [plain(model, PROMPT) for model in models]

    for _ in range(2):
        for i in (0, 2, 3):
            assert speculate(models[i], PROMPT) == expected[i]
            assert plain(models[1], PROMPT) == expected[1]
        with pytest.raises(UnsupportedModelError):
            mlx_rewind.attach(secretive(zoo.build("qwen3_5", fresh=True)))
    assert [type(module) for module in models[1].modules()] == kinds[1]

    both = (models[0], models[2])
    steps = [generate_step(PROMPT, model, drafter=NGram(), max_tokens=40) for model in both]
    texts = zip(*([token for token, *_ in pair] for pair in zip(*steps, strict=True)), strict=True)
    assert [list(text) for text in texts] == [expected[0], expected[2]]

    for model in models:
        mlx_rewind.detach(model)
    assert [[type(module) for module in model.modules()] for model in models] == kinds
    assert {kind: kind.__call__ for kind in calls} == calls


def secretive(model: nn.Module) -> nn.Module:
    """A model whose last recurrent layer writes its slots where nobody can see it."""
    layer = model.layers[2].linear_attn
    stock = type(layer)

    class Secretive(stock):  # type: ignore[misc,valid-type]
        def __call__(self, inputs: mx.array, mask: Any = None, cache: Any = None) -> Any:
            out = super().__call__(inputs, mask, cache)
            if cache is not None:
                cache.cache[0] = cache.cache[0] + 0
            return out

    layer.__class__ = Secretive
    return model


def test_a_refused_model_is_left_as_it_was() -> None:
    model = secretive(zoo.build("qwen3_5", fresh=True))
    kinds = [type(module) for module in model.modules()]
    known = dict(attaching._attachments)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="cannot be observed"):
            mlx_rewind.Round(model, make_prompt_cache(model))
    assert [type(module) for module in model.modules()] == kinds
    assert attaching._attachments == known
    assert not retrace._tapes


def test_a_failed_load_leaves_no_trace(tmp_path: Path) -> None:
    modules, known = set(sys.modules), dict(attaching._attachments)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5"}')
    with pytest.raises((ValueError, FileNotFoundError)):
        mlx_rewind.load(tmp_path)
    assert attaching._attachments == known
    assert not [name for name in set(sys.modules) - modules if name.startswith("mlx_rewind")]


def test_a_model_that_is_gone_is_forgotten() -> None:
    model = zoo.build("lfm2", fresh=True)
    mlx_rewind.attach(model)
    assert id(model) in attaching._attachments
    key = id(model)
    del model
    gc.collect()
    assert key not in attaching._attachments


def test_attach_detach_reload() -> None:
    """The same weights, loaded again after the first model was detached and dropped."""
    text = None
    for _ in range(3):
        model = zoo.build("qwen3_5", fresh=True)
        mlx_rewind.attach(model)
        mlx_rewind.detach(model)
        mlx_rewind.attach(model)
        text = text or plain(model, PROMPT)
        assert speculate(model, PROMPT) == text
        mlx_rewind.detach(model)
        assert plain(model, PROMPT) == text
        del model
        gc.collect()
