"""The routes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .access import Access, read_body, refused
from .answers import Answer, ChatAnswer, TextAnswer
from .metrics import Metrics
from .protocol import ChatBody, TextBody, chat_ask, read, text_ask
from .records import Ask, Backend, Refusal
from .settings import Settings
from .stream import Disconnected, Events, EventStream, collect

_PAGE = {"": "text/html", "page.js": "text/javascript", "page.css": "text/css"}


def make_app(backend: Backend, settings: Settings, metrics: Metrics, version: str) -> Starlette:
    """The web application on a running backend."""
    server = _Server(backend, settings, metrics, version)
    chat, text = server.completions(_chat), server.completions(_text)
    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", text, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        Route("/health", server.health),
        Route("/metrics", server.metrics_text),
        Route("/figures", server.figures),
        *(Route(f"/{name}", _static(name, kind)) for name, kind in _PAGE.items()),
    ]
    middleware = [Middleware(Access, settings=settings)]
    if settings.origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(settings.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
        middleware.insert(0, cors)
    handlers: dict[Any, Any] = {HTTPException: _http_error, 500: _server_error}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


#: From a body to what is asked, and the shape of the answer.
_Kind = Callable[[bytes, Settings], tuple[ChatBody | TextBody, Ask, type[Answer]]]


def _chat(body: bytes, settings: Settings) -> tuple[ChatBody | TextBody, Ask, type[Answer]]:
    given = read(ChatBody, body)
    return given, chat_ask(given, settings, f"chatcmpl-{uuid.uuid4().hex}"), ChatAnswer


def _text(body: bytes, settings: Settings) -> tuple[ChatBody | TextBody, Ask, type[Answer]]:
    given = read(TextBody, body)
    return given, text_ask(given, settings, f"cmpl-{uuid.uuid4().hex}"), TextAnswer


class _Completions:
    """An ASGI endpoint that answers completions."""

    def __init__(self, server: _Server, kind: _Kind) -> None:
        self._server, self._kind = server, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server, route, status = self._server, scope["path"].removeprefix("/v1"), 499
        try:
            body = await read_body(Request(scope, receive), server.settings)
            given, ask, shape = self._kind(body, server.settings)
            model = given.model or server.settings.models[0]
            answer = shape(ask, model, server.fingerprint, given.includes_usage)
            async with Events(server.backend, ask, receive) as events:
                if given.stream:
                    response: Any = EventStream(events, answer, await events.next() or ())
                else:
                    response = JSONResponse(await collect(events, answer))
                status = 200
                await response(scope, receive, send)
        except Disconnected:
            status = 499
        except Refusal as refusal:
            status = refusal.status
            await refused(refusal)(scope, receive, send)
        finally:
            server.metrics.requests.labels(route, str(status)).inc()


class _Server:
    def __init__(
        self, backend: Backend, settings: Settings, metrics: Metrics, version: str
    ) -> None:
        self.backend, self.settings, self.metrics = backend, settings, metrics
        self.fingerprint = f"mlx-rewind-{version}"
        self._created = int(time.time())

    def completions(self, kind: _Kind) -> _Completions:
        return _Completions(self, kind)

    async def health(self, request: Request) -> Response:
        status = self.backend.status
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def models(self, request: Request) -> Response:
        data = [self._model(name) for name in self.settings.models]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.settings.models:
            message = "there is no such model here"
            return refused(Refusal(404, message, "model", "model_not_found"))
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> Mapping[str, Any]:
        drafters = self.backend.drafters
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "mlx-rewind",
            "draft_kind": drafters[0] if drafters else "none",
            "drafters": list(drafters),
            "num_draft_tokens": self.settings.num_draft_tokens,
            "note": self.settings.note or None,
        }

    async def metrics_text(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    async def figures(self, request: Request) -> Response:
        return JSONResponse(dict(self.backend.figures()))


def _static(name: str, kind: str) -> Callable[[Request], Any]:
    content = (files(__package__) / "page" / (name or "index.html")).read_bytes()

    async def serve(request: Request) -> Response:
        return Response(content, media_type=kind, headers={"cache-control": "no-cache"})

    return serve


async def _http_error(request: Request, error: HTTPException) -> Response:
    return refused(Refusal(error.status_code, str(error.detail)))


async def _server_error(request: Request, error: Exception) -> Response:
    return refused(Refusal(500, "the server failed"))
