"""A result as tables, as JSON, and as advice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.table import Table

from ..types import SpecStats
from .run import Result
from .trials import Chosen, Run

#: A speed-up below this is not worth a drafter: it is within what two runs differ by.
WORTH = 1.03


def verdict(result: Result) -> dict[str, Any]:
    """Which drafter and length to use on this machine, and why."""
    best = result.best
    if best is None or best.speed < WORTH:
        found = "nothing was drafted"
        if best is not None:
            found = (
                f"the best, {_name(best)}, gave {best.speed:.2f} of plain decoding "
                f"(ideal {best.ideal:.2f})"
            )
        return {
            "draft": "none",
            "num_draft_tokens": 0,
            "text": f"decode plainly: drafting does not pay here; {found}",
        }
    return {
        "draft": best.draft,
        "num_draft_tokens": best.num_draft_tokens,
        "text": f"use {_name(best)}: {best.speed:.2f} times plain decoding (ideal "
        f"{best.ideal:.2f}, {best.achieved_over_ideal:.0%} of it reached)",
    }


def _name(run: Run) -> str:
    return f"--draft {run.draft} --num-draft-tokens {run.num_draft_tokens}"


def as_json(result: Result, about: dict[str, Any]) -> dict[str, Any]:
    """One JSON object: `about`, what was measured, and the figures of the best run on top.

    Costs are in units of a plain step of our loop; `speed_up` is over mlx_lm's plain decoding,
    `speed` over our own.
    """
    best = _run(result, result.best) if result.best else {}
    figures = ("tau", "m", "c", "ideal", "speed_up", "achieved_over_ideal")
    return {
        **about,
        **{name: best.get(name) for name in ("draft", "num_draft_tokens", *figures)},
        "plain_over_mlx_lm": result.plain_over_mlx_lm,
        "plain_tokens_per_second": 1 / median(result.plain),
        "mlx_lm_tokens_per_second": 1 / median(result.stock),
        "verify_over_plain_step": {str(size): cost for size, cost in result.verify.items()},
        "commit_window": result.window,
        "commit_over_plain_step": {str(kept): cost for kept, cost in result.commit.items()},
        "full_commit_over_plain_step": result.full_commit,
        "reject_commit_over_plain_step": result.reject_commit,
        "memory": None if result.memory is None else asdict(result.memory),
        "runs": [_run(result, run) for run in result.runs],
        "auto": None if result.auto is None else _auto(result, result.auto),
        "against": [stock._asdict() for stock in result.against],
        "verdict": verdict(result),
    }


def _run(result: Result, run: Run) -> dict[str, Any]:
    return {
        "draft": run.draft,
        "num_draft_tokens": run.num_draft_tokens,
        "tau": run.tau,
        "m": run.m,
        "c": run.c,
        "ideal": run.ideal,
        "speed": run.speed,
        "speed_up": run.speed * result.plain_over_mlx_lm,
        "achieved_over_ideal": run.achieved_over_ideal,
        "tokens_per_second": run.speed / median(result.plain),
        "identical": run.identical,
        **_counters(run.stats),
        "kinds": {
            kind: {"speed": speed, **_counters(stats)} for kind, (stats, speed) in run.kinds.items()
        },
    }


def _auto(result: Result, auto: Chosen) -> dict[str, Any]:
    return {**auto._asdict(), "speed_up": auto.speed * result.plain_over_mlx_lm}


def _counters(stats: SpecStats) -> dict[str, Any]:
    return {
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_per_position": shares(stats),
    }


def shares(stats: SpecStats) -> list[float]:
    """The share of the draft tokens at each position that were emitted."""
    pairs = zip(stats.accepted_per_position, stats.drafted_per_position, strict=True)
    return [accepted / drafted for accepted, drafted in pairs]


def tables(result: Result) -> Iterator[Table]:
    """What a person reads."""
    yield _costs(result)
    if result.runs:
        yield _runs(result)
    if any(len(run.kinds) > 1 for run in result.runs):
        yield _kinds(result)
    if result.against:
        yield _against(result)
    if result.memory is not None:
        yield _memory(result)


def _costs(result: Result) -> Table:
    table = Table(title="In units of a plain step", show_header=False)
    table.add_row("plain speed over mlx_lm's", f"{result.plain_over_mlx_lm:.3f}")
    for name, sizes in (("1-8", range(1, 9)), ("9-16", range(9, 17))):
        costs = "  ".join(f"{result.verify[size]:.2f}" for size in sizes)
        table.add_row(f"verify of {name} tokens", costs)
    kept = "  ".join(f"{cost:.3f}" for cost in result.commit.values())
    table.add_row(f"commit of 1-{result.window} of {result.window} tokens", kept)
    table.add_row("rejecting commit, mean", f"{result.reject_commit:.3f}")
    return table


def _runs(result: Result) -> Table:
    table = Table(title="Drafters")
    columns = ("drafter", "K", "accepted/drafted", "tau", "m", "c", "speed-up", "ideal", "reached")
    for column in (*columns, "per position", "text"):
        left = column in ("drafter", "per position", "text")
        table.add_column(column, justify="left" if left else "right")
    for run in result.runs:
        numbers = (run.tau, run.m, run.c, run.speed * result.plain_over_mlx_lm, run.ideal)
        table.add_row(
            run.draft,
            str(run.num_draft_tokens),
            f"{run.stats.accepted}/{run.stats.drafted}",
            *(f"{number:.2f}" for number in numbers),
            f"{run.achieved_over_ideal:.2f}",
            " ".join(f"{share:.2f}" for share in shares(run.stats)),
            "identical" if run.identical else "differs",
        )
    if result.auto is not None:
        auto = _auto(result, result.auto)
        empty = [""] * 4
        told = "identical" if result.auto.identical else "differs"
        speed = f"{auto['speed_up']:.2f}"
        table.add_row("auto", f"<= {result.auto.num_draft_tokens}", *empty, speed, "", "", "", told)
    return table


def _kinds(result: Result) -> Table:
    names = sorted({kind for run in result.runs for kind in run.kinds})
    table = Table(title="Speed-up by kind of text")
    table.add_column("drafter")
    for column in ("K", *names):
        table.add_column(column, justify="right")
    for run in result.runs:
        speeds = (run.kinds[name][1] if name in run.kinds else None for name in names)
        cells = ("" if x is None else f"{x * result.plain_over_mlx_lm:.2f}" for x in speeds)
        table.add_row(run.draft, str(run.num_draft_tokens), *cells)
    return table


def _against(result: Result) -> Table:
    table = Table(title="mlx_lm's own speculative decoding")
    for column in ("drafter", "K", "speed-up", "text"):
        table.add_column(column)
    for stock in result.against:
        row = [stock.draft, str(stock.num_draft_tokens)]
        if stock.speed is None:
            table.add_row(*row, "refused", str(stock.refusal))
        else:
            speed = f"{stock.speed * result.plain_over_mlx_lm:.2f}"
            table.add_row(*row, speed, "identical" if stock.identical else "differs")
    return table


def _memory(result: Result) -> Table:
    memory = result.memory
    assert memory is not None
    table = Table(title="Bytes held beyond the model")
    for column in ("tokens", "plain", "speculative", "difference"):
        table.add_column(column, justify="right")
    for tokens, plain, ours in zip(memory.tokens, memory.plain, memory.speculative, strict=True):
        table.add_row(f"{tokens:,}", f"{plain:,}", f"{ours:,}", f"{ours - plain:,}")
    table.caption = f"one round of {result.window} tokens holds {memory.records:,} until it ends"
    return table
