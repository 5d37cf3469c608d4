"""Option types and the options that commands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Reports a bad option in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def number(name: str, kind: type, low: float, high: float = math.inf) -> Callable[[str], Any]:
    """An option type: a number within bounds, so that a bad one is refused before any work."""

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            limits = f"{low} or more" if high == math.inf else f"within {low}..{high}"
            raise argparse.ArgumentTypeError(f"{name} must be {limits}, got {text}")
        return value

    return convert


def true_or_false(text: str) -> bool:
    if text.lower() not in ("true", "t", "false", "f"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text.lower().startswith("t")


def common_options() -> argparse.ArgumentParser:
    """The options of every command that loads a model to look at it or to run it."""
    common = OneLineParser(add_help=False)
    common.add_argument("--model", help="local folder or hub name (default: the shipped model)")
    common.add_argument("--trust-remote-code", action="store_true", help="as in mlx-lm")
    common.add_argument("--json", action="store_true", help="print one JSON value")
    return common


def add_head_options(parser: argparse.ArgumentParser) -> None:
    """How to read the MTP head of a checkpoint."""
    parser.add_argument(
        "--mtp-norms",
        choices=("raw", "converted"),
        help="how the norms of an MTP head are stored, where the checkpoint does not tell",
    )
