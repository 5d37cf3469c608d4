"""The engine on a thread of its own, fed by a queue. Answers go back through callbacks.

If the engine itself fails, every request in it fails, and a new one is made for the same weights.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from jinja2 import TemplateError

from ..cache.store import PromptCacheStore
from ..draft.ngram import NGram, Prediction
from ..draft.protocol import Drafter
from ..engine import Engine
from ..generate import encode
from ..grammar import Grammar
from ..messages import message_ends
from ..request import Handle, Output, Request
from ..sampling import SamplingParams
from ..target import Target
from . import counts
from .caught import Caught
from .jobs import Job, Limits, Memory, Piece, RefusedError, Totals
from .reply import Markers

_log = logging.getLogger("mlx_rewind.server")

Sink = Callable[[Piece], None]


@dataclass(eq=False)
class Ticket:
    """A request on its way. `sink` is called on the engine's thread."""

    request: Request
    sink: Sink
    handle: Handle | None = None


class Worker:
    """Owns a model and its engine.

    drafter             the operator's, for every request that does not say otherwise; None for none
    num_draft_tokens    most draft tokens per round
    store_bytes         of the prompt-cache store; 0 for none
    store_folder        where the store is read from at the start, and saved to at the end
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        drafter: Drafter | None = None,
        num_draft_tokens: int = 4,
        limits: Limits | None = None,
        prefill_step_size: int = 512,
        store_bytes: int = 1 << 30,
        store_folder: str | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.totals = Totals()
        self.restarts = 0
        self._model, self._tokenizer, self._drafter = model, tokenizer, drafter
        self._num_draft_tokens, self._prefill_step_size = num_draft_tokens, prefill_step_size
        self._target = Target(model)
        self._store = None
        if store_bytes:
            self._store = PromptCacheStore(model, tokenizer, max_bytes=store_bytes)
        self._folder = store_folder
        if self._store is not None and store_folder is not None and Path(store_folder).exists():
            self._store.load(store_folder)
        self._is_failing = False
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}
        self._requests: dict[int, Request] = {}  # of tickets that are not over
        self._waiting = 0
        self._closing = False
        self._drained = threading.Event()
        self._engine = self._new_engine()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def _new_engine(self) -> Engine:
        return Engine(
            self._model,
            self._tokenizer,
            max_rows=self.limits.max_rows,
            prefill_step_size=self._prefill_step_size,
            max_draft_tokens=max(16, self._num_draft_tokens),
            store=self._store,
        )

    # -- any thread -----------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def health(self) -> str:
        """ok, draining, restarting or dead."""
        if not self._thread.is_alive():
            return "dead"
        if self._is_failing:
            return "restarting"
        return "draining" if self._closing else "ok"

    @property
    def load(self) -> tuple[int, int]:
        """Requests under work or in the engine's queue, and those on their way to it."""
        return len(self._tickets), self._waiting

    @property
    def choices(self) -> dict[str, int]:
        """Requests under work that choose their drafts, by what they do now."""
        return counts.choices(ticket.handle for ticket in list(self._tickets.values()))

    @property
    def memory(self) -> Memory:
        return counts.memory(self._store)

    @property
    def markers(self) -> Markers:
        t = self._tokenizer
        think = (t.think_start, t.think_end) if t.has_thinking else None
        tool = (t.tool_call_start, t.tool_call_end) if t.has_tool_calling else None
        return Markers(think, tool, t.tool_parser if t.has_tool_calling else None)

    def decode(self, token: int) -> str:
        """The text of one token."""
        text: str = self._tokenizer.decode([token])
        return text

    def starts_reasoning(self, job: Job, request: Request) -> bool:
        """Whether the template leaves the answer inside of a reasoning block."""
        t, prompt = self._tokenizer, list(request.prompt)
        if not t.has_thinking or not isinstance(job.prompt, list):
            return False
        return bool(t.rfind_think_start(prompt) > t.rfind_think_end(prompt))

    def prepare(self, job: Job) -> Request:
        """Tokens, grammar and drafter of a job. Takes its time; not on the engine's thread.

        Raises `RefusedError`.
        """
        if self._closing or not self._thread.is_alive():
            raise RefusedError("the server is closing", status=503)
        try:
            return self._request(job)
        except RefusedError:
            raise
        except (ValueError, KeyError, TypeError, ImportError, TemplateError) as error:
            raise RefusedError(" ".join(str(error).split())) from error

    def _request(self, job: Job) -> Request:
        self._check(job)
        prompt = self._prompt(job)
        try:
            self._target.check_tokens(prompt or [0])
        except ValueError as error:
            raise RefusedError(str(error), param="prompt") from error
        if len(prompt) > self.limits.max_prompt:
            raise RefusedError(
                f"the prompt has {len(prompt)} tokens, this server takes {self.limits.max_prompt}"
            )
        processors: tuple[Any, ...] = ()
        if job.schema is not None:
            if job.schema:
                grammar = Grammar.json_schema(job.schema, self._tokenizer, compact=True)
            else:
                grammar = Grammar.json_object(self._tokenizer, compact=True)
            processors = (grammar.processor(),)
        params = SamplingParams(**job.sampling, logprobs=job.top)
        params.check_vocab(self._target.vocab_size)
        most = self._num_draft_tokens if job.num_draft_tokens is None else job.num_draft_tokens
        return Request(
            prompt,
            max_tokens=min(job.max_tokens, self.limits.max_tokens),
            drafter=self._drafter_of(job),
            num_draft_tokens=most,
            logits_processors=processors,
            sampling=params,
            acceptance=job.acceptance,  # type: ignore[arg-type]
            boundaries=self._boundaries(job, prompt),
        )

    def _check(self, job: Job) -> None:
        """Raises `RefusedError` for what would otherwise be ignored."""
        tools, most = bool(job.template.get("tools")), self._engine.max_draft_tokens
        if tools and self.markers.tool is None:
            message = "tools: the model has no tool calls that mlx-lm can read"
            raise RefusedError(message, param="tools")
        if tools and job.schema is not None:
            message = "response_format: cannot be combined with tools"
            raise RefusedError(message, param="response_format")
        if job.prediction is not None and job.draft != "server":
            message = f"prediction: cannot be combined with the draft {job.draft}"
            raise RefusedError(message, param="prediction")
        if job.num_draft_tokens is not None and job.num_draft_tokens > most:
            message = f"num_draft_tokens: at most {most}, got {job.num_draft_tokens}"
            raise RefusedError(message, param="num_draft_tokens")

    def _prompt(self, job: Job) -> list[int]:
        t = self._tokenizer
        if isinstance(job.prompt, str):
            text: Any = job.prompt
        elif job.prompt and isinstance(job.prompt[0], int):
            return [int(token) for token in job.prompt]
        elif not t.has_chat_template:
            text = "\n".join(str(message["content"]) for message in job.prompt)  # type: ignore[index]
        else:
            options = {**job.template, "add_generation_prompt": True}
            tokens: list[int] = t.apply_chat_template(list(job.prompt), **options)
            return tokens
        ids: Any = encode(t, text)
        return [int(token) for token in ids]

    def _boundaries(self, job: Job, prompt: list[int]) -> list[int]:
        is_chat = isinstance(job.prompt, list) and not isinstance((job.prompt or [0])[0], int)
        if self._store is None or not is_chat or not self._tokenizer.has_chat_template:
            return []
        messages: Any = job.prompt
        return message_ends(self._tokenizer, messages, prompt, **job.template)

    def _drafter_of(self, job: Job) -> Drafter | None:
        if job.draft == "none":
            return None
        if job.prediction is not None:
            ids = self._tokenizer.encode(job.prediction, add_special_tokens=False)
            return Prediction(ids)
        if job.draft == "ngram":
            return NGram()
        return self._drafter

    def submit(self, request: Request, sink: Sink) -> Ticket:
        """Hands a request to the engine. Raises `RefusedError` if the queue is full."""
        if self._closing or not self._thread.is_alive():
            raise RefusedError("the server is closing", status=503)
        if len(self._tickets) + self._waiting >= self.limits.max_rows + self.limits.max_queue:
            raise RefusedError("too many requests are waiting; try again later", status=429)
        ticket = Ticket(request, sink)
        most, size = self.limits.max_total_tokens, counts.size(request)
        if most and sum(map(counts.size, list(self._requests.values()))) + size > most:
            raise RefusedError(f"all requests together may have {most} tokens", status=429)
        self._requests[id(ticket)] = request
        self._waiting += 1
        self._inbox.put(lambda: self._take(ticket))
        if self._drained.is_set():  # the thread ended meanwhile, and looks no more
            self._fail_rest()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request before its next round; without effect on one that is over."""
        self._inbox.put(lambda: self._cancel(ticket))

    def close(self, timeout: float = 60.0) -> None:
        """Finishes what is under work, then ends the thread."""
        self._closing = True
        self._inbox.put(lambda: None)
        self._drained.wait(timeout)

    # -- the engine's thread --------------------------------------------------------------------

    def _run(self) -> None:
        """Serves until it is closed. However it ends, nobody is left waiting."""
        try:
            self._serve()
        finally:
            self._closing = True
            self._drained.set()
            self._fail_rest()

    def _fail_rest(self) -> None:
        """The thread is over: so are the requests in the engine, and those on their way to it."""
        tickets, self._tickets = list(self._tickets.values()), {}
        for ticket in tickets:
            self._end(ticket, Piece(error="internal"))
        with suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()()

    def _serve(self) -> None:
        while not (self._closing and self._inbox.empty() and not self._engine.is_busy):
            with Caught() as caught:
                self._turn()
            if caught.error is not None:
                self._fail(caught.error)
        if self._store is not None and self._folder is not None:
            self._store.save(self._folder)

    def _turn(self) -> None:
        """What has come in, then one step of the engine."""
        if not self._engine.is_busy and not self._closing:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()
        for output in self._engine.step():
            self._tell(output)

    def _end(self, ticket: Ticket, piece: Piece) -> None:
        """The last piece of a request."""
        self._requests.pop(id(ticket), None)
        ticket.sink(piece)

    def _take(self, ticket: Ticket) -> None:
        self._waiting -= 1
        if self._drained.is_set():
            self._end(ticket, Piece(error="internal"))
            return
        with Caught() as caught:
            ticket.handle = self._engine.submit(ticket.request)
        if ticket.handle is not None:
            self._tickets[ticket.handle.id] = ticket
        elif isinstance(caught.error, ValueError):
            self._end(ticket, Piece(error=" ".join(str(caught.error).split())))
        else:
            self._end(ticket, Piece(error="internal"))

    def _cancel(self, ticket: Ticket) -> None:
        handle = ticket.handle
        self._requests.pop(id(ticket), None)
        if handle is not None and self._tickets.pop(handle.id, None) is ticket and not handle.done:
            self._engine.cancel(handle)
            self.totals.add(counts.usage(handle), "cancelled")

    def _tell(self, output: Output) -> None:
        ticket = self._tickets.get(output.handle.id)
        if ticket is None:
            return
        logprob = None
        if output.token is not None and output.logprobs is not None:
            params = ticket.request.sampling
            if params is not None and params.logprobs is not None:
                logprob = float(output.logprobs[output.token].item())  # type: ignore[arg-type]
        piece = Piece(
            output.text,
            output.token,
            logprob,
            tuple(output.top_logprobs),
            output.from_draft,
            output.finish_reason,
        )
        if output.finish_reason is not None:
            del self._tickets[output.handle.id]
            usage = counts.usage(output.handle)
            self.totals.add(usage, output.finish_reason)
            piece = replace(piece, usage=usage)
            if output.finish_reason == "error":
                _log.error("a request failed: %s", output.handle.error)
                piece = Piece(error="internal")
            self._end(ticket, piece)
        else:
            ticket.sink(piece)

    def _fail(self, error: Exception) -> None:
        """The engine failed: so do all its requests, and a new one takes over."""
        _log.error("the engine failed and starts again", exc_info=error)
        tickets, self._tickets = list(self._tickets.values()), {}
        self.restarts, self._is_failing = self.restarts + 1, True
        for ticket in tickets:
            self._end(ticket, Piece(error="internal"))
        self._engine = self._new_engine()
        mx.clear_cache()
        self._is_failing = False
