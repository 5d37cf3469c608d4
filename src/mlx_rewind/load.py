"""Loading models: a local folder, a hub name, or the models that ship with the package."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.nn as nn
import mlx_lm

from .cache.attach import attach
from .draft.model import DraftModel, check_tokenizers
from .errors import UnsupportedModelError

_MODELS = Path(__file__).parent / "models"

#: The hybrid model and the smaller hybrid draft model that ship with the package.
SHIPPED = _MODELS / "demo"
SHIPPED_DRAFT = _MODELS / "demo-draft"


def load(path_or_hf_repo: str | Path | None = None, **options: Any) -> tuple[nn.Module, Any]:
    """Loads a model and its tokenizer as `mlx_lm.load` does; None is the shipped model.

    options    those of `mlx_lm.load`: tokenizer_config, adapter_path, trust_remote_code, ...

    The model is attached at once, so that recurrent caches count their tokens from the first.

    Raises FileNotFoundError for a path or name that leads nowhere, ValueError for a folder that
    holds no model.
    """
    name = str(SHIPPED if path_or_hf_repo is None else path_or_hf_repo)
    if name.startswith("~"):
        name = str(Path(name).expanduser())
    if not Path(name).exists() and (name.startswith((".", "/")) or name.count("/") > 1):
        raise FileNotFoundError(f"no model at {name}: the folder does not exist")
    try:
        model, tokenizer, *_ = mlx_lm.load(name, **options)
    except OSError as error:
        raise FileNotFoundError(f"cannot load {name}: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise ValueError(f"{name} holds no model that mlx-lm can load: {e!r}") from e
    if len(tokenizer.get_vocab()) < 2:
        raise ValueError(f"{name} has no tokenizer (tokenizer.json or the like is missing)")
    with suppress(UnsupportedModelError):  # refused where it matters: at the first round
        attach(model)
    return model, tokenizer


def load_draft(path_or_hf_repo: str | Path | None, tokenizer: Any, **options: Any) -> DraftModel:
    """Loads a draft model for a target with `tokenizer`; None is the shipped draft model.

    Raises as `load` does, and `DraftMismatchError` if the tokenizers differ.
    """
    model, draft_tokenizer = load(path_or_hf_repo or SHIPPED_DRAFT, **options)
    check_tokenizers(tokenizer, draft_tokenizer)
    return DraftModel(model, draft_tokenizer)


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
