"""The zoo proves itself: varied text, no near-ties, and how exact a window is in each family."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

import zoo

FAMILIES = zoo.FAMILIES
CACHES = {
    "qwen3_5": {"ArraysCache", "KVCache"},
    "qwen3_5_moe": {"ArraysCache", "KVCache"},
    "qwen3_next": {"ArraysCache", "KVCache"},
    "mamba2": {"ArraysCache"},
    "lfm2": {"ArraysCache", "KVCache"},
    "falcon_h1": {"CacheList"},
    "kimi_linear": {"ArraysCache", "KVCache"},
    "gpt_oss": {"RotatingKVCache", "KVCache"},
    "gemma3_text": {"RotatingKVCache", "KVCache"},
    "llama4_text": {"KVCache"},
    "llama4": {"ChunkedKVCache", "KVCache"},
    "llama": {"KVCache"},
}


def relative(a: mx.array, b: mx.array) -> float:
    return (mx.abs(a - b).max() / mx.abs(b).max()).item()


# --- models ---


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_the_caches_it_is_here_for(name: str) -> None:
    cache = make_prompt_cache(zoo.build(name))
    assert {type(c).__name__ for c in cache} == CACHES[name]
    if name == "falcon_h1":
        assert [type(c) for c in cache[0].caches] == [ArraysCache, KVCache]
    if name == "kimi_linear":
        assert len(cache[0].cache) == 4


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("prompt", zoo.PROMPTS, ids=lambda prompt: f"prompt{len(prompt)}")
def test_greedy_text_is_varied_and_guarded(name: str, prompt: list[int]) -> None:
    assert zoo.guard(zoo.build(name), prompt) is None


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("prompt", [1, 7, 40])
def test_windows_are_as_exact_as_listed(name: str, prompt: int) -> None:
    model = zoo.build(name)
    tokens = [(5 * i * i + 11 * i + 3) % zoo.VOCAB for i in range(prompt + 20)]
    steps, expected = zoo.windowed(model, tokens, 1, 1)
    for window in (1, 2, 3, 5, 8):
        logits, cache = zoo.windowed(model, tokens, prompt, window)
        assert relative(logits, steps) <= zoo.tolerance(name)
        zoo.assert_state_equal(cache, expected, zoo.tolerance(name))


@pytest.mark.parametrize("name", sorted(zoo.INEXACT))
def test_a_listed_exception_is_one(name: str) -> None:
    """When mlx-lm removes the reason, the entry goes."""
    model = zoo.build(name)
    tokens = zoo.PROMPTS[2] + zoo.PROMPTS[1]
    steps, _ = zoo.windowed(model, tokens, 1, 1)
    block, _ = zoo.windowed(model, tokens, len(tokens), 1)
    assert relative(block, steps) > 0


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - zoo.FLOAT32_ONLY))
def test_models_run_in_bfloat16(name: str) -> None:
    model = zoo.build(name, dtype=mx.bfloat16)
    logits, cache = zoo.windowed(model, zoo.PROMPTS[2], 1, 1)
    assert logits.dtype == mx.bfloat16
    assert not mx.isnan(logits).any()
    if name in zoo.BITWISE:
        block, same = zoo.windowed(model, zoo.PROMPTS[2], 4, 5)
        assert mx.array_equal(block, logits)
        zoo.assert_state_equal(same, cache)


def test_models_are_shared_unless_fresh() -> None:
    assert zoo.build("llama") is zoo.build("llama", dtype=mx.float32)
    assert zoo.build("llama", num_hidden_layers=1) is not zoo.build("llama")
    private = zoo.build("llama", fresh=True)
    assert private is not zoo.build("llama")
    assert mx.array_equal(private.lm_head.weight, zoo.build("llama").lm_head.weight)


def test_reference_is_remembered_and_feed_follows_it() -> None:
    prompt, model = zoo.PROMPTS[1], zoo.build("qwen3_5")
    tokens, logprobs = zoo.reference(model, prompt, 9)
    assert zoo.reference("qwen3_5", prompt, 9).logprobs is logprobs
    cache = zoo.feed(model, prompt + tokens[:-2])
    assert mx.argmax(model(mx.array([[tokens[-2]]]), cache=cache)[0, 0]).item() == tokens[-1]


# --- state ---


def numbered(positions: range) -> mx.array:
    """Keys [1, 1, S, 32] whose numbers say their position."""
    return mx.array([[[[float(p)] * 32 for p in positions]]])


def shown(cache: Any) -> list[int]:
    keys = dict(zoo.state([cache]))[f"layer 0 {type(cache).__name__} keys"]
    return [int(p) for p in keys[0, 0, :, 0].tolist()]


def append(cache: Any, *sizes: int) -> int:
    for size in sizes:
        if isinstance(cache, ChunkedKVCache):
            cache.maybe_trim_front()
        block = numbered(range(cache.offset, cache.offset + size))
        cache.update_and_fetch(block, block)
    return cache.offset


@pytest.mark.parametrize(
    "sizes", [(3,), (1,) * 5, (7, 1, 1, 1), (20, 1, 1), (1,) * 21, (5, 6, 1, 3)]
)
@pytest.mark.parametrize("keep", [0, 2])
def test_a_ring_is_shown_in_time_order(sizes: tuple[int, ...], keep: int) -> None:
    cache = RotatingKVCache(max_size=8, keep=keep)
    positions = list(range(append(cache, *sizes)))
    kept, rest = positions[:keep], positions[keep:]
    assert shown(cache) == kept + rest[-(8 - keep) :]


@pytest.mark.parametrize("sizes", [(3, 1), (20, 1, 5), (1,) * 21])
def test_a_chunk_shows_its_newest(sizes: tuple[int, ...]) -> None:
    cache = ChunkedKVCache(chunk_size=8)
    positions = list(range(append(cache, *sizes)))
    assert shown(cache) == positions[-8:]


@pytest.mark.parametrize("kind", [KVCache, ConcatenateKVCache])
def test_a_trimmed_cache_hides_what_was_trimmed(kind: type) -> None:
    cache = kind()
    append(cache, 6)
    cache.trim(2)
    assert shown(cache) == [0, 1, 2, 3]


def test_quantized_and_nested_caches_are_read() -> None:
    quantized, nested = (
        QuantizedKVCache(group_size=32, bits=8),
        CacheList(ArraysCache(2), KVCache()),
    )
    append(quantized, 5)
    labels = {label: array.shape for label, array in zoo.state([quantized, nested])}
    assert labels["layer 0 QuantizedKVCache keys.0"] == (1, 1, 5, 8)
    assert labels["layer 0 QuantizedKVCache values.2"] == (1, 1, 5, 1)
    assert labels["layer 1 CacheList[0] ArraysCache slot 1"] == (0,)
    assert labels["layer 1 CacheList[1] KVCache offset"] == ()


def test_a_difference_names_its_place() -> None:
    one, other = ArraysCache(2), ArraysCache(2)
    one[0] = other[0] = mx.ones((1, 3))
    one[1], other[1] = mx.ones((1, 3)), mx.array([[1.0, 1.25, 1.0]])
    zoo.assert_state_equal([one], [one])
    zoo.assert_state_equal([one], [other], tol=0.2)
    with pytest.raises(
        AssertionError, match=r"layer 0 ArraysCache slot 1: max abs difference 0\.25"
    ):
        zoo.assert_state_equal([one], [other])
    other[1] = mx.array([[1.0, mx.nan, 1.0]])
    with pytest.raises(AssertionError, match="slot 1: max abs difference nan"):
        zoo.assert_state_equal([one], [other], tol=1.0)


def test_an_unknown_cache_is_refused() -> None:
    class Unknown:
        keys = offset = 0

    with pytest.raises(TypeError, match="Unknown"):
        zoo.state([Unknown()])


# --- drafter ---


def test_the_script_is_followed() -> None:
    reference = [10, 20, 30, 40, 96, 60]
    drafter = zoo.Scripted(reference, [2, None, 0, 9], prompt_length=2)
    assert drafter.propose([7, 7], 4) == [10, 20, 31, 42]
    assert drafter.propose([7, 7, 10, 20], 4) == []
    assert drafter.propose([7, 7, 10, 20, 30, 40], 1) == [0]
    assert drafter.propose([7, 7, 10, 20, 30, 40], 4) == [96, 60]
    assert drafter.propose([7, 7, *reference], 4) == []
    assert drafter.calls[0] == zoo.Call(0, 4, [10, 20, 31, 42])
    with pytest.raises(AssertionError, match="left the reference"):
        drafter.propose([7, 7, 11], 4)
