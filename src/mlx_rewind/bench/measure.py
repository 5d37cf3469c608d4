"""Times, measured in turn so that a busy machine slows all of them alike. Seconds throughout."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ..cache.round import Round
from .record import Clock

Key = TypeVar("Key")
Value = TypeVar("Value")

#: Windows of 1 to so many tokens are timed, or more if longer ones are asked for.
LONGEST = 16


@dataclass(frozen=True)
class Stretch:
    """The timed part of a generation: what came after its first round.

    The first round is left out since it also reads the prompt, in the drafter too.
    """

    tokens: int
    seconds: float


def decode(steps: Iterable[tuple[Any, ...]], count: int, clock: Clock) -> Stretch:
    """Takes `count` tokens of a generation; steps yields (token, logprobs, from_draft if it tells).

    A step may be launched before the token of the one before it goes out. Ask for one token more
    than `count` where that is so: else the last step was computed within the time of another.
    """
    begun: float | None = None
    tokens, end = 0, 0.0
    for _, _, *from_draft in islice(steps, count):
        end = clock()
        if begun is not None:
            tokens += 1
        elif not any(from_draft):  # the target's own token ends a round
            begun = end
    return Stretch(tokens, 0.0 if begun is None else end - begun)


def dealt(*decks: Mapping[Any, Value]) -> dict[Any, Value]:
    """All entries, those of each mapping spread evenly: what is compared is measured close by."""
    places = [
        ((i + 0.5) / len(deck), key, value)
        for deck in decks
        for i, (key, value) in enumerate(deck.items())
    ]
    return {key: value for _, key, value in sorted(places, key=lambda place: place[0])}


def in_turn(
    tasks: Mapping[Key, Callable[[], Value]],
    repeats: int,
    done: Callable[[], None] = lambda: None,
) -> dict[Key, list[Value]]:
    """Runs every task once for nothing, then all of them in turn, `repeats` times.

    done    called after every task
    """
    results: dict[Key, list[Value]] = {key: [] for key in tasks}
    for turn in range(repeats + 1):
        for key, task in tasks.items():
            result = task()
            mx.synchronize(generation_stream)  # a step may have been launched ahead
            if turn:
                results[key].append(result)
            done()
    return results


def seconds_per_token(stretches: Sequence[Sequence[Stretch]]) -> list[float]:
    """By turn: the time of all prompts over their tokens. One sequence of turns per prompt."""
    return [
        sum(one.seconds for one in turn) / max(1, sum(one.tokens for one in turn))
        for turn in zip(*stretches, strict=True)
    ]


def ratio(times: Sequence[float], units: Sequence[float]) -> float:
    """The median over the turns of what was measured in the same turn; 0 for no time at all."""
    return median(time / unit if unit else 0.0 for time, unit in zip(times, units, strict=True))


def active_memory() -> int:
    """Bytes in use by arrays, with nothing left over that is only waiting to be freed."""
    gc.collect()
    mx.synchronize(generation_stream)
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


class Windows:
    """Windows fed to a model after a prompt.

    prompt    token ids
    text      token ids that the windows are made of, from its start, again and again
    """

    def __init__(
        self, model: nn.Module, prompt: Sequence[int], text: Sequence[int], clock: Clock
    ) -> None:
        self._model, self._clock = model, clock
        self._text = list(text)
        self.cache = make_prompt_cache(model)
        model(mx.array([list(prompt)]), cache=self.cache)
        self._settle()

    def verify(self, size: int) -> float:
        """The time of a forward over `size` tokens, which are taken back."""
        with Round(self._model, self.cache):
            seconds = self._feed(size)
        self._settle()
        return seconds

    def commit(self, size: int, kept: int) -> float:
        """The time of keeping `kept` of `size` tokens, when they have been computed."""
        with Round(self._model, self.cache) as window:
            self._feed(size)
            begun = self._clock()
            window.commit(kept)
            self._settle()
            return self._clock() - begun

    def records(self, size: int) -> int:
        """The bytes that rounds of `size` tokens add to caches that were fed single tokens.

        The growth of the caches is included, and logits and logprobs. A second round is looked at,
        since a ring is longer after a window.
        """
        self._feed(1)
        before = active_memory()
        for _ in range(2):
            with Round(self._model, self.cache) as window:
                logits = self._model(self._window(size), cache=self.cache)
                logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
                mx.eval(logprobs, [entry.state for entry in self.cache])
                added = active_memory() - before
                window.commit(size)
        return added

    def _feed(self, size: int) -> float:
        begun = self._clock()
        logits = self._model(self._window(size), cache=self.cache)
        mx.eval(logits, [entry.state for entry in self.cache])
        return self._clock() - begun

    def _window(self, size: int) -> mx.array:
        return mx.array([list(islice(cycle(self._text), size))])

    def _settle(self) -> None:
        mx.eval([entry.state for entry in self.cache])


def window_tasks(
    windows: Windows, sizes: Iterable[int], whole: int
) -> dict[tuple[str, int], Callable[[], float]]:
    """("verify", tokens of a window) and ("commit", tokens kept of `whole`): what times them."""
    verifies = {("verify", size): partial(windows.verify, size) for size in sizes}
    counts = range(1, whole + 1)
    commits = {("commit", kept): partial(windows.commit, whole, kept) for kept in counts}
    return {name: partial(_steadied, task) for name, task in {**verifies, **commits}.items()}


def _steadied(task: Callable[[], float]) -> float:
    """The median of a few, for what is much shorter than the decoding that it is compared with."""
    return median(task() for _ in range(3))
