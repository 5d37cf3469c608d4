"""Half precision and 4-bit weights, one family of each mechanism, and why some models differ.

The CPU's kernels give a row the same bits alone and in a window, at any precision. bfloat16 is the
sensitive detector: exact ties of the two best logits are common there.
"""

import re
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_rewind
import zoo
from mlx_rewind.cache import attach

#: Family -> what makes it run: the CPU multiplies stacked experts in float32 only, and what
#: `ssm_update` adds up leaves the range of float16 unless the weights are small.
FAMILIES: dict[str, dict[str, Any]] = {
    "falcon_h1": {"spread": 1.0},
    "gemma3_text": {},
    "gpt_oss": {},
    "jamba": {"num_experts": 1, "expert_layer_offset": 99, "expert_layer_period": 100},
    "kimi_linear": {"first_k_dense_replace": 4},
    "lfm2": {},
    "llama": {},
    "llama4_text": {},
    "mamba2": {"spread": 1.0},
    "qwen3_5": {},
    "qwen3_next": {"mlp_only_layers": [0, 1, 2, 3]},
    "recurrent_gemma": {},
    "rwkv7": {},
}
PLAN = [3, None, 0, 4, None, 1, 0, 0, 2, 4]
HALVES = pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)


def build(name: str, dtype: mx.Dtype, weights: str) -> nn.Module:
    model = zoo.build(name, dtype=dtype, fresh=True, **FAMILIES.get(name, {}))
    if weights == "4-bit":

        def fits(path: str, module: nn.Module) -> bool:
            return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0

        nn.quantize(model, group_size=32, bits=4, class_predicate=fits)
        assert any(isinstance(module, nn.QuantizedLinear) for module in model.modules())
    return model


def check_equal(model: nn.Module, prompt: list[int]) -> None:
    """Speculation gives the bits of plain decoding, in logprobs and in the caches."""
    expected = zoo.reference(model, prompt, 48)
    assert not mx.isnan(mx.stack(expected.logprobs)).any()
    caches = []
    for drafter in (None, zoo.Scripted(expected.tokens, PLAN, prompt_length=len(prompt))):
        cache = make_prompt_cache(model)
        steps = mlx_rewind.generate_step(
            prompt, model, drafter=drafter, max_tokens=48, prompt_cache=cache
        )
        for i, (token, logprobs, _) in enumerate(steps):
            assert token == expected.tokens[i]
            assert mx.array_equal(logprobs, expected.logprobs[i])
        caches.append(cache)
    zoo.assert_state_equal(*caches)


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - zoo.INEXACT_IN_ROUNDS))
@pytest.mark.parametrize("weights", ["16-bit", "4-bit"])
@HALVES
def test_the_bits_are_those_of_plain_decoding(name: str, dtype: mx.Dtype, weights: str) -> None:
    if name == "gpt_oss" and weights == "16-bit":
        pytest.skip("its experts are stacked: the CPU has them in float32 and quantised")
    model = build(name, dtype, weights)
    for prompt in zoo.PROMPTS[1:]:
        check_equal(model, prompt)


# --- the reasons of docs/models.md -----------------------------------------------------------


@pytest.fixture(autouse=True)
def _classes_are_patched_for_one_test() -> Iterator[None]:
    """Attaching remembers a class's own call."""
    attach._subclass.cache_clear()
    yield
    attach._subclass.cache_clear()


def take_by_steps(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls every attention of `model` token by token, also in a window."""

    def cut(value: Any, window: int, step: int) -> Any:
        """An input [B, S, ...] or a scale [S, 1]; a mask is None for a single token."""
        if isinstance(value, str):
            return None
        if not isinstance(value, mx.array):
            return value
        if value.ndim == 3 and value.shape[1] == window:
            return value[:, step : step + 1]
        return value[step : step + 1] if value.shape == (window, 1) else None

    def by_steps(stock: Any) -> Any:
        def call(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> Any:
            window = x.shape[1]
            outputs = [
                stock(
                    self,
                    x[:, step : step + 1],
                    *(cut(value, window, step) for value in args),
                    **{name: cut(value, window, step) for name, value in kwargs.items()},
                )
                for step in range(window)
            ]
            return mx.concatenate(outputs, axis=1)

        return call

    kinds = {type(module) for module in model.modules() if ATTENTION.search(type(module).__name__)}
    for kind in kinds:
        monkeypatch.setattr(kind, "__call__", by_steps(kind.__call__))


ATTENTION = re.compile(r"Attention|MLA|AttentionBlock")


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "kimi_linear", "recurrent_gemma"])
@pytest.mark.parametrize("weights", ["16-bit", "4-bit"])
@HALVES
def test_attention_is_all_that_differs(
    name: str, dtype: mx.Dtype, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "gpt_oss" and weights == "16-bit":
        pytest.skip("its experts are stacked: the CPU has them in float32 and quantised")
    model = build(name, dtype, weights)
    take_by_steps(model, monkeypatch)
    assert zoo.window_error(model) == 0
    check_equal(model, zoo.PROMPTS[1])


#: Without those whose attention hands keys to another layer or lives in the model's own loop, so
#: that it cannot be taken by steps from outside.
EXPLAINED = sorted(
    {name for name, why in zoo.INEXACT_IN_ROUNDS.items() if why in (zoo.LATENT, zoo.RING)}
    - {"gemma3n", "gemma4", "gemma4_text", "iquestloopcoder"}
)


@pytest.mark.parametrize("name", EXPLAINED)
def test_the_reason_is_the_whole_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With attention taken by steps, the models that the table calls inexact are exact."""
    model = zoo.build(name, fresh=True)
    assert zoo.window_error(model) > 0
    take_by_steps(model, monkeypatch)
    assert zoo.window_error(model) == 0
    check_equal(model, zoo.PROMPTS[1])
