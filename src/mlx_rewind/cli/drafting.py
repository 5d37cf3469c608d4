"""The options that choose a drafter, and the drafter that they mean."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..draft.checkpoint import folder_of, is_separate_head
from ..draft.ngram import NGram, Prediction
from ..draft.protocol import Drafter
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
        return "model" if model else "prediction" if prediction else "none"
    kind = str(args.draft)
    if model and kind not in ("model", "mtp"):
        raise ValueError(f"--draft-model cannot be used with --draft {kind}")
    if prediction and kind != "prediction":
        raise ValueError(f"--prediction-file cannot be used with --draft {kind}")
    if kind == "prediction" and not prediction:
        raise ValueError("--draft prediction needs --prediction-file")
    if kind == "model" and not model and args.model is not None:
        raise ValueError("--draft model needs --draft-model (only the shipped model has a default)")
    return kind


def drafter_for(
    kind: str, args: argparse.Namespace, model: nn.Module, tokenizer: Any
) -> Drafter | None:
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
        choices=("none", "mtp", "ngram", "model", "prediction"),
        help="the drafter (none, or what the next two options imply); mtp: the model's own head",
    )
    add("--draft-model", help="draft model, or MTP head by itself: folder or hub name")
    add("--prediction-file", help="a file with the expected text; implies --draft prediction")
    add("--num-draft-tokens", type=int, default=4, help="most draft tokens per round (4)")
    add_head_options(parser)
