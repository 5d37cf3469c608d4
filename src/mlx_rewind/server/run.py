"""A worker behind uvicorn: listens, drains at the first signal, ends at the second."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from types import FrameType

import uvicorn

from .. import __version__
from .app import make_app
from .settings import Settings
from .worker import Worker

_log = logging.getLogger("mlx_rewind.server")


class Server(uvicorn.Server):
    """Serves a worker that was started, and stops it at the end.

    drain_seconds    how long requests that were taken may go on after the first signal

    While it drains, `/health` says so and new requests are refused.
    """

    def __init__(self, worker: Worker, settings: Settings, drain_seconds: float = 30.0) -> None:
        app = make_app(worker, settings, worker.metrics, __version__)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=5,
        )
        super().__init__(config)
        self._worker, self._drain_seconds = worker, drain_seconds
        self._is_draining = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; the next one ends."""
        if self._is_draining:
            super().handle_exit(sig, frame)
        else:
            self.drain()

    def drain(self) -> None:
        """Takes no more requests, and ends when those that were taken are through."""
        self._is_draining = True
        self._worker.drain()

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls this ten times a second; True ends the server."""
        if self._is_draining:
            self._drain_seconds -= 0.1
            self.should_exit = self.should_exit or self._worker.is_idle or self._drain_seconds <= 0
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await asyncio.to_thread(self._worker.stop)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises OSError for an address that is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(2048)
    except OSError:
        bound.close()
        raise
    return bound


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
