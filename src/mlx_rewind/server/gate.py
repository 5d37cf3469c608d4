"""Who may call, and how much they may send."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from .answers import error_body


class Gate:
    """Refuses requests without the key, from foreign names, and bodies that are too large.

    A web page of somebody else reaches a server on loopback under a name of its own that leads
    there: the Host header tells.
    """

    def __init__(
        self, app: ASGIApp, api_key: str | None, hosts: Sequence[str], max_body: int
    ) -> None:
        self._app, self._key, self._hosts, self._most = app, api_key, hosts, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if self._hosts and _host_of(headers.get(b"host", b"")) not in self._hosts:
            body = error_body("the Host header names another server")
            await JSONResponse(body, 403)(scope, receive, send)
            return
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        is_open = scope["path"] in ("/", "/page.js", "/page.css", "/health")
        if not (is_open or self._key is None or hmac.compare_digest(given, self._key.encode())):
            body = error_body("a valid API key is needed", kind="authentication_error")
            await JSONResponse(body, 401)(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._most:
            body = error_body(f"the body may have {self._most} bytes")
            await JSONResponse(body, 413)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _host_of(header: bytes) -> str:
    """The name in a Host header, without its port and brackets."""
    text = header.decode("latin-1").lower()
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
