"""Another engine's speculative round beside ours: same weights, same drafts, one process.

A script per peer (mlx_vlm.py, z_lab.py, ...) says how the peer feeds a window and takes back what
was rejected. This file decodes with it and takes the times. `run PEER` makes the environment.

Units are the engine's own plain step, so that only what its rounds add is compared:

    verify      one forward over K + 1 tokens, as the engine prepares it for a rollback
    rollback    what it takes until the caches are right after 1 of K drafts was accepted
    speed-up    over its own plain decoding, with a drafter that is right with p = 0.8
    identical   whether the text is that of its own plain decoding; else where it leaves it
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from statistics import median
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_rewind import Round
from mlx_rewind.bench.blas import blas, restart
from mlx_rewind.bench.measure import in_turn, ratio
from mlx_rewind.bench.models import SIZES, Scripted, hybrid, random_prompts

#: How often the drafts are right in the comparison of texts: all depths of rejection come up.
PS = (0.3, 0.8)

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


class Engine(Protocol):
    """How an engine decodes. One cache at a time is in a round."""

    name: str

    def make_cache(self) -> list[Any]: ...

    def step(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """The logits of a plain forward."""
        ...

    def verify(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """The logits of a window, of which a part may be taken back."""
        ...

    def keep(self, cache: list[Any], accepted: int, drafted: int) -> None:
        """Keeps the first token of the window and the accepted drafts."""
        ...


class Rewind:
    """mlx-rewind."""

    name = "mlx-rewind"

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def make_cache(self) -> list[Any]:
        return make_prompt_cache(self.model)

    def step(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        return self.model(tokens, cache=cache)

    def verify(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        self.round = Round(self.model, cache).open()
        return self.model(tokens, cache=cache)

    def keep(self, cache: list[Any], accepted: int, drafted: int) -> None:
        self.round.commit(accepted + 1)


def model_of(size: str, dtype: str, spread: float, equal_heads: bool) -> nn.Module:
    """A random hybrid whose text is varied, so that a wrong state shows in the next tokens.

    spread         of the weights, over the root of the inputs: with 3 a wrong state shows at once,
                   with 1 so does a constant that is added to small numbers
    equal_heads    as many key heads as value heads in the recurrent layers
    """
    model = hybrid(SIZES[size])
    if equal_heads:
        config = model.args.text_config
        config["linear_num_key_heads"] = config["linear_num_value_heads"]
        model = type(model)(model.args)
        model.eval()

    def redraw(name: str, weight: mx.array) -> mx.array:
        if weight.ndim >= 2 and "A_log" not in name:
            weight = mx.random.normal(weight.shape) * (spread / weight.shape[-1] ** 0.5)
        return weight if "A_log" in name else weight.astype(DTYPES[dtype])

    mx.random.seed(1)
    weights = [(name, redraw(name, x)) for name, x in tree_flatten(model.parameters())]
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    return model


def settle(cache: list[Any], *arrays: mx.array) -> None:
    mx.eval(*arrays, [entry.state for entry in cache])


def plain(engine: Engine, prompt: list[int], count: int) -> list[int]:
    cache, window = engine.make_cache(), mx.array([prompt])
    text: list[int] = []
    while len(text) < count:
        window = mx.argmax(engine.step(window, cache)[:, -1:], axis=-1)
        text.append(int(window.item()))
    return text


def speculative(
    engine: Engine, prompt: list[int], reference: list[int], k: int, p: float
) -> list[int]:
    cache = engine.make_cache()
    drafter = Scripted(prompt, reference, p)
    logits = engine.step(mx.array([prompt]), cache)
    text = [int(mx.argmax(logits[0, -1]).item())]
    while len(text) < len(reference):
        drafts = drafter.propose([*prompt, *text], min(k, len(reference) - len(text) - 1))
        window = mx.array([[text[-1], *drafts]])
        logits = engine.verify(window, cache) if drafts else engine.step(window, cache)
        best: Any = mx.argmax(logits[0], axis=-1).tolist()
        accepted = 0
        while accepted < len(drafts) and best[accepted] == drafts[accepted]:
            accepted += 1
        if drafts:
            engine.keep(cache, accepted, len(drafts))
        text += best[: accepted + 1]
    return text


def windows(engine: Engine, prompt: list[int], k: int) -> dict[str, Callable[[], float]]:
    """What times a verify and the rollback after one accepted draft, over and over."""
    cache = engine.make_cache()
    settle(cache, engine.step(mx.array([prompt]), cache))
    window = mx.array([prompt[: k + 1]])

    def both() -> tuple[float, float]:
        begun = time.perf_counter()
        settle(cache, engine.verify(window, cache))
        fed = time.perf_counter()
        engine.keep(cache, 1, k)
        settle(cache)
        return fed - begun, time.perf_counter() - fed

    return {"verify": lambda: both()[0], "rollback": lambda: both()[1]}


def leaves(engine: Engine, prompt: list[int], reference: list[int], k: int) -> int:
    """The index of the first token that differs from plain decoding, or the length."""
    texts = [speculative(engine, prompt, reference, k, p) for p in PS]
    pairs = (enumerate(zip(text, reference, strict=False)) for text in texts)
    found = (next((i for i, (ours, plain) in one if ours != plain), None) for one in pairs)
    return min(len(reference) if at is None else at for at in found)


def compare(
    engines: list[Engine], about: dict[str, Any], args: argparse.Namespace
) -> list[dict[str, Any]]:
    k, count = args.draft_tokens, args.tokens
    prompt, *more = random_prompts(args.prompts, 32)
    stock = plain(engines[0], prompt, count)
    tasks: dict[tuple[str, str], Callable[[], float]] = {}
    rows = []

    def timed(work: Callable[[], Any]) -> Callable[[], float]:
        def run() -> float:
            begun = time.perf_counter()
            work()
            return time.perf_counter() - begun

        return run

    for engine in engines:
        reference = plain(engine, prompt, count)
        try:
            found = [leaves(engine, prompt, reference, k)]
            found += [leaves(engine, q, plain(engine, q, count), k) for q in more]
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            print(json.dumps({**about, "engine": engine.name, "error": repr(error)}), flush=True)
            continue
        at = min(found)
        same = {"identical": at == count, "differs_at": None if at == count else at}
        rows.append({"engine": engine.name, **same, "plain_is_mlx_lm": reference == stock})
        tasks[engine.name, "plain"] = timed(lambda e=engine: plain(e, prompt, count))
        tasks[engine.name, "speculative"] = timed(
            lambda e=engine, r=reference: speculative(e, prompt, r, k, 0.8)
        )
        for name, task in windows(engine, prompt, k).items():
            tasks[engine.name, name] = task
    if not args.repeats:
        return rows
    times = in_turn(tasks, args.repeats)
    for row in rows:
        name = row["engine"]
        unit = [seconds / count for seconds in times[name, "plain"]]
        row["verify"] = ratio(times[name, "verify"], unit)
        row["rollback"] = ratio(times[name, "rollback"], unit)
        row["speed_up"] = ratio(times[name, "plain"], times[name, "speculative"])
        row["plain_ms"] = 1e3 * median(unit)
    return rows


def main(package: str, make: Callable[[nn.Module], Engine]) -> None:
    parser = argparse.ArgumentParser(description=f"{package} and mlx-rewind, round by round")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["5M", "50M"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--equal-heads", action="store_true", help="key heads = value heads")
    parser.add_argument("--prompts", type=int, default=4, help="whose texts are compared")
    parser.add_argument("--repeats", type=int, default=5, help="of the times; 0: texts only")
    parser.add_argument("--spread", type=float, default=3.0, help="of the weights")
    parser.add_argument("--no-preload", action="store_true", help="keep the BLAS of the mlx wheel")
    args = parser.parse_args()
    if not args.no_preload:
        restart([*sys.argv, "--no-preload"])
    about = {
        "peer": f"{package} {version(package)}",
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "blas": blas().name,
    }
    for size in args.sizes:
        for dtype in args.dtypes:
            # A model for each: ours records the layers, some peers patch their classes.
            ours, theirs = (model_of(size, dtype, args.spread, args.equal_heads) for _ in range(2))
            engines: list[Engine] = [Rewind(ours), make(theirs)]
            told = {**about, "size": size, "dtype": dtype}
            for row in compare(engines, told, args):
                print(json.dumps({**told, **row}), flush=True)
