"""Request bodies: what is taken, what is refused, and the `Ask` that comes of it.

Types are strict. A field that is not listed here is refused by its name, so that nothing that would
change an answer is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from .records import Ask, Chat, Drafting, Refusal
from .settings import Settings

#: Fields that ask for nothing where they have one of these values; refused with any other.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "function_call": (None,),
    "functions": (None,),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True),
    "reasoning_effort": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "adapters": (None,),
    "role_mapping": (None,),
}
#: Parameters of the tokenizer's method, which a request must not reach through the template's.
_NOT_TEMPLATE = frozenset(
    "conversation messages tools documents chat_template add_generation_prompt tokenize padding "
    "continue_final_message truncation max_length return_tensors return_dict tokenizer_kwargs "
    "return_assistant_tokens_mask".split()
)

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(max_length=512)]


class _Part(BaseModel):
    """Objects of a body: strict types, no other fields, finite numbers."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class TextPart(_Part):
    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class FunctionCall(_Part):
    name: str
    arguments: str


class Call(_Part):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(_Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None


class Function(_Part):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(_Part):
    type: Literal["function"]
    function: Function


class JsonSchema(_Part):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class Format(_Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class PredictedContent(_Part):
    type: Literal["content"]
    content: Content


class StreamOptions(_Part):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class Speculation(_Part):
    drafter: Name | None = None
    num_draft_tokens: Count | None = None


class _Body(_Part):
    """What both kinds of requests have."""

    model: Name | None = None
    n: Size | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Size | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    min_p: Share | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0)] | None = None
    repetition_context_size: Size | None = None
    presence_penalty: float | None = None
    presence_context_size: Size | None = None
    frequency_penalty: float | None = None
    frequency_context_size: Size | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[Count], Field(max_length=64)] | None = None
    draft_model: Name | None = None
    num_draft_tokens: Count | None = None
    speculation: Literal["auto", "off"] | Speculation | None = None
    acceptance: Literal["match", "rejection", "block"] | None = None
    prediction: PredictedContent | None = None
    response_format: Format | None = None
    draft_details: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(_Body):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Size | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TextBody(_Body):
    """The body of `/v1/completions`."""

    prompt: str | list[str] | list[Count] | list[list[Count]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


Body = TypeVar("Body", ChatBody, TextBody)

_SAMPLING = (
    "temperature top_p top_k min_p xtc_probability xtc_threshold repetition_penalty "
    "repetition_context_size presence_penalty presence_context_size frequency_penalty "
    "frequency_context_size min_tokens seed"
).split()


def read(kind: type[Body], body: bytes) -> Body:
    """The checked body. Raises `Refusal` that names the field."""
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(data, dict):
        raise Refusal(400, f"the body must be a JSON object, got {type(data).__name__}")
    data = {k: v for k, v in data.items() if not (k in _NEUTRAL and v in _NEUTRAL[k])}
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _refusal(error, data) from None


def _refusal(error: ValidationError, data: Any) -> Refusal:
    """The first problem, by the name that the field has in the body."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path, at = "", data
    for step in problem["loc"]:
        if isinstance(step, int) and isinstance(at, list) and step < len(at):
            path, at = f"{path}[{step}]", at[step]
        elif isinstance(at, dict) and (step in at or problem["type"] == "missing"):
            path, at = f"{path}.{step}".lstrip("."), at.get(step)
    if problem["type"] == "extra_forbidden":
        message = f"{path[:200]}: unknown or unsupported field, or a value that is not supported"
        return Refusal(400, message, path[:200], "unsupported_parameter")
    return Refusal(400, f"{path[:200]}: {problem['msg'][:300]}", path[:200], "invalid_value")


def chat_ask(body: ChatBody, settings: Settings, ident: str) -> Ask:
    """Raises `Refusal` for what the server does not allow, or what cannot be combined."""
    if body.top_logprobs is not None and not body.logprobs:
        raise Refusal(400, "top_logprobs needs logprobs: true", "top_logprobs")
    longest = [x for x in (body.max_completion_tokens, body.max_tokens) if x is not None]
    if len(set(longest)) > 1:
        raise Refusal(400, "max_tokens and max_completion_tokens differ", "max_tokens")
    tools = None if body.tool_choice == "none" or not body.tools else body.tools
    template = _template(body.chat_template_kwargs or {})
    ask = _ask(body, settings, ident, longest[0] if longest else None)
    if tools and ask.schema is not None:
        raise Refusal(400, "response_format cannot be combined with tools", "response_format")
    chat = Chat(
        [_message(message) for message in body.messages],
        [tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
        template,
    )
    return replace(ask, chat=chat, logprobs=(body.top_logprobs or 0) if body.logprobs else None)


def text_ask(body: TextBody, settings: Settings, ident: str) -> Ask:
    """Raises `Refusal` as `chat_ask` does."""
    given: Any = body.prompt
    is_one = isinstance(given, str) or (given and isinstance(given[0], int))
    prompts: list[Any] = [given] if is_one else list(given)
    if not prompts:
        raise Refusal(400, "prompt: at least one is needed", "prompt")
    if not all(prompts):
        raise Refusal(400, "prompt: it is empty; at least one token is needed", "prompt")
    ask = replace(_ask(body, settings, ident, body.max_tokens), prompts=prompts)
    _check_choices(ask, settings)
    return replace(ask, logprobs=body.logprobs)


def _ask(body: _Body, settings: Settings, ident: str, max_tokens: int | None) -> Ask:
    if body.model not in (None, "default_model", *settings.models):
        raise Refusal(404, "there is no such model here", "model", "model_not_found")
    if body.stream_options is not None and not body.stream:
        raise Refusal(400, "stream_options needs stream: true", "stream_options")
    if body.draft_details and not body.stream:
        raise Refusal(400, "draft_details needs stream: true", "draft_details")
    longest = min(settings.max_tokens, settings.max_tokens_limit)
    longest = longest if max_tokens is None else max_tokens
    if longest > settings.max_tokens_limit:
        most = settings.max_tokens_limit
        raise Refusal(400, f"max_tokens is {longest}, this server allows {most}", "max_tokens")
    given = {name: getattr(body, name) for name in _SAMPLING}
    sampling = {**settings.defaults, **{k: v for k, v in given.items() if v is not None}}
    if body.logit_bias:
        sampling["logit_bias"] = _bias(body.logit_bias)
    stop = [body.stop] if isinstance(body.stop, str) else (body.stop or [])
    if not all(stop):
        raise Refusal(400, "stop: strings must not be empty", "stop")
    sampling["stop"] = (*stop, *(body.stop_token_ids or ()))
    ask = Ask(
        id=ident,
        max_tokens=longest,
        n=body.n or 1,
        sampling=sampling,
        schema=_schema(body.response_format, settings),
        drafting=_drafting(body, settings),
        details=bool(body.draft_details),
    )
    _check_choices(ask, settings)
    return ask


def _check_choices(ask: Ask, settings: Settings) -> None:
    count = max(ask.num_choices, ask.n)
    if count > settings.max_choices:
        name = "n" if ask.n > 1 else "prompt"
        raise Refusal(400, f"{count} choices, this server allows {settings.max_choices}", name)


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    if not all(key.isascii() and key.isdigit() and len(key) < 12 for key in given):
        raise Refusal(400, "logit_bias: keys must be token ids", "logit_bias")
    return {int(key): value for key, value in given.items()}


def _schema(given: Format | None, settings: Settings) -> dict[str, Any] | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"type": "object"}
    if given.json_schema is None:
        raise Refusal(400, "response_format: json_schema is missing", "response_format.json_schema")
    schema = given.json_schema.schema_
    if len(json.dumps(schema)) > settings.max_schema_bytes:
        most = settings.max_schema_bytes
        raise Refusal(400, f"the schema has more than {most} bytes", "response_format.json_schema")
    return schema


def _drafting(body: _Body, settings: Settings) -> Drafting:
    """Raises `Refusal` for drafters that the operator did not set up, and contradictions."""
    if body.draft_model not in (None, "default_model", *settings.draft_models):
        raise Refusal(404, "there is no such draft model here", "draft_model", "model_not_found")
    chosen, tokens = body.speculation, body.num_draft_tokens
    kind = "none" if chosen == "off" else None
    if isinstance(chosen, Speculation):
        kind = chosen.drafter
        if tokens is not None and chosen.num_draft_tokens not in (None, tokens):
            raise Refusal(400, "num_draft_tokens is given twice", "num_draft_tokens")
        tokens = chosen.num_draft_tokens if tokens is None else tokens
    if tokens is not None and tokens > settings.max_draft_tokens:
        most = settings.max_draft_tokens
        message = f"num_draft_tokens is {tokens}, this server allows {most}"
        raise Refusal(400, message, "num_draft_tokens")
    if body.prediction is not None and kind not in (None, "prediction"):
        raise Refusal(400, f"prediction cannot be used with the drafter {kind}", "prediction")
    if body.draft_model is not None and kind not in (None, "model", "mtp", "auto"):
        raise Refusal(400, f"draft_model cannot be used with the drafter {kind}", "draft_model")
    prediction = None if body.prediction is None else _text(body.prediction.content)
    if kind == "prediction" and prediction is None:
        raise Refusal(400, "the drafter prediction needs the field prediction", "prediction")
    return Drafting(kind, tokens, prediction, body.acceptance or "match")


def _template(given: dict[str, Any]) -> dict[str, Any]:
    for name in given:
        if name in _NOT_TEMPLATE or not name.isidentifier():
            path = f"chat_template_kwargs.{name[:100]}"
            raise Refusal(400, f"{path}: not an option of a template", path)
    return given


def _message(message: Message) -> dict[str, Any]:
    """A message as chat templates take it: text in one piece, arguments as objects."""
    made: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message.content or ""),
    }
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            made[name] = getattr(message, name)
    reasoning = message.reasoning or message.reasoning_content
    if reasoning:
        made["reasoning_content"] = reasoning
    if message.tool_calls:
        made["tool_calls"] = [_call(call) for call in message.tool_calls]
    return made


def _call(call: Call) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError:
        raise Refusal(400, "arguments of a tool call are not JSON", "messages") from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _text(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
