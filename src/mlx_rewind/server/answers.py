"""Answers in OpenAI's shapes, whole or in chunks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .records import Ask, Counts, Ended, Event, Logprob, Piece, Started, Tokens


@dataclass
class _Choice:
    """What came of one choice so far."""

    pieces: list[Piece] = field(default_factory=list)
    end: Ended | None = None
    calls: int = 0
    offset: int = 0


class Answer(ABC):
    """One response. `take` every event but `Failed`; then `whole`, or `chunks` as they come.

    model          the name that the request used
    fingerprint    of the server's version
    """

    kind: str
    chunk_kind: str

    def __init__(self, ask: Ask, model: str, fingerprint: str, includes_usage: bool) -> None:
        self._ask, self._includes_usage = ask, includes_usage
        self._created, self._model, self._fingerprint = int(time.time()), model, fingerprint
        self._choices = [_Choice() for _ in range(ask.num_choices)]
        self._prompt_tokens = 0

    @property
    def is_done(self) -> bool:
        return all(choice.end for choice in self._choices)

    def take(self, events: Sequence[Event]) -> None:
        """Keeps what is needed for `whole` and for the usage."""
        for event in events:
            if isinstance(event, Started):
                self._prompt_tokens = event.prompt_tokens
            elif isinstance(event, Tokens):
                self._choices[event.index].pieces += event.pieces
            elif isinstance(event, Ended):
                self._choices[event.index].end = event

    def whole(self) -> dict[str, Any]:
        """The complete response."""
        choices = [
            {**self._body(choice), **self._last(index, choice)}
            for index, choice in enumerate(self._choices)
        ]
        return {**self._head(self.kind), "choices": choices, "usage": self.usage()}

    def chunks(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """The chunks of a stream that these events make."""
        made: list[dict[str, Any]] = []
        for event in events:
            self.take([event])
            if isinstance(event, Started):
                made += [self._chunk(body) for body in self._first()]
            elif isinstance(event, Tokens):
                made += [self._chunk(body) for body in self._deltas(event)]
            elif isinstance(event, Ended):
                last = self._last(event.index, self._choices[event.index])
                made.append(self._chunk({**self._empty(), **last}))
        if self.is_done and self._includes_usage:
            made.append({**self._head(self.chunk_kind), "choices": [], "usage": self.usage()})
        return made

    def usage(self) -> dict[str, Any]:
        """Sums over all choices, in OpenAI's names and ours."""
        ends = [choice.end for choice in self._choices if choice.end is not None]
        counts = [end.counts for end in ends]

        def total(name: str) -> int:
            return sum(getattr(one, name) for one in counts)

        completion = total("completion_tokens")
        drafted, accepted = total("draft_n"), total("draft_n_accepted")
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in ends)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
                "reasoning_tokens": total("reasoning_tokens"),
            },
            "draft_n": drafted,
            "draft_n_accepted": accepted,
            "draft_rounds": total("draft_rounds"),
            "draft_kind": counts[0].draft_kind if counts else "none",
            "draft_reason": next((one.reason for one in counts if one.reason), None),
            "exactness": _loosest([one.exactness for one in counts]),
        }

    # -- parts ----------------------------------------------------------------------------------

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._ask.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(self.chunk_kind), "choices": [choice]}

    def _last(self, index: int, choice: _Choice) -> dict[str, Any]:
        """What only the end of a choice has."""
        made: dict[str, Any] = {"index": index, "finish_reason": None}
        if choice.end is not None:
            made["finish_reason"] = choice.end.reason
            if choice.end.counts.seed is not None:
                made["seed"] = choice.end.counts.seed
        return made

    def _deltas(self, event: Tokens) -> list[dict[str, Any]]:
        choice = self._choices[event.index]
        body = self._delta(choice, event.pieces)
        if self._ask.details and event.counts is not None:
            body["draft"] = _details(event.pieces, event.counts)
        if not body:
            return []
        return [{**self._empty(), **body, "index": event.index, "finish_reason": None}]

    @abstractmethod
    def _first(self) -> list[dict[str, Any]]:
        """What a stream begins with."""

    @abstractmethod
    def _empty(self) -> dict[str, Any]:
        """A choice of a chunk that adds nothing."""

    @abstractmethod
    def _delta(self, choice: _Choice, pieces: Sequence[Piece]) -> dict[str, Any]:
        """What pieces add to a choice of a chunk; empty if there is nothing to send yet."""

    @abstractmethod
    def _body(self, choice: _Choice) -> dict[str, Any]:
        """A choice of a whole response, without what `_last` adds."""


