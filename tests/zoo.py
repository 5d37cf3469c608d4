"""Tiny random models of every cache kind, the plain decoding that judges, a scripted drafter.

Everything here is the slow obvious way: the oracle of the other tests.
"""

import functools
import importlib
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from zoo_configs import (
    COMPRESSED,
    CONFIGS,
    FAMILIES,
    FLOAT32_ONLY,
    GLA,
    INEXACT,
    INEXACT_IN_ROUNDS,
    LATENT,
    NOT_BUILT,
    PROMPTS,
    REFUSED,
    RING,
    SEEDS,
    SPREAD,
    VOCAB,
)

__all__ = [
    "BITWISE",
    "COMPRESSED",
    "CONFIGS",
    "FAMILIES",
    "FLOAT32_ONLY",
    "GLA",
    "INEXACT",
    "INEXACT_IN_ROUNDS",
    "LATENT",
    "NOT_BUILT",
    "PROMPTS",
    "REFUSED",
    "RING",
    "SEEDS",
    "VOCAB",
    "Call",
    "Reference",
    "Scripted",
    "assert_state_equal",
    "build",
    "difference",
    "feed",
    "guard",
    "prefill",
    "reference",
    "round_tolerance",
    "state",
    "tolerance",
    "window_error",
    "windowed",
]

BITWISE = frozenset(CONFIGS) - frozenset(INEXACT)


def tolerance(name: str) -> float:
    """How far a window's numbers may be from those of single steps, in float32 on the CPU.

    A fraction of the largest number of the array, as for `assert_state_equal`; 0 is to the bit.
    """
    return 0.0 if name in BITWISE else 1e-5


def round_tolerance(name: str) -> float:
    """The same for windows inside a Round, which takes some layers token by token."""
    return 1e-5 if name in INEXACT_IN_ROUNDS else 0.0


# --- models ----------------------------------------------------------------------------------


def build(
    name: str,
    seed: int | None = None,
    dtype: mx.Dtype = mx.float32,
    *,
    fresh: bool = False,
    spread: float | None = None,
    **overrides: Any,
) -> nn.Module:
    """The tiny model `name`, shared between the callers with equal arguments unless `fresh`.

    `overrides` replace entries of its configuration. Only the default seed and spread of the
    default configuration have the margin guard (see `zoo_configs`).
    """
    seed = SEEDS[name] if seed is None else seed
    spread = SPREAD[name] if spread is None else spread
    arguments = (name, seed, dtype, spread, json.dumps(overrides, sort_keys=True))
    return _build(*arguments) if fresh else _shared(*arguments)


def _build(name: str, seed: int, dtype: mx.Dtype, spread: float, overrides: str) -> nn.Module:
    config = json.loads(json.dumps(CONFIGS[name]))  # some models edit the dicts they are given
    config.get("text_config", config).update(json.loads(overrides))
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    casts = getattr(model, "cast_predicate", lambda path: True)

    def redraw(path: str, weight: mx.array) -> mx.array:
        if not mx.issubdtype(weight.dtype, mx.floating):  # packed codes
            return mx.random.randint(0, 2**31 - 1, weight.shape).astype(weight.dtype) * 2
        if path.endswith((".scales", ".biases")):  # of packed codes: as wide as the others
            step = spread / weight.shape[-1] ** 0.5 / 12.6
            return mx.full(weight.shape, step * (1 if path.endswith("scales") else -1.5), dtype)
        if weight.ndim >= 2 and "A_log" not in path:
            weight = mx.random.normal(weight.shape) * (spread / weight.shape[-1] ** 0.5)
        return weight.astype(dtype if casts(path) else mx.float32)

    weights = [(path, redraw(path, weight)) for path, weight in tree_flatten(model.parameters())]
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


_shared = functools.cache(_build)


# --- plain decoding --------------------------------------------------------------------------


class Reference(NamedTuple):
    """What stock greedy decoding makes of a prompt: n token ids and n rows of logprobs [V]."""

    tokens: list[int]
    logprobs: list[mx.array]


# By the identity of the model, which is kept here so that the identity stays its own.
_references: dict[tuple[int, tuple[int, ...], int], tuple[nn.Module, Reference]] = {}


