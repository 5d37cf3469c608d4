"""Drafting that chooses by itself: it stops where it does not pay, and never changes a token."""

import functools
import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step as stock_step

import mlx_rewind.speculate
import zoo
from mlx_rewind import (
    Auto,
    DraftModel,
    Engine,
    NGram,
    Request,
    SamplingParams,
    generate_step,
    load,
    load_mtp,
    stream_generate,
)
from mlx_rewind.draft.auto import Acceptance, Costs, _best_gain
from mlx_rewind.load import held_out_prompts
from mlx_rewind.target import Target

PROMPT = [3, 14, 15, 9, 26, 5]


@functools.cache
def plain(name: str, n: int, salt: int = 0) -> list[int]:
    prompt = mx.array([*PROMPT, salt])
    return [token for token, _ in stock_step(prompt, zoo.build(name), max_tokens=n)]


class Knowing:
    """Proposes the known text, wrong at every token before `wrong_until`; notes its rounds."""

    def __init__(self, text: Sequence[int], wrong_until: int = 0) -> None:
        self.text, self.wrong_until = list(text), wrong_until
        self.asked: list[int] = []

    def propose(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
        at = len(tokens) - len(PROMPT) - 1
        self.asked.append(at)
        known = self.text[at : at + num_draft_tokens]
        return [(t + (at + i < self.wrong_until)) % zoo.VOCAB for i, t in enumerate(known)]


def run(name: str, n: int, auto: Auto, k: int, salt: int = 0) -> Any:
    engine = Engine(zoo.build(name))
    handle = engine.submit(Request([*PROMPT, salt], n, auto, k))
    for _ in engine:
        pass
    assert handle.tokens == plain(name, n, salt)
    return handle.stats


# --- when it does not pay --------------------------------------------------------------------


@pytest.mark.parametrize("slope", [0.0, 0.05, 0.5, 3.0])
@pytest.mark.parametrize("k", [2, 8])
def test_a_drafter_that_is_always_wrong_is_stopped(k: int, slope: float) -> None:
    drafter = Knowing(plain("qwen3_5", 300), wrong_until=300)
    stats = run("qwen3_5", 300, Auto(drafter, costs=Costs(fixed=slope)), k)
    assert stats.accepted == 0
    assert stats.emitted + stats.drafted <= 1.3 * stats.emitted
    early = [at for at in drafter.asked if at < 32]
    assert len(early) < 32  # it rested within 32 rounds
    assert "stopped: acceptance too low" in stats.reason
    gaps = [b - a for a, b in zip(drafter.asked, drafter.asked[1:], strict=False) if b - a > 1]
    assert gaps == sorted(gaps)  # tried again at growing intervals
    assert gaps[-1] >= 8 * gaps[0]


def test_it_goes_on_when_drafts_are_right_again() -> None:
    text = plain("qwen3_5", 300)
    stats = run("qwen3_5", 300, Auto(Knowing(text, 100), costs=Costs(fixed=0.1)), 4)
    assert stats.accepted > 80
    assert "stopped" not in stats.reason
    assert stats.emitted + stats.drafted - stats.accepted <= 1.3 * stats.emitted


def test_the_better_drafter_is_used() -> None:
    text = plain("llama", 120)
    good, bad = Knowing(text), Knowing(text, 1000)
    stats = run("llama", 120, Auto(bad, good, costs=Costs(fixed=0.1)), 4)
    assert stats.accepted > 80
    assert stats.drafted - stats.accepted < 40


class Clock:
    """Time that only forwards of the target take: 1 for a step, and `slope` per further token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slope: float) -> None:
        self.now, self.slope = 0.0, slope
        forward = Target.__call__

        def timed(target: Target, window: mx.array, cache: list[Any]) -> Any:
            self.now += 1 + self.slope * (window.shape[1] - 1)
            return forward(target, window, cache)

        monkeypatch.setattr(Target, "__call__", timed)
        monkeypatch.setattr(mlx_rewind.speculate.time, "perf_counter", lambda: self.now)


def test_the_length_follows_the_measured_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    text = plain("llama", 200)
    lengths = {}
    for slope in (0.02, 0.4, 1.5):
        with monkeypatch.context() as patch:
            clock = Clock(patch, slope)
            auto = Auto(Knowing(text), costs=Costs())
            stats = run("llama", 200, auto, 8)
            lengths[slope] = stats.drafted / stats.steps
            assert auto.costs.slope("custom", 1) == pytest.approx(slope, abs=0.01)
            if slope < 1:
                assert clock.now < 200  # faster than plain decoding
    assert lengths[0.02] > 5
    assert lengths[1.5] < 0.3


def test_a_wrong_drafter_costs_three_percent_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 0.1)
    run("llama", 300, Auto(Knowing(plain("llama", 300), 300)), 4)
    assert clock.now <= 300 / 0.97 + 1  # the forward of the prompt


def test_costs_need_a_plain_step_first() -> None:
    costs = Costs()
    costs.note("mtp", 1, 4, 2.0)
    assert costs.slope("mtp", 1) == Costs.guesses["mtp"]
    for _ in range(2):
        assert not costs.is_timed(1)
        costs.note(None, 1, 0, 1.0)
    assert costs.is_timed(1)
    costs.note("mtp", 1, 4, 2.0)
    assert costs.slope("mtp", 1) == pytest.approx(0.25)
    assert costs.slope("mtp", 3) == pytest.approx(0.25)  # of the nearest batch
    costs.note(None, 3, 0, 2.0)
    costs.note(None, 3, 0, 2.0)
    costs.note("mtp", 3, 2, 6.0)
    assert costs.slope("mtp", 3) == pytest.approx(1.0)


def test_acceptance_fades_and_depth_follows_the_position_before() -> None:
    seen = Acceptance()
    for _ in range(60):
        seen.note(2, 2)
    assert min(seen.shares(4)) > 0.9
    for _ in range(40):
        seen.note(1, 0)
    assert seen.shares(1)[0] < 0.05
    for _ in range(60):
        seen.note(1, 1)
    assert seen.expected(3)[2] > 0.5  # what was wrong long ago is tried again


# --- the same text ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2", "gpt_oss", "falcon_h1", "llama"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_auto_changes_no_token(name: str, temperature: float) -> None:
    model = zoo.build(name)
    params = SamplingParams(temperature=temperature, seed=1)
    options: dict[str, Any] = {"max_tokens": 60, "sampling": params}
    expected = [token for token, *_ in generate_step(PROMPT, model, **options)]
    for costs in (Costs(fixed=0.02), Costs()):
        auto = Auto(NGram(1, 3), DraftModel(model), costs=costs)
        steps = generate_step(PROMPT, model, drafter=auto, num_draft_tokens=5, **options)
        assert [token for token, *_ in steps] == expected


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_rows_that_choose_for_themselves(data: st.DataObject) -> None:
    """Rows come and go; some drafters are right, some wrong, some change their mind."""
    name = data.draw(st.sampled_from(["qwen3_5", "gpt_oss", "llama"]))
    model = zoo.build(name)
    engine = Engine(model, max_rows=3, prefill_step_size=16)
    shared = DraftModel(zoo.build(name, 5))
    costs = Costs(fixed=data.draw(st.sampled_from([0.0, 0.1, 0.6])))
    handles = []
    for i in range(data.draw(st.integers(2, 5))):
        wrong = data.draw(st.sampled_from([0, 15, 1000]))
        drafters = [Knowing(plain(name, 40, i), wrong), shared, NGram(1, 3)]
        random.Random(i).shuffle(drafters)
        auto = Auto(*drafters[: data.draw(st.integers(1, 3))], costs=costs)
        request = Request([*PROMPT, i], 40, data.draw(st.sampled_from([auto, auto, shared])), 4)
        handles.append(engine.submit(request))
        for _ in range(data.draw(st.integers(0, 4))):
            engine.step()
    for _ in engine:
        pass
    for i, handle in enumerate(handles):
        assert (handle.error, handle.tokens) == (None, plain(name, 40, i))


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3_text", "qwen3_5"])
def test_a_draft_model_that_rested_catches_up_in_a_batch(name: str) -> None:
    """Farther behind than the longest window that a ring of rows takes."""
    model, shared = zoo.build(name), DraftModel(zoo.build(name, 5))
    engine = Engine(model, max_draft_tokens=4)
    costs = Costs(fixed=0.0)
    handles = [
        engine.submit(Request([*PROMPT, i], 60, Auto(shared, NGram(2, 3), costs=costs), 4))
        for i in range(3)
    ]
    for _ in engine:
        pass
    for i, handle in enumerate(handles):
        assert (handle.error, handle.tokens) == (None, plain(name, 60, i))


def test_the_best_length_of_a_round() -> None:
    shares = [0.7**k for k in range(1, 9)]
    assert [_best_gain([shares], slope, 1)[1] for slope in (0.0, 0.1, 0.4, 0.8)] == [8, 4, 2, 0]
    one, two = _best_gain([shares], 0.1, 2), _best_gain([shares, shares], 0.1, 2)
    assert one[0] < two[0]  # a neighbour that does not draft shares the cost alone
    assert two == _best_gain([shares], 0.1, 1)


def test_one_wrong_row_rests_while_its_neighbour_drafts() -> None:
    model = zoo.build("qwen3_5")
    engine = Engine(model)
    costs = Costs(fixed=0.1)
    handles = [
        engine.submit(Request([*PROMPT, i], 120, Auto(Knowing(plain("qwen3_5", 120, i), wrong),
                                                      costs=costs), 4))
        for i, wrong in enumerate((0, 1000))
    ]  # fmt: skip
    for _ in engine:
        pass
    right, wrong = (handle.stats for handle in handles)
    assert right.accepted > 80
    assert wrong.drafted < 30
    assert "stopped" in wrong.reason


def test_rows_that_rest_together_try_more_rarely() -> None:
    """A trial makes the window of every row longer."""
    model, costs = zoo.build("qwen3_5"), Costs(fixed=0.1)

    def trials(rows: int) -> int:
        engine = Engine(model)
        drafters = [Auto(Knowing(plain("qwen3_5", 120, i), 1000), costs=costs) for i in range(rows)]
        requests = [Request([*PROMPT, i], 120, one, 4) for i, one in enumerate(drafters)]
        handles = [engine.submit(request) for request in requests]
        for _ in engine:
            pass
        assert all("stopped" in handle.stats.reason for handle in handles)
        return sum(handle.stats.rounds for handle in handles)

    assert 6 <= trials(6) <= 0.7 * 6 * trials(1)


def test_a_head_that_rested_reads_on() -> None:
    """More plain rounds than a head lets wait, then drafts: as right as without the rest."""
    model, tokenizer = load()
    head = load_mtp(None, model)
    prompt = next(e["prompt"] for e in held_out_prompts(tokenizer) if e["kind"] == "prose")
    cheap, dear = Costs(fixed=0.05), Costs(fixed=4.0)
    auto = Auto(head, costs=dear)
    texts = []
    for response in stream_generate(
        model, tokenizer, prompt, drafter=auto, num_draft_tokens=1, max_tokens=200
    ):
        texts.append(response.token)
        if len(texts) == 90:
            assert response.draft_n < 12
            auto.costs = cheap
    expected = stream_generate(model, tokenizer, prompt, max_tokens=200)
    assert texts == [response.token for response in expected]
    assert response.draft_n > 20
    assert response.draft_n_accepted / response.draft_n > 0.4


# --- refusals --------------------------------------------------------------------------------


def test_auto_decodes_plainly_where_windows_are_refused() -> None:
    model = zoo.build("plamo3")
    engine = Engine(model)
    handle = engine.submit(Request(PROMPT, 6, Auto(NGram())))
    list(engine)
    assert handle.stats.reason.startswith("plain: ")
    assert handle.stats.drafted == 0
    assert len(handle.tokens) == 6
    with pytest.raises(ValueError, match="windows"):
        engine.submit(Request(PROMPT, 6, NGram()))


def test_auto_needs_a_drafter() -> None:
    with pytest.raises(ValueError, match="at least one drafter"):
        Auto()
