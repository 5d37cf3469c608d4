"""The prompt of a conversation: how it goes on, and where its messages end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError


def prompt_after(
    tokenizer: Any, messages: Sequence[dict[str, Any]], before: Sequence[int], **template: Any
) -> list[int]:
    """The prompt for the next answer, that begins with the very tokens of the last turn.

    before    the last prompt and what was emitted after it; may be empty

    A reply need not be cut into tokens as its text would be. Where the text of the conversation
    begins with that of `before`, its tokens are kept, and only the rest is made of text.
    """
    options = {**template, "add_generation_prompt": True}
    text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    known: str = tokenizer.decode(list(before)) if before else ""
    if before and text.startswith(known):
        rest: list[int] = tokenizer.encode(text[len(known) :], add_special_tokens=False)
        return [*before, *rest]
    prompt: list[int] = tokenizer.apply_chat_template(list(messages), **options)
    return prompt


def message_ends(
    tokenizer: Any, messages: Sequence[dict[str, Any]], prompt: Sequence[int], **template: Any
) -> list[int]:
    """Tokens of `prompt` up to the end of each message: where edits and branches begin.

    messages    those that the prompt was made of, by the tokenizer's chat template
    template    options that the template was given, such as `tools`

    Messages at which the template does not leave the beginning as it is are left out.
    """
    ends: list[int] = []
    for count in range(1, len(messages) + 1):
        part = _rendered(tokenizer, messages[:count], template)
        shared = 0
        for ours, theirs in zip(part, prompt, strict=False):
            if ours != theirs:
                break
            shared += 1
        if shared == len(part) and shared > (ends[-1] if ends else 0):
            ends.append(shared)
    return ends


def _rendered(
    tokenizer: Any, messages: Sequence[dict[str, Any]], template: dict[str, Any]
) -> list[int]:
    """The tokens of some messages; none for a beginning that the template refuses."""
    try:
        tokens: list[int] = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=False, **template
        )
    except (TemplateError, LookupError, TypeError, ValueError):
        return []
    return tokens
