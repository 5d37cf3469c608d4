"""`mlx-rewind generate --prompts-file`: many prompts from JSON lines, results as JSON lines."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.sample_utils import make_sampler
from rich.console import Console
from rich.progress import Progress

from ..draft.protocol import Drafter, kind_of
from ..engine import Engine
from ..generate import encode
from ..request import Handle, Request

#: What a line may set for its own prompt, and the type of it.
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "prompt": str,
    "id": (str, int),
    "max_tokens": int,
    "num_draft_tokens": int,
    "temp": (int, float),
    "top_p": (int, float),
    "top_k": int,
    "min_p": (int, float),
}

_BOUNDS: dict[str, tuple[float, float]] = {
    "temp": (0, math.inf),
    "top_p": (0, 1),
    "top_k": (0, math.inf),
    "min_p": (0, 1),
}


def read_prompts(name: str) -> list[dict[str, Any]]:
    """The objects of a JSON lines file; - is stdin.

    Raises FileNotFoundError, ValueError that names a line that is malformed.
    """
    if name != "-" and not Path(name).is_file():
        raise FileNotFoundError(f"no prompts file at {name}")
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: {error}") from error
    entries = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}, line {number}: not JSON ({error})") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise ValueError(f'{name}, line {number}: expected an object with a "prompt" string')
        for field, value in entry.items():
            if not _is_valid(field, value):
                raise ValueError(
                    f"{name}, line {number}: {field} = {value!r} is no field with a value that it "
                    f"can have (fields: {', '.join(_FIELDS)})"
                )
        entries.append(entry)
    if not entries:
        raise ValueError(f"{name} holds no prompt")
    return entries


def _is_valid(field: str, value: Any) -> bool:
    """Whether a line may set `field` to `value`: what the flag of that name would take."""
    kind, (low, high) = _FIELDS.get(field), _BOUNDS.get(field, (-math.inf, math.inf))
    if kind is None or not isinstance(value, kind) or isinstance(value, bool):
        return False
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)
    number: Any = value
    return bool(low <= number <= high)


def generate_all(
    entries: Sequence[dict[str, Any]],
    prompts: Sequence[str | list[int]],
    model: nn.Module,
    tokenizer: Any,
    drafter: Drafter | None,
    args: argparse.Namespace,
) -> None:
    """Runs all prompts through an engine; prints one JSON line for each, in their order."""
    engine = Engine(
        model,
        tokenizer,
        max_rows=args.max_rows,
        prefill_step_size=args.prefill_step_size,
        max_draft_tokens=max(0, *(_own(entry, "num_draft_tokens", args) for entry in entries)),
    )
    handles = [
        engine.submit(_request(entry, encode(tokenizer, prompt), drafter, args))
        for entry, prompt in zip(entries, prompts, strict=True)
    ]
    printed = 0
    with _bar(len(handles)) as done:
        for output in engine:
            if output.finish_reason is None:
                continue
            done()
            while printed < len(handles) and handles[printed].done:
                print(json.dumps(_result(printed, entries[printed], handles[printed], drafter)))
                printed += 1
    failed = sum(handle.error is not None for handle in handles)
    if failed:
        raise ValueError(f"{failed} of {len(handles)} prompts failed; their lines say why")


def _own(entry: dict[str, Any], field: str, args: argparse.Namespace) -> Any:
    """What a line says of a field, or the command line does."""
    return entry.get(field, getattr(args, field))


def _request(
    entry: dict[str, Any], prompt: Any, drafter: Drafter | None, args: argparse.Namespace
) -> Request:
    own = partial(_own, entry, args=args)
    sampler = make_sampler(own("temp"), own("top_p"), own("min_p"), top_k=own("top_k"))
    return Request(
        prompt,
        max_tokens=own("max_tokens"),
        drafter=drafter,
        num_draft_tokens=own("num_draft_tokens"),
        sampler=sampler,
        stop=args.stop,
        kv_bits=args.kv_bits,
        kv_group_size=args.kv_group_size,
        quantized_kv_start=args.quantized_kv_start,
    )


def _result(
    index: int, entry: dict[str, Any], handle: Handle, drafter: Drafter | None
) -> dict[str, Any]:
    stats = handle.stats
    result = {
        "index": index,
        "text": handle.text,
        "tokens": handle.tokens,
        "finish_reason": handle.finish_reason,
        "prompt_tokens": len(handle.request.prompt),
        "generation_tokens": len(handle.tokens),
        "draft_kind": kind_of(drafter),
        "draft_rounds": stats.rounds,
        "draft_n": stats.drafted,
        "draft_n_accepted": stats.accepted,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "exactness": handle.exactness,
    }
    if handle.error is not None:
        result["error"] = str(handle.error)
    return {**({"id": entry["id"]} if "id" in entry else {}), **result}


@contextmanager
def _bar(total: int) -> Iterator[Any]:
    """A progress bar over the prompts, on a terminal only."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda: bar.advance(task)
