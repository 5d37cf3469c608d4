"""Predicted output: an edit leaves most of a file as it was, so the old file is a good draft."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

import mlx_rewind

OLD = """def total_price(items):
    total = 0
    for item in items:
        total += item.price
    return total
"""
REQUEST = f"Rename total to amount in this code:\n\n{OLD}"


def decode(
    model: nn.Module, tokenizer: Any, prompt: list[int], drafter: Any = None
) -> tuple[list[int], mlx_rewind.GenerationResponse]:
    responses = list(
        mlx_rewind.stream_generate(
            model, tokenizer, prompt, drafter=drafter, num_draft_tokens=8, max_tokens=64
        )
    )
    return [response.token for response in responses], responses[-1]


def main() -> None:
    model, tokenizer = mlx_rewind.load()
    # float32, for the comparison below: on a GPU a near-tie in bfloat16 may go either way.
    model.set_dtype(mx.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": REQUEST}], add_generation_prompt=True
    )
    plain, _ = decode(model, tokenizer, prompt)
    print(tokenizer.decode(plain, skip_special_tokens=True))
    print()

    # The old file; what the model itself wrote, for a model that edits well; and nonsense.
    predictions = {
        "old file": tokenizer.encode(OLD, add_special_tokens=False),
        "exact result": plain,
        "nonsense": [5] * 40,
    }
    steps = {}
    for name, expected in predictions.items():
        tokens, last = decode(model, tokenizer, prompt, mlx_rewind.Prediction(expected))
        assert tokens == plain  # a bad prediction costs time and changes nothing
        steps[name] = len(tokens) / last.mean_acceptance_length
        print(
            f"{name}: {last.draft_n_accepted}/{last.draft_n} accepted, "
            f"{last.mean_acceptance_length:.2f} tokens per step, tokens identical"
        )
    assert steps["exact result"] < len(plain)


if __name__ == "__main__":
    main()
