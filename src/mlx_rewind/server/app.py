"""The routes: OpenAI's, health, metrics, and the page."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import generate_latest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from .answers import Answer, Envelope, error_body, usage_of
from .gate import Gate
from .jobs import Job, Limits, Piece, RefusedError
from .metrics import Source, WorkerMetrics
from .protocol import ChatRequest, CompletionRequest, Generation
from .reply import Markers, Splitter

_PAGE = Path(__file__).parent / "page"


class Backend(Source, Protocol):
    """What the routes need of `worker.Worker`."""

    limits: Limits

    @property
    def health(self) -> str: ...
    @property
    def markers(self) -> Markers: ...
    def prepare(self, job: Job) -> Any: ...
    def starts_reasoning(self, job: Job, request: Any) -> bool: ...
    def submit(self, request: Any, sink: Callable[[Piece], None]) -> Any: ...
    def cancel(self, ticket: Any) -> None: ...
    def decode(self, token: int) -> str: ...
    def start(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Settings:
    """What the operator decided.

    model, draft     names that clients may use for the model and its draft model
    draft_kind       the kind of drafter, for /v1/models
    api_key          what clients have to send, None for nobody
    cors             origins that browsers may come from; none by default
    hosts            names that the Host header may have; none: any
    """

    model: str
    draft: str | None = None
    draft_kind: str = "none"
    api_key: str | None = None
    cors: Sequence[str] = ()
    hosts: Sequence[str] = ()

    @property
    def entry(self) -> dict[str, Any]:
        """The model in OpenAI's form, and how it drafts."""
        speculation = {"draft_kind": self.draft_kind, "draft_model": self.draft}
        entry = {"id": self.model, "object": "model", "created": 0, "owned_by": "operator"}
        return {**entry, "speculation": speculation}


def make_app(backend: Backend, settings: Settings) -> Starlette:
    """The application. It starts the backend with itself, and drains it at its end."""
    routes = _Routes(backend, settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await run_in_threadpool(backend.start)
        yield
        await run_in_threadpool(backend.close)

    middleware = [Middleware(Gate, settings.api_key, settings.hosts, backend.limits.max_body)]
    if settings.cors:
        origins = list(settings.cors)
        middleware.insert(0, Middleware(CORSMiddleware, allow_origins=origins, allow_headers=["*"]))
    return Starlette(
        routes=[
            Route("/", routes.page),
            Route("/page.js", routes.script),
            Route("/page.css", routes.style),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/completions", routes.complete, methods=["POST"]),
        ],
        middleware=middleware,
        lifespan=lifespan,
    )


class _Routes:
    def __init__(self, backend: Backend, settings: Settings) -> None:
        self._backend, self._settings = backend, settings
        self._metrics = WorkerMetrics(backend)

    # -- the page and the state -----------------------------------------------------------------

    async def page(self, request: Request) -> Response:
        return FileResponse(_PAGE / "index.html")

    async def script(self, request: Request) -> Response:
        return FileResponse(_PAGE / "page.js", media_type="text/javascript")

    async def style(self, request: Request) -> Response:
        return FileResponse(_PAGE / "page.css", media_type="text/css")

    async def health(self, request: Request) -> Response:
        state = self._backend.health
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), media_type="text/plain")

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._settings.entry]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ("default_model", self._settings.model):
            return _refused(self._no_model(name))
        return JSONResponse(self._settings.entry)

    def _no_model(self, name: str) -> RefusedError:
        message = f"model: there is no {name!r} here, only {self._settings.model!r}"
        return RefusedError(message, status=404, param="model")

    # -- generation -----------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatRequest)

    async def complete(self, request: Request) -> Response:
        return await self._answer(request, CompletionRequest)

    async def _answer(self, request: Request, kind: type[Generation]) -> Response:
        try:
            asked = await self._parse(request, kind)
            # Processors have a state of their own: one for every choice.
            jobs = self._jobs(asked)
            ready = [await run_in_threadpool(self._backend.prepare, one) for one in jobs]
            run = _Run(self._backend, asked, jobs, ready, self._settings.model)
        except RefusedError as refused:
            return _refused(refused)
        if asked.stream:
            return StreamingResponse(run.events(), media_type="text/event-stream")
        return await _unless_gone(request, run.whole, run.cancel)

    async def _parse(self, request: Request, kind: type[Generation]) -> Generation:
        # Pages of other origins may send any other type without asking first.
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise RefusedError("the content type must be application/json", status=415)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._backend.limits.max_body:
                raise RefusedError(
                    f"the body may have {self._backend.limits.max_body} bytes", status=413
                )
        try:
            return kind.model_validate_json(bytes(body))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            known = "unknown or unsupported field" if first["type"] == "extra_forbidden" else None
            raise RefusedError(
                f"{field or 'body'}: {known or first['msg']}", param=field or None
            ) from None

    def _jobs(self, asked: Generation) -> list[Job]:
        """One for every choice: prompt by prompt, n times each."""
        settings, limits = self._settings, self._backend.limits
        if asked.model not in (None, "default_model", settings.model):
            raise self._no_model(asked.model)
        if asked.draft_model not in (None, "default_model", settings.draft):
            raise RefusedError(
                "draft_model: not one that the operator allowed", param="draft_model"
            )
        budget = limits.max_tokens if asked.budget is None else asked.budget
        if budget > limits.max_tokens:
            raise RefusedError(
                f"max_tokens: at most {limits.max_tokens}, got {budget}", param="max_tokens"
            )
        drafting = asked.drafting
        prompts = asked.prompts
        job = Job(
            prompt=prompts[0],
            max_tokens=budget,
            template=_template(asked),
            sampling=asked.sampling,
            top=asked.top,
            schema=_schema(asked, limits.max_schema),
            prediction=None if asked.prediction is None else asked.prediction.text,
            draft=drafting.draft,
            num_draft_tokens=drafting.num_draft_tokens,
            acceptance=drafting.acceptance,
        )
        jobs = [dataclasses.replace(job, prompt=prompt) for prompt in prompts]
        return [_again(one, i) for one in jobs for i in range(asked.n)]


