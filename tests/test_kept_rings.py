"""Rings that keep their first tokens (`max_kv_size`): no window reaches past their size."""

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

import mlx_rewind
import zoo
from mlx_rewind import Prediction


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
