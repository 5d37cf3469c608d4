"""The runs that are compared: plain decoding by mlx-lm, and a drafter that errs as planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

#: Prompt tokens per forward: mlx-lm's default.
PREFILL = 2048

Sampler = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class Plain:
    """What mlx-lm's own `generate_step` makes of a prompt: n tokens, each with

    logits      [V] in the model's dtype, what the token was chosen from
    logprobs    [V]
    """

    prompt: list[int]
    tokens: list[int]
    logits: list[mx.array]
    logprobs: list[mx.array]

    @classmethod
    def record(
        cls, model: nn.Module, prompt: Sequence[int], count: int, sampler: Sampler | None = None
    ) -> Plain:
        rows: list[mx.array] = []

        def note(tokens: mx.array, logits: mx.array) -> mx.array:
            rows.append(logits[0])
            return logits

        steps: Any = list(
            generate_step(
                mx.array(list(prompt)),
                model,
                max_tokens=count,
                sampler=sampler,
                logits_processors=[note],
            )
        )
        tokens, logprobs = [token for token, _ in steps], [row for _, row in steps]
        mx.eval(rows, logprobs)
        return cls(list(prompt), tokens, rows[:count], logprobs)


class Walk:
    """Plain decoding once more, token by token, for its caches.

    cache       mlx-lm's own, mutated by `to`
    logprobs    of the tokens so far
    """

    def __init__(self, model: nn.Module, plain: Plain) -> None:
        self._model, self._prompt = model, plain.prompt
        self.cache: list[Any] = make_prompt_cache(model)
        self.tokens: list[int] = []
        self.logprobs: list[mx.array] = []
        self._steps: Any = generate_step(
            mx.array(plain.prompt), model, max_tokens=len(plain.tokens), prompt_cache=self.cache
        )

    def to(self, position: int) -> list[Any]:
        """Caches that hold the prompt and `position` tokens; goes on as far as that, never back.

        mlx-lm feeds a token before it hands it out, so that many have been handed out then. It
        never stands at 0: these caches are filled apart.
        """
        if position == 0:
            return prefilled(self._model, self._prompt, last=True)
        while len(self.tokens) < position:
            token, logprobs = next(self._steps)
            self.tokens.append(token)
            self.logprobs.append(logprobs)
        return self.cache

    def close(self) -> None:
        self._steps.close()


def prefilled(model: nn.Module, prompt: list[int], *, last: bool = False) -> list[Any]:
    """A fresh cache, fed the prompt but for its last token, as mlx-lm does; or that one too."""
    cache: list[Any] = make_prompt_cache(model)
    chunks = [prompt[start:-1][:PREFILL] for start in range(0, len(prompt) - 1, PREFILL)]
    for chunk in [*chunks, *([prompt[-1:]] if last else [])]:
        model(mx.array([chunk]), cache=cache)
        mx.eval([entry.state for entry in cache])
    return cache


@dataclass
class Planned:
    """A drafter that is right as often as planned: the r-th call has plan[r] right tokens, then
    wrong ones. The plan is cycled.

    text    the continuation that plain decoding gives after `prompt_length` tokens
    """

    text: Sequence[int]
    plan: Sequence[int]
    prompt_length: int
    vocab_size: int
    calls: int = field(default=0, init=False)

    def propose(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
        right = self.plan[self.calls % len(self.plan)]
        self.calls += 1
        start = len(tokens) - self.prompt_length
        upcoming = self.text[start : start + num_draft_tokens]
        return [t if i < right else wrong(t, self.vocab_size) for i, t in enumerate(upcoming)]


def wrong(token: int, vocab_size: int, by: int = 1) -> int:
    """Another token."""
    return (token + by) % vocab_size


def accept_lengths(num_draft_tokens: int) -> list[int]:
    """Every number of accepted drafts, low and high in turn: 0, K, 1, K - 1, ..."""
    low, high = 0, num_draft_tokens
    order = []
    while low <= high:
        order += [low, high] if low < high else [low]
        low, high = low + 1, high - 1
    return order


def spread(count: int, length: int) -> Iterator[int]:
    """`count` positions in 1..length, evenly spread."""
    for i in range(count):
        yield 1 + i * max(0, length - 1) // max(1, count - 1)
