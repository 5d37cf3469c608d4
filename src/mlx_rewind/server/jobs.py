"""What passes between the web and the engine's thread: plain values, no mlx."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class RefusedError(ValueError):
    """A request that cannot be served as it is. The client is told why.

    status    of HTTP: 400 for the request's own fault, 429 for a full queue, 503 while closing
    param     the field at fault, if it is one
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param


@dataclass(frozen=True)
class Job:
    """One answer to make.

    prompt       messages for the chat template, a text, or token ids
    template     options of the template, tools among them
    sampling     arguments of `SamplingParams`, but for those below
    top          best logprobs to report with each token; None for none
    schema       the JSON schema that binds the text; {} for any object, None for free text
    prediction   the text that the client expects
    draft        server, ngram or none
    """

    prompt: list[dict[str, Any]] | str | list[int]
    max_tokens: int
    template: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    top: int | None = None
    schema: dict[str, Any] | None = None
    prediction: str | None = None
    draft: str = "server"
    num_draft_tokens: int | None = None
    acceptance: str = "match"


@dataclass(frozen=True)
class Piece:
    """What one step gave a request.

    token, logprob, top    the token, its logprob and the best ones; None where none was asked for
    from_draft             whether it was a draft token
    finish_reason          stop or length with the last one
    error                  what ended the request instead; internal if it was not its own fault
    """

    text: str = ""
    token: int | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    from_draft: bool = False
    finish_reason: str | None = None
    error: str | None = None
    usage: Usage | None = None


@dataclass(frozen=True)
class Usage:
    """The counts of a request, so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafted: int
    accepted: int
    rounds: int
    draft_kind: str
    draft_reason: str
    exactness: str
    seed: int | None
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()


@dataclass(frozen=True)
class Limits:
    """What a server takes.

    max_rows      requests under work at once
    max_queue     requests that may wait
    max_tokens    most tokens of an answer, and what an answer without a limit gets
    max_prompt    most tokens of a prompt
    max_body      bytes of a request
    max_schema    bytes of a JSON schema
    max_total_tokens    tokens that all requests together may come to; 0 for no limit
    """

    max_rows: int = 8
    max_queue: int = 64
    max_tokens: int = 4096
    max_prompt: int = 131072
    max_body: int = 4 << 20
    max_schema: int = 64 << 10
    max_total_tokens: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes in use by arrays, of which the store has some; its entries, hits and evictions."""

    active: int
    store: int = 0
    entries: int = 0
    hits: int = 0
    evictions: int = 0


@dataclass
class Totals:
    """Counters since the start, for metrics."""

    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    requests: dict[str, int] = field(default_factory=dict)

    def add(self, usage: Usage, outcome: str) -> None:
        self.drafted += usage.drafted
        self.accepted += usage.accepted
        self.rounds += usage.rounds
        self.tokens += usage.completion_tokens
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        missing = len(usage.accepted_per_position) - len(self.accepted_per_position)
        self.accepted_per_position += [0] * missing
        for i, count in enumerate(usage.accepted_per_position):
            self.accepted_per_position[i] += count
        self.requests[outcome] = self.requests.get(outcome, 0) + 1
