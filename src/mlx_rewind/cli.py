"""The command line: `mlx-rewind generate` and `mlx-rewind inspect`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from . import __version__
from .cache.describe import inspect
from .draft.ngram import NGram, Prediction
from .draft.protocol import Drafter
from .generate import GenerationResponse, stream_generate
from .load import SHIPPED, load, load_draft

_DEFAULT_PROMPT = "Count from 1 to 20."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0, or 2 after one line that says what was wrong."""
    args = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], None] = args.command
    try:
        command(args)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stdout = None
        return 0
    except (ValueError, OSError) as error:
        print(f"mlx-rewind: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


# -- generate ---------------------------------------------------------------------------------


def _generate(args: argparse.Namespace) -> None:
    prompt_text = sys.stdin.read() if args.prompt == "-" else args.prompt
    kind = _draft_kind(args)
    model, tokenizer = load(
        args.model,
        adapter_path=args.adapter_path,
        trust_remote_code=args.trust_remote_code,
        tokenizer_config={"trust_remote_code": args.trust_remote_code},
    )
    _add_end_tokens(tokenizer, args.extra_eos_token)
    prompt = _apply_template(tokenizer, prompt_text, args)
    drafter = _drafter(kind, args, tokenizer)
    if args.top_k >= len(tokenizer.get_vocab()):
        raise ValueError(f"top_k must be below the vocabulary size, got {args.top_k}")
    if args.seed is not None:
        mx.random.seed(args.seed)  # after loading, which draws random weights first
    with _prefill_bar() as progress:
        responses = stream_generate(
            model,
            tokenizer,
            prompt,
            drafter=drafter,
            num_draft_tokens=args.num_draft_tokens,
            max_tokens=args.max_tokens,
            stop=args.stop,
            sampler=make_sampler(args.temp, args.top_p, args.min_p, top_k=args.top_k),
            max_kv_size=args.max_kv_size,
            prefill_step_size=args.prefill_step_size,
            kv_bits=args.kv_bits,
            kv_group_size=args.kv_group_size,
            quantized_kv_start=args.quantized_kv_start,
            prompt_progress_callback=progress,
        )
        (_print_json if args.json else _print_text)(responses, args)


def _print_text(responses: Iterator[GenerationResponse], args: argparse.Namespace) -> None:
    for response in responses:
        print(response.text, end="", flush=True)
    print()
    if args.verbose:
        Console(highlight=False, soft_wrap=True).print(closing_line(response), style="dim")


def _print_json(responses: Iterator[GenerationResponse], args: argparse.Namespace) -> None:
    pieces, tokens = [], []
    for response in responses:
        pieces.append(response.text)
        tokens.append(response.token)
    fields = dataclasses.asdict(dataclasses.replace(response, logprobs=mx.zeros(0)))
    for name in ("text", "token", "from_draft", "logprobs"):
        del fields[name]
    fields["acceptance_per_position"] = response.acceptance_per_position
    print(json.dumps({"text": "".join(pieces), "tokens": tokens, **fields}))


def closing_line(response: GenerationResponse) -> str:
    """One line on what the generation cost and what speculation gave."""
    parts = [
        f"{response.prompt_tokens} prompt tokens at {response.prompt_tps:.0f}/s",
        f"{response.generation_tokens} tokens at {response.generation_tps:.1f}/s",
    ]
    if response.draft_kind == "none":
        parts.append("no drafter")
    else:
        shares = " ".join(f"{share:.2f}" for share in response.acceptance_per_position)
        parts += [
            f"{response.draft_kind}: {response.draft_rounds} rounds",
            f"{response.draft_n_accepted}/{response.draft_n} drafts accepted",
            f"{response.mean_acceptance_length:.2f} tokens per step",
            f"acceptance per position {shares or '-'}",
        ]
    return " | ".join([*parts, response.exactness, str(response.finish_reason)])


def _add_end_tokens(tokenizer: Any, tokens: Sequence[str]) -> None:
    for token in tokens:
        if not token.isdigit() and token not in tokenizer.get_vocab():
            raise ValueError(f"--extra-eos-token {token}: the tokenizer has no such token")
        tokenizer.add_eos_token(token)


def _apply_template(tokenizer: Any, text: str, args: argparse.Namespace) -> str | list[int]:
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        return text
    messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
    messages.append({"role": "user", "content": text})
    prompt: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return prompt


def _draft_kind(args: argparse.Namespace) -> str:
    """The drafter asked for, by name or by the option that only it has. Refuses contradictions."""
    wanted = {
        "model": args.draft_model is not None,
        "prediction": args.prediction_file is not None,
    }
    implied = [kind for kind, given in wanted.items() if given]
    if len(implied) > 1:
        raise ValueError("--draft-model and --prediction-file exclude each other")
    if args.draft is None:
        return implied[0] if implied else "none"
    if implied and implied[0] != args.draft:
        option = "--draft-model" if wanted["model"] else "--prediction-file"
        raise ValueError(f"{option} cannot be used with --draft {args.draft}")
    if args.draft == "prediction" and not implied:
        raise ValueError("--draft prediction needs --prediction-file")
    if args.draft == "model" and not implied and args.model is not None:
        raise ValueError("--draft model needs --draft-model (only the shipped model has a default)")
    return str(args.draft)


def _drafter(kind: str, args: argparse.Namespace, tokenizer: Any) -> Drafter | None:
    if kind == "model":
        return load_draft(args.draft_model, tokenizer)
    if kind == "ngram":
        return NGram()
    if kind == "prediction":
        file = Path(args.prediction_file)
        if not file.is_file():
            raise FileNotFoundError(f"no prediction file at {file}")
        text = file.read_text(encoding="utf-8")
        return Prediction(tokenizer.encode(text, add_special_tokens=False, verbose=False))
    return None


@contextmanager
def _prefill_bar() -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar for the prompt, on a terminal only; gone when the first token is there."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("prompt", total=None)

        def progress(processed: int, total: int) -> None:
            bar.update(task, completed=processed, total=total)
            if processed == total:
                bar.stop()

        yield progress


# -- inspect ----------------------------------------------------------------------------------


def _inspect(args: argparse.Namespace) -> None:
    model, _ = load(args.model, lazy=True, trust_remote_code=args.trust_remote_code)
    records = inspect(model)
    if args.json:
        print(json.dumps([dataclasses.asdict(record) for record in records]))
        return
    table = Table(title=str(args.model or f"{SHIPPED.name} (shipped)"))
    for column in ("layer", "cache", "mechanism", "slots", "bytes"):
        table.add_column(column, justify="right" if column in ("slots", "bytes") else "left")
    for record in records:
        size = f"{record.bytes:,} {record.growth}"
        layer = str(record.layer) if record.child is None else f"{record.layer}[{record.child}]"
        table.add_row(layer, record.cache, record.mechanism, str(record.slots), size)
    Console().print(table)


# -- options ----------------------------------------------------------------------------------


class _OneLineParser(argparse.ArgumentParser):
    """Reports a bad option in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _number(name: str, kind: type, low: float, high: float = math.inf) -> Callable[[str], Any]:
    """An option type: a number within bounds, so that a bad one is refused before any work."""

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            limits = f"{low} or more" if high == math.inf else f"within {low}..{high}"
            raise argparse.ArgumentTypeError(f"{name} must be {limits}, got {text}")
        return value

    return convert


def _true_or_false(text: str) -> bool:
    if text.lower() not in ("true", "t", "false", "f"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text.lower().startswith("t")


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="mlx-rewind",
        description="Exact speculative decoding with cache rollback for mlx-lm models.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    common = _OneLineParser(add_help=False)
    common.add_argument("--model", help="local folder or hub name (default: the shipped model)")
    common.add_argument("--trust-remote-code", action="store_true", help="as in mlx-lm")
    common.add_argument("--json", action="store_true", help="print one JSON value")

    generate = commands.add_parser(
        "generate", parents=[common], help="generate text, speculatively if a drafter is given"
    )
    generate.set_defaults(command=_generate)
    _add_generation_options(generate)
    _add_draft_options(generate)

    inspecting = commands.add_parser(
        "inspect", parents=[common], help="show every cache of a model and how it is rolled back"
    )
    inspecting.set_defaults(command=_inspect)
    return parser


def _add_generation_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt", "-p", default=_DEFAULT_PROMPT, help="the prompt (%(default)r); - reads stdin")
    add("--system-prompt", help="system message for the chat template")
    add("--ignore-chat-template", action="store_true", help="feed the prompt as it is")
    add(
        "--max-tokens",
        "-m",
        type=int,
        default=256,
        help="tokens to generate (%(default)s), -1: no limit",
    )
    add("--stop", action="append", default=[], help="a string that ends the text; repeatable")
    add("--extra-eos-token", nargs="+", default=[], help="more tokens that end the text")
    add("--temp", type=_number("temp", float, 0), default=0.0, help="temperature (0: greedy)")
    add("--top-p", type=_number("top_p", float, 0, 1), default=1.0, help="nucleus (1: all)")
    add("--top-k", type=_number("top_k", int, 0), default=0, help="best tokens to keep (0: all)")
    add("--min-p", type=_number("min_p", float, 0, 1), default=0.0, help="share of the best (0)")
    add("--seed", type=_number("seed", int, 0, 2**64 - 1), help="seed of mlx's random state")
    add("--adapter-path", help="trained adapter weights")
    add("--max-kv-size", type=int, help="longest attention window to keep")
    add("--prefill-step-size", type=int, default=2048, help="prompt tokens per forward (2048)")
    add("--kv-bits", type=int, help="quantise KV caches to this many bits")
    add("--kv-group-size", type=int, default=64, help="group size of kv-bits (64)")
    add("--quantized-kv-start", type=int, default=5000, help="tokens before kv-bits takes effect")
    add("--verbose", type=_true_or_false, default=True, help="print the closing line (true)")


def _add_draft_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--draft",
        choices=("none", "ngram", "model", "prediction"),
        help="the drafter (none, or what the next two options imply)",
    )
    add("--draft-model", help="draft model: local folder or hub name; implies --draft model")
    add("--prediction-file", help="a file with the expected text; implies --draft prediction")
    add("--num-draft-tokens", type=int, default=4, help="most draft tokens per round (4)")


if __name__ == "__main__":
    sys.exit(main())
