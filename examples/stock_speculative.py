"""mlx-lm's own speculative decoding on a hybrid model, with a prompt cache that can be trimmed."""

import mlx.core as mx
from mlx_lm import stream_generate

import mlx_rewind

PROMPT = "import os\nimport sys\n\n\ndef main():\n"
MAX_TOKENS = 60


def main() -> None:
    model, tokenizer = mlx_rewind.load()
    draft = mlx_rewind.load_draft(None, tokenizer).model
    # float32, for the comparison below: on a GPU a near-tie in bfloat16 may go either way.
    for each in (model, draft):
        each.set_dtype(mx.float32)
    plain = list(stream_generate(model, tokenizer, PROMPT, max_tokens=MAX_TOKENS))

    # With caches of its own mlx-lm refuses: recurrent state cannot be trimmed.
    try:
        next(stream_generate(model, tokenizer, PROMPT, draft_model=draft))
    except ValueError as error:
        print(f"mlx_lm alone: {error}")
    else:
        raise AssertionError("mlx_lm trims recurrent state by itself now")

    # The same call, with caches that can.
    responses = list(
        stream_generate(
            model,
            tokenizer,
            PROMPT,
            max_tokens=MAX_TOKENS,
            draft_model=draft,
            num_draft_tokens=3,
            prompt_cache=mlx_rewind.speculative_prompt_cache(model, draft),
        )
    )
    print("".join(response.text for response in responses))
    assert [r.token for r in responses] == [r.token for r in plain]
    accepted = sum(response.from_draft for response in responses)
    assert accepted > 0
    print(f"{accepted} of {len(responses)} tokens were drafted, and accepted")
    print("with mlx_rewind's cache: the text of plain mlx_lm decoding")


if __name__ == "__main__":
    main()
