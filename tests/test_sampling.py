"""Sampling: the text is that of plain decoding, whatever drafts, neighbours and caches do."""

import functools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx_lm.sample_utils as upstream
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step as stock_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

import zoo
from mlx_rewind import (
    MTP,
    DraftModel,
    Engine,
    NGram,
    Prediction,
    Request,
    SamplingParams,
    batch_generate,
    generate_step,
    load,
    load_draft,
    load_mtp,
    stream_generate,
)
from mlx_rewind.sampling import Acceptance, Draws, draw, laws, top_logprobs

N = 24
PROMPT = [3, 14, 15, 9, 26, 5, 3, 14]
FAMILIES = ["qwen3_5", "mamba2", "lfm2", "falcon_h1", "kimi_linear", "gpt_oss", "llama"]
TEMPERATURES = [0.3, 0.7, 1.0, 1.5]
FILTERS: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 12}, {"min_p": 0.05}]
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.6,
    "frequency_penalty": 0.3,
    "frequency_context_size": 7,
    "logit_bias": {5: 3.0, 8: -2.5},
}


def tokens_of(steps: Any) -> list[int]:
    return [token for token, *_ in steps]


def plain(name: str, params: SamplingParams, prompt: Sequence[int] = PROMPT, n: int = N) -> Any:
    """Stock mlx-lm: its loop, its processors, and a sampler that draws by position."""
    own = Draws(params, 0)
    position = iter(range(n + 1))  # mlx-lm draws one more than it yields
    processors = make_logits_processors(
        dict(params.logit_bias or {}),
        params.repetition_penalty,
        params.repetition_context_size,
        params.presence_penalty,
        params.presence_context_size,
        params.frequency_penalty,
        params.frequency_context_size,
    )
    steps = stock_step(
        mx.array(prompt),
        zoo.build(name),
        max_tokens=n,
        sampler=lambda logprobs: draw([(own, next(position))], logprobs)[0],
        logits_processors=processors,
    )
    return list(steps)


@functools.cache
def reference(name: str, params: SamplingParams) -> tuple[int, ...]:
    return tuple(token for token, _ in plain(name, params))


class Wild:
    """A drafter that is right, wrong, short or silent at random."""

    def __init__(self, text: Sequence[int], seed: int) -> None:
        self.text, self.random = list(text), random.Random(seed)

    def propose(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
        at = len(tokens) - len(PROMPT)
        known = self.text[at : at + self.random.randint(0, num_draft_tokens)]
        return [t if self.random.random() < 0.7 else (t + 1) % zoo.VOCAB for t in known]


# --- the same text ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "temperature", "filters"),
    [
        pytest.param(
            name, temperature, filters, id=f"{name}-{temperature}-{next(iter(filters), 'all')}"
        )
        for name in FAMILIES
        for i, temperature in enumerate(TEMPERATURES)
        for j, filters in enumerate(FILTERS)
        if name in ("qwen3_5", "lfm2") or i == j
    ],
)
def test_any_drafter_any_length_one_text(
    name: str, temperature: float, filters: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=temperature, seed=11, **filters)
    expected = list(reference(name, params))
    assert len(set(expected)) > 3
    model = zoo.build(name)
    drafters: list[tuple[Any, int]] = [(None, 4), (NGram(1, 3), 3), (DraftModel(model), 2)]
    drafters += [(Wild(expected, k), k) for k in (1, 5)]
    for drafter, k in drafters:
        steps = generate_step(
            PROMPT, model, drafter=drafter, num_draft_tokens=k, max_tokens=N, sampling=params
        )
        assert tokens_of(steps) == expected


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_any_batch_one_text(data: st.DataObject) -> None:
    """Rows of mixed parameters that join at different times, with every kind of drafter."""
    name = data.draw(st.sampled_from(["qwen3_5", "lfm2", "gpt_oss", "llama"]))
    model = zoo.build(name)
    engine = Engine(model, max_rows=data.draw(st.integers(1, 4)), prefill_step_size=16)
    handles, expected = [], []
    for i in range(data.draw(st.integers(2, 5))):
        params = SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, *TEMPERATURES])),
            seed=data.draw(st.sampled_from([1, 2])),
            **data.draw(st.sampled_from(FILTERS)),
            **data.draw(st.sampled_from([{}, PENALTIES])),
        )
        text = reference(name, params)
        kinds: list[Callable[[], Any]] = [
            lambda: None,
            NGram,
            lambda text=text, i=i: Wild(text, i),
            lambda text=text: Prediction(text),
            lambda: shared_draft(name),
        ]
        drafter = data.draw(st.sampled_from(kinds))()
        k = data.draw(st.integers(0, 6))
        request = Request(
            PROMPT, max_tokens=N, drafter=drafter, num_draft_tokens=k, sampling=params
        )
        handles.append(engine.submit(request))
        expected.append(list(text))
        for _ in range(data.draw(st.integers(0, 3))):
            engine.step()
    for _ in engine:
        pass
    assert [handle.tokens for handle in handles] == expected


