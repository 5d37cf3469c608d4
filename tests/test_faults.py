"""What goes wrong under a Round or a speculating cache: it is noticed, or it was never there."""

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache, trim_prompt_cache

import mlx_rewind
import zoo
from mlx_rewind import Round, record_rollback, speculative_prompt_cache, start_speculation
from mlx_rewind.cache.probe import walk

TEXT = [(5 * i * i + 11 * i + 3) % zoo.VOCAB for i in range(60)]
HYBRIDS = ("qwen3_5", "lfm2", "jamba", "mamba2", "rwkv7", "falcon_h1", "exaone4", "llama4")


class PlannedError(Exception):
    pass


def feed(model: nn.Module, cache: list[Any], tokens: list[int]) -> None:
    mx.eval(model(mx.array([tokens]), cache=cache), [c.state for c in cache])


def speculating(model: nn.Module, window: int = 64) -> list[Any]:
    cache = make_prompt_cache(model)
    start_speculation(model, cache, window)
    for token in TEXT[:10]:
        feed(model, cache, [token])
    return cache


class Failing:
    """Makes a module raise while it is entered."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.kind = module, type(module)

    def __enter__(self) -> None:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            raise PlannedError

        self.module.__class__ = type("Failing", (self.kind,), {"__call__": call})

    def __exit__(self, *exception: object) -> None:
        self.module.__class__ = self.kind


# --- counts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HYBRIDS)
def test_all_caches_agree_on_what_can_be_taken_back(name: str) -> None:
    """Whatever each of them happens to retain."""
    model = zoo.build(name)
    cache = speculating(model, window=8)
    for token in TEXT[10:20]:
        feed(model, cache, [token])
    trim_prompt_cache(cache, 8)
    before = copy.deepcopy(cache)
    with pytest.raises(ValueError, match="0 to 0"):
        trim_prompt_cache(cache, 3)
    zoo.assert_state_equal(cache, before)
    for size in (5, 1, 3):
        feed(model, cache, TEXT[:size])
    with pytest.raises(ValueError, match="0 to 8"):
        trim_prompt_cache(cache, 9)
    trim_prompt_cache(cache, 8)
    expected = zoo.feed(model, [*TEXT[:12], TEXT[0]])
    zoo.assert_state_equal(cache, expected, zoo.round_tolerance(name))


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1", "plamo2"])
@pytest.mark.parametrize("length", [1, 2, 7, 40])
def test_a_prompt_is_told_from_a_verify(name: str, length: int) -> None:
    """In bfloat16 the window formula leads to other text: neither is taken for the other."""
    model = zoo.build(name, dtype=mx.bfloat16)
    for first in (3, 15, 18, 19, 21, 32, 34, 35, 63):
        prompt = [first, *TEXT][:length]
        expected = zoo.reference(model, prompt, 14).tokens
        cache = speculative_prompt_cache(model, model)
        steps = speculative_generate_step(
            mx.array(prompt), model, model, prompt_cache=cache, num_draft_tokens=4, max_tokens=14
        )
        assert [int(token) for token, *_ in steps] == expected


# --- failures --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("place", ["first layer", "in it", "last layer"])
def test_a_forward_that_failed_may_be_fed_again_or_is_noticed(name: str, place: str) -> None:
    model = zoo.build(name, fresh=True)
    cache = speculating(model)
    broken = model.layers[-1 if place == "last layer" else 0]
    if place == "in it":  # where the layer is entered and has bound no slot
        broken = next(m for m in broken.modules()[::-1] if isinstance(m, nn.Linear))
    with pytest.raises(PlannedError), Failing(broken):
        feed(model, cache, TEXT[10:13])
    held = {getattr(leaf, "offset", 10) for _, leaf in walk(cache)}
    feed(model, cache, TEXT[10:13])
    if place == "first layer":
        trim_prompt_cache(cache, 2)
        zoo.assert_state_equal(cache, zoo.feed(model, TEXT[:11]), zoo.round_tolerance(name))
    elif place == "last layer":
        with pytest.raises(RuntimeError, match="Start from a fresh cache"):
            trim_prompt_cache(cache, 2)
    else:  # some kept what they got: exact for what was fed, or noticed
        try:
            trim_prompt_cache(cache, 2)
        except RuntimeError as error:
            assert "Start from a fresh cache" in str(error)  # noqa: PT017
        else:
            once = held == {10}
            fed = TEXT[:11] if once else [*TEXT[:13], TEXT[10]]
            zoo.assert_state_equal(cache, zoo.feed(model, fed), zoo.round_tolerance(name))


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2", "falcon_h1"])
def test_a_trim_that_failed_is_not_built_upon(name: str) -> None:
    model = zoo.build(name, fresh=True)
    cache = speculating(model)
    feed(model, cache, TEXT[10:15])
    convolutions = [m for m in model.layers[1].modules() if isinstance(m, nn.Conv1d)]
    with pytest.raises(PlannedError), Failing(convolutions[0]):
        trim_prompt_cache(cache, 2)
    for n in (2, 1):
        with pytest.raises(RuntimeError, match="Start from a fresh cache"):
            trim_prompt_cache(cache, n)


def test_trimming_some_caches_only_is_noticed() -> None:
    model = zoo.build("qwen3_5")
    cache = speculating(model)
    cache[0].trim(3)
    feed(model, cache, TEXT[:2])
    with pytest.raises(RuntimeError, match="reached only some"):
        trim_prompt_cache(cache, 2)


@pytest.mark.parametrize("name", ["rwkv7", "qwen3_5", "gpt_oss", "baichuan_m1"])
@pytest.mark.parametrize("end", ["commit", "leave"])
def test_half_a_forward_is_taken_back(name: str, end: str) -> None:
    """Also where a layer has written some of its slots: rwkv7 does so in two calls."""
    model = zoo.build(name, fresh=True)
    cache = zoo.feed(model, TEXT[:10])
    before = copy.deepcopy(cache)
    layer = model.layers[0]
    second_half = layer.ffn_norm if name == "rwkv7" else layer.mlp
    with pytest.raises(PlannedError), Round(model, cache) as round_:
        try:
            with Failing(second_half):
                feed(model, cache, [5])
        finally:
            if end == "commit":
                round_.commit(0)
    zoo.assert_state_equal(cache, before)


def test_a_front_that_was_cut_for_nothing() -> None:
    """llama4 cuts a chunk's front before the forward that then fails; a trim comes between."""
    model = zoo.build("llama4", fresh=True)
    cache = speculating(model)
    feed(model, cache, TEXT[10:14])
    with pytest.raises(PlannedError), Failing(model.layers[0]):
        feed(model, cache, TEXT[14:18])
    trim_prompt_cache(cache, 2)
    feed(model, cache, TEXT[12:16])
    trim_prompt_cache(cache, 4)
    zoo.assert_state_equal(cache, zoo.feed(model, TEXT[:12]))


