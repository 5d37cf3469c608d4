"""docs/models.md: what the tests of tests/test_models.py found, model by model.

    make models        runs them and writes the table

A test notes what it found with `record_property`; this plugin collects the notes of a run in which
every model passed.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import __version__ as mlx_lm_version

import zoo
from mlx_rewind.cache.ragged import RAGGED, ROW_BY_ROW

_HEAD = """# Models

Every file of `mlx_lm.models` that defines a model, mlx-lm {version}: {total} in all.

| | model files |
|---|---|
| exact to the bit | {bitwise} |
| equal tokens, numbers to 1e-5 | {inexact} |
| refused | {refused} |
| cannot run on a CPU | {absent} |

Written by `make models` from a run of [`tests/test_models.py`](../tests/test_models.py): for each
file a tiny model with every kind of layer that it has (`tests/models/`), float32 on the CPU,
prompts of 1, 7 and 40 tokens. Speculation with 7 draft tokens, of which 0 to 7 are right, gives
the tokens, the logprobs and, after every token, the cache of `mlx_lm.generate_step`; and a round
that keeps n tokens leaves the same bits whatever was rejected, after one window and after single
steps. [exactness.md](exactness.md) says what the levels mean, [caches.md](caches.md) what the
mechanisms do.

"Batched" says how several rows of the model run in `Engine` and `batch_generate`: ragged, one
forward for rows of any length (`tests/test_rows.py`), or row by row, and why.

"""
_REASONS = {
    zoo.RING: "ring",
    zoo.LATENT: "latent",
    zoo.GLA: "latent, gla",
    zoo.COMPRESSED: "near-tie",
}


def _batched(name: str) -> str:
    return "ragged" if name in RAGGED else f"row by row: {ROW_BY_ROW[name]}"


class Table:
    """Collects what the tests note, and writes it when all of them have passed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, dict[str, Any]] = defaultdict(dict)
        self._failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed
        notes = dict(report.user_properties)
        if report.when == "call" and "model" in notes:
            self._found[notes.pop("model")].update(notes)

    def pytest_sessionfinish(self) -> None:
        if not self._failed and self._found.keys() == zoo.CONFIGS.keys():
            self._path.write_text(self.text(), "utf-8")

    def text(self) -> str:
        rows, exact = [], 0
        for name in sorted({*zoo.CONFIGS, *zoo.NOT_BUILT}, key=str.lower):
            if name in zoo.NOT_BUILT:
                rows.append(f"| {name} | | | not run: {zoo.NOT_BUILT[name]} | not run |")
                continue
            found = self._found[name]
            if name in zoo.REFUSED:
                rows.append(
                    f"| {name} | {found['caches']} | {found['mechanisms']} | refused: "
                    f"{zoo.REFUSED[name]} | {_batched(name)} |"
                )
                continue
            reason = zoo.INEXACT_IN_ROUNDS.get(name)
            level = f"1e-5 ({_REASONS[reason]})" if reason else "bitwise"
            exact += reason is None
            cells = (name, found["caches"], found["mechanisms"], level, _batched(name))
            rows.append(f"| {' | '.join(cells)} |")
        refused = len(zoo.REFUSED)
        head = _HEAD.format(
            version=mlx_lm_version,
            total=len(rows),
            bitwise=exact,
            inexact=len(zoo.CONFIGS) - exact - refused,
            refused=refused,
            absent=len(zoo.NOT_BUILT),
        )
        why = "\n".join(f"* {short}: {reason}." for reason, short in _REASONS.items())
        table = "| model type | caches | undone by | exactness | batched |\n|---|---|---|---|---|\n"
        return f"{head}{table}" + "\n".join(rows) + f"\n\n## Why 1e-5\n\n{why}\n"
