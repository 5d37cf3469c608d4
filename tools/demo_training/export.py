"""Model folders in the layout of mlx-lm, checked against stock mlx-lm after writing.

Layout: conv1d  [C, 4, 1]  and norm weights as they are multiplied, which mlx-lm's `sanitize`
takes as already converted; the head's tensors under `mtp.`, which it leaves out.
"""

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from demo_training import distil, prompts, tokenizer, train, verify
from demo_training.config import MAX_POSITIONS, ModelConfig
from demo_training.head import MTPHead
from demo_training.model import Trunk

TRUNK_PREFIX, HEAD_PREFIX = "language_model.model.", "mtp."

#: Tells mlx-rewind how the head is stored, which its tensors do not show.
HEAD_RECORD = {"mlx_rewind_mtp": {"norms": "converted", "quantization": {}}}


def build(work: Path, models: Path) -> None:
    """Write `demo`, `demo-draft` and `prompts.jsonl`, then compare with mlx-lm."""
    models.mkdir(parents=True, exist_ok=True)
    trunk, head = train.load_target(work)
    draft = distil.load_draft(work)
    write_model(models / "demo", work / "tokenizer", trunk, head)
    write_model(models / "demo-draft", work / "tokenizer", draft, None)
    prompts.build(work, models / "prompts.jsonl")
    verify.check(models / "demo", trunk)
    verify.check_head(models / "demo", trunk, head)
    verify.check(models / "demo-draft", draft)


def write_model(folder: Path, tokenizer_files: Path, trunk: Trunk, head: MTPHead | None) -> None:
    folder.mkdir(exist_ok=True)
    weights = mlx_weights(trunk, head)
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
    (folder / "model.safetensors").chmod(0o644)
    for path in tokenizer_files.iterdir():
        shutil.copyfile(path, folder / path.name)
    encoder = tokenizer.load(tokenizer_files.parent)
    ends = tokenizer.end_ids(encoder)
    write_json(folder / "config.json", model_config(trunk.config, ends))
    generation = {"eos_token_id": ends, "pad_token_id": ends[1], "do_sample": False}
    write_json(folder / "generation_config.json", generation)
    size = (folder / "model.safetensors").stat().st_size / 1e6
    print(f"export: {folder.name} {size:.2f} MB, {len(weights)} tensors")


def mlx_weights(trunk: Trunk, head: MTPHead | None) -> dict[str, Tensor]:
    """Tensors by their names in the file: bfloat16, but the decay rates `A_log` in float32."""
    named = {TRUNK_PREFIX + name: p for name, p in trunk.state_dict().items()}
    if head is not None:
        named |= {HEAD_PREFIX + name: p for name, p in head.state_dict().items()}
    weights = {}
    for name, tensor in named.items():
        if name.endswith("conv1d.weight"):
            tensor = tensor.transpose(1, 2)
        dtype = torch.float32 if name.endswith("A_log") else torch.bfloat16
        weights[name] = tensor.to(dtype).contiguous()
    return weights


def model_config(config: ModelConfig, ends: list[int]) -> dict[str, Any]:
    """A config.json with the fields of Qwen3.5 checkpoints."""
    shapes = {f.name: getattr(config, f.name) for f in fields(ModelConfig)}
    rope = {
        "rope_type": "default",
        "rope_theta": shapes.pop("rope_theta"),
        "partial_rotary_factor": shapes.pop("partial_rotary_factor"),
    }
    kinds = ("full_attention", "linear_attention")
    text = {
        "model_type": "qwen3_5_text",
        **shapes,
        "layer_types": [kinds[config.is_linear(i)] for i in range(config.num_hidden_layers)],
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": rope,
        "max_position_embeddings": MAX_POSITIONS,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mamba_ssm_dtype": "float32",
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": ends[0],
        "dtype": "bfloat16",
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": True,
        "eos_token_id": ends,
        **(HEAD_RECORD if config.mtp_num_hidden_layers else {}),
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