def _template(asked: Generation) -> dict[str, Any]:
    if not isinstance(asked, ChatRequest):
        return {}
    for name in ("tokenize", "add_generation_prompt", "chat_template", "messages", "conversation"):
        if name in asked.chat_template_kwargs:
            raise RefusedError(
                f"chat_template_kwargs: {name} cannot be set", param="chat_template_kwargs"
            )
    tools = asked.tools if asked.tools and asked.tool_choice != "none" else None
    return {**asked.chat_template_kwargs, **({"tools": tools} if tools else {})}


def _schema(asked: Generation, most: int) -> dict[str, Any] | None:
    wanted = asked.response_format
    if wanted is None or wanted.type == "text":
        return None
    schema: dict[str, Any] = (wanted.json_schema or {}).get("schema", {})
    size = len(json.dumps(schema))
    if size > most:
        message = f"response_format: the schema has {size} bytes, this server takes {most}"
        raise RefusedError(message, param="response_format")
    return schema


def _again(job: Job, index: int) -> Job:
    """The job of a further choice: another seed, if there is one."""
    seed = job.sampling.get("seed")
    if seed is None or not index:
        return job
    sampling = {**job.sampling, "seed": (seed + index) % 2**64}
    return dataclasses.replace(job, sampling=sampling)


async def _unless_gone(
    request: Request, work: Callable[[], Awaitable[Response]], cancel: Callable[[], None]
) -> Response:
    """The answer, unless the client goes away before; then the work is cancelled."""

    async def gone() -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(0.05)

    answer, leaving = asyncio.ensure_future(work()), asyncio.ensure_future(gone())
    done, _ = await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
    if answer in done:
        leaving.cancel()
        return answer.result()
    cancel()
    answer.cancel()
    raise ClientDisconnect


