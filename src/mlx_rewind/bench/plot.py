"""Speed-up over draft length, as a picture."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from .run import Result


def check(path: Path) -> None:
    """Refuses, before anything is measured, a picture that could not be drawn at the end."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--plot {path}: there is no folder {path.parent}")
    try:
        pyplot = _pyplot()
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'mlx-rewind[plot]'") from error
    kinds = pyplot.figure().canvas.get_supported_filetypes()
    if path.suffix[1:] not in kinds:
        raise ValueError(f"--plot {path}: the name must end in one of {', '.join(sorted(kinds))}")


def plot(result: Result, title: str, path: Path) -> None:
    """Draws the speed-up of every run, solid, and the ideal, dashed."""
    figure, axes = _pyplot().subplots(figsize=(7, 4.5), layout="constrained")
    drafts = list(dict.fromkeys(run.draft for run in result.runs))
    for number, draft in enumerate(drafts):
        runs = sorted(
            (run for run in result.runs if run.draft == draft), key=lambda run: run.num_draft_tokens
        )
        lengths = [0, *(run.num_draft_tokens for run in runs)]
        ours = result.plain_over_mlx_lm
        reached = [ours, *(run.speed * ours for run in runs)]
        ideal = [ours, *(run.ideal * ours for run in runs)]
        axes.plot(lengths, reached, f"C{number}o-", label=draft)
        axes.plot(lengths, ideal, f"C{number}--", label=f"{draft}, ideal")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(xlabel="draft tokens per round", ylabel="speed-up over mlx_lm", title=title)
    if drafts:
        axes.legend()
    figure.savefig(path, dpi=150)


def _pyplot() -> Any:
    """Imported here, since it is an extra; without a window."""
    importlib.import_module("matplotlib").use("Agg")
    return importlib.import_module("matplotlib.pyplot")
