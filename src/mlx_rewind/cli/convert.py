"""`mlx-rewind convert`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from mlx_lm.convert import MODEL_CONVERSION_DTYPES, QUANT_RECIPES

from ..convert import ConvertOptions, ConvertReport, convert
from .options import add_head_options
from .progress import progress_bar

_MODES = ("affine", "mxfp4", "nvfp4", "mxfp8")


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "convert", help="convert a checkpoint as mlx_lm.convert does, and keep its MTP head"
    )
    parser.set_defaults(command=_convert)
    add = parser.add_argument
    add("--hf-path", "--model", required=True, help="local folder or hub name")
    add("--mlx-path", default="mlx_model", help="the folder to write (%(default)s)")
    add("-q", "--quantize", action="store_true", help="quantise the trunk")
    add("--q-group-size", type=int, help="group size of the trunk's quantisation")
    add("--q-bits", type=int, help="bits per weight of the trunk")
    add("--q-mode", choices=_MODES, default="affine", help="mode of the trunk (%(default)s)")
    add("--quant-predicate", choices=QUANT_RECIPES, help="a recipe of mixed bits")
    add("--dtype", choices=MODEL_CONVERSION_DTYPES, help="of what is not quantised")
    add("--upload-repo", help="hub name to upload the result to")
    add("--revision", help="branch, tag or commit of the hub checkpoint")
    add("-d", "--dequantize", action="store_true", help="dequantise trunk and head")
    add("--trust-remote-code", action="store_true", help="as in mlx-lm")
    add("--mtp", choices=("keep", "drop"), default="keep", help="the MTP head (%(default)s)")
    add("--mtp-from", help="take the head from this checkpoint of the same model")
    add("--mtp-only", action="store_true", help="write nothing but the head")
    add("--mtp-q-bits", type=int, help="quantise the head to these bits (as it is)")
    add("--mtp-q-group-size", type=int, help="group size of the head's quantisation")
    add("--mtp-q-mode", choices=_MODES, help="mode of the head's quantisation")
    add_head_options(parser)
    add("--json", action="store_true", help="print one JSON value")


def _convert(args: argparse.Namespace) -> None:
    names = {field.name for field in dataclasses.fields(ConvertOptions)}
    options = ConvertOptions(**{k: v for k, v in vars(args).items() if k in names})
    with progress_bar("convert") as progress:
        try:
            report = convert(args.hf_path, args.mlx_path, options, progress)
        except RuntimeError as failed:  # what was written does not compute what it should
            raise ValueError(str(failed)) from failed
    if args.json:
        fields = dataclasses.asdict(report)
        print(json.dumps({**fields, "folder": str(report.folder)}))
        return
    for line in _lines(report):
        print(line)


def _lines(report: ConvertReport) -> Iterator[str]:
    yield f"wrote {report.folder}"
    if report.bits_per_weight is not None:
        yield f"trunk: {report.bits_per_weight:.2f} bits per weight"
    if report.head is not None:
        kinds = {(q["bits"], q["mode"]) for q in report.head.quantization.values()}
        stored = ", ".join(f"{bits} bits {mode}" for bits, mode in sorted(kinds)) or "as it was"
        yield f"MTP head: {report.head.heads}, {stored}, in {', '.join(report.head.files)}"
    if report.agreement is not None:
        yield f"its proposals are those of the source at {report.agreement:.0%} of positions"
    yield from (f"note: {note}" for note in report.notes)
