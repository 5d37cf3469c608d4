"""Find a seed for a tiny model of the tests, and say how it behaves.

    python tools/tiny_model.py NAME ... [--keep]

NAME is a file of tests/models without its suffix: `{"seed": 0, "spread": 3.0, "config": {...}}`.
The first seed whose greedy text passes the margin guard (tests/zoo.py) after every prompt is
written to the file. With --keep the file stays as it is.
"""

import argparse
import json
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))

import zoo  # noqa: E402

SPREADS = (3.0, 2.0, 1.5, 4.0)
SEEDS = 40


def search(name: str) -> tuple[int, float]:
    """The first seed, by falling preference of spread, that passes the guard."""
    for spread in SPREADS:
        zoo.SPREAD[name] = spread
        complaints: dict[str, int] = {}
        for seed in range(SEEDS):
            model = zoo.build(name, seed, fresh=True)
            found = (zoo.guard(model, prompt) for prompt in zoo.PROMPTS)
            complaint = next((c for c in found if c), None)
            if complaint is None and (error := zoo.window_error(model)) > 3e-6:
                complaint = f"windows {error:.1e} from steps"
            if complaint is None:
                return seed, spread
            complaints[complaint] = complaints.get(complaint, 0) + 1
        print(f"{name}: spread {spread}: {complaints}")
    raise SystemExit(f"{name}: no seed passes; is every layer reached, and the text varied?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--keep", action="store_true", help="do not search, only report")
    options = parser.parse_args()
    for name in options.names:
        if not options.keep:
            seed, spread = search(name)
            entry = {"seed": seed, "spread": spread, "config": zoo.CONFIGS[name]}
            path = TESTS / "models" / f"{name}.json"
            path.write_text(json.dumps(entry, indent=1) + "\n", "utf-8")
            zoo.SEEDS[name] = seed
        model = zoo.build(name)
        caches = [type(entry).__name__ for entry in zoo.feed(model, zoo.PROMPTS[0])]
        error = zoo.window_error(model)
        print(f"{name}: seed {zoo.SEEDS[name]}, spread {zoo.SPREAD[name]}, windows {error:.1e}")
        print(f"    {' '.join(caches)}")


if __name__ == "__main__":
    main()
