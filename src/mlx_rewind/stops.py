"""Stop strings over text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back text that may be the start of a stop string, and cuts at the first whole one."""

    def __init__(self, stop: str | Sequence[str] = ()) -> None:
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(s, str) and s for s in self._stop):
            raise ValueError(f"stop must be non-empty strings, got {stop!r}")
        self._held = ""
        self.stopped = False

    def feed(self, segment: str) -> str:
        """Returns the text that may go out now. Sets `stopped` when a stop string is complete."""
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
