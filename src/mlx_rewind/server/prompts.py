"""From messages to a prompt, and from text to an answer: mlx-lm's templates and parsers.

text of the model    <think>hm</think>Let me see.<tool_call>{...}</tool_call>
state                reasoning        normal     tool
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ..grammar import Grammar
from .records import Ask, Chat, Logprob, Piece, Refusal, ToolCall

#: Character of a byte-level token -> its byte.
_BYTES = {char: byte for byte, char in bytes_to_unicode().items()}


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the state that the text after them begins in; None for plain text."""

    tokens: list[int]
    state: str | None


class Grammars:
    """Compiled grammars of a tokenizer; the last ones are kept."""

    def __init__(self, tokenizer: Any, most: int = 32) -> None:
        self._tokenizer, self._most = tokenizer, most
        self._known: dict[str, Grammar] = {}

    def get(self, schema: Mapping[str, Any]) -> Grammar:
        """Raises `Refusal` for a schema that cannot be enforced."""
        source = json.dumps(schema)
        grammar = self._known.pop(source, None)
        try:
            grammar = grammar or Grammar.json_schema(source, self._tokenizer, compact=True)
        except ImportError:
            message = "response_format needs the extra `grammar` on the server"
            raise Refusal(400, message, "response_format") from None
        except ValueError as error:
            raise Refusal(400, f"response_format: {error}", "response_format") from None
        self._known[source] = grammar
        while len(self._known) > self._most:
            del self._known[next(iter(self._known))]
        return grammar


def prompts_of(tokenizer: Any, ask: Ask, template: Mapping[str, Any]) -> list[Prompt]:
    """The prompts of a request. Raises `Refusal` for what the template does not take.

    template    the operator's options of the template
    """
    if ask.chat is not None:
        return [_chat(tokenizer, ask.chat, ask.schema is not None, template)]
    texts = [x if isinstance(x, str) else list(x) for x in ask.prompts]
    tokens = [tokenizer.encode(x) if isinstance(x, str) else x for x in texts]
    size = len(tokenizer)
    for one in tokens:
        if not one or max(one) >= size:
            message = f"token {max(one)} is not in the vocabulary of {size}" if one else "empty"
            raise Refusal(400, f"prompt: {message}", "prompt")
    return [Prompt(one, None) for one in tokens]


def _chat(tokenizer: Any, chat: Chat, is_json: bool, template: Mapping[str, Any]) -> Prompt:
    if not tokenizer.has_chat_template:
        message = "the model has no chat template: use /v1/completions"
        raise Refusal(400, message, "messages")
    if chat.tools and not tokenizer.has_tool_calling:
        message = "the chat template of this model has no tool calls that mlx-lm can read"
        raise Refusal(400, message, "tools", "unsupported_parameter")
    options = {**template, **chat.template}
    if is_json:
        options.setdefault("enable_thinking", False)
    messages = [dict(message) for message in chat.messages]
    try:
        tokens = tokenizer.apply_chat_template(
            messages, tools=chat.tools, add_generation_prompt=True, **options
        )
    except (TemplateError, LookupError, TypeError, ValueError) as error:
        message = f"the chat template does not take these messages: {str(error)[:200]}"
        raise Refusal(400, message, "messages") from None
    if not tokens:
        raise Refusal(400, "the chat template makes an empty prompt of this", "messages")
    state = _first_state(tokenizer, tokens)
    if is_json and state == "reasoning":
        message = "the chat template begins with reasoning, which response_format cannot bind"
        raise Refusal(400, message, "response_format")
    return Prompt(list(tokens), state)


def _first_state(tokenizer: Any, tokens: list[int]) -> str:
    state = "normal"
    if tokenizer.has_thinking:
        starts = tokenizer.rfind_think_start(tokens)
        state = "reasoning" if starts > tokenizer.rfind_think_end(tokens) else "normal"
    return tokenizer.response_initial_state or state


class Splitter:
    """Tells reasoning, tool calls and answer apart as the text of one choice comes in.

    state    of the text to come: normal, reasoning, tool; None once the format says it is over
    """

    def __init__(
        self, tokenizer: Any, prompt: Prompt, tools: Sequence[Mapping[str, Any]] | None
    ) -> None:
        self._tokenizer, self._tools = tokenizer, tools
        self.has_calls = False
        self._call = ""
        self._machine: Any = None
        self.state = prompt.state
        if prompt.state is not None:
            self._machine = make_text_state_machine(tokenizer).make_state(prompt.state)

    def take(self, text: str, is_last: bool) -> Piece:
        """What `text` adds. A call that cannot be parsed becomes text of the answer."""
        if self._machine is None:
            return Piece(text=text)
        if self.state is None:
            return Piece()
        before = self.state
        self._machine, segments = TextStateMachine.split(self._machine, text)
        if is_last and segments[-1][0] is not None:
            self._machine, rest, state = TextStateMachine.flush(self._machine)
            segments[-1] = (state, segments[-1][1] + rest)
        said: list[str] = []
        thought: list[str] = []
        calls: list[ToolCall] = []
        for i, (state, part) in enumerate(segments):
            if i and before == "tool":
                self._close(said, calls)
            if state == "tool":
                self._call += part
            elif state is not None:
                (thought if state == "reasoning" else said).append(part)
            before = state
        if is_last and self._call:
            self._close(said, calls)
        self.state = segments[-1][0]
        return Piece("".join(said), "".join(thought), tuple(calls))

    def _close(self, said: list[str], calls: list[ToolCall]) -> None:
        text, self._call = self._call, ""
        try:
            parsed = self._tokenizer.tool_parser(text, self._tools)
            made = [_tool_call(one) for one in (parsed if isinstance(parsed, list) else [parsed])]
        except (AttributeError, LookupError, SyntaxError, TypeError, ValueError):
            start, end = self._tokenizer.tool_call_start, self._tokenizer.tool_call_end
            said.append(f"{start}{text}{end or ''}")
            return
        calls += made
        self.has_calls = self.has_calls or bool(made)


def _tool_call(parsed: Mapping[str, Any]) -> ToolCall:
    arguments = parsed["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    ident = parsed.get("id") or f"call_{uuid.uuid4().hex[:24]}"
    return ToolCall(str(ident), str(parsed["name"]), arguments)


class TokenTexts:
    """Texts and bytes of single tokens, for logprobs."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._is_bytes = isinstance(tokenizer.detokenizer, BPEStreamingDetokenizer)

    def logprob(self, token: int, value: float, top: Sequence[tuple[int, float]] = ()) -> Logprob:
        text, raw = self._of(token)
        return Logprob(text, token, value, raw, tuple(self.logprob(*pair) for pair in top))

    def _of(self, token: int) -> tuple[str, tuple[int, ...] | None]:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if self._is_bytes and name is not None and all(char in _BYTES for char in name):
            raw = bytes(_BYTES[char] for char in name)
            return raw.decode("utf-8", "replace"), tuple(raw)
        text = self._tokenizer.decode([token])
        return text, None if "\ufffd" in text else tuple(text.encode())
