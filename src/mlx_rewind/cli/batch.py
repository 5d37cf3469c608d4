"""`mlx-rewind generate --prompts-file`: many prompts from JSON lines, results as JSON lines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..draft.protocol import Drafter, kind_of
from ..engine import Engine
from ..generate import encode
from ..grammar import Grammar
from ..request import Handle, Request
from .progress import progress_bar
from .sampling import OPTIONS, logprob_record, sampling_for

#: What a line may set for its own prompt, and the type of it.
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "prompt": str,
    "id": (str, int),
    "max_tokens": int,
    "num_draft_tokens": int,
    **{name: kind for name, (kind, _) in OPTIONS.items()},
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
    """Whether a line may set `field` to a value of this type. Bounds are checked later."""
    kind = _FIELDS.get(field)
    if kind is None or not isinstance(value, kind) or isinstance(value, bool):
        return False
    return not any("\ud800" <= character <= "\udfff" for character in str(value))


def generate_all(
    entries: Sequence[dict[str, Any]],
    prompts: Sequence[str | list[int]],
    model: nn.Module,
    tokenizer: Any,
    drafter: Drafter | None,
    grammar: Grammar | None,
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
        engine.submit(_request(entry, encode(tokenizer, prompt), drafter, grammar, args))
        for entry, prompt in zip(entries, prompts, strict=True)
    ]
    printed, over = 0, set()
    logprobs: dict[int, list[dict[str, Any]]] = {handle.id: [] for handle in handles}
    with progress_bar("prompts") as progress:
        for output in engine:
            params = output.handle.request.sampling
            if params is not None and params.logprobs is not None and output.token is not None:
                told = logprob_record(output.token, output.logprobs, output.top_logprobs)
                logprobs[output.handle.id].append(told)
            if output.finish_reason is None:
                continue
            over.add(output.handle.id)
            if progress is not None:
                progress(len(over), len(handles))
            while printed < len(handles) and handles[printed].id in over:
                result = _result(printed, entries[printed], handles[printed], drafter)
                told_of = logprobs.pop(handles[printed].id)
                print(json.dumps(result | ({"logprobs": told_of} if told_of else {})))
                printed += 1
    failed = sum(handle.error is not None for handle in handles)
    if failed:
        raise ValueError(f"{failed} of {len(handles)} prompts failed; their lines say why")


def _own(entry: dict[str, Any], field: str, args: argparse.Namespace) -> Any:
    """What a line says of a field, or the command line does."""
    return entry.get(field, getattr(args, field))


def _request(
    entry: dict[str, Any],
    prompt: Any,
    drafter: Drafter | None,
    grammar: Grammar | None,
    args: argparse.Namespace,
) -> Request:
    return Request(
        prompt,
        max_tokens=_own(entry, "max_tokens", args),
        drafter=drafter,
        num_draft_tokens=_own(entry, "num_draft_tokens", args),
        sampling=sampling_for(args, entry),
        acceptance=args.acceptance,
        logits_processors=(grammar.processor(),) if grammar else (),
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
        "draft_reason": stats.reason,
        "exactness": handle.exactness,
        "seed": handle.seed,
    }
    if handle.error is not None:
        result["error"] = str(handle.error)
    return {**({"id": entry["id"]} if "id" in entry else {}), **result}
