"""What a multi-token prediction head computes: a one-layer model of the target's own class.

    x = projection([norm(embedding of the next token); norm(state of the target)])
    logits = output head(norm(layers(x)))

Layers, masks and caches are those of mlx-lm's model file: the body of a head is the inner model of
the target's class, made with the head's layers only, and given x where it would look up embeddings.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import infer_quant_config

from ..errors import DraftMismatchError
from ..target import Trunk
from .checkpoint import Norms, Stored, announced, family_of, find_heads, is_norm, read_config
from .families import COPY, Family


class Head(nn.Module):
    """One head, with random weights until they are loaded.

    family    what it computes
    target    the model that it belongs to
    index     which of the checkpoint's heads it is
    config    the checkpoint's config.json, for what mlx-lm's `ModelArgs` leave out
    """

    def __init__(
        self, family: Family, target: nn.Module, index: int, config: dict[str, Any]
    ) -> None:
        super().__init__()
        model = _with_the_layers_of_the_head(family, target, index, config)
        trunk = Trunk.of(model)
        body = trunk.inner(model)
        norm = body[trunk.norm]
        vocab, size = body[trunk.embedding].weight.shape
        self.embedding_norm = type(norm)(size, eps=norm.eps)
        self.hidden_norm = type(norm)(size, eps=norm.eps)
        self.projection = nn.Linear(2 * size, size, bias=family.bias)
        self.norm = norm if family.has_norm else nn.Identity()
        self.output = nn.Linear(size, vocab, bias=False) if family.has_output else None
        for name in (trunk.embedding, trunk.norm):
            setattr(body, name, _same)
        for name, value in family.adjust.items():
            setattr(body, name, value)
        self.body = body
        # Kept out of the tree of modules: `body` is a part of it.
        vars(self).update(family=family, trunk=trunk, model=model)

    def make_cache(self) -> list[Any]:
        return make_prompt_cache(vars(self)["model"])

    def __call__(
        self, embedded: mx.array, hidden: mx.array, cache: list[Any]
    ) -> tuple[mx.array, mx.array]:
        """Reads pairs: `embedded` next tokens and `hidden` states, both [B, S, H]. Mutates `cache`.

        Returns the states for the next depth and the input of the output head, both [B, S, H].
        """
        pair = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        if self.family.hidden_first:
            pair.reverse()
        raw = self.body(self.projection(mx.concatenate(pair, axis=-1)), cache)
        normed = self.norm(raw)
        return (normed if self.family.hands_on == "normed" else raw), normed


def _same(x: mx.array) -> mx.array:
    return x


def _with_the_layers_of_the_head(
    family: Family, target: nn.Module, index: int, config: dict[str, Any]
) -> nn.Module:
    """A model of the target's class that has nothing but the layers of a head."""
    kind: Any = type(target)
    args: Any = target.args
    if isinstance(getattr(args, "text_config", None), dict):
        text = {**args.text_config, **family.layers(args.text_config, index, config)}
        args = dataclasses.replace(args, text_config=text)
    else:
        changes = family.layers(dataclasses.asdict(args), index, config)
        args = copy.copy(args)
        for name, value in changes.items():
            setattr(args, name, value)
    return kind(args)


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
    convention = stored.norms(norms)
    heads, unused = [], list(stored.unused)
    quantized: dict[str, Mapping[str, Any]] = {}
    for index in range(stored.heads):
        head = Head(stored.family, target, index, stored.config)
        weights = _sanitized(head, stored.of_head(index), convention == "raw")
        for path, parameters in _quantize(head, weights).items():
            quantized[f"{index}.{path}"] = parameters
        unused += _load(head, weights, f"head {index} in {folder}")
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
        unused=tuple(sorted(unused)),
    )
    return heads, report


def missing(folder: Path, target: nn.Module) -> str:
    """One line on a head that is not there."""
    count = announced(read_config(folder), family_of(target)[1])
    told = f"config.json announces {count}, but the tensors are missing" if count else "none"
    return (
        f"no MTP head in {folder} ({told}): it was dropped in a conversion, or never there. Take it "
        "from the original checkpoint with `mlx-rewind convert --mtp-only`."
    )


def _sanitized(head: Head, parts: dict[str, mx.array], raw: bool) -> dict[str, mx.array]:
    """Parameters of `head`, made of stored parts by the model's own `sanitize`.

    That dequantises, splits and stacks what it would in a layer of the trunk. Norms that are stored
    minus one go around it: their convention was decided for the head by itself.
    """
    model, trunk = vars(head)["model"], vars(head)["trunk"]
    layer = ".".join((*trunk.path, "layers.0."))
    around = {k: v + 1.0 if raw else v for k, v in parts.items() if head.family.shifted and is_norm(k)}
    given = {
        layer.replace("layers.0.", k) if k.startswith("layers.") else layer + _OUTSIDE + k: v
        for k, v in parts.items()
        if k not in around
    }
    given = model.sanitize(given) if hasattr(model, "sanitize") else given
    inner = layer.removesuffix("layers.0.")
    back = {k.removeprefix(layer + _OUTSIDE).removeprefix(inner): v for k, v in given.items()}
    weights = _with_stacked_experts({**back, **around})
    return {f"body.{k}" if k.startswith("layers.") else k: v for k, v in weights.items()}


#: Marks parts that are in no layer while they go through `sanitize`.
_OUTSIDE = "head_"
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(.*)")


def _with_stacked_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Stacks experts that are stored one by one and that `sanitize` looked for in another form."""
    stacks: dict[str, dict[int, mx.array]] = {}
    for name in list(weights):
        match = _EXPERT.fullmatch(name)
        if match:
            stack = stacks.setdefault(f"{match[1]}.switch_mlp.{match[3]}", {})
            stack[int(match[2])] = weights.pop(name)
        elif name.endswith(".experts.gate_up_proj"):
            base, both = name.removesuffix(".experts.gate_up_proj"), weights.pop(name)
            gate, up = mx.split(both, 2, axis=-2)
            weights[f"{base}.switch_mlp.gate_proj.weight"] = gate
            weights[f"{base}.switch_mlp.up_proj.weight"] = up
            weights[f"{base}.switch_mlp.down_proj.weight"] = weights.pop(f"{base}.experts.down_proj")
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
    for path in () if noted is None else sorted(noted.keys() | quantized.keys()):
        got, expected = quantized.get(path), noted.get(path)
        if got != expected:
            raise ValueError(
                f"{path} of the head in {stored.folder} is quantised as {got}, but config.json "
                f"notes {expected}: the files do not belong together. Convert the head again."
            )


def _load(head: Head, weights: dict[str, mx.array], where: str) -> list[str]:
    """Loads what belongs to the head and returns the names of what does not.

    Raises ValueError for missing parameters, `DraftMismatchError` for those of another size.
    """
    parameters: dict[str, mx.array] = dict(tree_flatten(head.parameters()))
    absent = sorted(parameters.keys() - weights.keys())
    if absent:
        raise ValueError(f"{where} lacks {', '.join(absent)}; stored: {', '.join(sorted(weights))}")
    for name, parameter in parameters.items():
        if weights[name].shape != parameter.shape:
            raise DraftMismatchError(
                f"{where} belongs to another model: {name} is {weights[name].shape}, the target "
                f"needs {parameter.shape}"
            )
    head.load_weights([(name, weights[name]) for name in parameters])
    head.eval()
    return sorted(weights.keys() - parameters.keys())
