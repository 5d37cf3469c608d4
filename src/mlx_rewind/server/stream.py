"""Events of one request as they reach its client, and the end of it when the client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from .answers import Answer
from .records import Ask, Backend, Event, Failed, Refusal

#: Seconds without a token after which a comment keeps the connection alive.
_QUIET = 10.0


class Disconnected(Exception):  # noqa: N818  # says what happened, and is no error
    """The client went away."""


class Events:
    """The events of one request. Leaving the block ends the request, whatever came of it.

    receive    of the connection, whose body was read
    """

    def __init__(self, backend: Backend, ask: Ask, receive: Receive) -> None:
        self._backend, self._ask, self._receive = backend, ask, receive
        self._queue: asyncio.Queue[Sequence[Event]] = asyncio.Queue()

    async def __aenter__(self) -> Events:
        """Raises `Refusal` for a request that the server does not take."""
        loop, queue = asyncio.get_running_loop(), self._queue

        def sink(events: Sequence[Event]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, events)

        self._ticket = self._backend.submit(self._ask, sink)
        self._gone = asyncio.ensure_future(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._gone.cancel()
        self._backend.cancel(self._ticket)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def next(self, seconds: float | None = None) -> Sequence[Event] | None:
        """The next events; None if there are none for so long.

        Raises `Disconnected`, and the `Refusal` of a request that failed.
        """
        get = asyncio.ensure_future(self._queue.get())
        first = asyncio.FIRST_COMPLETED
        done, _ = await asyncio.wait({get, self._gone}, timeout=seconds, return_when=first)
        if get not in done:
            get.cancel()
            if self._gone in done:
                raise Disconnected
            return None
        events = get.result()
        for event in events:
            if isinstance(event, Failed):
                raise event.refusal
        return events


async def collect(events: Events, answer: Answer) -> dict[str, Any]:
    """The whole answer. Raises as `Events.next` does."""
    while not answer.is_done:
        answer.take(await events.next() or ())
    return answer.whole()


class EventStream:
    """An ASGI response: server-sent events, the first of which are already here.

    Raises `Disconnected` when the client goes away.
    """

    def __init__(self, events: Events, answer: Answer, first: Sequence[Event]) -> None:
        self._events, self._answer, self._first = events, answer, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for data in self._lines():
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _lines(self) -> AsyncIterator[bytes]:
        try:
            events: Sequence[Event] | None = self._first
            while True:
                if events is None:
                    yield b": keepalive\n\n"
                else:
                    data = b"".join(_line(chunk) for chunk in self._answer.chunks(events))
                    if data:
                        yield data
                if self._answer.is_done:
                    break
                events = await self._events.next(_QUIET)
        except Refusal as refusal:
            yield _line(refusal.body())
            return
        yield b"data: [DONE]\n\n"


def _line(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"
