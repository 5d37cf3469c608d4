"""Loading models: a local folder, a hub name, or the models that ship with the package."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import _get_classes, load_adapters, load_model, load_tokenizer

from .cache.attach import attach
from .draft.checkpoint import (
    announced,
    family_of,
    find_heads,
    folder_of,
    names_of_heads,
    num_layers,
    read_config,
)
from .draft.loading import missing
from .draft.model import DraftModel, check_tokenizers
from .draft.mtp import MTP
from .errors import UnsupportedModelError

_MODELS = Path(__file__).parent / "models"

#: The hybrid model and the smaller hybrid draft model that ship with the package.
SHIPPED = _MODELS / "demo"
SHIPPED_DRAFT = _MODELS / "demo-draft"

_log = logging.getLogger("mlx_rewind")


def load(path_or_hf_repo: str | Path | None = None, **options: Any) -> tuple[nn.Module, Any]:
    """Loads a model and its tokenizer as `mlx_lm.load` does; None is the shipped model.

    options    those of `mlx_lm.load`: tokenizer_config, adapter_path, trust_remote_code, ...

    The model is attached at once, so that recurrent caches count their tokens from the first.
    Logs one line if config.json announces a multi-token prediction head that is not there.

    Raises FileNotFoundError for a path or name that leads nowhere, ValueError for a folder that
    holds no model.
    """
    options.pop("return_config", None)
    loaded = load_checkpoint(SHIPPED if path_or_hf_repo is None else path_or_hf_repo, **options)
    with suppress(UnsupportedModelError):  # refused where it matters: at the first round
        attach(loaded.model)
    note = head_is_missing(loaded.folder, loaded.model)
    if note:
        _log.warning(note)
    return loaded.model, loaded.tokenizer


class Loaded(NamedTuple):
    """A checkpoint as mlx-lm reads it."""

    folder: Path
    model: nn.Module
    tokenizer: Any
    config: dict[str, Any]


def load_checkpoint(
    path_or_hf_repo: str | Path,
    *,
    tokenizer_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    revision: str | None = None,
    **options: Any,
) -> Loaded:
    """What `mlx_lm.load` does, for checkpoints with heads that it does not know how to drop.

    Raises as `load` does.
    """
    name, classes = str(path_or_hf_repo), classes_without_heads
    folder = folder_of(name, revision)
    try:
        model, config = load_model(folder, get_model_classes=classes, **options)  # type: ignore[arg-type]
        if adapter_path is not None:
            model = load_adapters(model, adapter_path)
            model.eval()
        ends = config.get("eos_token_id")
        tokenizer = load_tokenizer(folder, tokenizer_config, eos_token_ids=ends)
    except OSError as error:
        raise FileNotFoundError(f"cannot load {name}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise ValueError(f"{name} holds no model that mlx-lm can load: {e!r}") from e
    if len(tokenizer.get_vocab()) < 2:
        raise ValueError(f"{name} has no tokenizer (tokenizer.json or the like is missing)")
    return Loaded(folder, model, tokenizer, config)


def classes_without_heads(config: dict[str, Any]) -> tuple[Callable[[Any], nn.Module], Any]:
    """mlx-lm's classes for a config; the model leaves out the tensors of heads in loading."""
    kind, args_kind = _get_classes(config)

    def build(args: Any) -> nn.Module:
        model: Any = kind(args)
        with suppress(UnsupportedModelError):
            _, family = family_of(model)
            layers = num_layers(model)

            def sanitize(weights: dict[str, mx.array]) -> dict[str, mx.array]:
                del model.sanitize  # the model's own from here on
                heads = names_of_heads(weights, family, layers)
                trunk = {name: x for name, x in weights.items() if name not in heads}
                return model.sanitize(trunk) if hasattr(model, "sanitize") else trunk

            model.sanitize = sanitize
        return model

    return build, args_kind


def head_is_missing(folder: Path, model: nn.Module) -> str | None:
    """One line on heads that config.json announces and that are not there, or not usable."""
    try:
        _, family = family_of(model)
        if announced(read_config(folder), family) and find_heads(folder, model) is None:
            return missing(folder, model)
    except UnsupportedModelError:
        return None
    except ValueError as error:
        return f"the MTP head cannot be used: {error}"
    return None


def load_draft(path_or_hf_repo: str | Path | None, tokenizer: Any, **options: Any) -> DraftModel:
    """Loads a draft model for a target with `tokenizer`; None is the shipped draft model.

    Raises as `load` does, and `DraftMismatchError` if the tokenizers differ.
    """
    model, draft_tokenizer = load(path_or_hf_repo or SHIPPED_DRAFT, **options)
    check_tokenizers(tokenizer, draft_tokenizer)
    return DraftModel(model, draft_tokenizer)


def load_mtp(path_or_hf_repo: str | Path | None, target: nn.Module, **options: Any) -> MTP:
    """Loads the heads for `target` from a checkpoint; None is the shipped one. See `MTP.load`."""
    return MTP.load(path_or_hf_repo or SHIPPED, target, **options)


def held_out_prompts(tokenizer: Any) -> list[dict[str, Any]]:
    """The prompts that ship with the model and were never trained on, ready to be generated from.

    Each has `kind` (code, docs, prose or task) and `prompt`, text with any chat template applied.
    """
    prompts = []
    for line in (_MODELS / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if "messages" in entry:
            entry["prompt"] = tokenizer.apply_chat_template(
                entry["messages"], add_generation_prompt=True, tokenize=False
            )
        prompts.append(entry)
    return prompts