def reference(model: str | nn.Module, prompt: Sequence[int], n: int) -> Reference:
    """`n` greedy steps of `mlx_lm.generate.generate_step` on a fresh cache; remembered."""
    if isinstance(model, str):
        model = build(model)
    key = (id(model), tuple(prompt), n)
    if key not in _references:
        steps = list(generate_step(mx.array(prompt), model, max_tokens=n))
        result = Reference([token for token, _ in steps], [logprobs for _, logprobs in steps])
        _references[key] = (model, result)
    return _references[key][1]


def feed(model: nn.Module, tokens: Sequence[int]) -> list[Any]:
    """A fresh cache of `model`, fed `tokens` one at a time."""
    cache = make_prompt_cache(model)
    for token in tokens:
        mx.eval(model(mx.array([[token]]), cache=cache), [c.state for c in cache])
    return cache


def prefill(model: nn.Module, prompt: Sequence[int]) -> list[Any]:
    """A fresh cache, fed `prompt` as stock decoding does: the last token on its own."""
    cache = make_prompt_cache(model)
    for part in (prompt[:-1], prompt[-1:]):
        if part:
            model(mx.array([part]), cache=cache)
    return cache


def windowed(model: Any, tokens: list[int], prompt: int, window: int) -> tuple[mx.array, list[Any]]:
    """Logits [T, V] and cache: `prompt` tokens in one forward, then windows of `window`."""
    cache = make_prompt_cache(model)
    cuts = [0, *range(prompt, len(tokens), window), len(tokens)]
    logits = [model(mx.array([tokens[start:end]]), cache=cache)[0] for start, end in pairwise(cuts)]
    return mx.concatenate(logits), cache


def window_error(model: nn.Module) -> float:
    """How far the logits of windows are from those of single steps, relative to the largest."""
    tokens = [(5 * i * i + 11 * i + 3) % VOCAB for i in range(60)]
    steps, _ = windowed(model, tokens, 1, 1)
    blocks = (windowed(model, tokens, *cuts)[0] for cuts in ((1, 2), (7, 5), (40, 8), (60, 1)))
    finite = mx.abs(steps) < mx.inf  # ids that a model rules out have logits of -inf
    gaps = [mx.where(finite, mx.abs(block - steps), 0).max() for block in blocks]
    return (mx.stack(gaps).max() / mx.where(finite, mx.abs(steps), 0).max()).item()


def guard(model: nn.Module, prompt: Sequence[int]) -> str | None:
    """Why the greedy text after `prompt` is no good for tests; None if it is.

    64 tokens have at least 12 different ones and no two best logits closer than 0.01, and one
    forward over all of them says the same: a token that differs is then a bug, not a near-tie.
    """
    tokens, logprobs = reference(model, prompt, 64)
    if len(set(tokens)) < 12:
        return f"only {len(set(tokens))} different tokens"
    ordered = mx.sort(mx.stack(logprobs), axis=-1)
    gap = (ordered[:, -1] - ordered[:, -2]).min().item()
    if not gap > 0.01:
        return f"two best logits {gap:.2g} apart"
    block = model(mx.array([[*prompt, *tokens[:-1]]]), cache=make_prompt_cache(model))[0]
    if mx.argmax(block[len(prompt) - 1 :], axis=-1).tolist() != tokens:
        return "one forward has other best tokens"
    return None


# --- cache state -----------------------------------------------------------------------------


def state(cache: Sequence[Any]) -> list[tuple[str, mx.array]]:
    """Labelled arrays of every cache, in time order and cut to what is valid and visible.

    A ring shows its kept first entries and then the newest, `min(offset, max_size)` in all; a
    chunked cache its newest `min(held, chunk_size)`: how many older ones a buffer still holds
    depends on how the tokens were grouped, and no query can see them. An empty slot shows as an
    array of size 0.
    """
    return [
        (f"layer {i} {label}", array)
        for i, layer in enumerate(cache)
        for label, array in _state_of(layer)
    ]


def _state_of(cache: Any) -> Iterator[tuple[str, mx.array]]:
    name = type(cache).__name__
    if isinstance(cache, CacheList):
        for i, child in enumerate(cache.caches):
            for label, array in _state_of(child):
                yield f"{name}[{i}] {label}", array
    elif isinstance(cache, ArraysCache):
        for i, slot in enumerate(cache.cache):
            yield f"{name} slot {i}", mx.array([]) if slot is None else slot
    elif name == "LayerCache":  # of deepseek_v41: attributes that are arrays or None
        for slot, value in vars(cache).items():
            if isinstance(value, mx.array | int | None):
                yield f"{name} {slot}", mx.array([] if value is None else value)
    else:
        yield f"{name} offset", mx.array(cache.offset)
        if cache.keys is not None:
            order = mx.array(_visible(cache))
            for side in ("keys", "values"):
                for path, array in tree_flatten({side: getattr(cache, side)}):
                    yield f"{name} {path}", mx.take(array, order, axis=2)


