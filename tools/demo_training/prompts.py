"""Prompts from the held-out split, with the true continuation where it is short."""

import json
import random
import re
from pathlib import Path
from typing import Any

from demo_training import corpus
from demo_training.corpus import Document

NUMBER = {"code": 10, "docs": 10, "prose": 10, "task": 12}
PROMPT_CHARACTERS = 260
REFERENCE_CHARACTERS = 200
LONGEST_TASK = 700
GAP = re.compile(r"(?<=\S) (?=\S)")


def build(work: Path, path: Path) -> list[dict[str, Any]]:
    """Write prompts.jsonl; returns its records."""
    rng = random.Random(7)
    held_out = [d for d in corpus.load(work) if d.held_out]
    prompts = [
        text_prompt(document, rng)
        for kind in ("code", "docs", "prose")
        for document in choose(held_out, kind, rng)
    ]
    prompts += task_prompts(work)
    lines = (json.dumps(prompt, ensure_ascii=False) for prompt in prompts)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return prompts


def choose(documents: list[Document], kind: str, rng: random.Random) -> list[Document]:
    """Documents long enough for a prompt; prose takes novels and the Bible in equal parts."""
    fitting = [d for d in documents if d.kind == kind and len(d.text) > 1500]
    if kind != "prose":
        return rng.sample(fitting, NUMBER[kind])
    bible = [d for d in fitting if d.name.startswith("King James")]
    novels = [d for d in fitting if not d.name.startswith("King James")]
    half = NUMBER[kind] // 2
    novels = rng.sample(novels, min(half, len(novels)))
    return novels + rng.sample(bible, NUMBER[kind] - len(novels))


def text_prompt(document: Document, rng: random.Random) -> dict[str, Any]:
    """A stretch from a line's start to a word's end; the reference is what follows."""
    text = document.text
    middle = rng.randrange(len(text) // 8, len(text) // 2)
    start = text.rfind("\n", 0, middle) + 1
    start += len(text[start:]) - len(text[start:].lstrip("\n"))
    # End before a single space, so that the next token is a whole word.
    gaps = GAP.finditer(text, start, len(text) - REFERENCE_CHARACTERS)
    end = [g.start() for g in gaps if g.start() < start + PROMPT_CHARACTERS][-1]
    reference = text[end : end + REFERENCE_CHARACTERS]
    return {
        "kind": document.kind,
        "source": document.name,
        "prompt": text[start:end],
        "reference": reference,
    }


def task_prompts(work: Path) -> list[dict[str, Any]]:
    """The first short held-out tasks, the kinds of task in turn."""
    by_task: dict[str, list[dict[str, Any]]] = {}
    for line in (work / "held_out_tasks.jsonl").read_text().splitlines():
        record = json.loads(line)
        if len(record["question"]) <= LONGEST_TASK:
            by_task.setdefault(record["task"], []).append(record)
    chosen: list[dict[str, Any]] = []
    while len(chosen) < NUMBER["task"]:
        chosen += [records.pop(0) for _, records in sorted(by_task.items())]
    return [
        {
            "kind": "task",
            "source": record["task"],
            "messages": [{"role": "user", "content": record["question"]}],
            "reference": record["answer"],
        }
        for record in chosen[: NUMBER["task"]]
    ]
