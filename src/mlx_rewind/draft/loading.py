"""From stored tensors to loaded heads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from ..errors import DraftMismatchError
from ..target import Trunk
from .checkpoint import (
    RECORD,
    Norms,
    Stored,
    announced,
    family_of,
    find_heads,
    is_norm,
    num_layers,
    read_config,
)
from .families import COPY
from .heads import Head

#: What other quantisations leave beside a weight, once mlx-lm has taken what it knows.
_FOREIGN = {"qweight", "qzeros", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv"}
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(.*)")
_FUSED = re.compile(r"(.*)\.experts\.(gate_up|down)_proj(\.\w+)?")


@dataclass(frozen=True)
class HeadReport:
    """What a checkpoint holds of its heads.

    family         model type whose heads these are
    layout         embedded (among the trunk's files), side file, or separate (a folder of its own)
    files          where the tensors are, relative to the folder
    heads          how many there are
    announced      how many config.json announces, None if it does not
    norms          raw, converted, or plain for families that store them as they are used
    quantization   quantised part of the heads -> bits, group size and mode
    copies         tensors of the trunk that are stored again, and shared instead
    unused         tensors that belong to no part of a head
    """

    family: str
    layout: str
    files: tuple[str, ...]
    heads: int
    announced: int | None
    norms: str
    quantization: Mapping[str, Mapping[str, Any]]
    copies: tuple[str, ...]
    unused: tuple[str, ...]


def load_heads(
    folder: Path, target: nn.Module, norms: Norms | None
) -> tuple[list[Head], HeadReport]:
    """Builds and loads every head in a folder. See `MTP.load` for what it raises."""
    stored = find_heads(folder, target)
    if stored is None:
        raise FileNotFoundError(missing(folder, target))
    _check_sizes(stored, target)
    convention = stored.norms(norms)
    heads, unused = [], list(stored.unused)
    quantized: dict[str, Mapping[str, Any]] = {}
    for index in range(stored.heads):
        head = Head(stored.family, target, index, stored.config)
        weights = _sanitized(head, stored.of_head(index), convention == "raw")
        for path, parameters in _quantize(head, weights).items():
            quantized[f"{index}.{path}"] = parameters
        extra = _load(head, weights, f"head {index} in {folder}")
        taken = {name.removeprefix("body.") for name in weights} - set(extra)
        for part in (*extra, *_dropped(stored, taken)):
            unused += stored.names_of(part, index)
        heads.append(head)
    _check_quantization(quantized, stored)
    report = HeadReport(
        family=family_of(target)[0],
        layout=stored.layout,
        files=tuple(sorted(set(stored.files.values()))),
        heads=stored.heads,
        announced=announced(stored.config, stored.family),
        norms=convention,
        quantization=quantized,
        copies=tuple(sorted(stored.names_of(COPY))),
        unused=tuple(sorted(set(unused))),
    )
    return heads, report


def _check_sizes(stored: Stored, target: nn.Module) -> None:
    """Raises `DraftMismatchError` for a head by itself that was taken from another model."""
    trunk = Trunk.of(target)
    rows = trunk.inner(target)[trunk.embedding].weight.shape[0]
    for name, ours in (("vocab_size", rows), ("num_hidden_layers", num_layers(target))):
        theirs = stored.config.get(name, ours)
        if stored.layout == "separate" and RECORD in stored.config and theirs != ours:
            raise DraftMismatchError(
                f"the head in {stored.folder} was taken from a model with {name} {theirs}, the "
                f"target has {ours}"
            )


def missing(folder: Path, target: nn.Module) -> str:
    """One line on a head that is not there."""
    count = announced(read_config(folder), family_of(target)[1])
    told = f"config.json announces {count}, but the tensors are missing" if count else "none"
    return (
        f"no MTP head in {folder} ({told}): it was dropped in a conversion, or never there. Take "
        "it from the original checkpoint with `mlx-rewind convert --mtp-only`."
    )


def _sanitized(head: Head, parts: dict[str, mx.array], raw: bool) -> dict[str, mx.array]:
    """Parameters of `head`, made of stored parts by the model's own `sanitize`.

    That dequantises, splits and stacks what it would in a layer of the trunk. Norms that may be
    stored minus one go around it: their convention was decided for the head by itself.
    """
    model, trunk = vars(head)["model"], vars(head)["trunk"]
    inner = "".join(f"{name}." for name in trunk.path)
    outside = f"{inner}layers.0.head_"  # parts that are in no layer, for the time being
    around, given = {}, {}
    for part, tensor in parts.items():
        if head.family.shifted and is_norm(part):
            around[part] = tensor + 1.0 if raw else tensor
        else:
            given[(inner if part.startswith("layers.") else outside) + part] = tensor
    if hasattr(model, "sanitize"):
        try:
            given = model.sanitize(given)
        except KeyError as missing:
            raise ValueError(f"the stored head lacks {missing.args[0]}") from missing
    back = {name.removeprefix(outside).removeprefix(inner): v for name, v in given.items()}
    weights = _with_stacked_experts({**back, **around})
    return {f"body.{k}" if k.startswith("layers.") else k: v for k, v in weights.items()}


def _with_stacked_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Stacks experts that `sanitize` left alone, because the trunk stores its own otherwise."""
    stacks: dict[str, dict[int, mx.array]] = {}
    for name in list(weights):
        match = _EXPERT.fullmatch(name)
        if match:
            stack = stacks.setdefault(f"{match[1]}.switch_mlp.{match[3]}", {})
            stack[int(match[2])] = weights.pop(name)
        match = _FUSED.fullmatch(name)
        if match:
            kinds = match[2].split("_")
            for kind, part in zip(kinds, mx.split(weights.pop(name), len(kinds), -2), strict=True):
                weights[f"{match[1]}.switch_mlp.{kind}_proj{match[3] or '.weight'}"] = part
    for name, stack in stacks.items():
        weights[name] = mx.stack([stack[i] for i in sorted(stack)])
    return weights


def _quantize(head: Head, weights: dict[str, mx.array]) -> dict[str, dict[str, Any]]:
    """Makes those modules quantised whose weights are; returns path -> parameters."""
    found: dict[str, dict[str, Any]] = {}

    def of(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights or not hasattr(module, "to_quantized"):
            return False
        found[path] = infer_quant_config(path, module, weights)
        scaled = {"global_scale": True} if f"{path}.global_scale" in weights else {}
        return {**found[path], **scaled}

    nn.quantize(head, class_predicate=of)
    return found


def _check_quantization(quantized: Mapping[str, Any], stored: Stored) -> None:
    """Raises ValueError if the tensors are not quantised as the converter noted."""
    noted = stored.record.get("quantization")
    if noted is None:
        return
    for path in sorted(noted.keys() | quantized.keys()):
        got, expected = quantized.get(path), noted.get(path)
        if got != expected:
            raise ValueError(
                f"{path} of the head in {stored.folder} is quantised as {got}, but config.json "
                f"notes {expected}: the files do not belong together. Convert the head again."
            )


def _load(head: Head, weights: dict[str, mx.array], where: str) -> list[str]:
    """Loads what belongs to the head and returns the names of what does not.

    Raises ValueError for parameters that are missing or stored in an unknown way,
    `DraftMismatchError` for those of another size.
    """
    everything: Any = head.parameters()  # type: ignore[no-untyped-call]
    parameters: dict[str, mx.array] = dict(tree_flatten(everything))
    foreign = [name for name in sorted(weights) if name.rpartition(".")[2] in _FOREIGN]
    if foreign:
        raise ValueError(
            f"{where} is quantised in a way that mlx-lm does not read: {foreign[0]}. Use a "
            "checkpoint with an unquantised head and quantise it with `mlx-rewind convert`."
        )
    projection = weights.get("projection.weight")
    if projection is not None and projection.shape == parameters["projection.weight"].shape[::-1]:
        weights["projection.weight"] = projection.T  # as the large ERNIE 4.5 was first published
    absent = sorted(parameters.keys() - weights.keys())
    if absent:
        lacks = ", ".join(name.removeprefix("body.") for name in absent)
        raise ValueError(f"{where} lacks {lacks}; it has {', '.join(sorted(weights))}")
    for name, parameter in parameters.items():
        if weights[name].shape != parameter.shape:
            raise DraftMismatchError(
                f"{where} belongs to another model: {name} is {weights[name].shape}, the target "
                f"needs {parameter.shape}"
            )
        if mx.issubdtype(weights[name].dtype, mx.floating) != mx.issubdtype(
            parameter.dtype, mx.floating
        ):
            raise ValueError(f"{where}: {name} is stored as {weights[name].dtype}")
    head.load_weights([(name, weights[name]) for name in parameters])
    head.eval()
    return sorted(name.removeprefix("body.") for name in weights.keys() - parameters.keys())


def _dropped(stored: Stored, taken: set[str]) -> list[str]:
    """Parts that ended up in none of the parameters that were taken.

    These are what mlx-lm computes anew, and kinds of tensors that it does not stack for experts.
    """
    dropped = []
    for part, _ in stored.parts.values():
        match = _EXPERT.fullmatch(part)
        kinds = {name.rpartition(".")[2] for name in taken if ".switch_mlp." in name}
        foreign = match is not None and match[3].rpartition(".")[2] not in kinds | _FOREIGN
        if foreign or part.endswith("rotary_emb.inv_freq"):
            dropped.append(part)
    return dropped
