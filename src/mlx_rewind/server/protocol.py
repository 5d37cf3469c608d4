"""What clients send: every field that is known, its bounds, and what it means to the worker.

A field that is not here is refused by name. Those in `_NO_EFFECT` are taken and change nothing.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=0)]
#: A key of a JSON object is a string.
TokenId = Annotated[int, Field(ge=0, strict=False)]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]

#: The parameters that go to `SamplingParams` under the same name.
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "xtc_probability", "xtc_threshold", "seed"),
    *("repetition_penalty", "repetition_context_size", "presence_penalty"),
    *("presence_context_size", "frequency_penalty", "frequency_context_size"),
    *("logit_bias", "min_tokens", "stop"),
)
#: A text, or token ids.
Prompt = str | Annotated[list[Count], Field(min_length=1)]
#: Answers that one request may ask for, all of its prompts together.
MOST_CHOICES = 64
#: What messages may have beside their content; the last ones change no token.
_MESSAGE = {
    *("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"),
    *("annotations", "refusal", "id"),
}
#: Names that say something to other servers and change no token.
_NO_EFFECT = {"user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "store"}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    include_usage: bool = False


class Speculation(_Strict):
    """How a request drafts: the operator's drafter, n-grams, or nothing."""

    draft: Literal["server", "ngram", "none"] = "server"
    num_draft_tokens: Count | None = None
    acceptance: Literal["match", "rejection", "block"] = "match"


class Predicted(_Strict):
    type: Literal["content"]
    content: str | list[dict[str, Any]]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(str(part.get("text", "")) for part in self.content)


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        schema = (self.json_schema or {}).get("schema")
        if self.type == "json_schema" and not isinstance(schema, dict):
            raise ValueError("json_schema needs a schema: {'name': ..., 'schema': {...}}")
        return self


class Generation(_Strict):
    """What chat and text completions share. The bounds are those of `SamplingParams`."""

    model: str | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_p: Share = 1.0
    top_k: Count = 0
    min_p: Share = 0.0
    xtc_probability: Share = 0.0
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0)] | None = None
    repetition_context_size: Positive = 20
    presence_penalty: Penalty | None = None
    presence_context_size: Positive = 20
    frequency_penalty: Penalty | None = None
    frequency_context_size: Positive = 20
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = None
    min_tokens: Count = 0
    stop: str | list[str] | None = None
    n: Annotated[int, Field(ge=1, le=16)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    prediction: Predicted | None = None
    draft_model: str | None = None
    num_draft_tokens: Count | None = None
    speculation: Literal["auto", "off"] | Speculation = "auto"

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {k: v for k, v in data.items() if k not in _NO_EFFECT and v is not None}
        return data

    @property
    def drafting(self) -> Speculation:
        """What `speculation` and `num_draft_tokens` say together."""
        if isinstance(self.speculation, Speculation):
            given = self.speculation
        else:
            given = Speculation(draft="none" if self.speculation == "off" else "server")
        if given.num_draft_tokens is None and self.num_draft_tokens is not None:
            given = given.model_copy(update={"num_draft_tokens": self.num_draft_tokens})
        return given

    @property
    def sampling(self) -> dict[str, Any]:
        """The arguments of `SamplingParams`, but for the budget and logprobs."""
        given = {name: getattr(self, name) for name in SAMPLING}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def prompts(self) -> list[Any]:
        """What to answer: a text, token ids, or messages as chat templates take them."""
        raise NotImplementedError

    @property
    def budget(self) -> int | None:
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """How many logprobs are wanted with every token; None for none at all."""
        return None


class ChatRequest(Generation):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _is_whole(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        for message in self.messages:
            if message.get("role") not in ("system", "developer", "user", "assistant", "tool"):
                raise ValueError(f"messages: no role {message.get('role')!r}")
            unknown = [k for k, v in message.items() if k not in _MESSAGE and v is not None]
            if unknown:
                raise ValueError(f"messages: unknown or unsupported field {unknown[0]!r}")
            _plain(message)
        return self

    @property
    def budget(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompts(self) -> list[Any]:
        return [[_plain(one) for one in self.messages]]


class CompletionRequest(Generation):
    prompt: Prompt | Annotated[list[Prompt], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] = False

    @property
    def prompts(self) -> list[Any]:
        """Texts or token ids, one or more."""
        is_list = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return list(self.prompt) if is_list else [self.prompt]

    @model_validator(mode="after")
    def _is_bounded(self) -> CompletionRequest:
        if len(self.prompts) * self.n > MOST_CHOICES:
            raise ValueError(f"prompt: at most {MOST_CHOICES} answers (prompts times n)")
        return self

    @property
    def top(self) -> int | None:
        return self.logprobs


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its content as text, and the arguments of tool calls as objects.

    Raises ValueError for other content, and for arguments that are not JSON.
    """
    made = {**message, "content": _text_of(message.get("content"))}
    if message.get("tool_calls") is None:
        return made
    try:
        made["tool_calls"] = [_with_arguments(call) for call in message["tool_calls"]]
    except (AttributeError, TypeError, ValueError):
        raise ValueError(
            "messages: tool_calls must be a list of {'function': {'name': ..., 'arguments': JSON}}"
        ) from None
    return made


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    given = json.loads(arguments) if arguments.strip() else {}
    return {**call, "function": {**function, "arguments": given}}


def _text_of(content: Any) -> str:
    """The text of a message. Raises ValueError for parts of another kind."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        return "".join(str(part.get("text", "")) for part in content)
    raise ValueError("messages: content must be text, or a list of parts of type text")
