"""Sampling that drafts cannot change: every draw is a function of seed and position.

    logits -> bias, penalties -> log-softmax -> filters -> / temperature -> + noise -> argmax

The noise of a position is Gumbel noise (`mx.random.gumbel`), keyed by a hash of (seed, purpose,
position), so the draw at a position is the same whatever was drawn before or beside it (the
Gumbel-max trick: argmax(log p + G) is a sample of p). Filters and penalties are mlx-lm's.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    apply_xtc,
    make_logits_processors,
)

#: How draft tokens are accepted; see `accept`.
Acceptance = Literal["match", "rejection", "block"]
ACCEPTANCE: tuple[Acceptance, ...] = ("match", "rejection", "block")

#: Temperatures below this are greedy: their inverse would leave the range of float16.
_COLDEST = 1e-4
#: name -> (lowest, highest) of every number; None may stand for some.
_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0, math.inf),
    "top_p": (0, 1),
    "top_k": (0, math.inf),
    "min_p": (0, 1),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 0.5),
    "seed": (0, 2**64 - 1),
    "repetition_penalty": (0, math.inf),
    "presence_penalty": (-math.inf, math.inf),
    "frequency_penalty": (-math.inf, math.inf),
    "repetition_context_size": (1, math.inf),
    "presence_context_size": (1, math.inf),
    "frequency_context_size": (1, math.inf),
    "min_tokens": (0, math.inf),
    "max_tokens": (-1, math.inf),
    "logprobs": (0, math.inf),
}
_WHOLE = {"top_k", "seed", "min_tokens", "max_tokens", "logprobs"}
_OPTIONAL = {"seed", "max_tokens", "logprobs"}
_OPTIONAL |= {"repetition_penalty", "presence_penalty", "frequency_penalty"}


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Numbers and filters mean what they mean in mlx-lm.

    temperature         0 is greedy
    top_p, top_k, min_p, xtc_probability, xtc_threshold, xtc_special_tokens
                        filters; 0 (and 1 for top_p) leaves one out
    seed                the same seed gives the same text; None draws a fresh one, which is reported
    repetition_penalty, presence_penalty, frequency_penalty
                        over the last `..._context_size` tokens, prompt included
    logit_bias          token id -> what is added to its logit
    min_tokens          end tokens and `stop` take effect only after so many
    max_tokens          tokens to generate, -1 for no limit; None leaves it to the call
    stop                strings that end the text, and ids that end it as an end token does
    logprobs            how many of the best tokens are reported with each token
    raw_logprobs        report logprobs before bias and penalties, not after them as mlx-lm does

    Raises ValueError for a value out of bounds.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: Sequence[int] = ()
    seed: int | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    presence_penalty: float | None = None
    presence_context_size: int = 20
    frequency_penalty: float | None = None
    frequency_context_size: int = 20
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: str | int | Sequence[str | int] = ()
    logprobs: int | None = None
    raw_logprobs: bool = False

    def __post_init__(self) -> None:
        for name, bounds in _BOUNDS.items():
            whole = name in _WHOLE or name.endswith("_context_size")
            _check_number(name, getattr(self, name), bounds, whole)
        one = isinstance(self.stop, (str, int))
        frozen: dict[str, Any] = {
            "stop": (self.stop,) if one else tuple(self.stop),  # type: ignore[arg-type]
            "xtc_special_tokens": tuple(self.xtc_special_tokens),
            "logit_bias": MappingProxyType(_bias(self.logit_bias or {})),
        }
        for name, value in frozen.items():
            object.__setattr__(self, name, value)
        for s in frozen["stop"]:
            if isinstance(s, bool) or not ((isinstance(s, str) and s) or isinstance(s, int)):
                raise ValueError(f"stop must be non-empty strings or token ids, got {s!r}")
        for token in (*self.stop_ids, *self.xtc_special_tokens):
            if not isinstance(token, int) or token < 0:
                raise ValueError(f"token ids must be 0 or more, got {token!r}")

    def __hash__(self) -> int:
        return hash((self.filters, self.penalties, self.seed, self.stop))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(s for s in self._stops if isinstance(s, int))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(s for s in self._stops if isinstance(s, str))

    @property
    def _stops(self) -> tuple[str | int, ...]:
        stop: Any = self.stop
        return stop

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _COLDEST

    @property
    def filters(self) -> tuple[Any, ...]:
        """What decides the law of a draw; rows in which it is equal are drawn in one operation."""
        if self.is_greedy:
            return ()
        xtc = self.xtc_probability, self.xtc_threshold, self.xtc_special_tokens
        return (self.temperature, self.top_p, self.top_k, self.min_p, xtc)

    @property
    def penalties(self) -> tuple[Any, ...]:
        """What changes logits; empty if nothing does."""
        each = [
            (self.repetition_penalty or None, self.repetition_context_size),
            (self.presence_penalty or None, self.presence_context_size),
            (self.frequency_penalty or None, self.frequency_context_size),
        ]
        bias = tuple((self.logit_bias or {}).items())
        return (bias, *each) if bias or any(penalty for penalty, _ in each) else ()

    def check_vocab(self, size: int) -> None:
        """Raises ValueError for what a vocabulary of `size` entries does not have."""
        if not self.is_greedy and self.top_k >= size:
            raise ValueError(f"top_k must be below the vocabulary size, {size}, got {self.top_k}")
        ids = {
            "logit_bias": tuple(self.logit_bias or {}),
            "stop": self.stop_ids,
            "xtc_special_tokens": self.xtc_special_tokens,
        }
        for name, tokens in ids.items():
            if max(tokens, default=0) >= size:
                raise ValueError(f"{name} has token {max(tokens)}; the model's end at {size - 1}")


def _check_number(name: str, value: Any, bounds: tuple[float, float], whole: bool) -> None:
    if value is None and name in _OPTIONAL:
        return
    low, high = bounds
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or math.isinf(value):
        kind = "a whole number" if whole else "a number"
        limits = f"of {low:g} or more" if high == math.inf else f"within {low:g}..{high:g}"
        limits = "" if low == -math.inf else f" {limits}"
        raise ValueError(f"{name} must be {kind}{limits}, got {value!r}")


def _bias(given: Mapping[int, float]) -> dict[int, float]:
    try:
        bias = {int(token): float(value) for token, value in given.items()}
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"logit_bias must map token ids to numbers, got {given!r}") from None
    for token, value in bias.items():
        if token < 0 or math.isnan(value):
            raise ValueError(f"logit_bias must map token ids to numbers, got {token}: {value}")
    return bias


class Draws:
    """The draws of one row.

    params      its sampling parameters
    start       tokens before the first draw: position p of the row is draw p - start
    acceptance  how drafts are accepted
    ends        ids that are not drawn before `min_tokens`
    """

    def __init__(
        self,
        params: SamplingParams,
        start: int,
        acceptance: Acceptance = "match",
        ends: frozenset[int] = frozenset(),
    ) -> None:
        if acceptance not in ACCEPTANCE:
            raise ValueError(f"acceptance must be match, rejection or block, got {acceptance!r}")
        self.params, self.start, self.ends = params, start, ends
        self.acceptance: Acceptance = "match" if params.is_greedy else acceptance
        self.seed = secrets.randbits(48) if params.seed is None else params.seed

    # -- noise ----------------------------------------------------------------------------------

    def key(self, purpose: str, *at: int) -> list[int]:
        """Two 32-bit words that depend on nothing but seed, purpose and place."""
        text = f"{self.seed}/{purpose}/{'/'.join(map(str, at))}"
        word = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        return [word >> 32, word & 0xFFFFFFFF]

    def uniform(self, purpose: str, *at: int) -> float:
        """A number in [0, 1)."""
        high, low = self.key(purpose, *at)
        return float(((high << 32 | low) >> 11) * 2.0**-53)

    # -- logits ---------------------------------------------------------------------------------

    @cached_property
    def _processors(self) -> list[Callable[[mx.array, mx.array], mx.array]]:
        p = self.params
        return make_logits_processors(
            dict(p.logit_bias or {}),
            p.repetition_penalty,
            p.repetition_context_size,
            p.presence_penalty,
            p.presence_context_size,
            p.frequency_penalty,
            p.frequency_context_size,
        )

    @property
    def reach(self) -> int:
        """Tokens before a position that its penalties look at."""
        sizes = (size for penalty, size in self.params.penalties[1:] if penalty)
        return max(sizes, default=0)

    def penalised(self, logits: mx.array, history: mx.array) -> mx.array:
        """Logits [1, V] after bias and penalties; history [>= reach] ends before their position."""
        for processor in self._processors if self.params.penalties else ():
            logits = processor(history, logits)
        return logits

    def bans(self, position: int) -> bool:
        """Whether `min_tokens` forbids end tokens at a position of the row."""
        return bool(self.ends) and position - self.start < self.params.min_tokens

    def without_ends(self, logits: mx.array) -> mx.array:
        """Logits [1, V] without end tokens, unless a constraint allows nothing else."""
        ends = mx.array(sorted(self.ends), mx.int32)
        others = mx.put_along_axis(logits, ends[None], mx.array(-mx.inf, logits.dtype), axis=-1)
        return mx.where(others.max() == -mx.inf, logits, others)


def draws_of(
    params: SamplingParams | None,
    acceptance: Acceptance,
    start: int,
    ends: Iterable[int] = (),
) -> Draws | None:
    """The draws of a row whose prompt has `start` tokens; None without parameters.

    Raises ValueError for an acceptance rule that needs the law of the target where it is not known.
    """
    if params is not None:
        return Draws(params, start, acceptance, frozenset(ends) | frozenset(params.stop_ids))
    if acceptance != "match":
        raise ValueError(f"acceptance {acceptance!r} needs sampling=SamplingParams(...)")
    return None


#: One draw: whose, and at which position of the row. None is greedy.
Draw = tuple[Draws, int] | None
#: The key of the noise of a draw.
Key = Callable[[Draws, int], list[int]]


def _token_key(own: Draws, position: int) -> list[int]:
    return own.key("token", position - own.start)


def laws(draws: Sequence[tuple[Draws, int]], logprobs: mx.array) -> mx.array:
    """Filters and temperature: unnormalised log-probabilities [n, V] that draws are made from.

    draws       [n], all of the same `SamplingParams.filters`
    logprobs    [n, V]
    """
    params = draws[0][0].params
    if 0 < params.top_p < 1:
        logprobs = apply_top_p(logprobs, params.top_p)
    if params.min_p:
        logprobs = apply_min_p(logprobs, params.min_p)
    if params.xtc_probability:
        lots = [own.uniform("xtc", at - own.start) for own, at in draws]
        hit = mx.array([lot < params.xtc_probability for lot in lots])[:, None]
        special = list(params.xtc_special_tokens)
        logprobs = mx.where(hit, _xtc(logprobs, params.xtc_threshold, special), logprobs)
    if params.top_k:
        logprobs = apply_top_k(logprobs, params.top_k)
    return logprobs * (1.0 / params.temperature)


def _xtc(logprobs: mx.array, threshold: float, special: list[int]) -> mx.array:
    """mlx-lm's filter with its own coin always won."""
    return apply_xtc(logprobs, 1.0, threshold, special)


