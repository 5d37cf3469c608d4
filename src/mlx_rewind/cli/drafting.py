"""The options that choose a drafter, and the drafter that they mean."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..draft.auto import Auto
from ..draft.checkpoint import folder_of, is_separate_head
from ..draft.ngram import NGram, Prediction
from ..draft.protocol import Drafter
from ..errors import UnsupportedModelError
from ..load import load_draft, load_mtp
from .options import add_head_options


def draft_kind(args: argparse.Namespace) -> str:
    """The drafter asked for, by name or by the option that only it has. Refuses contradictions."""
    model, prediction = args.draft_model is not None, args.prediction_file is not None
    if model and prediction:
        raise ValueError("--draft-model and --prediction-file exclude each other")
    if args.draft is None:
        if model and is_separate_head(folder_of(args.draft_model)):
            return "mtp"
        return "model" if model else "prediction" if prediction else "auto"
    kind = str(args.draft)
    if model and kind not in ("model", "mtp", "auto"):
        raise ValueError(f"--draft-model cannot be used with --draft {kind}")
    if prediction and kind not in ("prediction", "auto"):
        raise ValueError(f"--prediction-file cannot be used with --draft {kind}")
    if kind == "prediction" and not prediction:
        raise ValueError("--draft prediction needs --prediction-file")
    if kind == "model" and not model and args.model is not None:
        raise ValueError("--draft model needs --draft-model (only the shipped model has a default)")
    return kind


def drafter_for(
    kind: str, args: argparse.Namespace, model: nn.Module, tokenizer: Any
) -> Drafter | None:
    """The drafter of a kind; sets the most draft tokens where the command line does not."""
    if args.num_draft_tokens is None:
        args.num_draft_tokens = 8 if kind == "auto" else 4
    if kind == "auto":
        return Auto(*_candidates(args, model, tokenizer))
    return _one(kind, args, model, tokenizer)


def _candidates(args: argparse.Namespace, model: nn.Module, tokenizer: Any) -> Iterator[Drafter]:
    """What `auto` chooses from: what is named, the model's own head if it has one, n-grams."""
    if args.prediction_file is not None:
        yield _one("prediction", args, model, tokenizer)
    yield NGram()
    named = args.draft_model
    if named is not None:
        kind = "mtp" if is_separate_head(folder_of(named)) else "model"
        yield _one(kind, args, model, tokenizer)
        return
    try:
        yield _one("mtp", args, model, tokenizer)
    except (FileNotFoundError, UnsupportedModelError):
        return  # the model has none
    except ValueError as reason:
        print(f"mlx-rewind: note: the MTP head is not used: {reason}", file=sys.stderr)


def _one(kind: str, args: argparse.Namespace, model: nn.Module, tokenizer: Any) -> Any:
    if kind == "model":
        return load_draft(args.draft_model, tokenizer)
    if kind == "mtp":
        return load_mtp(args.draft_model or args.model, model, norms=args.mtp_norms)
    if kind == "ngram":
        return NGram()
    if kind == "prediction":
        file = Path(args.prediction_file)
        if not file.is_file():
            raise FileNotFoundError(f"no prediction file at {file}")
        text = file.read_text(encoding="utf-8")
        return Prediction(tokenizer.encode(text, add_special_tokens=False, verbose=False))
    return None


def add_draft_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--draft",
        choices=("auto", "none", "mtp", "ngram", "model", "prediction"),
        help="the drafter (auto, or what the next two options imply); auto: what pays, of n-grams, "
        "the model's own MTP head and what is named; mtp: that head",
    )
    add("--draft-model", help="draft model, or MTP head by itself: folder or hub name")
    add("--prediction-file", help="a file with the expected text; implies --draft prediction")
    add("--num-draft-tokens", type=int, help="most draft tokens per round (4; auto: 8)")
    add_head_options(parser)
