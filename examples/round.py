"""A Round by hand: feed a window, keep a part of it, and the rest was never there."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

import mlx_rewind
from mlx_rewind.target import row_invariant


def after_round(model: nn.Module, prompt: list[int], window: list[int], kept: int) -> mx.array:
    """The logits of token 7 after `prompt` and the first `kept` tokens of `window`."""
    cache = make_prompt_cache(model)  # mlx-lm's own objects
    model(mx.array([prompt]), cache=cache)
    with mlx_rewind.Round(model, cache) as this_round:
        model(mx.array([window]), cache=cache)
        this_round.commit(kept)
    return model(mx.array([[7]]), cache=cache)


def after_plain_steps(model: nn.Module, tokens: list[int]) -> mx.array:
    """The same logits from a cache that was fed one token at a time and rolled nothing back."""
    cache = make_prompt_cache(model)
    for token in tokens:
        model(mx.array([[token]]), cache=cache)
    return model(mx.array([[7]]), cache=cache)


def main() -> None:
    model, tokenizer = mlx_rewind.load()
    for record in mlx_rewind.inspect(model):
        print(f"layer {record.layer}: {record.cache}, undone by {record.mechanism}")

    prompt = tokenizer.encode("In the beginning God created the heaven and the earth.")
    window, other = [11, 12, 13, 14, 15], [11, 12, 801, 802, 803]
    for kept in range(3):
        mine = after_round(model, prompt, window, kept)
        theirs = after_round(model, prompt, other, kept)
        plain = after_plain_steps(model, prompt + window[:kept])
        # Two windows with the same kept part leave the same cache, whatever was rejected.
        assert mx.array_equal(mine, theirs)
        # Where a window has the bits of single steps, that is the cache of plain decoding.
        assert mx.array_equal(mine, plain) or not row_invariant()
        gap = mx.abs(mine - plain).max().item()
        print(f"kept {kept} of {len(window)}: next logits differ from plain steps by {gap}")

    cache = make_prompt_cache(model)
    model(mx.array([prompt]), cache=cache)
    before = cache[3].offset
    with mlx_rewind.Round(model, cache):
        model(mx.array([window]), cache=cache)
    assert cache[3].offset == before
    print("left without a commit: nothing was kept")


if __name__ == "__main__":
    main()
