"""What a rejecting commit costs at real layer shapes, as ratios to a plain step of the same run.

    python bench/commit.py                      a block of 8 layers, 6 of them recurrent
    python bench/commit.py --rows 1 2 --contexts 64 4096 --json

Hidden 2048, gated delta heads Hk 16, Hv 32, Dk = Dv = 128, float32, random weights: only time is
measured. Steps, verifies and commits are taken in turn; medians. On Linux the script starts itself
again with OpenBLAS on one thread and a malloc that keeps large arrays.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from batch import filled
from mlx_lm.models import qwen3_5
from overhead import timed

from mlx_rewind import Round
from mlx_rewind.cache.members import join
from mlx_rewind.cache.slots import is_recurrent

WINDOW = 5
SETTINGS = {
    "LD_PRELOAD": "libopenblas.so.0",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}


def block(layers: int) -> nn.Module:
    """Layers of the shapes above, and a vocabulary so small that its head costs nothing."""
    config = {
        "model_type": "qwen3_5_text",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 256,
        "tie_word_embeddings": True,
    }
    model = qwen3_5.Model(qwen3_5.ModelArgs(model_type="qwen3_5", text_config=config))
    model.eval()
    mx.eval(model.parameters())
    return model


def forward(model: nn.Module, cache: list[Any], rows: int, tokens: int) -> None:
    window = mx.broadcast_to(mx.arange(1, tokens + 1), (rows, tokens))
    mx.eval(model(window, cache=cache), [entry.state for entry in cache])


def commit(round_: Round, kept: Sequence[int], cache: list[Any]) -> tuple[float, float]:
    """Seconds of the Python of a commit, and until its state is there."""
    start = time.perf_counter()
    round_.commit(kept)
    built = time.perf_counter()
    mx.eval([x for entry in cache if is_recurrent(entry) for x in entry.cache])
    return built - start, time.perf_counter() - start


def measure(model: nn.Module, context: int, rows: int, repeats: int) -> dict[str, Any]:
    cache = filled(model, context)
    for _ in range(rows - 1):
        join(cache, filled(model, context))
    keeps = [[k] * rows for k in range(1, WINDOW + 1)]
    if rows > 1:
        keeps.append([1 + b % (WINDOW - 1) for b in range(rows)])
    seconds: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        seconds.setdefault(name, []).append(value)

    for _ in range(repeats + 1):
        for kept in keeps:
            with Round(model, cache):
                note("plain", timed(lambda: forward(model, cache, rows, 1)))
            with Round(model, cache) as round_:
                note("verify", timed(lambda: forward(model, cache, rows, WINDOW)))
                built, done = commit(round_, kept, cache)
            name = "+".join(map(str, kept)) if len(set(kept)) > 1 else str(kept[0])
            note(f"python {name}", built)
            note(f"commit {name}", done)
    medians = {name: median(times[len(times) // (repeats + 1) :]) for name, times in seconds.items()}
    plain = medians.pop("plain")
    ratios = {name: value / plain for name, value in medians.items()}
    return {"rows": rows, "context": context, "plain_ms": 1e3 * plain, **ratios}


def restart() -> None:
    """Replaces this process by one that runs with `SETTINGS`, where OpenBLAS can be found."""
    found = any(Path("/usr/lib").glob(f"*/{SETTINGS['LD_PRELOAD']}"))
    if found and any(os.environ.get(name) != value for name, value in SETTINGS.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **SETTINGS})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-preload", action="store_true", help="with the BLAS of the wheel")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.no_preload:
        restart()
    mx.set_default_device(mx.cpu)
    model = block(args.layers)
    records = [measure(model, n, rows, args.repeats) for rows in args.rows for n in args.contexts]
    if args.json:
        print(json.dumps(records))
        return
    for record in records:
        print("  ".join(f"{name} {value:.3g}" for name, value in record.items()))


if __name__ == "__main__":
    main()
