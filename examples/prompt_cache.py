"""Close early, and go on from the same prompt cache: with mlx_rewind, with mlx_lm, from a file."""

import tempfile
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

import mlx_rewind

STOP, TOTAL = 13, 30


def main() -> None:
    model, tokenizer = mlx_rewind.load()
    # float32, for the comparison below: on a GPU a near-tie in bfloat16 may go either way.
    model.set_dtype(mx.float32)
    prompt = tokenizer.encode("It is a truth universally acknowledged, that")
    plain = [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=TOTAL)]

    # A prediction that is right but for one token, so that the run stops inside a round.
    drafter = mlx_rewind.Prediction([*plain[:5], 5, *plain[6:]])
    cache = make_prompt_cache(model)
    steps = mlx_rewind.generate_step(
        prompt, model, drafter=drafter, num_draft_tokens=6, prompt_cache=cache, max_tokens=TOTAL
    )
    emitted = [next(steps)[0] for _ in range(STOP)]
    steps.close()
    assert emitted == plain[:STOP]

    # One rule for every stopping point: the last emitted token is pending, all before it are in.
    # (Layer 3 is an attention layer, whose cache knows its length.)
    assert cache[3].offset == len(prompt) + len(emitted) - 1
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "cache.safetensors")
        save_prompt_cache(file, cache)
        loaded = load_prompt_cache(file)
        mx.eval([entry.state for entry in loaded])

    # So the next call begins with it. Text of a next turn would follow it in the same prompt.
    pending, left = emitted[-1:], TOTAL - STOP
    rest = [
        token
        for token, _, _ in mlx_rewind.generate_step(
            pending, model, drafter=mlx_rewind.NGram(), prompt_cache=cache, max_tokens=left
        )
    ]
    stock = generate_step(mx.array(pending), model, prompt_cache=loaded, max_tokens=left)
    assert rest == plain[STOP:]
    assert [token for token, _ in stock] == plain[STOP:]
    print(f"stopped after {STOP} tokens, went on for {left}: identical to one plain run")
    print("mlx_lm went on from the saved file: identical as well")


if __name__ == "__main__":
    main()