class _Run:
    """The choices of one request under work."""

    def __init__(
        self, backend: Backend, asked: Generation, jobs: list[Job], ready: list[Any], model: str
    ) -> None:
        self._backend, self._asked = backend, asked
        is_chat = isinstance(asked, ChatRequest)
        self._envelope = Envelope(model, is_chat)
        # What a schema binds is the answer, whatever the template begins and its strings contain.
        is_free = is_chat and jobs[0].schema is None
        markers = backend.markers if is_free else Markers()
        self._answers = [
            Answer(
                index=i,
                is_chat=is_chat,
                splitter=Splitter(
                    markers,
                    starts_reasoning=is_free and backend.starts_reasoning(job, one),
                    has_tools="tools" in job.template,
                ),
                markers=markers,
                tools=job.template.get("tools"),
                decode=backend.decode,
                wants_logprobs=asked.top is not None,
            )
            for i, (job, one) in enumerate(zip(jobs, ready, strict=True))
        ]
        self._pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        self._tickets: list[Any] = []
        loop = asyncio.get_running_loop()
        try:
            for i, one in enumerate(ready):
                self._tickets.append(backend.submit(one, self._sink(loop, i)))
        except RefusedError:
            self.cancel()
            raise

    def _sink(self, loop: asyncio.AbstractEventLoop, index: int) -> Callable[[Piece], None]:
        def sink(piece: Piece) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._pieces.put_nowait, (index, piece))

        return sink

    def cancel(self) -> None:
        for ticket in self._tickets:
            self._backend.cancel(ticket)

    async def _all(self) -> AsyncGenerator[tuple[Answer, Piece], None]:
        """Every piece, until all choices are over. Cancels what is left when it is closed."""
        open_choices = len(self._answers)
        try:
            while open_choices:
                index, piece = await self._pieces.get()
                open_choices -= piece.finish_reason is not None or piece.error is not None
                yield self._answers[index], piece
        finally:
            if open_choices:
                self.cancel()

    async def whole(self) -> Response:
        async with aclosing(self._all()) as pieces:
            async for answer, piece in pieces:
                if piece.error is not None:
                    return _failed(piece.error)
                for _ in answer.take(piece):
                    pass
        choices = [answer.whole() for answer in self._answers]
        return JSONResponse(self._envelope.of(choices, is_chunk=False, usage=self._usage()))

    async def events(self) -> AsyncIterator[str]:
        """The chunks of a stream. The last with choices, and the one after if it is asked for,
        have the usage."""
        if self._envelope.is_chat:
            for answer in self._answers:
                first = {"delta": {"role": "assistant", "content": ""}}
                yield self._event([answer.chunk(first)])
        async with aclosing(self._all()) as pieces:
            async for answer, piece in pieces:
                if piece.error is not None:
                    message = _message(piece.error)
                    yield _data(error_body(message, kind="server_error"))
                    return
                for part in answer.take(piece):
                    yield self._event([answer.chunk(part)])
                if piece.finish_reason is not None:
                    last = answer.chunk({"delta": {}}, answer.finish_reason)
                    yield self._event([last], x_usage=usage_of([answer.usage]))  # type: ignore[list-item]
        if self._asked.stream_options is not None and self._asked.stream_options.include_usage:
            yield self._event([], usage=self._usage())
        yield "data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return _data(self._envelope.of(choices, is_chunk=True, **more))

    def _usage(self) -> dict[str, Any]:
        usages = [answer.usage for answer in self._answers if answer.usage is not None]
        return usage_of(usages, self._asked.n)


def _data(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _refused(refused: RefusedError) -> Response:
    own = None if refused.status < 500 else "server_error"
    kind = "rate_limit_error" if refused.status == 429 else own
    return JSONResponse(error_body(str(refused), refused.param, kind), refused.status)


def _message(error: str) -> str:
    return "the server failed while it worked on this request" if error == "internal" else error


def _failed(error: str) -> Response:
    is_ours = error == "internal"
    kind = "server_error" if is_ours else None
    return JSONResponse(error_body(_message(error), kind=kind), 500 if is_ours else 400)
