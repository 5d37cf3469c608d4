"""Who may call: keys, host names, origins, and how much of a body is read."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from .records import Refusal
from .settings import Settings

#: Paths that need no key: they show nothing, and the page must load to ask for one.
_OPEN = frozenset({"/", "/health", "/page.js", "/page.css"})
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"content-security-policy", b"default-src 'self'; base-uri 'none'; form-action 'none'"),
)


class Access:
    """ASGI middleware: refuses calls without a key or with a foreign Host header."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]  # type: ignore[misc]
            await send(message)

        refusal = self._refuses(scope)
        app = self._app if refusal is None else refused(refusal)
        await app(scope, receive, with_headers)  # type: ignore[arg-type]

    def _refuses(self, scope: Scope) -> Refusal | None:
        headers = Headers(scope=scope)
        hosts, keys = self._settings.hosts, self._settings.api_keys
        if hosts and _name_of(headers.get("host", "")) not in hosts:
            return Refusal(403, "the Host header names another server", code="wrong_host")
        if not keys or scope["path"] in _OPEN or scope["method"] == "OPTIONS":
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _is_known(given.strip(), keys):
            return None
        return Refusal(401, "a valid API key is needed", code="invalid_api_key")


def _is_known(given: str, keys: Sequence[str]) -> bool:
    """Compares with every key, in a time that tells nothing of them."""
    matches = [hmac.compare_digest(given.encode(), key.encode()) for key in keys]
    return any(matches)


def _name_of(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host.partition("]")[0].lstrip("[").lower()
    return host.partition(":")[0].lower()


async def read_body(request: Request, settings: Settings) -> bytes:
    """The body, no more of it than is allowed.

    Raises `Refusal` for another content type, one that is too large or too slow.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, "the content type must be application/json")
    length, most = request.headers.get("content-length", "0"), settings.max_body_bytes
    too_large = Refusal(413, f"the body has more than {most} bytes", code="body_too_large")
    if length.isdigit() and int(length) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise Refusal(408, "the body did not arrive in time") from None
    except ClientDisconnect:
        raise Refusal(400, "the body is incomplete") from None
    return bytes(body)


def refused(refusal: Refusal) -> JSONResponse:
    headers = {}
    if refusal.retry_after is not None:
        headers["retry-after"] = str(refusal.retry_after)
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(refusal.body(), refusal.status, headers)
