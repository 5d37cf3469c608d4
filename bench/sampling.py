"""How many draft tokens are accepted above temperature 0, by how they are drawn and accepted.

    python bench/sampling.py                    the shipped models on the held-out prompts
    python bench/sampling.py --per-kind 2       two prompts of each kind

    coupled        drawn with the target's noise, kept while they equal the target's draws
    independent    the same, drawn with noise of their own
    greedy         the same, the most likely tokens
    rejection, block    accepted by ratios of laws

Acceptance does not depend on the machine and nothing is timed. The first three must give the text
of plain sampling, token for token: a difference ends the program.
"""

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

import mlx_rewind
from mlx_rewind import SamplingParams
from mlx_rewind.load import held_out_prompts
from mlx_rewind.types import SpecStats

WAYS: dict[str, dict[str, Any]] = {
    "coupled": {"drafting": "coupled", "acceptance": "match"},
    "independent": {"drafting": "independent", "acceptance": "match"},
    "greedy": {"drafting": "greedy", "acceptance": "match"},
    "rejection": {"drafting": "coupled", "acceptance": "rejection"},
    "block": {"drafting": "coupled", "acceptance": "block"},
}


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    model, tokenizer = mlx_rewind.load()
    drafters: dict[str, Any] = {
        "model": mlx_rewind.load_draft(None, tokenizer),
        "mtp": mlx_rewind.load_mtp(None, model),
    }
    by_kind: dict[str, list[list[int]]] = {}
    for entry in held_out_prompts(tokenizer):
        ids = tokenizer.encode(entry["prompt"], add_special_tokens=False)
        by_kind.setdefault(entry["kind"], []).append(ids)
    prompts = [ids for kind in by_kind.values() for ids in kind[: args.per_kind]]
    totals: dict[tuple[float, str, str], SpecStats] = {}
    console = Console(stderr=True)
    for i, prompt in enumerate(track(prompts, console=console, disable=not console.is_terminal)):
        for temperature in args.temp:
            params = SamplingParams(temperature=temperature, top_p=args.top_p, seed=i)
            options = {"max_tokens": args.max_tokens, "sampling": params}
            texts = mlx_rewind.batch_generate(model, tokenizer, [prompt], **options).tokens
            for name, drafter in drafters.items():
                for way, how in WAYS.items():
                    drafter.drafting = how["drafting"]
                    result = mlx_rewind.batch_generate(
                        model, tokenizer, [prompt], drafter=drafter, acceptance=how["acceptance"],
                        num_draft_tokens=args.num_draft_tokens, **options,
                    )  # fmt: skip
                    if how["acceptance"] == "match" and result.tokens != texts:
                        sys.exit(f"{name}, {way}: not the text of plain sampling")
                    total = totals.setdefault((temperature, name, way), SpecStats())
                    (stats,) = result.stats
                    total.drafted += stats.drafted
                    total.accepted += stats.accepted
                    total.emitted += stats.emitted
                    total.steps += stats.steps
    return [
        {
            "temperature": temperature,
            "drafter": name,
            "way": way,
            "acceptance": stats.accepted / max(1, stats.drafted),
            "tokens_per_step": stats.mean_acceptance_length,
        }
        for (temperature, name, way), stats in totals.items()
    ]


def table(records: list[dict[str, Any]]) -> Table:
    result = Table(title="Accepted / drafted, and tokens per step")
    for column in ("temperature", "drafter", *WAYS):
        result.add_column(column)
    rows: dict[tuple[float, str], list[str]] = {}
    for record in records:
        cell = f"{record['acceptance']:.2f}, {record['tokens_per_step']:.2f}"
        rows.setdefault((record["temperature"], record["drafter"]), []).append(cell)
    for (temperature, name), cells in rows.items():
        result.add_row(str(temperature), name, *cells)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--temp", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens per prompt (48)")
    parser.add_argument("--per-kind", type=int, help="prompts of each kind (all)")
    parser.add_argument("--json", action="store_true", help="print one JSON value")
    args = parser.parse_args()
    records = run(args)
    if args.json:
        print(json.dumps(records))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(table(records))


if __name__ == "__main__":
    main()
