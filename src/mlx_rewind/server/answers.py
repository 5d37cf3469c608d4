"""Answers in OpenAI's form, whole and in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .jobs import Piece, Usage
from .reply import Markers, Splitter, tool_calls


def usage_of(usages: list[Usage], n: int = 1) -> dict[str, Any]:
    """The counts of all answers to one request; each prompt, which has n of them, counts once."""
    first, firsts = usages[0], usages[::n]
    prompt = sum(usage.prompt_tokens for usage in firsts)
    accepted = sum(usage.accepted for usage in usages)
    drafted = sum(usage.drafted for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in firsts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "draft_n": drafted,
        "draft_n_accepted": accepted,
        "draft_rounds": sum(usage.rounds for usage in usages),
        "draft_kind": first.draft_kind,
        "draft_reason": first.draft_reason,
        "draft_n_accepted_per_position": list(first.accepted_per_position),
        "draft_n_per_position": list(first.drafted_per_position),
        "exactness": first.exactness,
        "seed": first.seed,
    }


@dataclass
class Answer:
    """One choice of an answer, as it grows.

    decode    the text of a token id, for logprobs
    """

    index: int
    is_chat: bool
    splitter: Splitter
    markers: Markers
    tools: Any
    decode: Any
    wants_logprobs: bool
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage | None = None
    _call: str = ""

    def take(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Takes a piece; yields what it adds, as the `delta` of a chunk."""
        told: dict[str, Any] | None = None
        if self.wants_logprobs and piece.token is not None:
            told = self._logprob(piece)
            self.logprobs.append(told)
        parts = [*self.splitter.feed(piece.text)]
        if piece.finish_reason is not None:
            parts += self.splitter.flush()
        deltas = [delta for kind, text in parts for delta in self._delta(kind, text)]
        if piece.finish_reason is not None:
            self.finish_reason = "tool_calls" if self.calls else piece.finish_reason
            self.usage = piece.usage
        if told is not None and not deltas:
            deltas = [{"content": ""}]
        for i, delta in enumerate(deltas):
            extra = {"from_draft": piece.from_draft}
            yield {"delta": delta, "logprobs": told if i == 0 else None, **extra}

    def _delta(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if kind == "reasoning":
            self.reasoning += text
            yield {"reasoning": text}
        elif kind == "content":
            self.content += text
            yield {"content": text}
        elif text:
            self._call += text
        else:
            calls, self._call = tool_calls(self._call, self.markers, self.tools), ""
            for call in calls:
                self.calls.append(call)
                yield {"tool_calls": [{"index": len(self.calls) - 1, **call}]}

    def _logprob(self, piece: Piece) -> dict[str, Any]:
        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            text = self.decode(token)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        assert piece.token is not None
        top = [entry(token, logprob) for token, logprob in piece.top]
        return {**entry(piece.token, piece.logprob), "top_logprobs": top}

    def whole(self) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        choice: dict[str, Any] = {"index": self.index, "finish_reason": self.finish_reason}
        choice["logprobs"] = self._logprobs(self.logprobs) if self.wants_logprobs else None
        if not self.is_chat:
            return {**choice, "text": self.content}
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return {**choice, "message": message}

    def chunk(self, part: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        """The choice of one chunk of a stream."""
        told = part.get("logprobs")
        choice: dict[str, Any] = {"index": self.index, "finish_reason": finish_reason}
        choice["logprobs"] = None if told is None else self._logprobs([told])
        choice["from_draft"] = part.get("from_draft", False)
        if self.is_chat:
            return {**choice, "delta": part["delta"]}
        return {**choice, "text": part["delta"].get("content", "")}

    def _logprobs(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        if self.is_chat:
            return {"content": entries}
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries
            ],
        }


@dataclass(frozen=True)
class Envelope:
    """What answers of one request have in common."""

    model: str
    is_chat: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def of(self, choices: list[dict[str, Any]], *, is_chunk: bool, **more: Any) -> dict[str, Any]:
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {
            "id": f"chatcmpl-{self.id}" if self.is_chat else f"cmpl-{self.id}",
            "object": f"{kind}.chunk" if is_chunk and self.is_chat else kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


def error_body(message: str, param: str | None = None, kind: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kind = kind or "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}
