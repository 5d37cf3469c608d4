"""Every model that mlx-lm can build: speculation is plain decoding, and what a round takes back
has never been."""

import copy

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_rewind
import zoo
from mlx_rewind import Round

MODELS = sorted(zoo.CONFIGS)
PROMPTS = pytest.mark.parametrize("prompt", zoo.PROMPTS, ids=lambda prompt: f"prompt{len(prompt)}")
#: Every accept length of 7 draft tokens, mixed with rounds without a proposal.
PLAN = [3, None, 0, 7, None, 1, 6, 0, 0, 2, 5, None, 4, 7]
TAILS = ([20, 40, 60, 80, 1], [95, 30, 22, 5, 0])


@pytest.mark.parametrize("name", MODELS)
@PROMPTS
def test_speculation_is_plain_decoding(name: str, prompt: list[int]) -> None:
    """Tokens, logprobs, and the cache after every token."""
    model = zoo.build(name)
    expected = zoo.reference(model, prompt, 64)
    cache, plain = make_prompt_cache(model), zoo.prefill(model, prompt)
    drafter = zoo.Scripted(expected.tokens, PLAN, prompt_length=len(prompt))
    steps = mlx_rewind.generate_step(
        prompt, model, drafter=drafter, num_draft_tokens=7, max_tokens=64, prompt_cache=cache
    )
    for i, (token, logprobs, _) in enumerate(steps):
        assert token == expected.tokens[i]
        assert zoo.difference(logprobs, expected.logprobs[i], zoo.round_tolerance(name)) is None
        zoo.assert_state_equal(cache, plain, zoo.round_tolerance(name))
        model(mx.array([[token]]), cache=plain)
    assert i == 63
    assert len(drafter.calls) >= len(PLAN)


@pytest.mark.parametrize("name", MODELS)
@PROMPTS
@pytest.mark.parametrize("sizes", [[1] * 4, [5]], ids=["steps", "window"])
def test_what_is_taken_back_has_never_been(name: str, prompt: list[int], sizes: list[int]) -> None:
    """At every kept count, after single steps as a draft model makes them and after a window."""
    model, total = zoo.build(name), sum(sizes)
    tolerance = zoo.round_tolerance(name) if sizes == [5] else 0.0
    start, kept_tokens = zoo.prefill(model, prompt), zoo.reference(model, prompt, 64).tokens
    expected = copy.deepcopy(start)
    for kept in range(total + 1):
        results = []
        for tail in TAILS:
            cache, tokens = copy.deepcopy(start), kept_tokens[:kept] + tail[kept:total]
            with Round(model, cache) as round_:
                for size in sizes:
                    model(mx.array([tokens[:size]]), cache=cache)
                    tokens = tokens[size:]
                round_.commit(kept)
            results.append(cache)
        zoo.assert_state_equal(results[0], results[1])
        zoo.assert_state_equal(results[0], expected, tolerance)
        following = [
            model(mx.array([[42]]), cache=copy.deepcopy(cache))[0, -1]
            for cache in (*results, expected)
        ]
        assert mx.array_equal(following[0], following[1])
        assert zoo.difference(following[0], following[2], tolerance) is None
        if kept < total:
            model(mx.array([kept_tokens[kept : kept + 1]]), cache=expected)