class ChatAnswer(Answer):
    """Of `/v1/chat/completions`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def _first(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        count = len(self._choices)
        return [{"index": i, "delta": dict(delta), "finish_reason": None} for i in range(count)]

    def _empty(self) -> dict[str, Any]:
        return {"delta": {}}

    def _delta(self, choice: _Choice, pieces: Sequence[Piece]) -> dict[str, Any]:
        texts = {"content": _text(pieces), "reasoning": _reasoning(pieces)}
        delta: dict[str, Any] = {name: text for name, text in texts.items() if text}
        calls = _calls(pieces, choice.calls)
        choice.calls += len(calls)
        if calls:
            delta["tool_calls"] = calls
        logprobs = self._logprobs(pieces)
        if not delta and not (logprobs and logprobs["content"]):
            return {}
        return {"delta": delta, **({"logprobs": logprobs} if logprobs else {})}

    def _body(self, choice: _Choice) -> dict[str, Any]:
        pieces = choice.pieces
        calls = [{k: v for k, v in call.items() if k != "index"} for call in _calls(pieces, 0)]
        text = _text(pieces)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        if _reasoning(pieces):
            message["reasoning"] = _reasoning(pieces)
        return {"message": message, "logprobs": self._logprobs(pieces)}

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if self._ask.logprobs is None:
            return None
        given = [piece.logprob for piece in pieces if piece.logprob is not None]
        content = [{**_logprob(one), "top_logprobs": [*map(_logprob, one.top)]} for one in given]
        return {"content": content}


class TextAnswer(Answer):
    """Of `/v1/completions`."""

    kind = chunk_kind = "text_completion"

    def _first(self) -> list[dict[str, Any]]:
        return []

    def _empty(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def _delta(self, choice: _Choice, pieces: Sequence[Piece]) -> dict[str, Any]:
        text, logprobs = _text(pieces), self._logprobs(choice, pieces)
        if not text and not (logprobs and logprobs["tokens"]):
            return {}
        return {"text": text, "logprobs": logprobs}

    def _body(self, choice: _Choice) -> dict[str, Any]:
        choice.offset = 0
        return {"text": _text(choice.pieces), "logprobs": self._logprobs(choice, choice.pieces)}

    def _logprobs(self, choice: _Choice, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if self._ask.logprobs is None:
            return None
        given = [piece.logprob for piece in pieces if piece.logprob is not None]
        offsets = []
        for one in given:
            offsets.append(choice.offset)
            choice.offset += len(one.token)
        top = [{each.token: each.logprob for each in one.top} for one in given]
        return {
            "tokens": [one.token for one in given],
            "token_logprobs": [one.logprob for one in given],
            "top_logprobs": top if self._ask.logprobs else None,
            "text_offset": offsets,
        }


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _reasoning(pieces: Sequence[Piece]) -> str:
    return "".join(piece.reasoning for piece in pieces)


def _calls(pieces: Sequence[Piece], first: int) -> list[dict[str, Any]]:
    """Tool calls, counted from `first`."""
    calls = [call for piece in pieces for call in piece.tool_calls]
    return [
        {
            "index": index,
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls, first)
    ]


def _logprob(one: Logprob) -> dict[str, Any]:
    raw = None if one.bytes is None else list(one.bytes)
    return {"token": one.token, "id": one.id, "logprob": one.logprob, "bytes": raw}


def _details(pieces: Sequence[Piece], counts: Counts) -> dict[str, Any]:
    """Which text was drafted, and how drafting goes."""
    return {
        "pieces": [[piece.text or piece.reasoning, piece.from_draft] for piece in pieces],
        "completion_tokens": counts.completion_tokens,
        "steps": counts.steps,
        "draft_n": counts.draft_n,
        "draft_n_accepted": counts.draft_n_accepted,
        "draft_rounds": counts.draft_rounds,
        "draft_kind": counts.draft_kind,
        "draft_reason": counts.reason,
        "accepted_per_position": list(counts.accepted_per_position),
        "drafted_per_position": list(counts.drafted_per_position),
        "plain_seconds": counts.plain_seconds,
    }


def _loosest(levels: Sequence[str]) -> str | None:
    order = ("bitwise", "token", "near-tie", "law")
    return max(levels, key=order.index, default=None)
