"""`mlx-rewind bench`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from rich.console import Console
from rich.progress import Progress

from ..bench import plot, report
from ..bench.blas import blas, restart
from ..bench.models import SIZES, Scripted, hybrid, random_prompts
from ..bench.run import Settings, Subject, measure
from ..bench.trials import DrafterFor, Prompt
from ..draft.ngram import NGram, Prediction
from ..errors import UnsupportedModelError
from ..generate import encode
from ..load import SHIPPED, held_out_prompts, load, load_draft, load_mtp
from ..target import exactness
from .batch import read_prompts
from .options import add_head_options, common_options, number

_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_KINDS = ("ngram", "model", "mtp", "prediction")


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        parents=[common_options()],
        help="measure what each drafter gives on this machine, and what is lost on the way",
    )
    parser.set_defaults(command=_bench)
    add = parser.add_argument
    add(
        "--draft",
        choices=("none", "all", *_KINDS),
        default="all",
        help="drafters to try (all that there are); prediction: the references of the prompts",
    )
    add("--draft-model", help="draft model: local folder or hub name")
    add_head_options(parser)
    add(
        "--num-draft-tokens",
        type=number("num_draft_tokens", int, 1),
        nargs="+",
        default=[1, 2, 4, 8],
        help="draft tokens per round, one or several (1 2 4 8)",
    )
    add("--prompts-file", help="JSON lines with a prompt each, instead of the shipped prompts")
    add(
        "--per-kind",
        type=number("per_kind", int, 1),
        default=2,
        help="shipped prompts of each kind: code, docs, prose, task (2)",
    )
    add("--max-tokens", type=number("max_tokens", int, 8), default=64, help="per prompt (64)")
    add("--repeats", type=number("repeats", int, 1), default=5, help="of every measurement (5)")
    add(
        "--memory-tokens",
        type=number("memory_tokens", int, 0),
        default=64,
        help="tokens after which the memory in use is compared (64); 0: not at all",
    )
    add("--synthetic", choices=SIZES, help="a random hybrid of this size instead of a model")
    add("--acceptance", type=number("acceptance", float, 0, 1), help="of a scripted drafter (0.8)")
    add("--context", type=number("context", int, 1), help="tokens of a synthetic prompt (32)")
    add("--dtype", choices=_DTYPES, help="of a synthetic model (float32)")
    add("--against", choices=("mlx_lm",), help="measure its own speculative decoding too")
    add("--plot", type=Path, metavar="FILE", help="draw speed-up over draft length (matplotlib)")
    add("--no-preload", action="store_true", help="Linux: do not restart with OpenBLAS preloaded")


def _bench(args: argparse.Namespace) -> None:
    _check(args)
    if args.plot is not None:
        plot.check(args.plot)
    if not args.no_preload:
        restart(["-m", "mlx_rewind.cli", *args.argv, "--no-preload"])
    name, subject = _synthetic(args) if args.synthetic else _loaded(args)
    settings = Settings(
        lengths=tuple(sorted(set(args.num_draft_tokens))),
        max_tokens=args.max_tokens,
        repeats=args.repeats,
        memory_tokens=args.memory_tokens,
        against_stock=args.against is not None,
    )
    about = _about(name, subject, settings)
    with _stages() as done:
        result = measure(subject, settings, time.perf_counter, done)
    if args.plot is not None:
        plot.plot(result, name, args.plot)
    if args.json:
        print(json.dumps(report.as_json(result, about)))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    told = ("parameters", "dtype", "blas", "exactness", "mlx", "mlx_lm")
    console.print(" | ".join([name, *(f"{key} {about[key]}" for key in told)]), soft_wrap=True)
    for table in report.tables(result):
        console.print(table)
    console.print(report.verdict(result)["text"], style="bold", soft_wrap=True)


def _check(args: argparse.Namespace) -> None:
    """Refuses options that do not go together."""
    given = {
        "--model": args.model,
        "--draft-model": args.draft_model,
        "--prompts-file": args.prompts_file,
        "--mtp-norms": args.mtp_norms,
        "--draft": None if args.draft in ("all", "none") else args.draft,
    }
    only = {"--acceptance": args.acceptance, "--context": args.context, "--dtype": args.dtype}
    for option, value in (given if args.synthetic else only).items():
        if value is not None:
            verb = "cannot be used with" if args.synthetic else "needs"
            raise ValueError(f"{option} {verb} --synthetic")
    if args.draft_model is not None and args.draft not in ("all", "model", "mtp"):
        raise ValueError(f"--draft-model cannot be used with --draft {args.draft}")
    if args.draft == "model" and args.model is not None and args.draft_model is None:
        raise ValueError("--draft model needs --draft-model (only the shipped model has a default)")


def _synthetic(args: argparse.Namespace) -> tuple[str, Subject]:
    dtype = args.dtype or "float32"
    acceptance = 0.8 if args.acceptance is None else args.acceptance
    model = hybrid(SIZES[args.synthetic], _DTYPES[dtype])
    prompts = [Prompt(tokens, "random") for tokens in random_prompts(2, args.context or 32)]
    drafters: dict[str, DrafterFor] = {
        "scripted": lambda case: Scripted(case.prompt.tokens, case.text, acceptance)
    }
    if args.draft == "none":
        drafters = {}
    return f"synthetic {args.synthetic}, acceptance {acceptance}", Subject(model, prompts, drafters)


def _loaded(args: argparse.Namespace) -> tuple[str, Subject]:
    model, tokenizer = load(args.model, trust_remote_code=args.trust_remote_code)
    if args.prompts_file is None:
        entries = _some_of_each_kind(held_out_prompts(tokenizer), args.per_kind)
    else:
        entries = [{"kind": "file", **entry} for entry in read_prompts(args.prompts_file)]
    prompts = []
    for entry in entries:
        text = entry.get("reference")
        reference = tokenizer.encode(text, add_special_tokens=False) if text else None
        tokens = encode(tokenizer, entry["prompt"])
        prompts.append(Prompt([int(token) for token in tokens], entry["kind"], reference))
    name = str(args.model or f"{SHIPPED.name} (shipped)")
    ends = frozenset(tokenizer.eos_token_ids)
    return name, Subject(model, prompts, _drafters(args, model, tokenizer), ends)


def _some_of_each_kind(entries: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        kinds.setdefault(entry["kind"], []).append(entry)
    return [entry for found in kinds.values() for entry in found[:count]]


def _drafters(args: argparse.Namespace, model: Any, tokenizer: Any) -> dict[str, DrafterFor]:
    """Those asked for; `all` is all that can be had and need no text to expect."""
    wanted = _KINDS[:-1] if args.draft == "all" else (args.draft,)
    drafters: dict[str, DrafterFor] = {}
    if "ngram" in wanted:
        drafters["ngram"] = lambda case: NGram()
    if "model" in wanted and (args.draft_model or not args.model):
        draft = load_draft(args.draft_model, tokenizer)
        drafters["model"] = lambda case: draft
    if "mtp" in wanted:
        with suppress(*((FileNotFoundError, UnsupportedModelError) if args.draft == "all" else ())):
            path = args.model if args.draft == "all" else args.draft_model or args.model
            head = load_mtp(path, model, norms=args.mtp_norms)
            drafters["mtp"] = lambda case: head
    if "prediction" in wanted:
        drafters["prediction"] = lambda case: (
            Prediction(case.prompt.reference) if case.prompt.reference else None
        )
    return drafters


def _about(name: str, subject: Subject, settings: Settings) -> dict[str, Any]:
    """What was measured, on what, with what."""
    weights: Any = tree_flatten(subject.model.parameters())
    library = blas()
    return {
        "model": name,
        "parameters": sum(x.size for _, x in weights),
        "dtype": ", ".join(sorted({str(x.dtype).removeprefix("mlx.core.") for _, x in weights})),
        "device": str(mx.default_device()),
        "blas": library.name,
        "blas_library": library.library,
        "blas_threads": library.threads,
        "exactness": exactness(subject.model, make_prompt_cache(subject.model)),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "prompts": len(subject.prompts),
        "max_tokens": settings.max_tokens,
        "repeats": settings.repeats,
    }


@contextmanager
def _stages() -> Iterator[Callable[[str], None]]:
    """What runs now and how much of it is done, on a terminal only."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage: None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("bench", total=None)

        def done(stage: str) -> None:
            bar.update(task, description=stage, advance=1)

        yield done
