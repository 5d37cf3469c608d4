"""What passes between the web layer and the engine thread. Plain values, no arrays.

web layer    Ask ──────────────────────────────▶ engine thread
             ◀── Started, Tokens..., Ended ────   Ended once per choice
             ◀── Failed ───────────────────────   instead, at any point; nothing follows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Status = Literal["loading", "ok", "restarting", "draining", "dead"]


@dataclass(frozen=True)
class Drafting:
    """How a request wants to be drafted for.

    kind          a drafter by name, "none", or None for the server's own
    prediction    text that the answer is expected to be like
    """

    kind: str | None = None
    num_draft_tokens: int | None = None
    prediction: str | None = None
    acceptance: str = "match"


@dataclass(frozen=True)
class Chat:
    """Messages as a chat template takes them, its tools, and options of its own."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ask:
    """A request, checked as far as that goes without the model.

    prompts     texts or token ids; empty for a chat
    n           choices per prompt
    sampling    fields of SamplingParams
    logprobs    how many of the best tokens to report with each one; None: no logprobs
    schema      what the answer must match as JSON; {"type": "object"} for any object
    details     whether the stream tells drafted from other text, and how drafting goes
    """

    id: str
    max_tokens: int
    chat: Chat | None = None
    prompts: Sequence[str | Sequence[int]] = ()
    n: int = 1
    sampling: Mapping[str, Any] = field(default_factory=dict)
    logprobs: int | None = None
    schema: Mapping[str, Any] | None = None
    drafting: Drafting = field(default_factory=Drafting)
    details: bool = False

    @property
    def num_choices(self) -> int:
        return self.n * (1 if self.chat is not None else len(self.prompts))


@dataclass(frozen=True)
class Logprob:
    """A token and its logprob; `bytes` is None where a token is not known as bytes."""

    token: str
    id: int
    logprob: float
    bytes: tuple[int, ...] | None
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """A call that the model makes; `arguments` is JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Piece:
    """What one token adds to an answer."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    from_draft: bool = False
    logprob: Logprob | None = None


@dataclass(frozen=True)
class Counts:
    """What drafting did for a choice so far; see `SpecStats` and docs/server.md.

    plain_seconds    what a step without drafts takes here by itself, 0 where not known
    """

    completion_tokens: int = 0
    reasoning_tokens: int = 0
    draft_n: int = 0
    draft_n_accepted: int = 0
    draft_rounds: int = 0
    steps: int = 0
    draft_kind: str = "none"
    exactness: str = "bitwise"
    reason: str = ""
    seed: int | None = None
    accepted_per_position: tuple[int, ...] = ()
    drafted_per_position: tuple[int, ...] = ()
    plain_seconds: float = 0.0


@dataclass(frozen=True)
class Started:
    """The request is in the engine. `prompt_tokens` of all its prompts."""

    prompt_tokens: int


@dataclass(frozen=True)
class Tokens:
    """What a round added to choice `index`."""

    index: int
    pieces: tuple[Piece, ...]
    counts: Counts | None = None


@dataclass(frozen=True)
class Ended:
    """Choice `index` is complete: stop, length or tool_calls."""

    index: int
    reason: str
    counts: Counts
    cached_tokens: int = 0


@dataclass(eq=False)
class Refusal(Exception):  # noqa: N818  # an answer to a client, as well as an error
    """Why a request gets no answer, or no more of it. `message` is for the client."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    @property
    def kind(self) -> str:
        names = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        return names.get(self.status, default)

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


@dataclass(frozen=True)
class Failed:
    """The request is over without an answer."""

    refusal: Refusal


Event = Started | Tokens | Ended | Failed
Sink = Callable[[Sequence[Event]], None]


class Ticket(Protocol):
    """A request that was taken."""

    ask: Ask


class Backend(Protocol):
    """What the web layer asks of the engine thread. Every call returns at once.

    drafters    kinds that a request may choose, that of the others first
    """

    drafters: tuple[str, ...]

    @property
    def status(self) -> Status: ...

    def submit(self, ask: Ask, sink: Sink) -> Ticket:
        """Queues a request; `sink` is called from the engine thread. Raises `Refusal`."""
        ...

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request before its next round; its sink is not called again."""
        ...

    def figures(self) -> Mapping[str, Any]:
        """What the server is doing, for the page."""
        ...
