"""A model file with a recurrence of its own, outside any layer, that supplies the undo itself."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache, trim_prompt_cache
from mlx_lm.models.llama import Attention, ModelArgs

import mlx_rewind
import zoo
from mlx_rewind import Round, UnsupportedModelError, record_rollback
from mlx_rewind.cache.retrace import LOG

PROMPT = zoo.PROMPTS[2]
ARGS = ModelArgs("llama", 32, 1, 32, 2, 1e-5, zoo.VOCAB)


class Folding(nn.Module):
    """A folded state before an attention layer; `tells` says whether it supplies its undo."""

    def __init__(self, tells: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(zoo.VOCAB, 32)
        self.fold = nn.Linear(64, 32)
        self.attention = Attention(ARGS)
        self.head = nn.Linear(32, zoo.VOCAB)
        self.tells = tells
        self.rollbacks: list[int] = []
        self.layers = [SimpleNamespace()] * 2

    def make_cache(self) -> list[Any]:
        return [ArraysCache(2), KVCache()]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        recurrent, attention = cache
        state, count = recurrent[0], recurrent[1]
        state = mx.zeros((inputs.shape[0], 1, 32)) if state is None else state
        count = mx.array([0]) if count is None else count
        states, x = [], self.embed(inputs)
        for i in range(inputs.shape[1]):
            state = mx.tanh(self.fold(mx.concatenate([state, x[:, i : i + 1]], axis=-1)))
            states.append(state)
        if self.tells:
            before = [recurrent[0], recurrent[1]]

            def after(kept: int) -> list[Any]:
                self.rollbacks.append(kept)
                return [states[kept - 1], count + kept]

            record_rollback(recurrent, inputs.shape[1], after, before)
        recurrent[0], recurrent[1] = state, count + inputs.shape[1]
        x = mx.concatenate(states, axis=1)
        mask = None if x.shape[1] == 1 else "causal"
        return self.head(x - self.embed(inputs) + self.attention(x, mask, attention))


@pytest.fixture(scope="module")
def model() -> Folding:
    mx.random.seed(3)
    made = Folding()
    made.update(
        nn.utils.tree_map(
            lambda w: mx.random.normal(w.shape) * 4 / w.shape[-1] ** 0.5, made.parameters()
        )
    )
    mx.eval(made.parameters())
    return made


@pytest.mark.parametrize("sizes", [[5], [1] * 5, [2, 1, 2]], ids=str)
@pytest.mark.parametrize("kept", range(6))
def test_rounds_call_the_undo_of_the_model(model: Folding, sizes: list[int], kept: int) -> None:
    cache, tokens = zoo.prefill(model, PROMPT), [3, 50, 8, 91, 11]
    with Round(model, cache) as round_:
        for size in sizes:
            model(mx.array([tokens[:size]]), cache=cache)
            tokens = tokens[size:]
        round_.commit(kept)
    expected = zoo.prefill(model, PROMPT)
    for token in [3, 50, 8, 91, 11][:kept]:
        model(mx.array([[token]]), cache=expected)
    zoo.assert_state_equal(cache, expected)


def test_speculation_is_plain_decoding(model: Folding) -> None:
    expected = [token for token, _ in stock_generate_step(mx.array(PROMPT), model, max_tokens=40)]
    assert len(set(expected)) > 5
    drafter = zoo.Scripted(expected, [2, 0, None, 4, 1], prompt_length=len(PROMPT))
    model.rollbacks.clear()
    steps = mlx_rewind.generate_step(PROMPT, model, drafter=drafter, max_tokens=40)
    assert [token for token, *_ in steps] == expected
    assert set(model.rollbacks) == {1, 2, 3}


def test_the_trim_protocol_calls_it_too(model: Folding) -> None:
    cache = make_prompt_cache(model)
    mlx_rewind.start_speculation(model, cache, window=30)
    model(mx.array([PROMPT]), cache=cache)
    assert not vars(cache[0])[LOG]._forwards  # longer than the window
    text = [(7 * i * i + 2) % zoo.VOCAB for i in range(40)]
    model(mx.array([text[:5]]), cache=cache)
    for token in text[5:25]:
        model(mx.array([[token]]), cache=cache)
    for trimmed, left in ((3, 22), (14, 8), (5, 3)):
        trim_prompt_cache(cache, trimmed)
        expected = zoo.prefill(model, [*PROMPT, *text[:left]])
        zoo.assert_state_equal(cache, expected)
    mlx_rewind.stop_speculation(cache)
    model(mx.array([[1, 2]]), cache=cache)


def test_outside_of_rounds_nothing_is_kept(model: Folding) -> None:
    cache = zoo.prefill(model, PROMPT)
    model.rollbacks.clear()
    model(mx.array([[1, 2, 3]]), cache=cache)
    assert not model.rollbacks
    assert vars(cache[0]).keys() == vars(ArraysCache(2)).keys()


def test_without_it_the_model_is_refused() -> None:
    silent = Folding(tells=False)
    with pytest.raises(UnsupportedModelError, match="record_rollback"):
        Round(silent, make_prompt_cache(silent))
