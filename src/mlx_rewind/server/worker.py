"""The engine thread: requests come in by a queue, events go out to their sinks.

any thread      submit, cancel ──▶ commands
engine thread   load ─▶ take commands ─▶ step ─▶ events to sinks ─▶ ...
                        └ an exception of the model: fail what is open, a new engine, go on
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from .desk import Desk, Served
from .guard import Guard
from .metrics import Metrics
from .records import Ask, Counts, Ended, Event, Failed, Refusal, Sink, Status, Ticket, Tokens
from .settings import Settings

_log = logging.getLogger("mlx_rewind.server")

#: Seconds before an engine that died is started again: at first, and at most; it doubles.
_PAUSE, _LONGEST_PAUSE = 0.05, 5.0


@dataclass(eq=False)
class _Ticket:
    """A request in the worker."""

    ask: Ask
    sink: Sink
    began: float = field(default_factory=time.monotonic)
    left: int = 0
    has_token: bool = False

    def __post_init__(self) -> None:
        self.left = self.ask.num_choices


@dataclass(frozen=True)
class _Command:
    """Something for the engine thread to do; without a ticket, only to look up."""

    ticket: _Ticket | None = None
    is_cancel: bool = False


class Worker:
    """A thread that owns an engine.

    make        loads model and drafter; called once, on the thread
    drafters    kinds that a request may choose, that of the others first

    Sinks are called on the thread and must return at once.
    """

    def __init__(
        self, make: Callable[[], Served], settings: Settings, metrics: Metrics | None = None
    ) -> None:
        self.settings = settings
        self.metrics = Metrics() if metrics is None else metrics
        self._make = make
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[_Ticket] = set()
        self._rows = 0
        self._status: Status = "loading"
        self._is_stopped = self._is_draining = False
        self._loaded = threading.Event()
        self.drafters: tuple[str, ...] = ()
        self._failure: Exception | None = None
        self._figures: dict[str, Any] = {}
        self._total = Counts()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        watch = self.metrics.watch
        watch("mlx_rewind_requests_open", "Requests that are not through", lambda: len(self._open))
        watch("mlx_rewind_choices_open", "Choices that are not through", lambda: self._rows)
        watch("mlx_rewind_active_memory_bytes", "Memory in use by mlx", mx.get_active_memory)
        watch("mlx_rewind_up", "Whether requests are taken", lambda: self.status == "ok")

    # -- from any thread ------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread and waits until the model is loaded. Raises what loading raised."""
        self._thread.start()
        self._loaded.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def status(self) -> Status:
        if self._loaded.is_set() and not self._thread.is_alive():
            return "dead"
        return "draining" if self._is_draining and self._status == "ok" else self._status

    def submit(self, ask: Ask, sink: Sink) -> Ticket:
        """Queues a request. Raises `Refusal`: 503 if none is taken now, 429 if too many wait."""
        ticket = _Ticket(ask, sink)
        with self._lock:
            if self.status != "ok":
                message = f"the server is not taking requests: {self.status}"
                raise Refusal(503, message, code=self.status, retry_after=1)
            if self._rows + ticket.left > self.settings.max_rows + self.settings.queue_limit:
                message = "too many requests are waiting"
                raise Refusal(429, message, code="queue_full", retry_after=1)
            self._rows += ticket.left
            self._open.add(ticket)
        self._commands.put(_Command(ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request before its next round; its sink is not called again."""
        assert isinstance(ticket, _Ticket)
        if self._close(ticket):
            self.metrics.cancelled.inc()
            self._commands.put(_Command(ticket, is_cancel=True))

    def drain(self) -> None:
        """Takes no more requests; those that were taken go on."""
        with self._lock:
            self._is_draining = True

    @property
    def is_idle(self) -> bool:
        return not self._open

    def stop(self) -> None:
        """Ends the thread; what is open fails."""
        self._is_stopped = True
        self._commands.put(_Command())
        self._thread.join()

    def figures(self) -> Mapping[str, Any]:
        """What the page shows of the whole server."""
        return {"status": self.status, "open": len(self._open), **self._figures}

    # -- tickets --------------------------------------------------------------------------------

    def _close(self, ticket: _Ticket) -> bool:
        """Takes a request off the books; whether it was on them."""
        with self._lock:
            if ticket not in self._open:
                return False
            self._open.remove(ticket)
            self._rows -= ticket.left
            return True

    def _send(self, ticket: _Ticket, events: Sequence[Event]) -> None:
        """Hands events to a request that is still open, and closes it with its last one."""
        with self._lock:
            is_open = ticket in self._open
            ended = sum(isinstance(event, Ended) for event in events)
            if is_open:
                ticket.left -= ended
                self._rows -= ended
        failed = any(isinstance(event, Failed) for event in events)
        for event in events:
            if isinstance(event, Ended):
                self._count(event.counts, event.cached_tokens)
        if not is_open:
            return
        if not ticket.has_token and any(isinstance(event, Tokens) for event in events):
            ticket.has_token = True
            self.metrics.first.observe(time.monotonic() - ticket.began)
        if failed or not ticket.left:
            self._close(ticket)
            self.metrics.whole.observe(time.monotonic() - ticket.began)
        ticket.sink(events)

    def _count(self, counts: Counts, cached: int = 0) -> None:
        self.metrics.add(counts)
        self.metrics.cached.inc(cached)
        total = self._total
        self._total = replace(
            total,
            completion_tokens=total.completion_tokens + counts.completion_tokens,
            draft_n=total.draft_n + counts.draft_n,
            draft_n_accepted=total.draft_n_accepted + counts.draft_n_accepted,
            steps=total.steps + counts.steps,
        )

    def _fail_all(self, refusal: Refusal) -> None:
        for ticket in list(self._open):
            self._send(ticket, [Failed(refusal)])

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            guard = Guard("loading")
            with guard:
                served = self._make()
                desk = Desk.ready(served, self.settings)
                self.drafters = tuple(desk.drafters)
            if guard.error is not None:
                self._failure = guard.error
                return
            self._status = "ok"
            self._loaded.set()
            self._keep_serving(served, desk)
        finally:
            self._status = "dead"
            self._loaded.set()
            self._fail_all(Refusal(500, "the engine has stopped", code="engine_dead"))

    def _keep_serving(self, served: Served, first: Desk) -> None:
        """Serves with one engine after another until told to stop."""
        desk: Desk | None = first
        del first
        pause = _PAUSE
        while not self._is_stopped:
            began = time.monotonic()
            guard = Guard("the engine")
            with guard:
                desk = desk or Desk.ready(served, self.settings)
                self._status = "ok"
                self._serve(desk)
            if guard.error is None:
                return
            desk = None
            self._recover(pause)
            pause = _PAUSE if time.monotonic() - began > 60 else min(2 * pause, _LONGEST_PAUSE)

    def _recover(self, pause: float) -> None:
        """Fails what is open; the weights stay, everything else of the engine is gone."""
        with self._lock:
            self._status = "restarting"
        self.metrics.restarts.inc()
        self._fail_all(
            Refusal(500, "the engine failed and is starting again", code="engine_failed")
        )
        mx.clear_cache()
        time.sleep(pause)

    def _serve(self, desk: Desk) -> None:
        while not self._is_stopped:
            self._take_commands(desk)
            if not desk.engine.is_busy:
                continue
            for ticket, events in desk.step().items():
                assert isinstance(ticket, _Ticket)
                self._send(ticket, events)
            self._figures = self._look(desk)

    def _take_commands(self, desk: Desk) -> None:
        """Does what is asked; waits for it if there is nothing else to do."""
        command: _Command | None = None
        if not desk.engine.is_busy:
            command = self._commands.get()
        while True:
            if command is not None and command.ticket is not None:
                self._do(desk, command.ticket, command.is_cancel)
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return

    def _do(self, desk: Desk, ticket: _Ticket, is_cancel: bool) -> None:
        if is_cancel:
            for counts in desk.open_counts(ticket):
                self._count(counts)
            desk.cancel(ticket)
            return
        if ticket not in self._open:  # gone already
            return
        events: list[Event] = []
        guard = Guard(f"request {ticket.ask.id}")
        with guard:
            try:
                started = desk.take(ticket)
                self.metrics.prompt.inc(started.prompt_tokens)
                events.append(started)
            except Refusal as refusal:
                events.append(Failed(refusal))
        if guard.error is not None:
            desk.cancel(ticket)
            events = [Failed(Refusal(500, "the request failed", code="request_failed"))]
        self._send(ticket, events)

    def _look(self, desk: Desk) -> dict[str, Any]:
        total = self._total
        return {
            "plain_seconds": desk.plain_seconds,
            "completion_tokens": total.completion_tokens,
            "draft_n": total.draft_n,
            "draft_n_accepted": total.draft_n_accepted,
            "steps": total.steps,
        }
