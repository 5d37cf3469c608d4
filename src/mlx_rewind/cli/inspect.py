"""`mlx-rewind inspect`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

import mlx.nn as nn
from rich.console import Console
from rich.table import Table

from ..cache.describe import CacheRecord, describe, inspect
from ..cache.ragged import why_row_by_row
from ..draft.mtp import MTP
from ..errors import UnsupportedModelError
from ..load import SHIPPED, load, load_mtp
from .options import add_head_options, common_options


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        parents=[common_options()],
        help="show every cache of a model and how it is rolled back, and its MTP head",
    )
    parser.set_defaults(command=_inspect)
    add_head_options(parser)


def _inspect(args: argparse.Namespace) -> None:
    model, _ = load(args.model, lazy=True, trust_remote_code=args.trust_remote_code)
    records = inspect(model)
    mtp = _heads(args, model)
    console = Console()
    if args.json:
        heads = _head_records(mtp, len(records)) if isinstance(mtp, MTP) else []
        print(json.dumps([*(dataclasses.asdict(record) for record in records), *heads]))
        if isinstance(mtp, Unusable):
            print(f"mlx-rewind: note: {mtp}", file=sys.stderr)
        return
    console.print(_cache_table(str(args.model or f"{SHIPPED.name} (shipped)"), records))
    reason = why_row_by_row(model)
    told = "together in one forward" if reason is None else f"row by row ({reason})"
    console.print(f"rows of a batch: {told}", highlight=False, soft_wrap=True)
    if isinstance(mtp, MTP):
        console.print(_head_table(mtp))
    else:
        console.print(mtp, highlight=False, soft_wrap=True)


class Unusable(str):
    """Why heads that are there cannot be used."""


def _heads(args: argparse.Namespace, model: nn.Module) -> MTP | str:
    """The heads in the checkpoint, or a line that says why there are none."""
    try:
        return load_mtp(args.model, model, norms=args.mtp_norms, lazy=True)
    except (FileNotFoundError, UnsupportedModelError) as reason:
        return f"MTP head: {reason}"
    except ValueError as reason:
        return Unusable(f"MTP head: {reason}")


def _cache_table(title: str, records: list[CacheRecord]) -> Table:
    table = Table(title=title)
    for column in ("layer", "cache", "mechanism", "slots", "bytes"):
        table.add_column(column, justify="right" if column in ("slots", "bytes") else "left")
    for record in records:
        size = f"{record.bytes:,} {record.growth}"
        layer = str(record.layer) if record.child is None else f"{record.layer}[{record.child}]"
        table.add_row(layer, record.cache, record.mechanism, str(record.slots), size)
    return table


def _head_table(mtp: MTP) -> Table:
    report = mtp.report
    assert report is not None
    table = Table(title="MTP head", show_header=False)
    kinds = {tuple(p.values()) for p in report.quantization.values()}
    told = "not in config.json" if report.announced is None else f"{report.announced} announced"
    rows = {
        "heads": f"{report.heads} ({told}); drafts go round them to any depth",
        "family": report.family,
        "layout": f"{report.layout}: {', '.join(report.files)}",
        "reads": f"the {mtp.input} state of the target",
        "norms": report.norms,
        "quantization": ", ".join(f"{b} bits {m}, groups of {g}" for g, b, m in sorted(kinds))
        or "none",
        "caches": ", ".join(f"{r.cache} ({r.mechanism})" for r in _head_caches(mtp)),
        "copies of the trunk": ", ".join(report.copies),
        "unused tensors": ", ".join(report.unused),
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    return table


def _head_caches(mtp: MTP) -> list[CacheRecord]:
    return [record for head in mtp.heads for record in describe(head.trial_cache())]


def _head_records(mtp: MTP, first: int) -> list[dict[str, Any]]:
    """One record per cache of the heads, after those of the model, with the report of the heads."""
    assert mtp.report is not None
    report = {**dataclasses.asdict(mtp.report), "input": mtp.input}
    return [
        {**dataclasses.asdict(record), "layer": layer, "mtp": report}
        for layer, record in enumerate(_head_caches(mtp), first)
    ]
