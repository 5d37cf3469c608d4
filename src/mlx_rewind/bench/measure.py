"""Times, measured in turn so that a busy machine slows all of them alike. Seconds throughout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..cache.round import Round
from .record import Clock

Key = TypeVar("Key")
Value = TypeVar("Value")

#: The longest window whose time is measured, in tokens.
LONGEST = 16


@dataclass(frozen=True)
class Stretch:
    """The timed part of a generation: what came after its first round.

    The first round is left out since it also reads the prompt, in the drafter too.
    """

    tokens: int
    seconds: float


def decode(steps: Iterable[tuple[Any, ...]], clock: Clock) -> Stretch:
    """Takes all tokens of a generation; steps yields (token, logprobs, from_draft if it tells)."""
    begun: float | None = None
    tokens, end = 0, 0.0
    for _, _, *from_draft in steps:
        end = clock()
        if begun is not None:
            tokens += 1
        elif not any(from_draft):  # the target's own token ends a round
            begun = end
    mx.synchronize()  # mlx-lm computes one token more than it yields
    return Stretch(tokens, 0.0 if begun is None else end - begun)


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
            if turn:
                results[key].append(result)
            done()
    return results


def seconds_per_token(stretches: Sequence[Sequence[Stretch]]) -> float:
    """From the repeats of every prompt: the sum of the medians over the sum of the tokens."""
    tokens = sum(repeats[0].tokens for repeats in stretches)
    return sum(median(one.seconds for one in repeats) for repeats in stretches) / max(1, tokens)


class Windows:
    """Windows fed to a model after a prompt.

    prompt    token ids
    text      token ids that the windows are made of, from its start, again and again
    """

    def __init__(
        self, model: nn.Module, prompt: Sequence[int], text: Sequence[int], clock: Clock
    ) -> None:
        self._model, self._clock = model, clock
        self._text = list(islice(cycle(text), LONGEST))
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

    def kept_bytes(self, size: int) -> int:
        """What a round of `size` tokens holds until it ends, its logits included."""
        with Round(self._model, self.cache) as window:
            logits = self._model(mx.array([self._text[:size]]), cache=self.cache)
            mx.eval(logits, [entry.state for entry in self.cache])
            open_ = mx.get_active_memory()
            window.commit(size)
            del logits
            self._settle()
            return open_ - mx.get_active_memory()

    def _feed(self, size: int) -> float:
        begun = self._clock()
        logits = self._model(mx.array([self._text[:size]]), cache=self.cache)
        mx.eval(logits, [entry.state for entry in self.cache])
        return self._clock() - begun

    def _settle(self) -> None:
        mx.eval([entry.state for entry in self.cache])


def window_times(
    windows: Windows,
    sizes: Iterable[int],
    draft_tokens: int,
    repeats: int,
    done: Callable[[], None] = lambda: None,
) -> tuple[dict[int, float], dict[int, float]]:
    """Times of a forward by the size of the window, and of a commit by the tokens kept.

    The commits are of windows of `draft_tokens` + 1 tokens.
    """
    tasks: dict[tuple[str, int], Callable[[], float]] = {}
    for size in sizes:
        tasks["verify", size] = lambda size=size: windows.verify(size)  # type: ignore[misc]
    whole = draft_tokens + 1
    for kept in range(1, whole + 1):
        tasks["commit", kept] = lambda kept=kept: windows.commit(whole, kept)  # type: ignore[misc]
    times = {key: median(found) for key, found in in_turn(tasks, repeats, done).items()}
    return tuple(  # type: ignore[return-value]
        {size: time for (name, size), time in times.items() if name == wanted}
        for wanted in ("verify", "commit")
    )
