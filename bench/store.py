"""What a boundary costs and what it saves, as ratios to the prefill of the same run.

    python bench/store.py                         a random hybrid of Qwen3.5's kind, 5M
    python bench/store.py --size 50M --tokens 2000 --json

A conversation of `--tokens` tokens is read cold, a boundary of it is kept, and fetched again. A
second turn adds `--new` tokens, with the store and without. Medians; weights are random.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_rewind import PromptCacheStore, generate_step
from mlx_rewind.bench.models import SIZES, VOCAB, hybrid


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def prompt_of(length: int) -> list[int]:
    return [(5 * i * i + 11 * i + 3) % VOCAB for i in range(length)]


def costs(model: nn.Module, tokens: list[int], repeats: int) -> dict[str, float]:
    """Seconds of a prefill, and of keeping, fetching, saving and loading its boundary; bytes."""
    seconds: dict[str, list[float]] = {}
    for _ in range(repeats + 1):
        cache, store = make_prompt_cache(model), PromptCacheStore(model, interval=0)
        store.fingerprint()  # once per process in practice

        def read(cache: list[Any] = cache) -> None:
            for start in range(0, len(tokens), 512):
                model(mx.array([tokens[start : start + 512]]), cache=cache)
                mx.eval([entry.state for entry in cache])

        def fetch(store: PromptCacheStore = store) -> None:
            mx.eval([entry.state for entry in store.fetch([*tokens, 0])[0]])

        with tempfile.TemporaryDirectory() as folder:
            work = {
                "prefill": read,
                "keep": lambda store=store, cache=cache: store.insert(tokens, cache),
                "fetch": fetch,
                "save": lambda store=store, folder=folder: store.save(folder),
                "load": lambda folder=folder: PromptCacheStore(model).load(folder),
            }
            for name, call in work.items():
                seconds.setdefault(name, []).append(timed(call))
    return {name: median(times[1:]) for name, times in seconds.items()} | {
        "bytes": store.stats.bytes,
        "state_bytes": sum(slot.nbytes for entry in cache for slot in _fixed(entry)),
    }


def _fixed(entry: Any) -> list[mx.array]:
    return [slot for slot in vars(entry).get("cache", []) if slot is not None]


def second_turn(model: nn.Module, tokens: list[int], new: int, repeats: int) -> tuple[float, float]:
    """Seconds to the first token of a second turn: with the store, and without."""
    turn = [*tokens, *prompt_of(new)]
    warm, cold = [], []
    for _ in range(repeats):
        store = PromptCacheStore(model, interval=0)
        list(generate_step(tokens, model, max_tokens=2, store=store))
        warm.append(
            timed(lambda store=store: list(generate_step(turn, model, max_tokens=1, store=store)))
        )
        cold.append(timed(lambda: list(generate_step(turn, model, max_tokens=1))))
    return median(warm), median(cold)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="5M")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--new", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    model = hybrid(SIZES[args.size])
    tokens = prompt_of(args.tokens)
    cost = costs(model, tokens, args.repeats)
    warm, cold = second_turn(model, tokens, args.new, args.repeats)
    prefill = cost["prefill"]
    result = {
        "parameters": sum(x.size for _, x in tree_flatten(model.parameters())),
        **{f"{name}_over_prefill": cost[name] / prefill for name in ("keep", "fetch")},
        **{f"{name}_over_prefill": cost[name] / prefill for name in ("save", "load")},
        "bytes": int(cost["bytes"]),
        "state_over_bytes": cost["state_bytes"] / cost["bytes"],
        "default_interval": PromptCacheStore(model).interval,
        "second_turn_over_cold": warm / cold,
    }
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:32} {value:,.4f}" if isinstance(value, float) else f"{name:32} {value:,}")


if __name__ == "__main__":
    main()