def _visible(cache: Any) -> list[int]:
    """Positions of the visible entries in the buffer of an attention cache, oldest first."""
    if isinstance(cache, RotatingKVCache):
        size, index, keep = cache.keys.shape[2], cache._idx, cache.keep
        if index < cache.offset:  # wrapped: the oldest entry sits at the index
            order = [*range(keep), *range(index, size), *range(keep, index)]
        else:
            order = list(range(index))
        excess = max(0, len(order) - min(cache.offset, cache.max_size))
        return order[:keep] + order[keep + excess :] if excess else order
    if isinstance(cache, ChunkedKVCache):
        end = cache.offset - cache.start_position
        return list(range(max(0, end - cache.chunk_size), end))
    if isinstance(cache, KVCache | QuantizedKVCache | ConcatenateKVCache):
        return list(range(cache.offset))
    raise TypeError(f"zoo.state cannot read a {type(cache).__name__}")


def assert_state_equal(a: Sequence[Any], b: Sequence[Any], tol: float = 0.0) -> None:
    """Fail, naming layer, class, slot and distance, unless two prompt caches hold the same.

    Offsets, shapes and dtypes must be equal; floating-point numbers may differ by `tol` times the
    largest magnitude of their array (or times 1, if that is more): at 0 by nothing.
    """
    ours, theirs = state(a), state(b)
    assert [label for label, _ in ours] == [label for label, _ in theirs]
    mx.eval(ours, theirs)
    problems = [
        f"{label}: {problem}"
        for (label, x), (_, y) in zip(ours, theirs, strict=True)
        if (problem := difference(x, y, tol))
    ]
    assert not problems, "caches differ\n  " + "\n  ".join(problems)


def difference(x: mx.array, y: mx.array, tol: float) -> str | None:
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"{x.dtype}{list(x.shape)} against {y.dtype}{list(y.shape)}"
    if x.size == 0 or mx.array_equal(x, y, equal_nan=True):
        return None
    distance = mx.abs(x.astype(mx.float32) - y.astype(mx.float32)).max().item()
    if mx.issubdtype(x.dtype, mx.floating):
        largest = max(1.0, mx.abs(y).max().item())
        if distance <= tol * largest:  # never of a nan
            return None
        return f"max abs difference {distance:.3g}, largest magnitude {largest:.3g}"
    return f"max abs difference {distance:.3g}"


# --- a drafter on demand ---------------------------------------------------------------------


class Call(NamedTuple):
    """One call of a drafter: tokens already generated, tokens asked for, tokens given."""

    position: int
    num_draft_tokens: int
    proposed: list[int]


class Scripted:
    """A drafter that is right exactly as often as planned.

    `reference_tokens` is the continuation of a prompt of `prompt_length` tokens. Each call takes
    the next entry of the cycled `plan`: a number r gives r right tokens and wrong ones after
    them, None gives no proposal. Proposals stop where the reference ends.
    """

    def __init__(
        self,
        reference_tokens: Sequence[int],
        plan: Sequence[int | None],
        vocab: int = VOCAB,
        *,
        prompt_length: int,
    ) -> None:
        self.reference = list(reference_tokens)
        self.plan = list(plan)
        self.vocab = vocab
        self.prompt_length = prompt_length
        self.calls: list[Call] = []

    def propose(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
        generated = list(tokens[self.prompt_length :])
        position = len(generated)
        assert generated == self.reference[:position], "the text has left the reference"
        right = self.plan[len(self.calls) % len(self.plan)]
        upcoming = self.reference[position : position + num_draft_tokens]
        proposed = [] if right is None else [self._draft(*x, right) for x in enumerate(upcoming)]
        self.calls.append(Call(position, num_draft_tokens, proposed))
        return proposed

    def _draft(self, i: int, token: int, right: int) -> int:
        """The true token, then its successor, then tokens further and further off."""
        return token if i < right else (token + 1 + i - right) % self.vocab