def gumbel(keys: Sequence[list[int]], size: int) -> mx.array:
    """Noise [n, size] from n keys."""
    noise: Callable[[mx.array], mx.array] = mx.vmap(lambda key: mx.random.gumbel((size,), key=key))
    return noise(mx.array(list(keys), mx.uint32))


def draw(
    draws: Sequence[Draw], logprobs: mx.array, key: Key = _token_key, vocab: int | None = None
) -> tuple[mx.array, list[tuple[list[int], mx.array]]]:
    """Draws one token per row of logprobs [n, V], those of equal filters in one operation.

    key      of the noise; by default that of the target's own draw at the position
    vocab    entries that the noise goes over, if they are more than V

    Returns the tokens [n], and for each kind of filters the rows and their laws [rows, V].
    """
    alike: dict[Any, list[int]] = {}
    for i, each in enumerate(draws):
        alike.setdefault(each[0].params.filters if each else (), []).append(i)
    parts, order, kinds = [], [], []
    for filters, members in alike.items():
        some = logprobs if len(alike) == 1 else logprobs[mx.array(members)]
        if filters:
            own: Any = [draws[i] for i in members]
            some = laws(own, some)
            kinds.append((members, some))
            size = some.shape[-1]
            some = some + gumbel([key(*each) for each in own], vocab or size)[:, :size]
        parts.append(mx.argmax(some, axis=-1))
        order += members
    if len(parts) == 1:
        return parts[0], kinds
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return mx.concatenate(parts)[mx.array(inverse)], kinds


def top_logprobs(logprobs: mx.array, count: int) -> list[tuple[int, float]]:
    """The `count` best (id, logprob) of logprobs [V], best first; ties by the lower id."""
    count = min(count, logprobs.size)
    if not count:
        return []
    best: Any = mx.argsort(-logprobs)[:count]
    values: Any = logprobs[best].tolist()
    return list(zip(best.tolist(), values, strict=True))
