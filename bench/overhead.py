"""What rounds cost by themselves, as ratios to a plain step of the same run.

    python bench/overhead.py                      a random hybrid of Qwen3.5's kind, 12 layers
    python bench/overhead.py --hidden 2048 --layers 32 --draft-tokens 4 --json

Plain decoding goes through mlx_lm and through mlx-rewind in turn; then windows of K + 1 tokens are
fed in rounds that keep all of them, or two. Medians. Weights are random: only time is measured.
"""

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import make_prompt_cache

import mlx_rewind

PROMPT = list(range(1, 33))


def hybrid(hidden: int, layers: int) -> nn.Module:
    """Three gated delta layers to one of attention, heads of 64, as in Qwen3.5."""
    heads = hidden // 64
    config = {
        "model_type": "qwen3_5_text",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": 64,
        "linear_num_key_heads": max(1, heads // 2),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "vocab_size": 4096,
        "tie_word_embeddings": True,
    }
    model = qwen3_5.Model(qwen3_5.ModelArgs(model_type="qwen3_5", text_config=config))
    model.eval()
    mx.eval(model.parameters())
    return model


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def plain_steps(model: nn.Module, tokens: int, repeats: int) -> tuple[float, float]:
    """Seconds per token of mlx_lm and of mlx-rewind without a drafter, in turn."""
    runs: dict[str, list[float]] = {"mlx_lm": [], "ours": []}
    for _ in range(repeats + 1):
        stock = stock_generate_step(mx.array(PROMPT), model, max_tokens=tokens)
        runs["mlx_lm"].append(timed(lambda stock=stock: list(stock)))
        ours = mlx_rewind.generate_step(PROMPT, model, max_tokens=tokens)
        runs["ours"].append(timed(lambda ours=ours: list(ours)))
    return median(runs["mlx_lm"][1:]) / tokens, median(runs["ours"][1:]) / tokens


def rounds(model: nn.Module, window: int, kept: int, repeats: int) -> tuple[float, float]:
    """Seconds of the forward of a window, and of a commit that keeps `kept` of it."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([PROMPT]), cache=cache), [entry.state for entry in cache])
    forwards, commits = [], []
    for _ in range(repeats + 1):
        with mlx_rewind.Round(model, cache) as round_:
            start = time.perf_counter()
            mx.eval(model(mx.array([PROMPT[:window]]), cache=cache), [c.state for c in cache])
            fed = time.perf_counter()
            round_.commit(kept)
            mx.eval([entry.state for entry in cache])
            forwards.append(fed - start)
            commits.append(time.perf_counter() - fed)
    return median(forwards[1:]), median(commits[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    model = hybrid(args.hidden, args.layers)
    window = args.draft_tokens + 1
    stock, ours = plain_steps(model, 24, args.repeats)
    verify, full = rounds(model, window, window, args.repeats)
    _, rejecting = rounds(model, window, 2, args.repeats)
    result = {
        "parameters": sum(x.size for _, x in tree_flatten(model.parameters())),
        "plain_over_mlx_lm": stock / ours,
        "verify_over_plain_step": verify / ours,
        "full_commit_over_plain_step": full / ours,
        "reject_commit_over_plain_step": rejecting / ours,
    }
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:32} {value:,.3f}" if isinstance(value, float) else f"{name:32} {value:,}")


if __name__ == "__main__":
    main()
