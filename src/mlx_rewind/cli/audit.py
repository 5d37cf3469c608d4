"""`mlx-rewind audit`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from typing import Any

from rich.console import Console
from rich.table import Table

from ..audit import Difference, Report, audit
from ..generate import encode
from ..load import SHIPPED, held_out_prompts, load
from .batch import read_prompts
from .drafting import add_draft_options, draft_kind, drafter_for
from .options import common_options, number
from .progress import progress_bar

_KINDS = ("code", "prose", "docs")
_SHOWN = 10
_COLOURS = {"fault": "red", "near-ties": "yellow", "near-tie": "yellow"}


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "audit",
        parents=[common_options()],
        help="compare speculative with plain decoding on this machine; exit code 1 for a fault",
    )
    parser.set_defaults(command=_audit)
    add = parser.add_argument
    add("--prompts", help="JSON lines with a prompt each, fed as they are (default: three of ours)")
    add(
        "--max-tokens",
        "-m",
        type=number("max_tokens", int, 3),
        default=64,
        help="tokens of each text (64)",
    )
    add("--seed", type=number("seed", int, 0, 2**64 - 1), default=0, help="seed of the draws (0)")
    add("--adapter-path", help="trained adapter weights")
    add_draft_options(parser)


def _audit(args: argparse.Namespace) -> int:
    kind = draft_kind(args)
    if args.num_draft_tokens is None:
        args.num_draft_tokens = 4
    entries = None if args.prompts is None else read_prompts(args.prompts)
    model, tokenizer = load(
        args.model,
        adapter_path=args.adapter_path,
        trust_remote_code=args.trust_remote_code,
        tokenizer_config={"trust_remote_code": args.trust_remote_code},
    )
    drafter = drafter_for(kind, args, model, tokenizer)
    texts = _shipped(tokenizer) if entries is None else [entry["prompt"] for entry in entries]
    with progress_bar("audit") as progress:
        report = audit(
            model,
            [encode(tokenizer, text) for text in texts],
            drafter=drafter,
            num_draft_tokens=args.num_draft_tokens,
            max_tokens=args.max_tokens,
            seed=args.seed,
            progress=progress,
        )
    name = str(args.model or f"{SHIPPED.name} (shipped)")
    if args.json:
        print(json.dumps(as_json(name, report, tokenizer)))
    else:
        print_report(Console(highlight=False), name, report, tokenizer)
    return int(report.verdict == "fault")


def _shipped(tokenizer: Any) -> list[str]:
    """A held-out prompt of each kind that is plain text."""
    entries = held_out_prompts(tokenizer)
    return [next(e["prompt"] for e in entries if e["kind"] == kind) for kind in _KINDS]


def as_json(name: str, report: Report, tokenizer: Any) -> dict[str, Any]:
    """The report for programs; numbers that are not finite are null."""
    fields = dataclasses.asdict(report)
    for check, found in zip(fields["checks"], report.checks, strict=True):
        check["result"] = found.result
        check["differences"] = len(found.differences)
    differences = []
    for difference in report.differences:
        record = dataclasses.asdict(difference)
        for side in ("plain", "speculative"):
            record[f"{side}_text"] = _text(tokenizer, record[side])
        if record["gap"] is not None and not math.isfinite(record["gap"]):
            record["gap"] = None
        differences.append(record)
    result = {"verdict": report.verdict, "line": report.line, "model": name}
    return {**result, "differences": differences, **fields}


def print_report(console: Console, name: str, report: Report, tokenizer: Any) -> None:
    """One page: the checks, the differences, and the verdict."""
    console.print(
        f"{name} | drafter {report.draft_kind}, {report.num_draft_tokens} draft tokens | "
        f"{report.prompts} prompts of {report.max_tokens} tokens | {report.device}, "
        f"{report.logits_dtype} logits | promised: {report.exactness}",
        soft_wrap=True,
    )
    table = Table()
    for column in ("check", "compared with plain decoding"):
        table.add_column(column)
    for column in ("tokens", "states", "numbers"):
        table.add_column(column, justify="right")
    table.add_column("result")
    for check in report.checks:
        largest = max(check.logprobs, check.state)
        table.add_row(
            check.name,
            check.what,
            str(check.tokens or "-"),
            str(check.states or "-"),
            f"to {largest:.0e}" if largest else "to the bit",
            _coloured(check.result),
        )
    console.print(table)
    if report.differences:
        console.print(_differences(report, tokenizer))
        hidden = len(report.differences) - _SHOWN
        if hidden > 0:
            console.print(f"and {hidden} more; --json lists them all")
    console.print(f"verdict: {_coloured(report.verdict, report.line)}", soft_wrap=True)


def _coloured(result: str, text: str | None = None) -> str:
    colour = _COLOURS.get(result, "green")
    return f"[{colour}]{text or result}[/{colour}]"


def _differences(report: Report, tokenizer: Any) -> Table:
    table = Table(title=f"gaps in units in the last place of {report.logits_dtype}")
    for column in ("kind", "check", "at", "plain", "speculative", "gap", "what"):
        table.add_column(column)
    faults_first = sorted(report.differences, key=lambda d: (d.kind != "fault", d.layer is None))
    for difference in faults_first[:_SHOWN]:
        table.add_row(
            _coloured(difference.kind, difference.kind.upper()),
            difference.check,
            f"{difference.prompt}:{difference.position}",
            _candidate(tokenizer, difference.plain),
            _candidate(tokenizer, difference.speculative),
            _gap(difference),
            difference.detail,
        )
    return table


def _gap(difference: Difference) -> str:
    if difference.gap is None:
        return "-"
    bound = "" if difference.bound is None else f" (rounding: {difference.bound:.3g})"
    return f"{difference.gap:.3g}{bound}"


def _candidate(tokenizer: Any, token: int | None) -> str:
    return "-" if token is None else f"{token} {_text(tokenizer, token)!r}".replace("[", r"\[")


def _text(tokenizer: Any, token: int | None) -> str | None:
    return None if token is None else str(tokenizer.decode([token]))