# --- behind the back -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5", "lfm2"])
def test_what_is_fed_through_a_detached_model_is_noticed(name: str) -> None:
    model = zoo.build(name, fresh=True)
    cache = speculating(model)
    mlx_rewind.detach(model)
    feed(model, cache, TEXT[10:14])
    with pytest.raises(RuntimeError, match="Start from a fresh cache"):
        trim_prompt_cache(cache, 2)

    cache = zoo.feed(model, TEXT[:10])
    before = copy.deepcopy(cache)
    with pytest.raises(RuntimeError, match="not recorded"), Round(model, cache) as round_:
        mlx_rewind.detach(model)
        feed(model, cache, [1, 2])
        round_.commit(0)
    zoo.assert_state_equal(cache, before)


def test_a_trim_behind_the_log_is_noticed() -> None:
    model = zoo.build("llama")
    cache = speculating(model)
    KVCache.trim(cache[0], 3)
    with pytest.raises(RuntimeError, match="behind the log"):
        cache[0].trim(2)


@pytest.mark.parametrize("name", ["gpt_oss", "llama4", "qwen3_5"])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_in_an_open_round_is_its_own(name: str, copied: Any) -> None:
    model = zoo.build(name)
    cache = zoo.feed(model, TEXT[:10])
    with Round(model, cache) as round_:
        feed(model, cache, TEXT[10:12])
        twin = [copied(entry) for entry in cache]
        if copied is copy.deepcopy:  # shallow copies share their buffers
            feed(model, twin, TEXT[12:14])
            assert {type(a) for a in twin} == {type(a) for a in make_prompt_cache(model)}
        round_.commit(2)
    expected = zoo.feed(model, TEXT[:12])
    zoo.assert_state_equal(cache, expected, zoo.round_tolerance(name))


def test_a_quantised_cache_takes_the_log_along() -> None:
    model = zoo.build("llama")
    cache = speculating(model)
    old = cache[0]
    cache[0] = old.to_quantized(group_size=32, bits=8)
    assert type(old) is KVCache
    assert old.trim(1) == 1
    assert cache[0].offset == 10
    assert cache[0].trim(2) == 2
    assert cache[0].offset == 8


# --- the arguments of record_rollback --------------------------------------------------------


def test_record_rollback_checks_what_it_is_given() -> None:
    cache = ArraysCache(2)
    with pytest.raises(TypeError, match="ArraysCache, got a KVCache"):
        record_rollback(KVCache(), 1, lambda m: [], [])
    for num_tokens, snapshot in ((0, [None, None]), (3, [None])):
        with pytest.raises(ValueError, match="all 2 slots"):
            record_rollback(cache, num_tokens, lambda m: [], snapshot)


def test_a_slot_that_a_model_does_not_use_is_no_empty_cache() -> None:
    model = zoo.build("qwen3_5", fresh=True)
    stock = type(model).make_cache
    wide = type(
        "Wide",
        (type(model),),
        {
            "make_cache": lambda self: [
                ArraysCache(3) if type(entry) is ArraysCache else entry for entry in stock(self)
            ]
        },
    )
    model.__class__ = wide
    cache = make_prompt_cache(model)
    for _ in range(2):
        with Round(model, cache) as round_:
            feed(model, cache, [1, 2, 3])
            round_.commit(2)
    assert {entry.offset for entry in cache if type(entry) is KVCache} == {4}
