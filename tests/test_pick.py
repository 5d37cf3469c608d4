"""Slots that are picked from what a window went through; the layer's own forward judges."""

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

import zoo
from mlx_rewind import Round
from mlx_rewind.cache.calls import Call
from mlx_rewind.cache.pick import is_trusted
from windows import WINDOW, calls_of, computed_again, taken_back

#: Models whose recurrent slots are all states of the rule or ends of a convolution's input.
PICKED = [
    "bailing_moe_v3",
    "gear",
    "kimi_k3",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "olmo_hybrid",
    "prism_hadamard_qwen35",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
]


def writers_of(round_: Round) -> list[nn.Module]:
    return [call.layer for call in calls_of(round_)]


@pytest.mark.parametrize("name", PICKED)
def test_a_layer_is_compared_once_and_does_not_run_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.build(name, fresh=True)
    start = zoo.prefill(model, zoo.PROMPTS[1])
    with computed_again():
        expected = [taken_back(model, start, kept, [WINDOW]) for kept in range(1, 6)]
    with Round(model, start) as round_:
        model(mx.array([WINDOW]), cache=start)
        layers = writers_of(round_)
        assert [is_trusted(layer) for layer in layers] == [None] * len(layers)
        round_.rewind(4)
        assert [is_trusted(layer) for layer in layers] == [True] * len(layers)
        round_.commit(0)
    for kept in range(1, 6):
        cache = copy.deepcopy(start)
        with Round(model, cache) as round_:
            model(mx.array([WINDOW]), cache=cache)
            with monkeypatch.context() as patch:
                patch.setattr(Call, "_stock", None)
                round_.commit(kept)
        zoo.assert_state_equal(cache, expected[kept - 1])


@pytest.mark.parametrize("name", [name for name in PICKED if name not in zoo.FLOAT32_ONLY])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_picked_slots_have_the_bits_of_the_layer(name: str, dtype: mx.Dtype) -> None:
    model = zoo.build(name, dtype=dtype)
    for prompt in ([5], zoo.PROMPTS[1]):
        start = zoo.prefill(model, prompt)
        taken_back(model, start, 1, [WINDOW])
        for kept in range(1, 6):
            with computed_again():
                expected = taken_back(model, start, kept, [WINDOW])
            zoo.assert_state_equal(taken_back(model, start, kept, [WINDOW]), expected)


class Convolution(nn.Module):
    """Keeps the end of its convolution's input, or something that only looks like it."""

    def __init__(self, change: Any, back: Any) -> None:
        super().__init__()
        self.conv, self.change, self.back = nn.Conv1d(8, 8, 3), change, back

    def __call__(self, x: mx.array, cache: ArraysCache) -> mx.array:
        before = mx.zeros((x.shape[0], 2, 8)) if cache[0] is None else self.back(cache[0])
        joined = mx.concatenate([before, x], axis=1)
        cache[0] = self.change(joined[:, -2:])
        return self.conv(joined)


class Convolved(nn.Module):
    def __init__(self, change: Any, back: Any) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(zoo.VOCAB, 8), [Convolution(change, back)]

    def make_cache(self) -> list[Any]:
        return [ArraysCache(1)]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        return self.layers[0](self.embed(tokens), cache[0])


@pytest.mark.parametrize(
    ("change", "back", "is_right"),
    [
        (mx.contiguous, mx.contiguous, True),
        (lambda x: 2 * x, lambda x: x / 2, False),
        (lambda x: x[:, ::-1], lambda x: x[:, ::-1], False),
    ],
    ids=["end", "double", "reversed"],
)
def test_a_layer_that_keeps_something_else_is_not_picked_from(
    change: Any, back: Any, is_right: bool
) -> None:
    model = Convolved(change, back)
    start = make_prompt_cache(model)
    model(mx.array([[3, 1, 4]]), cache=start)
    for kept in (2, 1, 4, 3, 5):
        expected = copy.deepcopy(start)
        for token in WINDOW[:kept]:
            model(mx.array([[token]]), cache=expected)
        zoo.assert_state_equal(taken_back(model, start, kept, [WINDOW]), expected)
        assert is_trusted(model.layers[0]) is is_right


def test_a_verdict_is_final() -> None:
    """Also within a round: what looks right for one count only is not picked from later."""
    model = Convolved(lambda x: x[:, ::-1], lambda x: x[:, ::-1])
    cache = make_prompt_cache(model)
    model(mx.array([[3, 1, 4]]), cache=cache)
    with Round(model, cache) as round_:
        model(mx.array([[11, 52, 7, 7, 90]]), cache=cache)  # its end after 4 is its own reverse
        for kept in (2, 4, 3):
            round_.rewind(kept)
            assert is_trusted(model.layers[0]) is False
