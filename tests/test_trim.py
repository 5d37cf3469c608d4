"""The trim protocol: whatever was fed and trimmed, the caches are as if only the rest had been."""

import copy
import gc
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

import mlx_rewind
import zoo
from mlx_rewind import (
    Round,
    UnsupportedCacheError,
    speculative_prompt_cache,
    start_speculation,
    stop_speculation,
)
from mlx_rewind.cache.retrace import LOG

FAMILIES = zoo.FAMILIES
#: Their caches are of kinds that the families do not have.
RARE = ("baichuan_m1", "deepseek_v41", "longcat_flash_ngram", "recurrent_gemma", "rwkv7")
TEXT = [(5 * i * i + 11 * i + 3) % zoo.VOCAB for i in range(400)]


def feed(model: nn.Module, cache: list[Any], tokens: list[int]) -> None:
    mx.eval(model(mx.array([tokens]), cache=cache), [c.state for c in cache])


def speculating(name: str, prompt: int = 40, window: int = 64) -> tuple[nn.Module, list[Any]]:
    model = zoo.build(name)
    cache = make_prompt_cache(model)
    start_speculation(model, cache, window)
    feed(model, cache, TEXT[:prompt])
    return model, cache


# --- exactness -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FAMILIES, *RARE])
@pytest.mark.parametrize("seed", range(3))
def test_trim_undoes_across_forwards(name: str, seed: int) -> None:
    """Random forwards, many of one token, and random trims, some of them over many forwards."""
    chance, window = random.Random(seed), 24
    model, cache = speculating(name, prompt=window + 1 + seed, window=window)
    held = TEXT[: window + 1 + seed]
    recorded = 0
    for _ in range(25):
        tokens = chance.choices(range(zoo.VOCAB), k=chance.choice([1, 1, 1, 2, 5, 9]))
        feed(model, cache, tokens)
        held, recorded = held + tokens, min(recorded + len(tokens), window)
        trimmed = chance.choice([0, 0, 1, 2, len(tokens), recorded // 2, recorded])
        trimmed = min(trimmed, recorded)
        assert trim_prompt_cache(cache, trimmed) == trimmed
        held, recorded = held[: len(held) - trimmed], recorded - trimmed
    expected = make_prompt_cache(model)
    feed(model, expected, held[: window + 1 + seed])
    for token in held[window + 1 + seed :]:
        feed(model, expected, [token])
    zoo.assert_state_equal(cache, expected, zoo.round_tolerance(name))


@pytest.mark.parametrize("name", [*FAMILIES, *RARE])
def test_two_tails_leave_the_same_bits(name: str) -> None:
    """After steps as a draft model makes them and after a window, at every count."""
    for sizes in ([5], [1] * 5, [2, 1, 2]):
        for trimmed in range(6):
            caches = []
            for tail in ([20, 40, 60, 80, 1], [95, 30, 22, 5, 0]):
                model, cache = speculating(name, prompt=20, window=19)
                tokens = [3, 50, 8, 91, 11][: 5 - trimmed] + tail[5 - trimmed :]
                for size in sizes:
                    feed(model, cache, tokens[:size])
                    tokens = tokens[size:]
                trim_prompt_cache(cache, trimmed)
                caches.append(cache)
            zoo.assert_state_equal(*caches)


def test_a_long_way_back_over_single_steps_goes_through_states_that_were_not_kept() -> None:
    model, cache = speculating("qwen3_5", prompt=65)
    for token in TEXT[65:225]:
        feed(model, cache, [token])
    for trimmed, left in ((13, 212), (1, 211), (37, 174), (13, 161)):
        trim_prompt_cache(cache, trimmed)
        zoo.assert_state_equal(cache, zoo.feed(model, TEXT[:left]))
    with pytest.raises(ValueError, match="0 to 0"):
        trim_prompt_cache(cache, 1)


# --- limits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_a_trim_outside_the_window_changes_nothing(name: str) -> None:
    model, cache = speculating(name, prompt=30, window=8)
    for token in TEXT[30:50]:
        feed(model, cache, [token])
    before = copy.deepcopy(cache)
    for n in (9, 50, -1):
        with pytest.raises(ValueError, match=f"0 to 8 tokens here, got {n}: .*window=8"):
            trim_prompt_cache(cache, n)
    zoo.assert_state_equal(cache, before)
    assert trim_prompt_cache(cache, 8) == 8
    zoo.assert_state_equal(cache, zoo.feed(model, TEXT[:42]), zoo.tolerance(name))


def test_a_prefill_is_not_recorded() -> None:
    model, cache = speculating("qwen3_5", prompt=9, window=8)
    feed(model, cache, TEXT[9:12])
    feed(model, cache, TEXT[12:21])
    with pytest.raises(ValueError, match="0 to 0"):
        trim_prompt_cache(cache, 1)
    assert all(not vars(entry)[LOG]._forwards for entry in cache)


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_has_a_token(window: int) -> None:
    model = zoo.build("qwen3_5")
    cache = make_prompt_cache(model)
    with pytest.raises(ValueError, match="at least 1"):
        start_speculation(model, cache, window)
    assert type(cache[0]) is ArraysCache


def test_what_is_kept_is_bounded() -> None:
    """Forwards for the window, and a state every 16 tokens of them."""
    model, cache = speculating("qwen3_5", prompt=65)
    for token in TEXT[65:365]:
        feed(model, cache, [token])
    for entry in cache:
        forwards = vars(entry)[LOG]._forwards
        assert 64 <= len(forwards) < 64 + 16
        assert sum(undo.stands_alone for undo, _ in forwards) <= (6 if entry is cache[0] else 80)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3_text", "llama4"])
@pytest.mark.parametrize("sizes", [[5], [1], [5, 1, 1]], ids=str)
def test_rings_and_chunks_are_kept_sparingly(name: str, sizes: list[int]) -> None:
    """One copy per 16 tokens and those of the last forward, not one per forward."""
    model, cache = speculating(name, prompt=65)
    for i in range(90):
        feed(model, cache, TEXT[i : i + sizes[i % len(sizes)]])
        trim_prompt_cache(cache, max(sizes[i % len(sizes)] - 2, 0))
    undos = [undo for undo, _ in vars(cache[0])[LOG]._forwards]
    assert len(undos) >= 32
    assert sum(undo._before is not None for undo in undos) <= 7
    assert sum(undo._after is not None for undo in undos) <= 1


# --- stock objects stay stock ----------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_stop_leaves_stock_caches(name: str) -> None:
    model, cache = speculating(name)
    stock = make_prompt_cache(model)
    feed(model, stock, TEXT[:40])
    feed(model, cache, TEXT[40:45])
    assert all(entry.is_trimmable() for entry in cache)
    trim_prompt_cache(cache, 5)
    stop_speculation(cache)
    stop_speculation(cache)
    for entry, other in zip(cache, stock, strict=True):
        assert type(entry) is type(other)
        assert vars(entry).keys() == vars(other).keys()
    zoo.assert_state_equal(cache, stock)
    with Round(model, cache) as round_:
        feed(model, cache, [1, 2, 3])
        round_.commit(0)
    zoo.assert_state_equal(cache, stock)


def test_speculating_caches_are_copied_and_saved_as_stock(tmp_path: Path) -> None:
    model, cache = speculating("falcon_h1")
    copied = copy.deepcopy(cache)
    assert {type(leaf) for entry in copied for leaf in entry.caches} == {ArraysCache, KVCache}
    feed(model, copied, [1])
    feed(model, copied, [2])
    path = str(tmp_path / "cache.safetensors")
    save_prompt_cache(path, cache)
    zoo.assert_state_equal(load_prompt_cache(path), cache)
    feed(model, cache, [1])
    feed(model, cache, [2])
    zoo.assert_state_equal(copied, cache)


def test_a_speculating_cache_takes_no_second_watcher() -> None:
    model, cache = speculating("qwen3_5")
    with pytest.raises(UnsupportedCacheError, match="stop_speculation"):
        start_speculation(model, cache)
    with pytest.raises(UnsupportedCacheError, match="stop_speculation"):
        Round(model, cache)
    with pytest.raises(UnsupportedCacheError, match="stop_speculation"):
        next(mlx_rewind.generate_step([1, 2], model, prompt_cache=cache))
    assert trim_prompt_cache(cache, 0) == 0


def test_nothing_is_retained_after_stop() -> None:
    model, cache = speculating("lfm2", prompt=65)
    for token in TEXT[65:130]:
        feed(model, cache, [token])
    gc.collect()
    with_log = mx.get_active_memory()
    stop_speculation(cache)
    gc.collect()
    assert mx.get_active_memory() < with_log
    twin = zoo.feed(model, TEXT[:130])
    before = mx.get_active_memory()
    del cache
    gc.collect()
    assert before - mx.get_active_memory() <= sum(entry.nbytes for entry in twin) + 4096


# --- mlx-lm's own speculative decoding -------------------------------------------------------


def stock_speculation(
    model: nn.Module, draft: nn.Module, prompt: list[int], cache: list[Any], **options: Any
) -> tuple[list[int], int]:
    steps = speculative_generate_step(
        mx.array(prompt), model, draft, prompt_cache=cache, max_tokens=48, **options
    )
    steps = list(steps)
    return [int(token) for token, _, _ in steps], sum(drafted for _, _, drafted in steps)


@pytest.mark.parametrize("name", [*FAMILIES, *RARE])
@pytest.mark.parametrize("draft", ["self", "other seed", "llama", "lfm2", "gpt_oss"])
def test_stock_speculation_is_plain_decoding(name: str, draft: str) -> None:
    model = zoo.build(name)
    seeds = {"self": zoo.SEEDS[name], "other seed": 77}
    drafter = zoo.build(name, seeds[draft]) if draft in seeds else zoo.build(draft)
    for prompt in zoo.PROMPTS[1:]:
        cache = speculative_prompt_cache(model, drafter)
        tokens, drafted = stock_speculation(model, drafter, prompt, cache, num_draft_tokens=3)
        assert tokens == zoo.reference(name, prompt, 64).tokens[:48]
        if draft == "self":
            assert drafted == 36
        stop_speculation(cache)
        assert not any(LOG in vars(entry) for entry in cache)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3_text"])
def test_stock_speculation_alone_is_wrong_on_rings(name: str) -> None:
    """Why the protocol is needed; hybrids it refuses."""
    model, draft = zoo.build(name), zoo.build(name, 77)
    both = [*make_prompt_cache(model), *make_prompt_cache(draft)]
    tokens, _ = stock_speculation(model, draft, zoo.PROMPTS[1], both, num_draft_tokens=3)
    assert tokens != zoo.reference(name, zoo.PROMPTS[1], 64).tokens[:48]


def test_the_list_is_cut_where_the_caches_are() -> None:
    """longcat_flash_ngram has one more cache than layers."""
    model, draft = zoo.build("longcat_flash_ngram"), zoo.build("llama")
    cache = speculative_prompt_cache(model, draft)
    layers = len(model.layers)
    assert len(cache[:layers]) == len(make_prompt_cache(model)) == layers + 1
    assert [type(entry).__name__ for entry in cache[layers:]] == ["KVCache"] * 2
    assert len(cache) == layers + 3


@pytest.mark.parametrize("start", [0, 20])
def test_quantised_caches_go_on_speculating(start: int) -> None:
    model, draft = zoo.build("qwen3_5", head_dim=32), zoo.build("llama")
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    prompt = zoo.PROMPTS[1]
    plain = mlx_rewind.generate_step(prompt, model, max_tokens=48, **options)
    expected = [token for token, *_ in plain]
    cache = speculative_prompt_cache(model, draft)
    tokens, _ = stock_speculation(model, draft, prompt, cache, **options)
    assert tokens == expected
