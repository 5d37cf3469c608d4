"""What a thread that must outlive any error does with one."""

from __future__ import annotations

import logging
from types import TracebackType

_log = logging.getLogger("mlx_rewind.server")


class Guard:
    """Keeps an exception, logs it, and lets the code after the block run.

    error    what was raised, without the traceback, which would keep caches alive; else None

    A parser, a template, a model: they may raise anything, and it must not reach another request.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self.error: Exception | None = None

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        _log.error("%s failed", self._what, exc_info=error)
        self.error = error.with_traceback(None)
        return True
