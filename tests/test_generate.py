"""Tokens, logprobs and caches equal stock `mlx_lm.generate_step`, whatever the drafter."""

import copy
import itertools
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import zoo
from mlx_rewind import DraftModel, NGram, UnsupportedCacheError, generate_step
from mlx_rewind.engine import Engine
from mlx_rewind.request import Request
from mlx_rewind.target import Target, exactness

FAMILIES = zoo.FAMILIES
PLANS: dict[str, list[int | None]] = {
    "all": [4],
    "none": [0],
    "mixed": [2, 0, 3, 1, 4],
    "edges": [3, None, 0, None, 3, 1, None],
    "silent": [None],
}


def scripted(name: str, prompt: list[int], n: int, plan: list[int | None]) -> zoo.Scripted:
    tokens = zoo.reference(name, prompt, n).tokens
    return zoo.Scripted(tokens, plan, prompt_length=len(prompt))


def assert_same(name: str, out: list[Any], expected: zoo.Reference) -> None:
    assert [token for token, *_ in out] == expected.tokens
    for (_, logprobs, *_), reference in zip(out, expected.logprobs, strict=True):
        assert zoo.difference(logprobs, reference, zoo.round_tolerance(name)) is None


# --- tokens, logprobs, caches ----------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("prompt", zoo.PROMPTS, ids=lambda prompt: f"prompt{len(prompt)}")
def test_equals_plain_decoding(name: str, plan: str, prompt: list[int]) -> None:
    expected = zoo.reference(name, prompt, 40)
    drafter = scripted(name, prompt, 40, PLANS[plan])
    model, cache = zoo.build(name), make_prompt_cache(zoo.build(name))
    out = list(
        generate_step(
            prompt, model, drafter=drafter, num_draft_tokens=4, max_tokens=40, prompt_cache=cache
        )
    )
    assert_same(name, out, expected)
    committed = prompt + expected.tokens[:-1]
    zoo.assert_state_equal(cache, zoo.feed(model, committed), zoo.tolerance(name))


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2", "lfm2", "gpt_oss", "kimi_linear"])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 5, 7])
def test_every_accept_length(name: str, num_draft_tokens: int) -> None:
    prompt = zoo.PROMPTS[1]
    expected = zoo.reference(name, prompt, 40)
    for right in range(num_draft_tokens + 1):
        drafter = scripted(name, prompt, 40, [right])
        out = list(
            generate_step(
                prompt,
                zoo.build(name),
                drafter=drafter,
                num_draft_tokens=num_draft_tokens,
                max_tokens=40,
            )
        )
        assert_same(name, out, expected)
        full = [call for call in drafter.calls if len(call.proposed) == num_draft_tokens]
        starts = [call.position for call in full]
        assert all(b - a == right + 1 for a, b in itertools.pairwise(starts))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("plan", ["plain", "mixed", "edges"])
def test_caches_hold_the_text_at_every_yield(name: str, plan: str) -> None:
    model, prompt = zoo.build(name), zoo.PROMPTS[1]
    cache, expected = make_prompt_cache(model), zoo.feed(model, prompt)
    drafter = None if plan == "plain" else scripted(name, prompt, 20, PLANS[plan])
    steps = generate_step(prompt, model, drafter=drafter, max_tokens=20, prompt_cache=cache)
    for token, *_ in steps:
        zoo.assert_state_equal(cache, expected, zoo.tolerance(name))
        mx.eval(model(mx.array([[token]]), cache=expected))


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_are_those_of_a_teacher_forced_pass(name: str) -> None:
    model, prompt = zoo.build(name), zoo.PROMPTS[1]
    drafter = scripted(name, prompt, 24, PLANS["mixed"])
    out = list(generate_step(prompt, model, drafter=drafter, max_tokens=24))
    tokens = [token for token, *_ in out]
    logits = model(mx.array([prompt + tokens[:-1]]))[0, len(prompt) - 1 :]
    forced = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    assert mx.abs(mx.stack([logprobs for _, logprobs, _ in out]) - forced).max().item() < 2e-4
    assert {from_draft for *_, from_draft in out} == {True, False}


# --- history, prefill, budget ----------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_goes_on_from_a_cache_with_history(name: str) -> None:
    model, text = zoo.build(name), zoo.PROMPTS[2]
    caches = [zoo.feed(model, text[:12]) for _ in range(2)]
    stock = list(
        stock_generate_step(mx.array(text[12:]), model, max_tokens=24, prompt_cache=caches[0])
    )
    expected = zoo.Reference([token for token, _ in stock], [logprobs for _, logprobs in stock])
    drafter = zoo.Scripted(expected.tokens, PLANS["mixed"], prompt_length=len(text) - 12)
    out = list(
        generate_step(text[12:], model, drafter=drafter, max_tokens=24, prompt_cache=caches[1])
    )
    assert_same(name, out, expected)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("step", [1, 3, 8, 2048])
