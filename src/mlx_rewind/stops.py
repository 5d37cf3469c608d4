"""When a text ends: end tokens, stop strings, the budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .sampling import SamplingParams


class StopStrings:
    """Holds back text that may be the start of a stop string, and cuts at the first whole one."""

    def __init__(self, stop: str | Sequence[str] = ()) -> None:
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(s, str) and s for s in self._stop):
            raise ValueError(f"stop must be non-empty strings, got {stop!r}")
        self._held = ""
        self.stopped = False

    def feed(self, segment: str, *, may_stop: bool = True) -> str:
        """Returns the text that may go out now. Sets `stopped` when a stop string is complete."""
        if not may_stop:
            return segment
        text = self._held + segment
        # The first one to be complete ends the text, however it was cut into segments.
        ends = [(text.index(s) + len(s), text.index(s)) for s in self._stop if s in text]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        keep = max((self._partial(text, s) for s in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Returns what was held back; the text is over."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _partial(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        sizes = range(min(len(text), len(stop) - 1), 0, -1)
        return next((size for size in sizes if text.endswith(stop[:size])), 0)


class TextStream:
    """Turns the tokens of one row into pieces of text, and says when and why it is over.

    tokenizer    mlx-lm's TokenizerWrapper
    stop         strings that end the text; they are not part of it
    stop_ids     more tokens that end it, as end tokens do
    min_tokens   tokens within which no string ends it
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: str | Sequence[str] = (),
        *,
        stop_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._ends = {*tokenizer.eos_token_ids, *stop_ids}
        self._count, self._min_tokens = 0, min_tokens
        self._detokenizer = tokenizer.detokenizer
        self._stops = StopStrings(stop)

    def take(self, token: int, *, is_last: bool) -> tuple[str, str | None]:
        """Returns the text that may go out after `token`, and why it was the last one, or None.

        is_last    whether the budget is spent with it
        """
        if token in self._ends:
            return self._end("", "stop")
        self._count += 1
        self._detokenizer.add_token(token)
        may_stop = self._count > self._min_tokens
        text = self._stops.feed(self._detokenizer.last_segment, may_stop=may_stop)
        if self._stops.stopped:
            return text, "stop"
        return self._end(text, "length") if is_last else (text, None)

    def _end(self, text: str, reason: str) -> tuple[str, str]:
        self._detokenizer.finalize()
        text += self._stops.feed(self._detokenizer.last_segment) + self._stops.flush()
        return text, "stop" if self._stops.stopped else reason


def text_stream(
    tokenizer: Any, stop: str | Sequence[str], params: SamplingParams | None
) -> TextStream:
    """The text of a request: its own stop strings, and those of its parameters."""
    if params is None:
        return TextStream(tokenizer, stop)
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    return TextStream(
        tokenizer,
        (*strings, *params.stop_strings),
        stop_ids=params.stop_ids,
        min_tokens=params.min_tokens,
    )