@functools.cache
def shared_draft(name: str) -> DraftModel:
    return DraftModel(zoo.build(name, 5))


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss", "mamba2"])
def test_any_cache_hit_one_text(name: str) -> None:
    """The prompt, or its beginning, comes from a prompt cache."""
    params = SamplingParams(temperature=1.0, seed=4, top_p=0.95)
    for known in (1, 5):
        model, cache = zoo.build(name), make_prompt_cache(zoo.build(name))
        mx.eval(model(mx.array([PROMPT[:known]]), cache=cache))
        steps = generate_step(
            PROMPT[known:], model, prompt_cache=cache, max_tokens=N, sampling=params,
            drafter=DraftModel(model),
        )  # fmt: skip
        assert tokens_of(steps) == list(reference(name, params))


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "llama"])
def test_penalties_and_logprobs_are_those_of_plain_decoding(name: str) -> None:
    params = SamplingParams(temperature=0.8, seed=3, **PENALTIES)
    expected = plain(name, params)
    bare = SamplingParams(temperature=0.8, seed=3)
    assert [t for t, _ in expected] != list(reference(name, bare))
    for k in (0, 1, 4):
        drafter = Wild([t for t, _ in expected], k)
        steps = generate_step(
            PROMPT, zoo.build(name), drafter=drafter, num_draft_tokens=k, max_tokens=N,
            sampling=params,
        )  # fmt: skip
        for (token, logprobs, _), (theirs, stock) in zip(steps, expected, strict=True):
            assert token == theirs
            assert mx.array_equal(logprobs, stock)


@pytest.mark.parametrize("k", [0, 3])
def test_raw_logprobs_are_those_before_bias_and_penalties(k: int) -> None:
    params = SamplingParams(temperature=0.8, seed=3, raw_logprobs=True, **PENALTIES)
    tokens, told = [], []
    model = zoo.build("qwen3_5")
    steps = generate_step(
        PROMPT, model, drafter=NGram(1, 2), num_draft_tokens=k, max_tokens=8, sampling=params
    )
    for token, logprobs, _ in steps:
        tokens.append(token)
        told.append(logprobs)
    cache = make_prompt_cache(model)
    model(mx.array([PROMPT[:-1]]), cache=cache)
    for token, logprobs, previous in zip(tokens, told, [PROMPT[-1], *tokens], strict=False):
        logits = model(mx.array([[previous]]), cache=cache)[0, -1]
        assert mx.array_equal(logprobs, logits - mx.logsumexp(logits))
        assert 0 <= token < zoo.VOCAB


@pytest.mark.parametrize("draft", ["mtp", "model"])
def test_the_shipped_drafters_gain_by_coupling(draft: str) -> None:
    """Drawn with the target's noise, more drafts are right than with noise of their own."""
    model, tokenizer = load()
    accepted: dict[str, int] = {}
    for drafting in ("coupled", "independent"):
        drafter: Any = load_draft(None, tokenizer) if draft == "model" else load_mtp(None, model)
        drafter.drafting = drafting
        assert isinstance(drafter, (DraftModel, MTP))
        texts = []
        for seed in (0, 1):
            params = SamplingParams(temperature=1.0, seed=seed)
            *_, last = stream_generate(
                model, tokenizer, "import os", drafter=drafter, sampling=params, max_tokens=40
            )
            accepted[drafting] = accepted.get(drafting, 0) + last.draft_n_accepted
            texts.append(last.seed)
        assert texts == [0, 1]
    assert accepted["coupled"] > accepted["independent"] * 1.2


# --- draws -----------------------------------------------------------------------------------

KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.3, seed=2, top_p=0.6),
    SamplingParams(temperature=1.3, seed=3, top_p=0.6),
    SamplingParams(temperature=0.9, seed=3, xtc_probability=0.5, xtc_threshold=0.02),
    SamplingParams(temperature=1.0, seed=4, top_k=3, min_p=0.1),
]