def test_prefill_goes_in_the_chunks_of_mlx_lm(name: str, step: int) -> None:
    model, prompt = zoo.build(name), zoo.PROMPTS[2]
    ours: list[tuple[int, int]] = []
    stock: list[tuple[int, int]] = []
    options: dict[str, Any] = {"max_tokens": 8, "prefill_step_size": step}
    expected = [
        token
        for token, _ in stock_generate_step(
            mx.array(prompt), model, prompt_progress_callback=lambda *x: stock.append(x), **options
        )
    ]
    out = generate_step(
        prompt,
        model,
        drafter=NGram(),
        prompt_progress_callback=lambda *x: ours.append(x),
        **options,
    )
    assert [token for token, *_ in out] == expected
    assert ours == stock


@pytest.mark.parametrize("budget", range(13))
def test_the_budget_is_kept_to_the_token(budget: int) -> None:
    prompt = zoo.PROMPTS[1]
    model = zoo.build("qwen3_5")
    cache = make_prompt_cache(model)
    drafter = scripted("qwen3_5", prompt, 40, PLANS["all"])
    steps = generate_step(prompt, model, drafter=drafter, max_tokens=budget, prompt_cache=cache)
    tokens = [token for token, *_ in steps]
    assert tokens == zoo.reference("qwen3_5", prompt, 40).tokens[:budget]
    zoo.assert_state_equal(cache, zoo.feed(model, (prompt + tokens)[:-1]))


def test_no_budget_is_no_limit() -> None:
    steps = generate_step(zoo.PROMPTS[1], zoo.build("lfm2"), drafter=NGram(), max_tokens=-1)
    tokens = [next(steps)[0] for _ in range(64)]
    assert tokens == zoo.reference("lfm2", zoo.PROMPTS[1], 64).tokens


def test_bad_options_are_refused_at_the_call() -> None:
    model = zoo.build("lfm2")
    for options, message in (
        ({"num_draft_tokens": -1}, "num_draft_tokens"),
        ({"prefill_step_size": 0}, "prefill_step_size"),
    ):
        with pytest.raises(ValueError, match=message):
            generate_step([1, 2], model, **options)
    for prompt, message in (([], "empty"), ([3, -1], "negative"), ([[1, 2]], "flat")):
        with pytest.raises(ValueError, match=message):
            generate_step(prompt, model)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_that_the_model_lacks_are_refused(name: str) -> None:
    """mlx reads beyond the embedding on the CPU; far beyond, the process ends."""
    model = zoo.build(name)
    end = Target(model).token_end
    assert end >= Target(model).vocab_size > max(zoo.PROMPTS[1])
    for token in (end, 10**9):
        with pytest.raises(ValueError, match=rf"token {token}, .* ids are 0\.\.{end - 1}"):
            generate_step([1, token], model)
        with pytest.raises(ValueError, match="ids are"):
            Engine(model).submit(Request([token, 1]))


def test_a_drafter_may_do_what_it_likes_with_its_list() -> None:
    class Vandal:
        def propose(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
            tokens.clear()
            return []

    out = generate_step(zoo.PROMPTS[1], zoo.build("lfm2"), drafter=Vandal(), max_tokens=20)
    assert [token for token, *_ in out] == zoo.reference("lfm2", zoo.PROMPTS[1], 20).tokens


@pytest.mark.parametrize(
    ("name", "dtype", "level"),
    [
        ("qwen3_5", mx.bfloat16, "bitwise"),
        ("mamba2", mx.bfloat16, "bitwise"),
        ("falcon_h1", mx.float32, "bitwise"),
        ("llama4", mx.float32, "bitwise"),
        ("gemma3_text", mx.float32, "token"),
        ("gemma3_text", mx.float16, "near-tie"),
        ("kimi_linear", mx.float32, "token"),
    ],
)
def test_the_level_of_exactness(name: str, dtype: mx.Dtype, level: str) -> None:
    model = zoo.build(name, dtype=dtype)
    assert exactness(model, make_prompt_cache(model)) == level


# --- samplers and processors -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "llama", "kimi_linear", "gpt_oss"])
@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_a_seeded_sampler_draws_as_in_plain_decoding(name: str, temperature: float) -> None:
    model, prompt = zoo.build(name), zoo.PROMPTS[1]
    sampler = make_sampler(temperature, top_p=0.95, min_p=0.01, top_k=40)
    mx.random.seed(5)
    steps = stock_generate_step(mx.array(prompt), model, max_tokens=30, sampler=sampler)
    expected = [token for token, _ in steps]
    drafters = [None, NGram(), zoo.Scripted(expected, PLANS["mixed"], prompt_length=len(prompt))]
    for drafter in drafters:
        mx.random.seed(5)
        out = generate_step(prompt, model, drafter=drafter, max_tokens=30, sampler=sampler)
        assert [token for token, *_ in out] == expected


def test_a_sampler_is_asked_once_per_emitted_position() -> None:
    prompt = zoo.PROMPTS[1]
    asked: list[int] = []

    def sampler(logprobs: mx.array) -> mx.array:
        assert logprobs.shape == (1, zoo.VOCAB)
        token = mx.argmax(logprobs, axis=-1)
        asked.append(token.item())
        return token

    drafter = scripted("qwen3_5", prompt, 30, PLANS["mixed"])
    out = generate_step(
        prompt, zoo.build("qwen3_5"), drafter=drafter, max_tokens=30, sampler=sampler
    )
    assert [token for token, *_ in out] == asked == zoo.reference("qwen3_5", prompt, 30).tokens


@pytest.mark.parametrize("plan", PLANS)
def test_processors_see_prompt_and_emitted_tokens_each_once(plan: str) -> None:
    prompt, seen = zoo.PROMPTS[1], []

    def recorder(tokens: mx.array, logits: mx.array) -> mx.array:
        assert logits.shape == (1, zoo.VOCAB)
        seen.append(tokens.tolist())
        return logits

    drafter = scripted("qwen3_5", prompt, 30, PLANS[plan])
    out = generate_step(
        prompt,
        zoo.build("qwen3_5"),
        drafter=drafter,
        num_draft_tokens=3,
        max_tokens=30,
        logits_processors=[recorder],
    )
    tokens = [token for token, *_ in out]
    assert seen == [prompt + tokens[:i] for i in range(30)]


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "gpt_oss"])
def test_penalties_are_those_of_plain_decoding(name: str) -> None:
    model, prompt = zoo.build(name), zoo.PROMPTS[1]
    options: dict[str, Any] = {
        "max_tokens": 30,
        "logits_processors": make_logits_processors({7: 2.0}, repetition_penalty=1.3),
    }
    stock = list(stock_generate_step(mx.array(prompt), model, **options))
    expected = zoo.Reference([token for token, _ in stock], [logprobs for _, logprobs in stock])
    for drafter in (None, zoo.Scripted(expected.tokens, PLANS["mixed"], prompt_length=len(prompt))):
        assert_same(name, list(generate_step(prompt, model, drafter=drafter, **options)), expected)


