"""Rings that keep their first tokens (`max_kv_size`): no window reaches past their size."""

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import RotatingKVCache

import mlx_rewind
import zoo
from mlx_rewind import Prediction, Round, UnsupportedModelError


@pytest.mark.parametrize("name", ["mimo", "ernie4_5_moe", "glm4_moe"])
@pytest.mark.parametrize("size", [8, 16, 30])
@pytest.mark.parametrize("prompt", zoo.PROMPTS[1:], ids=["short", "long"])
def test_drafts_do_not_change_the_text(name: str, size: int, prompt: list[int]) -> None:
    model = zoo.build(name)
    stock = generate_step(mx.array(prompt), model, max_tokens=40, max_kv_size=size)
    expected = [token for token, _ in stock]
    steps = mlx_rewind.generate_step(
        prompt, model, max_tokens=40, max_kv_size=size, drafter=Prediction(expected)
    )
    tokens, drafted = zip(*((token, from_draft) for token, _, from_draft in steps), strict=True)
    assert list(tokens) == expected
    assert any(drafted) == (len(prompt) < size)


def test_a_round_past_the_size_is_refused() -> None:
    model = zoo.build("llama")
    cache = [RotatingKVCache(max_size=8, keep=4) for _ in model.layers]
    model(mx.array([[1, 2, 3, 4, 5, 6]]), cache=cache)
    with Round(model, cache) as window:
        model(mx.array([[7, 8, 9]]), cache=cache)
        with pytest.raises(UnsupportedModelError, match="beyond 8"):
            window.commit(2)
    assert [entry.offset for entry in cache] == [6] * len(cache)
