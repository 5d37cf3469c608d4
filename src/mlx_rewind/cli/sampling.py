"""The options that say how tokens are drawn, for a command line or a line of a prompts file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..grammar import Grammar
from ..sampling import ACCEPTANCE, SamplingParams

#: Option or field -> its type and what it does. The name in `SamplingParams` is the same, but one.
OPTIONS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "temp": ((int, float), "temperature (0: greedy)"),
    "top_p": ((int, float), "nucleus: share of the probability to keep (1: all)"),
    "top_k": (int, "best tokens to keep (0: all)"),
    "min_p": ((int, float), "share of the best token's probability (0)"),
    "xtc_probability": ((int, float), "how often the best tokens are left out (0)"),
    "xtc_threshold": ((int, float), "probability from which a token counts as best (0.1)"),
    "seed": (int, "the same seed, the same text; without one a fresh seed is drawn and reported"),
    "repetition_penalty": ((int, float), "divides logits of recent tokens"),
    "repetition_context_size": (int, "recent tokens of that (20)"),
    "presence_penalty": ((int, float), "taken off logits of recent tokens"),
    "presence_context_size": (int, "recent tokens of that (20)"),
    "frequency_penalty": ((int, float), "the same, for each time that they came"),
    "frequency_context_size": (int, "recent tokens of that (20)"),
    "logit_bias": (dict, "JSON object: token id to what is added to its logit"),
    "min_tokens": (int, "tokens before the text may end (0)"),
    "logprobs": (int, "with JSON: logprobs of every token, and this many of the best"),
}


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name, (kind, text) in OPTIONS.items():
        convert = int if kind is int else _object if kind is dict else float
        group.add_argument(f"--{name.replace('_', '-')}", type=convert, help=text)
    group.add_argument(
        "--raw-logprobs", action="store_true", help="report logprobs before bias and penalties"
    )
    group.add_argument(
        "--acceptance",
        choices=ACCEPTANCE,
        default="match",
        help="match: the text of plain decoding; rejection, block: more accepted, the same law",
    )
    one = parser.add_argument_group("grammar").add_mutually_exclusive_group()
    for name, text in GRAMMARS.items():
        one.add_argument(f"--{name}", help=text)


#: The text must match one of these; they need the extra `grammar`.
GRAMMARS = {
    "json-schema": "a JSON schema, or a file with one: the text is such JSON, without white space",
    "regex": "a regular expression",
    "lark": "a file with a Lark grammar",
}


def grammar_for(args: argparse.Namespace, tokenizer: Any) -> Grammar | None:
    """The grammar of a command line. Raises ValueError as `Grammar` does."""
    if args.json_schema is not None:
        text = args.json_schema
        if not text.lstrip().startswith("{"):
            text = _read("--json-schema", text)
        return Grammar.json_schema(text, tokenizer, compact=True)
    if args.regex is not None:
        return Grammar.regex(args.regex, tokenizer)
    if args.lark is not None:
        return Grammar.lark(_read("--lark", args.lark), tokenizer)
    return None


def _read(option: str, name: str) -> str:
    if not Path(name).is_file():
        raise FileNotFoundError(f"{option}: no file at {name}")
    return Path(name).read_text(encoding="utf-8")


def sampling_for(
    args: argparse.Namespace, entry: Mapping[str, Any] | None = None
) -> SamplingParams:
    """The parameters of a command line, or of a line of a prompts file that overrides some.

    Raises ValueError as `SamplingParams` does.
    """
    given = {name: (entry or {}).get(name, getattr(args, name)) for name in OPTIONS}
    values = {name: value for name, value in given.items() if value is not None}
    if "temp" in values:
        values["temperature"] = values.pop("temp")
    return SamplingParams(**values, raw_logprobs=args.raw_logprobs)


def _object(text: str) -> dict[Any, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text}")
    return value


def logprob_record(token: int, logprobs: Any, top: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """What JSON says of one token: its logprob, and those of the best tokens."""
    own = float(logprobs[token].item())
    return {"token": token, "logprob": own, "top": [list(pair) for pair in top]}
