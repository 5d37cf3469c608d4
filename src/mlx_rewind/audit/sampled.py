"""The checks of sampling: draws with a seed, and how often each token is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.sample_utils import make_sampler

from ..generate import generate_step
from ..sampling import ACCEPTANCE, Acceptance, Draws, SamplingParams, draw, gumbel, laws
from .chances import goodness_of_fit
from .judge import Judge, Place
from .records import FAULT
from .rounding import number
from .runs import Plain, Planned, accept_lengths, prefilled
from .state import clone

#: Draws by each rule of acceptance, and the chance of a false alarm that one test takes.
DRAWS, FALSE_ALARM = 200, 1e-6


class Keyed:
    """The keyed draws of `SamplingParams` as a sampler of mlx-lm: one draw after the other."""

    def __init__(self, params: SamplingParams, start: int) -> None:
        self._draws, self._start, self._next = Draws(params, start), start, start

    def __call__(self, logprobs: mx.array) -> mx.array:
        token, _ = draw([(self._draws, self._next)], logprobs)
        self._next += 1
        return token

    def scores(self, logprobs: mx.array, index: int) -> mx.array:
        """What the draw `index` chose the largest of, [V], from logprobs [V]."""
        law = laws([(self._draws, self._start + index)], logprobs[None])[0]
        return law + gumbel([self._draws.key("token", index)], logprobs.size)[0]


class Sampled:
    """Compares draws. mlx's random state is set."""

    def __init__(
        self, model: nn.Module, judge: Judge, vocab_size: int, num_draft_tokens: int, seed: int
    ) -> None:
        self.model, self.judge, self.vocab_size = model, judge, vocab_size
        self.num_draft_tokens, self.seed = num_draft_tokens, seed

    def seeds(self, at: Place, plain: Plain) -> None:
        """Draws with the same seed, plainly and speculatively: with a sampler of mlx-lm on mlx's
        random state, and with keyed draws."""
        sampler = make_sampler(temp=1.0)
        mx.random.seed(self.seed)
        drawn = Plain.record(self.model, plain.prompt, len(plain.tokens), sampler)
        mx.random.seed(self.seed)
        self._compare(at, drawn, None, sampler=sampler)
        params = SamplingParams(temperature=1.0, seed=self.seed)
        keyed = Keyed(params, len(plain.prompt))
        drawn = Plain.record(self.model, plain.prompt, len(plain.tokens), keyed)
        self._compare(at, drawn, keyed.scores, sampling=params)

    def _compare(
        self,
        at: Place,
        drawn: Plain,
        scores: Callable[[mx.array, int], mx.array] | None,
        **options: Any,
    ) -> None:
        plan = accept_lengths(self.num_draft_tokens)
        steps = generate_step(
            drawn.prompt,
            self.model,
            drafter=Planned(drawn.tokens, plan, len(drawn.prompt), self.vocab_size),
            num_draft_tokens=self.num_draft_tokens,
            max_tokens=len(drawn.tokens),
            **options,
        )
        for position, (token, logprobs, _) in enumerate(steps):
            if self.judge.draw(at, drawn, position, token, logprobs, scores):
                break

    def distribution(self, at: Place, plain: Plain) -> None:
        """Draws two tokens many times, the likeliest one drafted, and compares how often each came
        with the target's probabilities: chi-square tests for every rule of acceptance."""
        temperature = _temperature(plain.logprobs[0])
        laws_of = [_law(logprobs, temperature) for logprobs in plain.logprobs[:2]]
        cache = prefilled(self.model, plain.prompt)
        for turn, acceptance in enumerate(ACCEPTANCE):
            firsts: Counter[int] = Counter()
            seconds: Counter[int] = Counter()
            for i in range(DRAWS):
                seed = self.seed + turn * DRAWS + i
                params = SamplingParams(temperature=temperature, seed=seed % 2**64)
                first, second = self._two(plain, params, acceptance, cache)
                firsts[first] += 1
                if first == plain.tokens[0]:
                    seconds[second] += 1
            for position, counts in enumerate((firsts, seconds)):
                self._fit(at, position, counts, laws_of[position], acceptance)

    def _two(
        self, plain: Plain, params: SamplingParams, acceptance: Acceptance, cache: list[Any]
    ) -> list[int]:
        steps = generate_step(
            plain.prompt[-1:],
            self.model,
            drafter=Planned(plain.tokens[:1], [1], 1, self.vocab_size),
            num_draft_tokens=1,
            max_tokens=2,
            sampling=params,
            acceptance=acceptance,
            prompt_cache=clone(cache),
        )
        return [token for token, *_ in steps]

    def _fit(
        self, at: Place, position: int, counts: Counter[int], law: list[float], acceptance: str
    ) -> None:
        chance, bins = goodness_of_fit([counts[token] for token in range(len(law))], law)
        at.check.tokens += counts.total()
        at.check.notes.append(
            f"{acceptance}, token {position + 1}: {counts.total()} draws in {bins} bins, chance "
            f"{chance:.2g}"
        )
        if chance < FALSE_ALARM:
            detail = f"{acceptance}: the tokens drawn are not of the target's law ({chance:.0e})"
            at.add(FAULT, position, detail)


def _temperature(logprobs: mx.array) -> float:
    """A power of two at which about half of the draws are the likeliest token."""
    powers = [2.0**n for n in range(-4, 7)]
    best = [number(mx.softmax(logprobs.astype(mx.float32) / power).max()) for power in powers]
    return min(zip(powers, best, strict=True), key=lambda pair: abs(pair[1] - 0.5))[0]


def _law(logprobs: mx.array, temperature: float) -> list[float]:
    law: Any = mx.softmax(logprobs.astype(mx.float32) / temperature).tolist()
    return law