def some_logprobs(rows: int, seed: int = 0) -> mx.array:
    logits = mx.random.normal((rows, 60), key=mx.random.key(seed)) * 2
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def test_a_draw_does_not_depend_on_those_beside_it() -> None:
    draws = [(Draws(KINDS[i % len(KINDS)], 2), 2 + i // 3) for i in range(30)]
    logprobs = some_logprobs(30)
    together, _ = draw(draws, logprobs)
    alone = [draw([one], logprobs[i : i + 1])[0].item() for i, one in enumerate(draws)]
    assert together.tolist() == alone
    assert draw([None, *draws[1:]], logprobs)[0].tolist()[0] == mx.argmax(logprobs[0]).item()


def test_noise_differs_by_seed_position_and_purpose() -> None:
    keys = {
        tuple(Draws(SamplingParams(temperature=1.0, seed=seed), 0).key(purpose, at))
        for seed in (0, 1, 2**63)
        for purpose in ("token", "draft")
        for at in range(50)
    }
    assert len(keys) == 3 * 2 * 50
    texts = {reference("qwen3_5", SamplingParams(temperature=1.0, seed=seed)) for seed in range(3)}
    assert len(texts) == 3


@pytest.mark.parametrize("params", KINDS[1:], ids=range(1, 6))
def test_filters_are_those_of_mlx_lm(
    monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    """The law is what mlx-lm's own sampler hands to its categorical draw."""
    seen: list[mx.array] = []

    def caught(logits: mx.array, temp: float) -> mx.array:
        seen.append(logits * (1.0 / temp))
        return mx.argmax(logits, axis=-1)

    monkeypatch.setattr(upstream, "categorical_sampling", caught)
    logprobs = some_logprobs(1, 5)
    own = Draws(params, 0)
    wins = own.uniform("xtc", 0) < params.xtc_probability
    upstream.make_sampler(
        params.temperature,
        params.top_p,
        params.min_p,
        top_k=params.top_k,
        xtc_probability=float(wins),
        xtc_threshold=params.xtc_threshold,
    )(logprobs)
    assert mx.array_equal(laws([(own, 0)], logprobs), seen[0])


def test_xtc_tosses_its_coin_by_position() -> None:
    own = Draws(KINDS[4], 0)
    logprobs = mx.repeat(some_logprobs(1), 60, axis=0)
    cut = (laws([(own, at) for at in range(60)], logprobs) == -math.inf).any(axis=-1)
    assert 15 < int(cut.sum().item()) < 45


def test_a_request_without_seed_gets_a_fresh_one_that_repeats_it() -> None:
    model, tokenizer = load()
    params = SamplingParams(temperature=1.0)
    first, second = (
        batch_generate(model, tokenizer, ["import os"], sampling=params, max_tokens=12)
        for _ in range(2)
    )
    assert first.seeds != second.seeds
    again = SamplingParams(temperature=1.0, seed=first.seeds[0])
    *_, last = stream_generate(model, tokenizer, "import os", sampling=again, max_tokens=12)
    assert last.seed == first.seeds[0]
    pieces = stream_generate(model, tokenizer, "import os", sampling=again, max_tokens=12)
    assert "".join(piece.text for piece in pieces) == first.texts[0]


# --- parameters ------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0, 1e-9])
def test_temperature_zero_in_any_form_is_greedy(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.5, top_k=5)
    greedy = tokens_of(stock_step(
        mx.array(PROMPT), zoo.build("qwen3_5"), max_tokens=N))  # fmt: skip
    for acceptance in ("match", "rejection", "block"):
        steps = generate_step(
            PROMPT, zoo.build("qwen3_5"), max_tokens=N, sampling=params, acceptance=acceptance,
            drafter=NGram(1, 3),
        )  # fmt: skip
        assert tokens_of(steps) == greedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", None),
        ("temperature", True),
        ("top_p", 1.1),
        ("top_p", -1),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", 2),
        ("xtc_probability", 1.5),
        ("xtc_threshold", 0.6),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", math.nan),
        ("frequency_context_size", 0),
        ("logit_bias", {-1: 2.0}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", [3]),
        ("logit_bias", {"x": 1}),
        ("min_tokens", -1),
        ("max_tokens", -2),
        ("stop", ["a", ""]),
        ("stop", [None]),
        ("stop", -4),
        ("logprobs", -1),
    ],
)
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match="token ids" if value == -4 else name):
        SamplingParams(**{name: value})


def test_parameters_are_frozen_and_their_own() -> None:
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias, stop=["a", 4])
    bias[3] = 9.0
    assert params.logit_bias == {3: 1.0}
    assert (params.stop_strings, params.stop_ids) == (("a",), (4,))
    assert hash(params) == hash(SamplingParams(logit_bias={3: 1.0}, stop=("a", 4)))
    with pytest.raises(AttributeError):
        params.temperature = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": SamplingParams(temperature=1.0, top_k=zoo.VOCAB)}, "top_k"),
        ({"sampling": SamplingParams(logit_bias={zoo.VOCAB: 1.0})}, "logit_bias"),
        ({"sampling": SamplingParams(stop=zoo.VOCAB)}, "stop"),
        ({"sampling": SamplingParams(stop="x")}, "tokenizer"),
        ({"sampling": SamplingParams(), "sampler": lambda x: x}, "sampler, not both"),
        ({"acceptance": "rejection"}, "needs sampling="),
        ({"acceptance": "best", "sampling": SamplingParams()}, "match, rejection or block"),
        (
            {
                "sampling": SamplingParams(temperature=1.0),
                "acceptance": "block",
                "logits_processors": [lambda tokens, logits: logits],
            },
            "WindowProcessor",
        ),
    ],
)
def test_what_cannot_be_is_refused_at_the_call(options: dict[str, Any], message: str) -> None:
    model = zoo.build("qwen3_5")
    with pytest.raises(ValueError, match=message):
        generate_step(PROMPT, model, **options)
    given = {"acceptance": "match", **options}
    with pytest.raises(ValueError, match=message):
        Engine(model).submit(Request(PROMPT, **given))


