"""Every example runs, exits with 0 and says what it is there to show."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# What each example prints when its claim held.
EXAMPLES = {
    "custom_drafter": "has seen the answer: ",
    "batch": "identical to four runs alone",
    "demo": "Every run is identical to mlx_lm.",
    "edit_file": "exact result: ",
    "prompt_cache": "identical to one plain run",
    "round": "left without a commit: nothing was kept",
    "stock_speculative": "with mlx_rewind's cache: the text of plain mlx_lm decoding",
}


def run(script: str, *arguments: str) -> str:
    """Runs a script of the repository with this interpreter; returns what it printed."""
    command = [sys.executable, str(ROOT / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_no_example_is_forgotten() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_shows_its_claim(name: str) -> None:
    output = run(f"examples/{name}.py")
    assert EXAMPLES[name] in output
    if name == "demo":  # four prompts, each decoded plainly and with four drafters
        assert output.count("identical │") == 4 * 5
    if name == "stock_speculative":
        assert "mlx_lm alone: Speculative decoding requires a trimmable prompt cache" in output
        assert int(re.search(r"^(\d+) of 60 tokens were drafted", output, re.MULTILINE)[1]) > 0


def test_acceptance_is_counted_per_kind_and_drafter() -> None:
    output = run("bench/acceptance.py", "--per-kind", "1", "--max-tokens", "6", "--json")
    records = json.loads(output)
    assert {row["kind"] for row in records} == {"code", "docs", "prose", "task", "all"}
    assert {row["drafter"] for row in records} == {"ngram", "model", "mtp", "prediction"}
    for row in records:
        assert row["tokens"] <= row["steps"] + row["accepted"]
        assert row["accepted"] <= row["drafted"]
