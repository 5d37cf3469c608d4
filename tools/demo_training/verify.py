"""The exported folders in stock mlx-lm: same logits as the trainer, and text to look at."""

import copy
from pathlib import Path
from typing import TypeVar

import mlx.core as mx
import mlx_lm
import numpy as np
import torch
from mlx_lm.models.qwen3_5 import DecoderLayer

from demo_training.head import MTPHead
from demo_training.model import Trunk

TEXTS = (
    "def read_lines(path):\n    with open(path) as file:\n",
    "The following functions are provided by this module",
    "Elizabeth could not but look at him with surprise, and",
)
TOLERANCE = 5e-5
Module = TypeVar("Module", bound=torch.nn.Module)


def check(folder: Path, trunk: Trunk) -> None:
    """Show greedy text, then compare mlx-lm's float32 logits with the trainer's."""
    model, tokenizer = mlx_lm.load(str(folder))
    for text in TEXTS:
        print(f"verify: {text!r}")
        print("   ->  ", repr(mlx_lm.generate(model, tokenizer, text, max_tokens=40)))
    tokens = tokenizer.encode(" ".join(TEXTS))
    model.set_dtype(mx.float32)
    with torch.no_grad():
        rounded = as_exported(trunk)
        ours = rounded.logits(rounded(torch.tensor([tokens])))
    compare(f"{folder.name} logits", model(mx.array([tokens])), ours)


def check_head(folder: Path, trunk: Trunk, head: MTPHead) -> None:
    """The same for the prediction head, rebuilt from the file with mlx-lm's own layer."""
    model, tokenizer = mlx_lm.load(str(folder))
    model.set_dtype(mx.float32)
    tokens = tokenizer.encode(" ".join(TEXTS))
    args = model.language_model.args
    file = mx.load(str(folder / "model.safetensors"))
    weights = {k.removeprefix("mtp."): v.astype(mx.float32) for k, v in file.items() if "mtp" in k}
    layer = DecoderLayer(args, args.full_attention_interval - 1)
    layer_weights = {k: v for k, v in weights.items() if k.startswith("layers.0.")}
    layer.load_weights([(k.removeprefix("layers.0."), v) for k, v in layer_weights.items()])

    def norm(x: mx.array, name: str) -> mx.array:
        return mx.fast.rms_norm(x, weights[f"{name}.weight"], args.rms_norm_eps)

    hidden = model.model(mx.array([tokens[:-1]]))
    embedded = model.model.embed_tokens(mx.array([tokens[1:]]))
    pair = [norm(embedded, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")]
    mixed = mx.concatenate(pair, axis=-1) @ weights["fc.weight"].T
    theirs = model.model.embed_tokens.as_linear(norm(layer(mixed, mask="causal"), "norm"))

    with torch.no_grad():
        trunk, head = as_exported(trunk), as_exported(head)
        batch = torch.tensor([tokens])
        out = head(trunk.embed_tokens(batch[:, 1:]), trunk(batch[:, :-1]))
        compare(f"{folder.name} head logits", theirs, trunk.logits(out))


def compare(label: str, theirs: mx.array, ours: torch.Tensor) -> None:
    worst = float(np.abs(np.array(theirs) - ours.numpy()).max())
    print(f"verify: {label} differ from the trainer's by {worst:.1e}", flush=True)
    if worst > TOLERANCE:
        raise SystemExit(
            f"{label}: expected at most {TOLERANCE:.0e} between mlx-lm and the trainer"
        )


def as_exported(module: Module) -> Module:
    """A copy with the weights rounded as the file rounds them."""
    rounded = copy.deepcopy(module)
    with torch.no_grad():
        for name, p in rounded.named_parameters():
            if not name.endswith("A_log"):
                p.copy_(p.bfloat16().float())
    return rounded
