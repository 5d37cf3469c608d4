"""States of a window that are handed back; the layer's own forward, run again, judges."""

import copy
import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest
from mlx_lm.models import gated_delta, qwen3_5
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from mlx_lm.models.gated_delta import _gated_delta_step_ops, gated_delta_update
from mlx_lm.models.gated_delta import gated_delta_ops as stock_ops
from mlx_lm.models.ssm import ssm_update

import mlx_rewind
import zoo
from mlx_rewind import Round
from mlx_rewind.cache.members import join, rows_of
from mlx_rewind.cache.recurrence import DeltaStates
from windows import WINDOW, calls_of, computed_again, most_states, taken_back

#: The model files that call `gated_delta_update`.
DELTA = ["bailing_moe_v3", "kimi_k3", "kimi_linear", "olmo_hybrid", "qwen3_5", "qwen3_next"]
#: Those that call `ssm_update`: a round takes their windows token by token.
STEPPED = ["falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "plamo2"]
FAMILIES = [*DELTA, *STEPPED]
HALVES = (mx.bfloat16, mx.float16)


@pytest.mark.parametrize(("names", "rule"), [(DELTA, "gated_delta"), (STEPPED, "ssm")])
def test_the_families_are_those_of_mlx_lm(names: list[str], rule: str) -> None:
    (folder,) = mlx_lm.models.__path__
    call = f"= {rule}_update("
    assert sorted(p.stem for p in Path(folder).glob("*.py") if call in p.read_text()) == names


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, mx.float32) for name in FAMILIES]
    + [(name, d) for name in FAMILIES if name not in zoo.FLOAT32_ONLY for d in HALVES],
    ids=str,
)
def test_states_are_handed_back_to_the_bit(name: str, dtype: mx.Dtype) -> None:
    model = zoo.build(name, dtype=dtype)
    start = zoo.prefill(model, zoo.PROMPTS[1])
    for kept in range(1, 6):
        with computed_again():
            expected = taken_back(model, start, kept, [WINDOW])
        zoo.assert_state_equal(taken_back(model, start, kept, [WINDOW]), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_recurrence_runs_again(name: str) -> None:
    """A slot of every layer is the very array that the window left behind its kept token."""
    model = zoo.build(name)
    cache = zoo.prefill(model, zoo.PROMPTS[1])
    with Round(model, cache) as round_:
        model(mx.array([WINDOW]), cache=cache)
        for kept in (3, 1, 4, 2):
            round_.rewind(kept)
            calls = calls_of(round_)
            assert calls
            for call in calls:
                state = call.cache.cache[-1]
                if name in STEPPED:
                    assert state is list(call._after[kept - 1].values())[-1]
                else:
                    (noted,) = call._states.calls
                    assert state is noted.states[kept - 1]


@pytest.mark.parametrize("name", ["kimi_linear", "mamba2", "olmo_hybrid", "qwen3_5"])
def test_rows_that_keep_different_counts(name: str) -> None:
    model = zoo.build(name)
    rows = [rows_of(entry, 9) for entry in zoo.prefill(model, zoo.PROMPTS[1])]
    for prompt in ([3, 1, 4], [15, 92, 65, 35, 8, 9, 79]):
        join(rows, [rows_of(entry, 9) for entry in zoo.prefill(model, prompt)])
    window = [WINDOW, WINDOW[::-1], [5] * 5]
    for kept in ([1, 4, 2], [3, 3, 5], [0, 1, 4]):
        with computed_again():
            expected = recurrent_slots(taken_back(model, rows, kept, window))
        got = recurrent_slots(taken_back(model, rows, kept, window))
        assert all(mx.array_equal(x, y) for x, y in zip(got, expected, strict=True))


def recurrent_slots(cache: list[Any]) -> list[mx.array]:
    return [slot for entry in cache if isinstance(entry, ArraysCache) for slot in entry.cache]


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_long_windows_keep_no_states(name: str) -> None:
    """The limit counts rows times tokens; beyond it the kept part is computed."""
    model = zoo.build(name)
    one = zoo.prefill(model, zoo.PROMPTS[1])
    two = [rows_of(entry, 9) for entry in one]
    join(two, [rows_of(entry, 9) for entry in one])
    for cache, rows, limit, are_kept in ((one, 1, 5, True), (one, 1, 4, False), (two, 2, 9, False)):
        with most_states(limit), Round(model, cache) as round_:
            model(mx.array([WINDOW] * rows), cache=cache)
            assert all(keeps_states(call) is are_kept for call in calls_of(round_))


def keeps_states(call: Any) -> bool:
    noted = [] if call._states is None else call._states.calls
    return bool(call._after) or any(one.states for one in noted)


def at_once(q: mx.array, *args: Any) -> Any:
    """As on a GPU, whose kernel takes a window at once."""
    return stock_ops(q, *args)


def with_a_step_too_many(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, mask: Any) -> Any:
    q, k = (mx.repeat(x, v.shape[2] // x.shape[2], 2) for x in (q, k))
    outputs, start = [], state
    for t in (0, *range(q.shape[1])):
        state = state if t else start
        output, state = _gated_delta_step_ops(*(x[:, t] for x in (q, k, v, g, beta)), state)
        outputs.append(output)
    return mx.stack(outputs[1:], axis=1), state


def with_more_after_the_steps(
    q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, mask: Any
) -> Any:
    q, k = (mx.repeat(x, v.shape[2] // x.shape[2], 2) for x in (q, k))
    outputs = []
    for t in range(q.shape[1]):
        output, state = _gated_delta_step_ops(*(x[:, t] for x in (q, k, v, g, beta)), state)
        outputs.append(output)
    return mx.stack(outputs, axis=1), state + 0


@pytest.mark.parametrize("ops", [at_once, with_a_step_too_many, with_more_after_the_steps])
def test_without_a_state_per_token_the_kept_part_is_computed(
    ops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.build("qwen3_5")
    start = zoo.prefill(model, zoo.PROMPTS[1])
    expected = taken_back(model, start, 3, [WINDOW])
    monkeypatch.setattr(gated_delta, "gated_delta_ops", ops)
    for _ in range(2):  # the layer runs again, then the rule alone
        cache = copy.deepcopy(start)
        with Round(model, cache) as round_:
            model(mx.array([WINDOW]), cache=cache)
            assert not any(keeps_states(call) for call in calls_of(round_))
            round_.commit(3)
        zoo.assert_state_equal(cache, expected)


def test_modules_stay_as_they_are() -> None:
    model = zoo.build("qwen3_5")
    modules = [vars(gated_delta), vars(qwen3_5), vars(qwen3_5.GatedDeltaNet)]
    before = [dict(names) for names in modules]
    cache = make_prompt_cache(model)
    with Round(model, cache) as round_:
        model(mx.array([WINDOW]), cache=cache)
        assert [dict(names) for names in modules] == before
        round_.commit(2)
    assert [dict(names) for names in modules] == before


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_a_log_keeps_no_states(name: str) -> None:
    """Of start_speculation, whose window may be long."""
    model = zoo.build(name)
    cache = make_prompt_cache(model)
    mlx_rewind.start_speculation(model, cache, window=64)
    model(mx.array([[1, 2, 3]]), cache=cache)
    model(mx.array([WINDOW]), cache=cache)
    logs = [vars(entry)["_rewind_log"] for entry in cache if isinstance(entry, ArraysCache)]
    calls = [call for log in logs for undo, _ in log._forwards for call in undo.tape.calls]
    assert len(calls) == 2 * len(logs) > 0
    assert not any(keeps_states(call) for call in calls)


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_a_closed_round_holds_nothing(name: str) -> None:
    """Without the collector's help: what a round keeps is in no cycle."""
    model = zoo.build(name)
    cache = zoo.prefill(model, zoo.PROMPTS[1])
    mx.eval([entry.state for entry in cache])
    memory = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(6):
            with Round(model, cache) as round_:
                mx.eval(model(mx.array([WINDOW]), cache=cache))
                round_.commit(1)
            mx.eval([entry.state for entry in cache])
            mx.synchronize()  # what was started early is through
            memory.append(mx.get_active_memory())
    finally:
        gc.enable()
    assert min(memory[3:]) <= min(memory[:3])  # the device may be late to let go


# -- a layer that calls the rule as no model file does ------------------------------------------


def layer(x: mx.array, state: mx.array | None) -> tuple[mx.array, ...]:
    """Three calls: on the window, on every second token of it, and on the window once more."""
    gates = x[..., 0]
    rest = (mx.zeros((2,)), mx.zeros((2,)))
    first = gated_delta_update(x, x, x, gates, gates, *rest, state)
    second = gated_delta_update(*(y[:, ::2] for y in (x, x, x, gates, gates)), *rest, state)
    third = gated_delta_update(q=x, k=x, v=2 * x, a=gates, b=gates, A_log=rest[0], dt_bias=rest[1])
    return *first, *second, *third


def test_each_call_of_the_rule_gets_its_own_states() -> None:
    x = mx.random.normal((1, 5, 2, 4), key=mx.random.key(7))
    states = DeltaStates()
    watched = states.watch(layer)
    for got, expected in zip(watched(x, None), layer(x, None), strict=True):
        assert mx.array_equal(got, expected)
    assert [len(noted.states) for noted in states.calls] == [5, 3, 5]
    for kept in (2, 4, 5):
        states.replay(kept)
        results = zip(watched(x[:, :kept], None), layer(x[:, :kept], None), strict=True)
        assert all(mx.array_equal(got, expected) for got, expected in results)


def test_other_functions_are_left_alone() -> None:
    linear = nn.Linear(2, 2)
    assert DeltaStates().watch(zoo.build) is zoo.build
    assert DeltaStates().watch(linear) is linear


# -- two stepped layers that share one cache ------------------------------------------------------


class Halves(nn.Module):
    """A sum in one slot of a cache; `ssm_update` is only imported here, so a round takes steps."""

    def __init__(self, slot: int) -> None:
        super().__init__()
        self.slot = slot

    def __call__(self, x: mx.array, cache: ArraysCache) -> mx.array:
        before = 0 if cache[self.slot] is None else cache[self.slot]
        sums = before + mx.cumsum(x, axis=1)
        cache[self.slot] = sums[:, -1:]
        return sums


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(zoo.VOCAB, 8)
        self.first, self.second = Halves(0), Halves(1)
        self.layers = [self.first]

    def make_cache(self) -> list[Any]:
        return [ArraysCache(2)]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        return self.second(self.first(self.embed(tokens), cache[0]), cache[0])


def test_a_layer_hands_back_only_the_slots_that_it_writes() -> None:
    assert ssm_update is not None
    model = Shared()
    start = make_prompt_cache(model)
    model(mx.array([[3, 1, 4]]), cache=start)
    for kept in range(1, 6):
        expected = copy.deepcopy(start)
        for token in WINDOW[:kept]:
            model(mx.array([[token]]), cache=expected)
        zoo.assert_state_equal(taken_back(model, start, kept, [WINDOW]), expected)
