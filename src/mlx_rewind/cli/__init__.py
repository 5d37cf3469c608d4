"""The command line: `mlx-rewind generate`, `chat`, `convert` and `inspect`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from .. import __version__
from . import chat, convert, generate, inspect
from .options import OneLineParser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0, or 2 after one line that says what was wrong."""
    args = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], None] = args.command
    try:
        command(args)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stdout = None
        return 0
    except (ValueError, OSError, ImportError) as error:
        print(f"mlx-rewind: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="mlx-rewind",
        description="Exact speculative decoding with cache rollback for mlx-lm models.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in (generate, chat, convert, inspect):
        command.add_to(commands)
    return parser
