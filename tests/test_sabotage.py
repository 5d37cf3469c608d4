"""Breaks the rollback on purpose, in every family, and requires the comparison to notice.

If one of these passes unnoticed, the tests of exactness prove nothing.
"""

from collections.abc import Callable
from typing import Any

import pytest

import zoo
from mlx_rewind import UnsupportedCacheError, generate_step
from mlx_rewind.cache import retrace, undo

PROMPT = zoo.PROMPTS[1]
RECURRENT = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "mamba2", "falcon_h1", "kimi_linear"]
Rewind = Callable[[Any, int], None]


def shows(name: str) -> bool:
    """Whether a run with rejections at every depth is refused or differs from plain decoding."""
    expected = zoo.reference(name, PROMPT, 40).tokens
    guesses = {len(PROMPT) + i: expected[i + 1 : i + 5] for i in range(-1, 39)}

    class Drafter:
        rounds = 0

        def propose(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
            right = (2, 0, 3, 1)[self.rounds % 4]
            self.rounds += 1
            guess = guesses[len(tokens) - 1][:num_draft_tokens]
            return [token if i < right else (token + 1) % 97 for i, token in enumerate(guess)]

    try:
        out = list(generate_step(PROMPT, zoo.build(name), drafter=Drafter(), max_tokens=36))
    except UnsupportedCacheError:  # parts of different lengths
        return True
    return [token for token, *_ in out] != expected[:36]


def without(original: Rewind, stale: Callable[[int, int], bool]) -> Rewind:
    """A rewind that leaves slot i of n as the whole window made it, where stale(i, n)."""

    def rewind(self: Any, kept: int) -> None:
        original(self, kept)
        slots = self._cache.cache
        for i in range(len(slots)):
            if stale(i, len(slots)):
                slots[i] = self._after[i]

    return rewind


STALE: dict[str, Callable[[int, int], bool]] = {
    "none": lambda i, n: True,
    "convolution only": lambda i, n: i == n - 1,
    "state only": lambda i, n: i < n - 1 or n == 1,
}


@pytest.mark.parametrize("name", [*RECURRENT, "lfm2"])
def test_the_drafter_of_these_tests_is_sound(name: str) -> None:
    assert not shows(name)


@pytest.mark.parametrize("name", [*RECURRENT, "lfm2"])
@pytest.mark.parametrize("rolled_back", STALE)
def test_half_a_rollback_shows(
    name: str, rolled_back: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = without(retrace.RetraceUndo.rewind, STALE[rolled_back])
    monkeypatch.setattr(retrace.RetraceUndo, "rewind", broken)
    assert shows(name)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_step_too_early_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = retrace.RetraceUndo.rewind
    early: Rewind = lambda self, kept: original(self, max(0, kept - 1))  # noqa: E731
    monkeypatch.setattr(retrace.RetraceUndo, "rewind", early)
    assert shows(name)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", undo.TrimUndo),
        ("llama4_text", undo.TrimUndo),
        ("qwen3_5", undo.TrimUndo),
        ("falcon_h1", undo.TrimUndo),
        ("llama4", undo.ChunkUndo),
        ("gpt_oss", undo.RingUndo),
        ("gemma3_text", undo.RingUndo),
    ],
)
def test_attention_that_is_not_rolled_back_shows(
    name: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "rewind", lambda self, kept: None)
    assert shows(name)
