"""The multi-token prediction heads that are known, by mlx-lm's model type. Sources: docs/mtp.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..target import HiddenState

#: Changes of the target's config that make a model of a head's layers:
#: (the target's config, which head, the checkpoint's config.json) -> changed fields.
Layers = Callable[[dict[str, Any], int, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """How a family of checkpoints stores its heads, and what they compute.

    roots       what the names of a head's tensors begin with; {n} is the trunk's number of layers
                plus the index of the head
    names       what follows -> part of `Head`; {i} is the index of the head, a name without it
                belongs to all of them. COPY is a tensor of the trunk, stored again.
    layers      the layers of a head, as a config
    count       config fields that announce how many heads there are
    input       the state of the target that the first head reads: after its final norm or before
    hands_on    the state that a head hands to the next depth: after its own final norm or before
    """

    roots: tuple[str, ...]
    names: Mapping[str, str]
    layers: Layers
    count: tuple[str, ...]
    input: HiddenState = "normed"
    hands_on: HiddenState = "normed"
    hidden_first: bool = False
    shifted: bool = False
    bias: bool = False
    has_norm: bool = True
    has_output: bool = False
    adjust: Mapping[str, Any] = field(default_factory=dict)


#: A tensor of the trunk that the checkpoint stores a second time; it is shared, not read.
COPY = "copy"


def _qwen(config: dict[str, Any], index: int, stored: dict[str, Any]) -> dict[str, Any]:
    return {"num_hidden_layers": 1, "full_attention_interval": 1}


_QWEN = Family(
    roots=("mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp."),
    names={
        "pre_fc_norm_embedding.": "embedding_norm.",
        "pre_fc_norm_hidden.": "hidden_norm.",
        "fc.": "projection.",
        "layers.{i}.": "layers.0.",
        "norm.": "norm.",
    },
    layers=_qwen,
    count=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
    shifted=True,
    adjust={"ssm_idx": None},
)

FAMILIES: dict[str, Family] = {
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_next": _QWEN,
}

#: Model types whose heads are known to exist and cannot be used, and why.
REFUSED: dict[str, str] = {}
