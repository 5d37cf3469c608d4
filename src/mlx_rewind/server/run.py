"""A server that says that it drains: it goes on listening until what is under work is finished."""

from __future__ import annotations

import threading
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from .app import Backend


class DrainingServer(uvicorn.Server):
    """Ends at the first signal when the backend is through, at the second as uvicorn does.

    Until then new requests get a 503, and so does /health.
    """

    def __init__(self, config: uvicorn.Config, backend: Backend) -> None:
        super().__init__(config)
        self._backend, self._is_draining = backend, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._is_draining:
            super().handle_exit(sig, frame)
            return
        self._is_draining = True
        threading.Thread(target=self._drain, args=(sig, frame), daemon=True).start()

    def _drain(self, sig: int, frame: FrameType | None) -> None:
        self._backend.close()
        super().handle_exit(sig, frame)


def run(app: Starlette, backend: Backend, host: str, port: int) -> None:
    """Serves until a signal comes."""
    config = uvicorn.Config(app, host=host, port=port, log_level="info")
    DrainingServer(config, backend).run()
