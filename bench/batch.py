"""What rows and drafts together give, as ratios of tokens per second in one run.

    python bench/batch.py               a random hybrid; 1, 2, 4, 8 rows; drafts right with p = 0.8
    python bench/batch.py --commits     the time of an uneven commit over 1k to 32k tokens

Plain and speculative decoding, one row after the other and in a batch, and mlx-lm's own
`BatchGenerator`. The drafter knows the text that the model will give and is right with
probability p. Weights are random: only time is measured, and every text is compared.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_rewind import Engine, Request, Round, generate_step
from mlx_rewind.bench.models import VOCAB, Scripted, Size, hybrid
from mlx_rewind.cache.members import join, rows_of


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def decode(model: nn.Module, requests: list[Request], rows: int) -> list[list[int]]:
    engine = Engine(model, max_rows=rows)
    handles = [engine.submit(request) for request in requests]
    for _ in engine:
        pass
    return [handle.tokens for handle in handles]


def stock(model: nn.Module, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """mlx-lm's own batches, without drafts."""
    generator = BatchGenerator(model, max_tokens=max_tokens)
    ids = generator.insert(prompts)
    tokens: dict[int, list[int]] = {uid: [] for uid in ids}
    while responses := generator.next_generated():
        for response in responses:
            tokens[response.uid].append(response.token)
    return [tokens[uid] for uid in ids]


def speeds(
    model: nn.Module, rows: int, max_tokens: int, drafts: int, p: float
) -> dict[str, Callable[[], list[list[int]]]]:
    """The ways to decode `rows` prompts of different lengths."""
    draw = random.Random(rows)
    prompts = [[draw.randrange(1, VOCAB) for _ in range(16 + 5 * i)] for i in range(rows)]
    texts = [[t for t, *_ in generate_step(q, model, max_tokens=max_tokens)] for q in prompts]
    plain = [Request(prompt, max_tokens=max_tokens) for prompt in prompts]
    speculative = [
        Request(prompt, max_tokens, Scripted(prompt, text, p), drafts)
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    ways: dict[str, Callable[[], list[list[int]]]] = {
        "plain": lambda: decode(model, plain, 1),
        "batched plain": lambda: decode(model, plain, rows),
        "mlx_lm BatchGenerator": lambda: stock(model, prompts, max_tokens),
        "speculative": lambda: decode(model, speculative, 1),
        "batched speculative": lambda: decode(model, speculative, rows),
    }
    for name, way in ways.items():
        if way() != texts:  # also the first run, which compiles
            raise SystemExit(f"{name} with {rows} rows differs from plain decoding")
    return ways


def rows_table(model: nn.Module, args: argparse.Namespace) -> list[dict[str, Any]]:
    records = []
    for rows in args.rows:
        ways = speeds(model, rows, args.max_tokens, args.draft_tokens, args.p)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.repeats):
            for name, way in ways.items():
                seconds[name].append(timed(way)[0])
        fast = {name: rows * args.max_tokens / median(times) for name, times in seconds.items()}
        records.append({"rows": rows, **{name: x / fast["plain"] for name, x in fast.items()}})
    return records


def filled(model: nn.Module, length: int) -> list[Any]:
    """A cache of rows, its attention caches as long as after `length` tokens. What they hold does
    not matter for time."""
    one = make_prompt_cache(model)
    model(mx.ones((1, 8), mx.int32), cache=one)
    for entry in one:
        if isinstance(entry, KVCache):
            entry.keys, entry.values = (
                mx.zeros((*x.shape[:2], length, x.shape[3]), x.dtype)
                for x in (entry.keys, entry.values)
            )
            entry.offset = length
    mx.eval([entry.state for entry in one])
    return [rows_of(entry, 9) for entry in one]


def commit_table(model: nn.Module, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of an uneven commit of two rows over contexts of different length."""
    records = []
    for length in (1024, 4096, 16384, 32768):
        cache = filled(model, length)
        join(cache, filled(model, length))
        times = []
        for _ in range(repeats + 1):
            with Round(model, cache) as window:
                mx.eval(model(mx.ones((2, 5), mx.int32), cache=cache), [c.state for c in cache])

                def commit(window: Round = window, cache: list[Any] = cache) -> None:
                    window.commit([1, 3])
                    mx.eval([entry.state for entry in cache])

                times.append(timed(commit)[0])
        records.append({"tokens": length, "commit_ms": 1e3 * median(times[1:])})
    first = records[0]["commit_ms"]
    return [{**record, "over_1k": record["commit_ms"] / first} for record in records]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--p", type=float, default=0.8, help="how often a draft token is right")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commits", action="store_true", help="time uneven commits instead")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.commits:
        records = commit_table(hybrid(Size(256, 4)), args.repeats)
    else:
        records = rows_table(hybrid(Size(args.hidden, args.layers)), args)
    if args.json:
        print(json.dumps(records))
        return
    for record in records:
        print("  ".join(f"{name} {value:.3g}" for name, value in record.items()))


if __name__ == "__main__":
    main()
