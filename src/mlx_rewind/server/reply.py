"""Cuts a reply into reasoning, content and tool calls, by the markers of the tokenizer."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["reasoning", "content", "tool"]


@dataclass(frozen=True)
class Markers:
    """The texts that begin and end reasoning and tool calls; None for a model without them.

    parse    mlx-lm's parser of the text of a tool call
    """

    think: tuple[str, str] | None = None
    tool: tuple[str, str] | None = None
    parse: Callable[[str, Any], Any] | None = None


class Splitter:
    """Takes text as it comes, and tells of what kind it is. Markers themselves are left out.

    Text that may be the beginning of a marker waits until it is known to be one or not.
    """

    def __init__(self, markers: Markers, *, starts_reasoning: bool, has_tools: bool) -> None:
        self._kind: Kind = "reasoning" if starts_reasoning else "content"
        self._think = markers.think
        self._tool = markers.tool if has_tools else None
        self._held = ""

    def feed(self, text: str) -> Iterator[tuple[Kind, str]]:
        """Yields (kind, text) of what is certain; a tool call is yielded piece by piece too."""
        self._held += text
        while True:
            places = [(self._held.find(mark), mark, kind) for mark, kind in self._next()]
            found = [place for place in places if place[0] >= 0]
            if not found:
                break
            at, mark, kind = min(found)
            if at:
                yield self._kind, self._held[:at]
            self._held = self._held[at + len(mark) :]
            if self._kind == "tool":
                yield "tool", ""  # the call is complete
            self._kind = kind
        unsure = max((_overlap(self._held, mark) for mark, _ in self._next()), default=0)
        certain = len(self._held) - unsure
        if certain:
            yield self._kind, self._held[:certain]
            self._held = self._held[certain:]

    def flush(self) -> Iterator[tuple[Kind, str]]:
        if self._held:
            yield self._kind, self._held
        if self._kind == "tool":
            yield "tool", ""
        self._held = ""

    def _next(self) -> list[tuple[str, Kind]]:
        """The markers that may come now, and the kind of the text after them."""
        if self._kind == "tool":
            return [(self._tool[1], "content")] if self._tool and self._tool[1] else []
        if self._kind == "reasoning":
            return [(self._think[1], "content")] if self._think else []
        marks: list[tuple[str, Kind]] = []
        if self._think:
            marks.append((self._think[0], "reasoning"))
        if self._tool:
            marks.append((self._tool[0], "tool"))
        return marks


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    sizes = range(min(len(text), len(marker) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(marker[:size])), 0)


def tool_calls(text: str, markers: Markers, tools: Any) -> list[dict[str, Any]]:
    """The calls in the text of one, in OpenAI's form; none if the text is not a call."""
    assert markers.parse is not None
    try:
        parsed = markers.parse(text, tools)
    except (ValueError, KeyError, TypeError):
        return []
    calls = parsed if isinstance(parsed, list) else [parsed]
    return [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {
                "name": str(call.get("name")),
                "arguments": _arguments(call.get("arguments", {})),
            },
        }
        for call in calls
        if isinstance(call, dict)
    ]


def _arguments(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
