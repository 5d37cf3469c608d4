"""The command line: `mlx-rewind generate`, `chat`, `bench`, `audit`, `convert` and `inspect`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from .. import __version__
from . import audit, bench, chat, convert, generate, inspect, serve
from .options import OneLineParser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0, what the command found (an audit: 1 for a fault), or 2 after one
    line that says what was wrong."""
    args = _parser().parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else list(argv)
    command: Callable[[argparse.Namespace], int | None] = args.command
    try:
        return command(args) or 0
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stdout = None
        return 0
    except (ValueError, OSError, ImportError) as error:
        print(f"mlx-rewind: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="mlx-rewind",
        description="Exact speculative decoding with cache rollback for mlx-lm models.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in (generate, chat, bench, audit, convert, inspect, serve):
        command.add_to(commands)
    return parser
