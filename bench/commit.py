"""What a rejecting commit costs at real layer shapes, as ratios to a plain step of the same run.

    python bench/commit.py                      a block of 8 layers, 6 of them recurrent
    python bench/commit.py --mamba2             a block of 8 layers of Mamba-2
    python bench/commit.py --rows 1 --contexts 64 4096 16384 --repeats 3

Hidden 2048, float32; gated delta heads Hk 16, Hv 32, Dk = Dv = 128, or 64 Mamba-2 heads of 64 and a
state of 128. Weights are random: only time is measured, as CPU time, which other processes change
least. Steps, verifies and commits are taken in turn, with states handed back (`cache.recurrence`)
and computed again; medians. On Linux the script starts itself again with OpenBLAS on one thread and
a malloc that keeps large arrays.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from batch import filled
from mlx_lm.models import mamba2

from mlx_rewind import Round
from mlx_rewind.bench.blas import restart
from mlx_rewind.bench.models import SIZES, hybrid
from mlx_rewind.cache import recurrence
from mlx_rewind.cache.members import join
from mlx_rewind.cache.slots import is_recurrent

WINDOW = 5
MAMBA2 = {
    "model_type": "mamba2",
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_heads": 64,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 1,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": True,
    "time_step_limit": [0.001, 100.0],
    "time_step_rank": "auto",
    "vocab_size": 256,
    "num_hidden_layers": 8,
}


def mamba2_block() -> nn.Module:
    """Eight layers with random weights."""
    model = mamba2.Model(mamba2.ModelArgs.from_dict(MAMBA2))
    model.eval()
    mx.eval(model.parameters())
    return model


def forward(model: nn.Module, cache: list[Any], rows: int, tokens: int) -> float:
    """Seconds of a forward, until all that it leaves is there."""
    window = mx.broadcast_to(mx.arange(1, tokens + 1), (rows, tokens))
    start = time.process_time()
    mx.eval(model(window, cache=cache), [entry.state for entry in cache])
    return time.process_time() - start


def commit(round_: Round, kept: Sequence[int], cache: list[Any]) -> tuple[float, float]:
    """Seconds of the Python of a commit, and until its state is there."""
    start = time.process_time()
    round_.commit(kept)
    built = time.process_time()
    mx.eval([x for entry in cache if is_recurrent(entry) for x in entry.cache])
    return built - start, time.process_time() - start


def measure(model: nn.Module, context: int, rows: int, repeats: int) -> list[dict[str, Any]]:
    cache = filled(model, context)
    for _ in range(rows - 1):
        join(cache, filled(model, context))
    keeps = [[k] * rows for k in range(1, WINDOW + 1)]
    if rows > 1:
        keeps.append([1 + b % (WINDOW - 1) for b in range(rows)])
    limits = {"handed back": recurrence.MOST_STATES, "computed again": 0}
    plain: list[float] = []
    seconds: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in limits}
    for _ in range(repeats + 1):
        for kept in keeps:
            with Round(model, cache):
                plain.append(forward(model, cache, rows, 1))
            name = "+".join(map(str, kept)) if len(set(kept)) > 1 else str(kept[0])
            for way, noted in seconds.items():
                recurrence.MOST_STATES = limits[way]
                with Round(model, cache) as round_:
                    noted["verify"].append(forward(model, cache, rows, WINDOW))
                    built, done = commit(round_, kept, cache)
                noted[f"commit {name}"].append(done)
                noted["python"].append(built)
    recurrence.MOST_STATES = limits["handed back"]
    step = median(plain)
    head = {"rows": rows, "context": context, "plain_ms": 1e3 * step}
    return [
        {**head, "states": way, **{name: median(times) / step for name, times in noted.items()}}
        for way, noted in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--mamba2", action="store_true", help="layers with ssm_update instead")
    parser.add_argument(
        "--no-preload", action="store_true", help="run in this process, as it was started"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    if not args.no_preload:
        restart([*sys.argv, "--no-preload"])
    model = mamba2_block() if args.mamba2 else hybrid(SIZES["2B-block"])
    records = [
        record
        for rows in args.rows
        for context in args.contexts
        for record in measure(model, context, rows, args.repeats)
    ]
    if args.json:
        print(json.dumps(records))
        return
    for record in records:
        shown = (f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items())
        print("  ".join(shown))


if __name__ == "__main__":
    main()