# --- budgets and ends ------------------------------------------------------------------------


def test_the_budget_of_the_parameters_goes_first() -> None:
    params = SamplingParams(max_tokens=3)
    model = zoo.build("llama")
    assert len(tokens_of(generate_step(PROMPT, model, max_tokens=9, sampling=params))) == 3
    engine = Engine(model)
    handle = engine.submit(Request(PROMPT, max_tokens=9, sampling=params))
    list(engine)
    assert (len(handle.tokens), handle.finish_reason) == (3, "length")


@pytest.mark.parametrize("k", [0, 5])
def test_a_stop_id_ends_a_row_and_not_before_min_tokens(k: int) -> None:
    model = zoo.build("qwen3_5")
    bare = SamplingParams(temperature=0.9, seed=2)
    text = list(reference("qwen3_5", bare))
    end = text[6]
    at = text.index(end)
    params = SamplingParams(temperature=0.9, seed=2, stop=end)
    options: dict[str, Any] = {"drafter": Wild(text, 1), "num_draft_tokens": k}
    steps = generate_step(PROMPT, model, max_tokens=N, sampling=params, **options)
    assert tokens_of(steps) == text[: at + 1]
    late = SamplingParams(temperature=0.9, seed=2, stop=end, min_tokens=at + 3)
    engine = Engine(model)
    handle = engine.submit(Request(PROMPT, max_tokens=N, sampling=late, **options))
    list(engine)
    assert handle.tokens[:at] == text[:at]
    assert end not in handle.tokens[: at + 3]
    assert tokens_of(generate_step(PROMPT, model, max_tokens=N, sampling=late)) == handle.tokens


def test_end_tokens_and_strings_wait_for_min_tokens() -> None:
    model, tokenizer = load()
    whole = batch_generate(model, tokenizer, ["import os"], max_tokens=30).texts[0]
    stop = whole[2:5]
    soon = SamplingParams(stop=stop)
    late = SamplingParams(stop=stop, min_tokens=25)
    result = batch_generate(
        model, tokenizer, ["import os"] * 2, max_tokens=30, sampling=[soon, late]
    )
    assert result.texts[0] == whole[: whole.index(stop)]
    assert len(result.texts[1]) > len(result.texts[0])
    assert len(result.tokens[1]) >= 25


# --- logprobs --------------------------------------------------------------------------------


@pytest.mark.parametrize("acceptance", ["match", "rejection", "block"])
def test_top_logprobs_of_every_token(acceptance: Acceptance) -> None:
    model, tokenizer = load()
    head = load_mtp(None, model)
    params = SamplingParams(temperature=0.8, seed=1, logprobs=3)
    responses = list(
        stream_generate(
            model, tokenizer, "import os", drafter=head, sampling=params, max_tokens=20,
            acceptance=acceptance,
        )
    )  # fmt: skip
    assert responses[-1].draft_n_accepted > 0
    text = tokenizer.encode("import os")
    for response in responses:
        logits = model(mx.array([text]))[0, -1]
        logprobs = logits - mx.logsumexp(logits)
        assert mx.abs(response.logprobs - logprobs).max().item() < 1e-4
        assert response.top_logprobs == top_logprobs(response.logprobs, 3)
        best = [value for _, value in response.top_logprobs]
        assert best == sorted(best, reverse=True)
        assert best[0] == response.logprobs.max().item()
        text.append(response.token)


