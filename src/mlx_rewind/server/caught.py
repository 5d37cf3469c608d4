"""An exception, kept for later: the engine's thread has to go on."""

from __future__ import annotations

from types import TracebackType


class Caught:
    """Takes an exception of the model or of a request for later."""

    error: Exception | None = None

    def __enter__(self) -> Caught:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = error
        return True
