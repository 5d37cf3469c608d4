"""One benchmark: plain decoding, windows, commits, and every drafter with every draft length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step as stock_generate_step

from ..generate import generate_step
from .measure import (
    LONGEST,
    Stretch,
    Windows,
    dealt,
    decode,
    in_turn,
    ratio,
    seconds_per_token,
    window_tasks,
)
from .memory import Memory, compare
from .record import Clock
from .trials import (
    AutoTrial,
    Case,
    Chosen,
    DrafterFor,
    Prompt,
    Run,
    Stock,
    StockTrial,
    Trial,
    auto_of,
)


@dataclass(frozen=True)
class Subject:
    """What is measured.

    drafters    kind -> drafter; None from it where the drafter has nothing to say to a case
    ends        token ids that end a text
    """

    model: nn.Module
    prompts: Sequence[Prompt]
    drafters: Mapping[str, DrafterFor]
    ends: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Settings:
    """How it is measured.

    lengths         draft tokens per round to try
    memory_tokens   tokens after which memory is compared; 0: not at all
    against_stock   measure mlx-lm's own speculative decoding too
    """

    lengths: tuple[int, ...] = (1, 2, 4, 8)
    max_tokens: int = 64
    repeats: int = 5
    memory_tokens: int = 64
    against_stock: bool = False


@dataclass
class Result:
    """What was measured. Costs are in units of a plain step of our loop.

    plain       seconds per token of our loop without a drafter, by turn
    stock       those of mlx_lm.generate_step
    verify      tokens of a window -> cost of its forward
    commit      tokens kept of a window of `window` -> cost of the commit
    auto        `Auto` over all drafters, None without any
    against     mlx-lm's own speculative decoding
    """

    plain: list[float]
    stock: list[float]
    verify: dict[int, float]
    commit: dict[int, float]
    window: int
    memory: Memory | None
    runs: list[Run] = field(default_factory=list)
    auto: Chosen | None = None
    against: list[Stock] = field(default_factory=list)

    @property
    def plain_over_mlx_lm(self) -> float:
        """The ratio of speeds."""
        return ratio(self.stock, self.plain)

    @property
    def full_commit(self) -> float:
        return self.commit[self.window]

    @property
    def reject_commit(self) -> float:
        """The mean over all counts that keep something and reject something."""
        rejecting = [cost for kept, cost in self.commit.items() if kept < self.window]
        return sum(rejecting) / len(rejecting)

    @property
    def best(self) -> Run | None:
        return max(self.runs, key=lambda run: run.speed, default=None)


def measure(
    subject: Subject, settings: Settings, clock: Clock, done: Callable[[str], None]
) -> Result:
    """Runs the benchmark.

    done    called with the stage after every part of it, for a progress bar

    Raises ValueError if no prompt has a text of two tokens, and what generation raises.
    """
    cases = [case for case in _cases(subject, settings) if len(case.text) > 1]
    if not cases:
        raise ValueError("every text ends with its first token; give other prompts")
    trials = list(_trials(subject, settings, cases, clock, done))
    texts: dict[tuple[Any, Any], Callable[[], Any]] = {}
    for i, case in enumerate(cases):
        for way in (_STOCK, _PLAIN):
            texts[way, i] = _plain(subject, case, way, clock)
        for t, trial in enumerate(trials):
            if i in trial.rounds:
                texts[t, i] = trial.timed(case, clock)
    tasks = dealt(_windows(subject, settings, cases[0], clock), texts)
    times = in_turn(tasks, settings.repeats, lambda: done("times"))
    plain, stock = (
        seconds_per_token([times[way, i] for i in range(len(cases))]) for way in (_PLAIN, _STOCK)
    )
    verify, commit = (
        {size: ratio(found, plain) for (name, size), found in times.items() if name == wanted}
        for wanted in ("verify", "commit")
    )
    result = Result(
        plain,
        stock,
        verify,
        commit,
        window=max(settings.lengths) + 1,
        memory=_memory(subject, settings, cases[0]),
    )
    for t, trial in enumerate(trials):
        stretches = {i: times[t, i] for i in trial.rounds}
        if isinstance(trial, StockTrial):
            result.against.append(trial.outcome(plain, stretches))
        elif isinstance(trial, AutoTrial):
            result.auto = trial.outcome(plain, stretches)
        else:
            result.runs.append(trial.run(plain, result.verify, cases, stretches))
    return result


_PLAIN, _STOCK = "plain", "mlx_lm"


def _cases(subject: Subject, settings: Settings) -> Iterator[Case]:
    """Every prompt with its text, up to an end token or the budget."""
    for prompt in subject.prompts:
        text = []
        steps = stock_generate_step(
            mx.array(prompt.tokens), subject.model, max_tokens=settings.max_tokens
        )
        for token, _ in steps:
            text.append(int(token))
            if token in subject.ends:
                break
        yield Case(prompt, text)


def _windows(
    subject: Subject, settings: Settings, case: Case, clock: Clock
) -> dict[tuple[str, int], Callable[[], float]]:
    windows = Windows(subject.model, case.prompt.tokens, case.text, clock)
    whole = max(settings.lengths) + 1
    return window_tasks(windows, range(1, max(LONGEST, whole) + 1), whole)


def _plain(subject: Subject, case: Case, way: str, clock: Clock) -> Callable[[], Stretch]:
    prompt, count = case.prompt.tokens, len(case.text)

    def run() -> Stretch:
        steps: Any
        if way == _STOCK:
            steps = stock_generate_step(mx.array(prompt), subject.model, max_tokens=count + 1)
        else:
            steps = generate_step(prompt, subject.model, max_tokens=count + 1)
        return decode(steps, count, clock)

    return run


def _memory(subject: Subject, settings: Settings, case: Case) -> Memory | None:
    if not settings.memory_tokens:
        return None
    prompt, longest = case.prompt.tokens, max(settings.lengths)
    return compare(subject.model, prompt, settings.memory_tokens, longest)


def _trials(
    subject: Subject,
    settings: Settings,
    cases: Sequence[Case],
    clock: Clock,
    done: Callable[[str], None],
) -> Iterator[Trial]:
    """Every drafter with every length, and auto, watched once; who guesses nothing is left out."""
    kinds: list[type[Trial]] = [Trial, StockTrial] if settings.against_stock else [Trial]
    model, auto_for = subject.model, auto_of(subject.drafters.values())
    trials: list[Trial] = [
        kind(model, draft, drafter_for, length)
        for kind in kinds
        for draft, drafter_for in subject.drafters.items()
        for length in settings.lengths
    ]
    for trial in [*trials, AutoTrial(model, "auto", auto_for, max(settings.lengths))]:
        for i, case in enumerate(cases):
            trial.watch(i, case, clock)
            done("drafters")
        if trial.says_something:
            yield trial
