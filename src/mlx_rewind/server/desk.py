"""The engine's side of requests: from an `Ask` to rows of the engine, from its outputs to events.

Lives and dies with one `Engine`, on the engine thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import mlx.nn as nn

from ..draft.auto import parts
from ..draft.ngram import NGram, Prediction
from ..draft.protocol import Drafter, kind_of
from ..engine import Engine
from ..request import Handle, Output, Request
from ..sampling import SamplingParams
from .guard import Guard
from .prompts import Grammars, Prompt, Splitter, TokenTexts, prompts_of
from .records import Ask, Counts, Ended, Event, Failed, Refusal, Started, Ticket, Tokens
from .settings import Settings

#: Plain tokens that are generated before the first request.
_WARM_UP = 8


@dataclass(frozen=True)
class Served:
    """What the engine thread works with, loaded once.

    drafter     of requests that do not choose; None: they are not drafted for
    template    options of the chat template
    engine      options of `Engine`
    request     options of every `Request`: kv_bits and its like
    """

    model: nn.Module
    tokenizer: Any
    drafter: Drafter | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)

    def drafters(self) -> dict[str, Drafter | None]:
        """Those that a request may choose, by kind; that of the others first."""
        known: dict[str, Drafter | None] = {kind_of(self.drafter): self.drafter}
        for one in parts(self.drafter):
            if isinstance(one, Drafter):
                known.setdefault(kind_of(one), one)
        return {**known, "ngram": known.get("ngram", NGram()), "none": None}


@dataclass(eq=False)
class Choice:
    """One answer under way."""

    ticket: Ticket
    index: int
    handle: Handle
    splitter: Splitter
    kind: str
    reasoning: int = 0
    pieces: list[Any] = field(default_factory=list)


class Desk:
    """Requests at work in one engine."""

    def __init__(self, served: Served, settings: Settings) -> None:
        self._served, self._settings = served, settings
        self.engine = Engine(served.model, served.tokenizer, **served.engine)
        self._grammars = Grammars(self.engine.tokenizer)
        self._texts = TokenTexts(self.engine.tokenizer)
        self.drafters = served.drafters()
        self._choices: dict[Handle, Choice] = {}
        self._plain: deque[float] = deque(maxlen=33)
        self._rounds = -1
        #: Prompt tokens and `max_tokens` of each request at work.
        self._tokens: dict[str, int] = {}

    @classmethod
    def ready(cls, served: Served, settings: Settings) -> Desk:
        """A desk whose kernels are compiled, and that knows what a plain step takes.

        Raises what the model raises.
        """
        desk = cls(served, settings)
        tokens = desk.engine.tokenizer.encode("1")
        desk.engine.submit(Request(tokens, _WARM_UP, **served.request))
        while desk.engine.is_busy:
            began = time.perf_counter()
            desk.engine.step()
            desk._plain.append(time.perf_counter() - began)
        return desk

    # -- in -------------------------------------------------------------------------------------

    def take(self, ticket: Ticket) -> Started:
        """Hands a request to the engine. Raises `Refusal`, and then nothing of it is left."""
        ask = ticket.ask
        prompts = prompts_of(self.engine.tokenizer, ask, self._served.template)
        self._check(ask, prompts)
        made: list[Handle] = []
        try:
            for index in range(ask.num_choices):
                i, j = divmod(index, ask.n)
                made.append(self._submit(ticket, prompts[i], index, j))
        except ValueError as error:
            self._drop(made)
            raise _refused(error) from None
        except Refusal:
            self._drop(made)
            raise
        total = sum(len(prompt.tokens) for prompt in prompts)
        self._tokens[ask.id] = sum(len(p.tokens) + ask.max_tokens for p in prompts) * ask.n
        return Started(total)

    def _check(self, ask: Ask, prompts: list[Prompt]) -> None:
        most = self._settings.max_prompt_tokens
        name = "prompt" if ask.chat is None else "messages"
        for prompt in prompts:
            if len(prompt.tokens) > most:
                message = f"the prompt has {len(prompt.tokens)} tokens, this server allows {most}"
                raise Refusal(400, message, name, "context_length_exceeded")
        limit = self._settings.max_total_tokens
        if limit is None:
            return
        need = sum(len(prompt.tokens) + ask.max_tokens for prompt in prompts) * ask.n
        if need > limit:
            message = f"prompt and max_tokens make {need} tokens, this server allows {limit}"
            raise Refusal(400, message, name, "context_length_exceeded")
        if need + sum(self._tokens.values()) > limit:
            message = "the server has as many tokens at work as it allows"
            raise Refusal(429, message, code="tokens_exceeded", retry_after=1)

    def _submit(self, ticket: Ticket, prompt: Prompt, index: int, j: int) -> Handle:
        ask, tokenizer = ticket.ask, self.engine.tokenizer
        drafter = self._drafter(ask)
        tokens = ask.drafting.num_draft_tokens
        request = Request(
            prompt.tokens,
            ask.max_tokens,
            drafter,
            self._settings.num_draft_tokens if tokens is None else tokens,
            logits_processors=(
                () if ask.schema is None else (self._grammars.get(ask.schema).processor(),)
            ),
            sampling=self._sampling(ask, j),
            acceptance=ask.drafting.acceptance,  # type: ignore[arg-type]
            **self._served.request,
        )
        splitter = Splitter(tokenizer, prompt, None if ask.chat is None else ask.chat.tools)
        handle = self.engine.submit(request)
        self._choices[handle] = Choice(ticket, index, handle, splitter, kind_of(drafter))
        return handle

    def _drafter(self, ask: Ask) -> Drafter | None:
        drafting = ask.drafting
        if drafting.prediction is not None:
            encode = self.engine.tokenizer.encode
            return Prediction(encode(drafting.prediction, add_special_tokens=False))
        if drafting.kind is None:
            return self._served.drafter
        if drafting.kind not in self.drafters:
            known = ", ".join((*self.drafters, "prediction"))
            message = f"speculation.drafter: this server has {known}"
            raise Refusal(400, message, "speculation.drafter")
        return self.drafters[drafting.kind]

    def _sampling(self, ask: Ask, j: int) -> SamplingParams:
        """Choice number j of a prompt has the seed + j."""
        given = dict(ask.sampling)
        if given.get("seed") is not None:
            given["seed"] = (given["seed"] + j) % 2**64
        if given.get("xtc_probability"):
            tokenizer = self.engine.tokenizer
            given["xtc_special_tokens"] = (*tokenizer.encode("\n"), *tokenizer.eos_token_ids)
        return SamplingParams(**given, logprobs=ask.logprobs or None)

    def cancel(self, ticket: Ticket) -> None:
        """Ends what is left of a request."""
        self._drop([h for h, choice in self._choices.items() if choice.ticket is ticket])
        self._tokens.pop(ticket.ask.id, None)

    def _drop(self, handles: Iterable[Handle]) -> None:
        for handle in handles:
            self.engine.cancel(handle)
            self._choices.pop(handle, None)

    # -- out ------------------------------------------------------------------------------------

    def step(self) -> dict[Ticket, list[Event]]:
        """One step of the engine, and what it means for which request."""
        began = time.perf_counter()
        outputs = self.engine.step()
        self._note(outputs, time.perf_counter() - began)
        events: dict[Ticket, list[Event]] = {}
        touched: dict[Handle, Choice] = {}
        for output in outputs:
            choice = self._choices.get(output.handle)
            if choice is None:
                continue
            guard = Guard(f"request {choice.ticket.ask.id}")
            with guard:
                self._add(choice, output)
            if guard.error is not None:
                output.handle.error = output.handle.error or guard.error
                self.cancel(choice.ticket)
            touched[output.handle] = choice
        for handle, choice in touched.items():
            events.setdefault(choice.ticket, []).extend(self._events(handle, choice))
        return events

    def _note(self, outputs: list[Output], seconds: float) -> None:
        """Takes the time of a plain step of one row."""
        if len(outputs) == 1 and len(self._choices) == 1 and outputs[0].token is not None:
            stats = outputs[0].handle.stats
            if stats.steps > 1 and stats.rounds == self._rounds:
                self._plain.append(seconds)
            self._rounds = stats.rounds
        else:
            self._rounds = -1

    @property
    def plain_seconds(self) -> float:
        return median(self._plain) if self._plain else 0.0

    def _add(self, choice: Choice, output: Output) -> None:
        if output.token is None:
            return
        ask = choice.ticket.ask
        state = choice.splitter.state
        piece = choice.splitter.take(output.text, output.finish_reason is not None)
        choice.reasoning += state == "reasoning"
        logprob = None
        is_end = output.token in self.engine.tokenizer.eos_token_ids
        if ask.logprobs is not None and output.logprobs is not None and not is_end:
            value = float(output.logprobs[output.token].item())  # type: ignore[arg-type]
            logprob = self._texts.logprob(output.token, value, output.top_logprobs)
        choice.pieces.append(replace(piece, from_draft=output.from_draft, logprob=logprob))

    def _events(self, handle: Handle, choice: Choice) -> list[Event]:
        if handle.error is not None:
            self.cancel(choice.ticket)
            return [Failed(Refusal(500, "the request failed", code="request_failed"))]
        ask, pieces, choice.pieces = choice.ticket.ask, tuple(choice.pieces), []
        counts = self.counts(choice) if ask.details or handle.done else None
        events: list[Event] = [Tokens(choice.index, pieces, counts)] if pieces else []
        if handle.done and counts is not None:
            reason = str(handle.finish_reason)
            if choice.splitter.has_calls and reason == "stop":
                reason = "tool_calls"
            events.append(Ended(choice.index, reason, counts))
            del self._choices[handle]
            if all(other.ticket is not choice.ticket for other in self._choices.values()):
                self._tokens.pop(ask.id, None)
        return events

    def counts(self, choice: Choice) -> Counts:
        handle, stats = choice.handle, choice.handle.stats
        params = handle.request.sampling
        is_drawn = params is not None and not params.is_greedy
        return Counts(
            completion_tokens=len(handle.tokens),
            reasoning_tokens=choice.reasoning,
            draft_n=stats.drafted,
            draft_n_accepted=stats.accepted,
            draft_rounds=stats.rounds,
            steps=stats.steps,
            draft_kind=choice.kind,
            exactness=handle.exactness,
            reason=stats.reason,
            seed=handle.seed if is_drawn else None,
            accepted_per_position=tuple(stats.accepted_per_position),
            drafted_per_position=tuple(stats.drafted_per_position),
            plain_seconds=self.plain_seconds,
        )

    def open_counts(self, ticket: Ticket) -> list[Counts]:
        """What drafting did for the choices of a request that are not through."""
        return [self.counts(one) for one in self._choices.values() if one.ticket is ticket]


def _refused(error: ValueError) -> Refusal:
    """The engine's refusals begin with the name of what is wrong."""
    message = " ".join(str(error).split())
    name = message.split(" ", 1)[0]
    fields = {*SamplingParams.__dataclass_fields__, "num_draft_tokens", "acceptance"}
    return Refusal(400, message, name if name in fields else None, "invalid_value")