def test_top_logprobs_of_rows() -> None:
    model = zoo.build("llama")
    engine = Engine(model)
    params = SamplingParams(temperature=1.0, seed=1, logprobs=2)
    engine.submit(Request(PROMPT, max_tokens=4, sampling=params))
    engine.submit(Request(PROMPT, max_tokens=4))
    for output in engine:
        wanted = 2 if output.handle.id == 0 else 0
        assert len(output.top_logprobs) == wanted


# --- samplers of one's own -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_the_second_best_token(name: str) -> None:
    def second(logprobs: mx.array) -> mx.array:
        return mx.argsort(logprobs, axis=-1)[..., -2]

    model = zoo.build(name)
    stock = stock_step(mx.array(PROMPT), model, max_tokens=N, sampler=second)
    expected = [token for token, _ in stock]
    for drafter in (None, NGram(1, 3), Wild(expected, 3), DraftModel(model)):
        steps = generate_step(PROMPT, model, drafter=drafter, max_tokens=N, sampler=second)
        assert tokens_of(steps) == expected


# --- processors that follow windows ----------------------------------------------------------


class Alternating:
    """Even and odd ids in turn, by a state that counts; notes how it was asked."""

    def __init__(self) -> None:
        self.start: int | None = None
        self.windows: list[int] = []

    def _mask(self, count: int, logits: mx.array) -> mx.array:
        start = self.start or 0
        allowed = mx.arange(logits.shape[-1]) % 2 == (count - start) % 2
        return mx.where(allowed, logits, -mx.inf)

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.start = tokens.size if self.start is None else self.start
        return self._mask(tokens.size, logits)

    def legal(self, tokens: list[int], draft: list[int]) -> int:
        self.start = len(tokens) if self.start is None else self.start
        for i, token in enumerate(draft):
            if token % 2 != (len(tokens) + i - self.start) % 2:
                return i
        return len(draft)

    def window(self, tokens: list[int], draft: list[int], logits: mx.array) -> mx.array:
        self.start = len(tokens) if self.start is None else self.start
        self.windows.append(len(draft))
        assert logits.shape[0] == len(draft) + 1
        rows = [self._mask(len(tokens) + i, logits[i : i + 1]) for i in range(len(logits))]
        return mx.concatenate(rows)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", ["qwen3_5", "llama"])
def test_a_window_processor_constrains_every_position(name: str, temperature: float) -> None:
    model = zoo.build(name)
    params = SamplingParams(temperature=temperature, seed=5)
    own, position = Draws(params, 0), iter(range(N + 1))
    stock = stock_step(
        mx.array(PROMPT), model, max_tokens=N, logits_processors=[Alternating()],
        sampler=lambda logprobs: draw([(own, next(position))], logprobs)[0],
    )  # fmt: skip
    expected = [token for token, _ in stock]
    assert [token % 2 for token in expected] == [0, 1] * (N // 2)
    options: dict[str, Any] = {"max_tokens": N, "sampling": params}
    for drafter, k in ((None, 4), (Wild(expected, 1), 4), (DraftModel(model), 3)):
        constraint = Alternating()
        steps = generate_step(
            PROMPT, model, drafter=drafter, num_draft_tokens=k, logits_processors=[constraint],
            **options,
        )  # fmt: skip
        assert tokens_of(steps) == expected
        assert (max(constraint.windows) > 0) == (drafter is not None)
    engine = Engine(model)
    handles = [
        engine.submit(
            Request(PROMPT, drafter=Wild(expected, i), logits_processors=[Alternating()], **options)
        )
        for i in range(3)
    ]
    list(engine)
    assert [handle.tokens for handle in handles] == [expected] * 3
    steps = generate_step(
        PROMPT, model, drafter=NGram(1, 3), logits_processors=[Alternating()],
        acceptance="block", **options,
    )  # fmt: skip
    assert [token % 2 for token in tokens_of(steps)] == [0, 1] * (N // 2)


def test_illegal_drafts_are_never_verified() -> None:
    model = zoo.build("qwen3_5")
    constraint = Alternating()

    class Odd:
        def propose(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
            return [1] * num_draft_tokens

    steps = generate_step(
        PROMPT, model, drafter=Odd(), max_tokens=12, logits_processors=[constraint]
    )
    assert [token % 2 for token in tokens_of(steps)] == [0, 1] * 6
    assert set(constraint.windows) == {0, 1}  # where an odd one is due, one may be verified