# --- quantised caches ------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("start", [0, 3, 12, 17, 18, 19, 100])
@pytest.mark.parametrize("name", ["qwen3_5", "llama"])
def test_the_cache_is_quantised_at_the_token_of_plain_decoding(
    name: str, start: int, bits: int
) -> None:
    model, prompt = zoo.build(name, head_dim=64), zoo.PROMPTS[1]
    options: dict[str, Any] = {
        "max_tokens": 30,
        "kv_bits": bits,
        "kv_group_size": 32,
        "quantized_kv_start": start,
    }
    stock_cache = make_prompt_cache(model)
    stock = list(stock_generate_step(mx.array(prompt), model, prompt_cache=stock_cache, **options))
    expected = zoo.Reference([token for token, _ in stock], [logprobs for _, logprobs in stock])
    kinds = [type(entry) for entry in stock_cache]
    for plan in (None, "all", "mixed"):
        drafter = plan and zoo.Scripted(expected.tokens, PLANS[plan], prompt_length=len(prompt))
        cache = make_prompt_cache(model)
        steps = generate_step(prompt, model, drafter=drafter, prompt_cache=cache, **options)
        assert_same(name, list(steps), expected)
        if start != 100:
            assert [type(entry) for entry in cache] == kinds


def test_a_ring_that_cannot_be_quantised_is_refused_before_the_first_token() -> None:
    with pytest.raises(UnsupportedCacheError, match="kv_bits"):
        generate_step([1, 2], zoo.build("gpt_oss"), kv_bits=4)


# --- draft models ----------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["qwen3_5", "gpt_oss", "mamba2", "falcon_h1"])
@pytest.mark.parametrize("draft", ["qwen3_5", "gpt_oss", "mamba2", "lfm2", "llama", "llama4"])
def test_any_model_drafts_for_any_other(target: str, draft: str) -> None:
    prompt = zoo.PROMPTS[1]
    drafter = DraftModel(zoo.build(draft))
    out = list(
        generate_step(prompt, zoo.build(target), drafter=drafter, num_draft_tokens=3, max_tokens=24)
    )
    assert_same(target, out, zoo.reference(target, prompt, 24))
    if target == draft:
        assert sum(from_draft for *_, from_draft in out) >= 17


def test_restoring_a_snapshot_repeats_the_text() -> None:
    model = zoo.build("qwen3_5")
    text = zoo.reference("qwen3_5", zoo.PROMPTS[2], 20).tokens
    cache = zoo.feed(model, zoo.PROMPTS[2][:-1])
    snapshot = copy.deepcopy(cache)

    def decode(cache: list[Any]) -> list[int]:
        drafter = zoo.Scripted(text, PLANS["mixed"], prompt_length=1)
        last = zoo.PROMPTS[2][-1:]
        steps = generate_step(last, model, drafter=drafter, max_tokens=10, prompt_cache=cache)
        return [token for token, *_ in steps]

    assert decode(cache) == text[:10]
    twins = [copy.deepcopy(snapshot) for _ in range(2)]
    assert decode(twins[0]) == decode(twins[1]) == text[:10]
    zoo.assert_state_equal(snapshot, zoo.feed(model, zoo.PROMPTS[2][:-1]))
