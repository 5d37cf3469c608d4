"""Every model that mlx-lm can build: speculation is plain decoding, and what a round takes back
has never been."""

import copy
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

import mlx_rewind
import zoo
from mlx_rewind import Round, UnsupportedModelError

ALL = sorted(zoo.CONFIGS)
MODELS = sorted(zoo.CONFIGS.keys() - zoo.REFUSED)
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


# --- quantised caches ------------------------------------------------------------------------


#: Sizes of heads that groups of 32 divide, for the models that have these settings.
WIDE = {"head_dim": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}


def with_wide_heads(name: str) -> nn.Module:
    config = zoo.CONFIGS[name]
    settings = config.get("text_config", config)
    model = zoo.build(name, fresh=True, **{key: WIDE[key] for key in WIDE if key in settings})
    model(mx.array([[1]]), cache=make_prompt_cache(model))
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_cache_speculates_or_is_refused_at_once(name: str, bits: int) -> None:
    """Tokens of plain decoding with the same `kv_bits`, quantised from token 3 on."""
    try:
        model = with_wide_heads(name)
    except ValueError:
        pytest.skip("its heads have a fixed size")
    prompt = zoo.PROMPTS[1]
    options: dict[str, Any] = {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": 3}
    try:
        stock = stock_generate_step(mx.array(prompt), model, max_tokens=24, **options)
        expected = [token for token, _ in stock]
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        with pytest.raises(ValueError, match=r"kv_bits|kv_group_size"):
            mlx_rewind.generate_step(prompt, model, drafter=mlx_rewind.NGram(), **options)
        return
    cache = make_prompt_cache(model)
    drafter = zoo.Scripted(expected, PLAN, prompt_length=len(prompt))
    steps = mlx_rewind.generate_step(
        prompt, model, drafter=drafter, max_tokens=24, prompt_cache=cache, **options
    )
    assert [token for token, *_ in steps] == expected


# --- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_every_cache_is_described(name: str, record_property: Callable[[str, str], None]) -> None:
    model = zoo.build(name)
    records = mlx_rewind.inspect(model)
    cache = make_prompt_cache(model)
    assert len({record.layer for record in records}) == len(cache)
    record_property("model", name)
    record_property("caches", shortened(record.cache for record in records))
    record_property("mechanisms", shortened(record.mechanism for record in records))
    if name not in zoo.REFUSED:
        inexact = mlx_rewind.target.exactness(model, cache) != "bitwise"
        assert inexact == (name in zoo.INEXACT_IN_ROUNDS)


def shortened(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def model_files() -> set[str]:
    """The files of mlx_lm.models that define a model."""
    folder = Path(mlx_lm.models.__file__).parent
    texts = {path.stem: path.read_text("utf-8") for path in folder.glob("*.py")}
    defines = re.compile(r"^class Model\b|^from \.\w+ import .*\bModel\b", re.MULTILINE)
    return {name for name, text in texts.items() if defines.search(text)}


def test_every_model_file_is_known() -> None:
    """When mlx-lm gains one: a tiny configuration, `python tools/tiny_model.py`, `make models`."""
    assert model_files() == {*zoo.CONFIGS, *zoo.NOT_BUILT}


def test_the_page_is_of_this_table(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--model-table"):
        pytest.skip("this run writes it")
    page = (Path(__file__).parents[1] / "docs" / "models.md").read_text("utf-8")
    rows = re.findall(
        r"^\| (\S+) \|.*\| (bitwise|1e-5 \(.+\)|refused: .*|not run: .*) \| "
        r"(?:ragged|row by row: .*|not run) \|$",
        page,
        re.MULTILINE,
    )
    levels = dict(rows)
    assert levels.keys() == {*zoo.CONFIGS, *zoo.NOT_BUILT}
    for level, names in (
        ("1e-5", zoo.INEXACT_IN_ROUNDS),
        ("refused", zoo.REFUSED),
        ("not run", zoo.NOT_BUILT),
    ):
        assert {name for name in levels if levels[name].startswith(level)} == names.keys()


@pytest.mark.parametrize("name", sorted(zoo.REFUSED))
def test_a_model_that_computes_windows_wrongly_is_refused(name: str) -> None:
    """It decodes plainly; what would feed it a window is refused before the first token."""
    model, prompt = zoo.build(name), zoo.PROMPTS[1]
    assert zoo.window_error(model) > 0.1
    cache = make_prompt_cache(model)
    for refused in (
        lambda: mlx_rewind.generate_step(prompt, model, drafter=mlx_rewind.NGram()),
        lambda: mlx_rewind.start_speculation(model, cache),
        lambda: mlx_rewind.speculative_prompt_cache(model, zoo.build("llama")),
        lambda: Round(model, cache),
    ):
        with pytest.raises(UnsupportedModelError, match="otherwise than single tokens"):
            refused()
    steps = mlx_rewind.generate_step(prompt, model, max_tokens=12, prompt_cache=cache)
    assert [token for token, *_ in steps] == zoo.reference(model, prompt, 12).tokens
    before = copy.deepcopy(cache)
    with Round(model, cache, single_steps=3) as round_:
        for token in (1, 2, 3):
            model(mx.array([[token]]), cache=cache)
        round_.commit(0)
    zoo.assert_state_equal(cache, before)


# --- branches that a configuration does not show -----------------------------------------------


@pytest.mark.parametrize("plan", [[0], PLAN], ids=["all wrong", "mixed"])
def test_a_layer_that_compiles_its_single_step(
    plan: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """kimi_k3 does so on Metal. What is recorded must not end up in the compiled graph."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    model, prompt = zoo.build("kimi_k3", fresh=True), zoo.PROMPTS[1]
    expected = zoo.reference(zoo.build("kimi_k3", fresh=True), prompt, 40).tokens
    drafter = zoo.Scripted(expected, plan, prompt_length=len(prompt))
    cache = make_prompt_cache(model)
    steps = mlx_rewind.generate_step(
        prompt, model, drafter=drafter, max_tokens=40, prompt_cache=cache
    )
    assert [token for token, *_ in steps] == expected
    assert any(layer.self_attn._step for layer in model.layers if layer.is_linear)
    assert zoo.reference(model, prompt, 40).tokens == expected
    for _ in range(2):
        cache = zoo.prefill(model, prompt)
        mlx_rewind.start_speculation(model, cache)
        for token in expected[:20]:
            model(mx.array([[token]]), cache=cache)
        trim_prompt_cache(cache, 13)
        zoo.assert_state_equal(cache, zoo.prefill(model, prompt + expected[:7]), 1e-5)


@pytest.mark.parametrize("name", ["internlm2", "internlm3"])
def test_positions_beyond_those_of_a_dynamic_rope_are_fed_alone(name: str) -> None:
    """There every token of a window would be turned by the base of the last one."""
    kind = "type" if name == "internlm2" else "rope_type"
    scaling = {kind: "dynamic", "factor": 2.0}
    model = zoo.build(name, max_position_embeddings=32, rope_scaling=scaling)
    assert zoo.window_error(model) > 0.1
    for prompt in zoo.PROMPTS:
        expected = zoo.reference(model, prompt, 64)
        drafter = zoo.Scripted(expected.tokens, PLAN, prompt_length=len(prompt))
        cache = make_prompt_cache(model)
        steps = mlx_rewind.generate_step(
            prompt, model, drafter=drafter, max_tokens=64, prompt_cache=cache
        )
        for (_, logprobs, _), plain in zip(steps, expected.logprobs, strict=True):
            assert mx.array_equal(logprobs, plain)
        refused = pytest.raises(UnsupportedModelError, match=r"ends at \d+: beyond 32")
        with refused, Round(model, cache) as round_:
            model(mx.array([[1, 2]]), cache=cache)
            round_.commit(1)
        held = cache[0].offset
        mlx_rewind.start_speculation(model, cache)
        with refused:
            model(mx.array([[1, 2]]), cache=cache)
        assert {entry.offset for entry in cache} == {held}
        ends = [len(prompt) + call.position + len(call.proposed) for call in drafter.calls]
        assert max(ends, default=0) <= 32
