"""How many draft tokens are accepted on the held-out prompts, by kind of text and drafter.

    python bench/acceptance.py                      the shipped models, all prompts
    python bench/acceptance.py --per-kind 3 --json  three prompts of each kind, as JSON

Greedy decoding up to an end token or `--max-tokens`. Acceptance does not depend on the machine and
nothing here is timed. Every run is also compared with `mlx_lm.generate_step`: the figures of a run
that differs would mean nothing, so a difference ends the program.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from rich.console import Console
from rich.progress import track
from rich.table import Table

import mlx_rewind
from mlx_rewind.bench.record import Recorder, Verify, cut
from mlx_rewind.bench.report import shares
from mlx_rewind.draft.protocol import Drafter
from mlx_rewind.load import held_out_prompts
from mlx_rewind.types import SpecStats

ALL = "all"


class Case(NamedTuple):
    """A drafter and the most draft tokens it may propose per round."""

    drafter: str
    num_draft_tokens: int


@dataclass
class Bench:
    """The models under measurement; None for a draft model or a head that there is not."""

    model: nn.Module
    tokenizer: Any
    draft: mlx_rewind.DraftModel | None
    head: mlx_rewind.MTP | None
    max_tokens: int

    def plain(self, prompt: list[int]) -> list[int]:
        tokens = []
        for token, _ in generate_step(mx.array(prompt), self.model, max_tokens=self.max_tokens):
            tokens.append(token)
            if token in self.tokenizer.eos_token_ids:
                break
        return tokens

    def cases(self, reference: list[int] | None) -> Iterator[tuple[Case, Drafter]]:
        """Every drafter with every draft length; a prediction only where there is a reference."""
        for k in (2, 4, 8):
            yield Case("ngram", k), mlx_rewind.NGram()
        if self.draft is not None:
            for k in (1, 2, 3, 4):
                yield Case("model", k), self.draft
        if self.head is not None:
            for k in (1, 2, 3, 4, 5):
                yield Case("mtp", k), self.head
        if reference:
            for k in (4, 8):
                yield Case("prediction", k), mlx_rewind.Prediction(reference)

    def rounds(
        self, prompt: list[int], plain: list[int], case: Case, drafter: Drafter
    ) -> list[Verify]:
        """Decodes speculatively; returns the rounds. Exits if the tokens are not those of plain."""
        tokens, from_draft = [], []
        recorder = Recorder(drafter, clock=lambda: 0.0)
        generation = mlx_rewind.generate_step(
            prompt,
            self.model,
            drafter=recorder,
            num_draft_tokens=case.num_draft_tokens,
            max_tokens=self.max_tokens,
        )
        with closing(generation) as steps:
            for token, _, drafted in steps:
                tokens.append(token)
                from_draft.append(drafted)
                if token in self.tokenizer.eos_token_ids:
                    break
        if tokens != plain:
            sys.exit(f"{case} differs from plain decoding: {tokens} instead of {plain}")
        lengths = {at - len(prompt): guess.drafted for at, guess in recorder.guesses.items()}
        return list(cut(from_draft, lengths))


def measure(bench: Bench, prompts: list[dict[str, Any]]) -> dict[tuple[str, Case], SpecStats]:
    """Counters per kind and case, each kind on its own and all together."""
    results: dict[tuple[str, Case], SpecStats] = {}
    console = Console(stderr=True)
    for entry in track(prompts, "prompts", console=console, disable=not console.is_terminal):
        prompt = bench.tokenizer.encode(entry["prompt"], add_special_tokens=False)
        text = entry.get("reference")
        reference = text and bench.tokenizer.encode(text, add_special_tokens=False)
        plain = bench.plain(prompt)
        for case, drafter in bench.cases(reference):
            for one in bench.rounds(prompt, plain, case, drafter):
                for kind in (entry["kind"], ALL):
                    results.setdefault((kind, case), SpecStats()).count(*one)
    return results


def record(kind: str, case: Case, stats: SpecStats) -> dict[str, Any]:
    return {
        "kind": kind,
        "drafter": case.drafter,
        "num_draft_tokens": case.num_draft_tokens,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "tokens": stats.emitted,
        "steps": stats.steps,
        "tokens_per_step": stats.mean_acceptance_length,
        "acceptance_per_position": shares(stats),
    }


def table(records: list[dict[str, Any]]) -> Table:
    result = Table(title="Acceptance on held-out prompts, greedy")
    for column in ("kind", "drafter", "K", "accepted/drafted", "tokens/step", "per position"):
        left = column in ("kind", "drafter", "per position")
        result.add_column(column, justify="left" if left else "right")
    previous = None
    for row in records:
        if previous not in (None, row["kind"]):
            result.add_section()
        previous = row["kind"]
        share = f" {row['accepted'] / row['drafted']:.2f}" if row["drafted"] else ""
        result.add_row(
            row["kind"],
            row["drafter"],
            str(row["num_draft_tokens"]),
            f"{row['accepted']}/{row['drafted']}{share}",
            f"{row['tokens_per_step']:.2f}",
            " ".join(f"{share:.2f}" for share in row["acceptance_per_position"]),
        )
    return result


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="target: local folder or hub name (the shipped model)")
    parser.add_argument("--draft-model", help="draft model (the shipped one for the shipped model)")
    parser.add_argument("--mtp-norms", choices=("raw", "converted"), help="see mlx-rewind generate")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens per prompt (48)")
    parser.add_argument("--per-kind", type=int, help="prompts of each kind (all)")
    parser.add_argument("--json", action="store_true", help="print one JSON value")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    model, tokenizer = mlx_rewind.load(args.model)
    draft = None
    if args.draft_model or not args.model:
        draft = mlx_rewind.load_draft(args.draft_model, tokenizer)
    head = None
    with suppress(FileNotFoundError, mlx_rewind.UnsupportedModelError):
        head = mlx_rewind.load_mtp(args.model, model, norms=args.mtp_norms)
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for entry in held_out_prompts(tokenizer):
        by_kind.setdefault(entry["kind"], []).append(entry)
    prompts = [entry for entries in by_kind.values() for entry in entries[: args.per_kind]]

    results = measure(Bench(model, tokenizer, draft, head, args.max_tokens), prompts)
    kinds = (*by_kind, ALL)
    order = sorted(results, key=lambda key: kinds.index(key[0]))
    records = [record(kind, case, results[kind, case]) for kind, case in order]
    if args.json:
        print(json.dumps(records))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(table(records))


if __name__ == "__main__":
    main()
