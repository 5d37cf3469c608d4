"""The multi-token prediction heads that are known, by mlx-lm's model type. Sources: docs/mtp.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..target import HiddenState

#: Changes of the target's config that make a model of a head's layers:
#: (the target's config, which head, the checkpoint's config.json) -> changed fields.
Layers = Callable[[dict[str, Any], int, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """How a family of checkpoints stores its heads, and what they compute.

    roots       what the names of a head's tensors begin with; {n} is the number of layers of the
                trunk plus the index of the head
    names       what follows -> part of `Head`; {i} is the index of the head, a name without it
                belongs to all of them. COPY is a tensor of the trunk, stored again.
    layers      the layers of a head, as a config
    count       config fields that announce how many heads there are

    input       the state of the target that the first head reads: after its final norm or before
    hands_on    the state that a head hands to the next depth: after its own final norm or before
    chained     with several heads, head k reads what head k - 1 hands on; else they all read the
                states of the target
    shifted     norm weights are stored minus one by the authors
    own_norm    the final norm is the head's own; else it is the target's
    own_output  the output head is the head's own; else it is the target's
    reshape     last changes to the body
    """

    roots: tuple[str, ...]
    names: Mapping[str, str]
    layers: Layers
    count: tuple[str, ...] = ("num_nextn_predict_layers",)
    input: HiddenState = "normed"
    hands_on: HiddenState = "normed"
    hidden_first: bool = False
    chained: bool = True
    shifted: bool = False
    own_norm: bool = True
    own_output: bool = False
    reshape: Callable[[nn.Module], None] = lambda body: None


#: A tensor of the trunk that the checkpoint stores a second time; it is shared, not read.
COPY = "copy"

#: How most families call what turns a state and a token into the input of a head.
_READS = {
    "enorm.": "embedding_norm.",
    "hnorm.": "hidden_norm.",
    "eh_proj.": "projection.",
}
_NEXTN = {
    **_READS,
    "shared_head.norm.": "norm.",
    "shared_head.head.": COPY,
    "embed_tokens.": COPY,
    "": "layers.0.",
}


def _fixed(**changes: Any) -> Layers:
    return lambda config, index, stored: changes


# -- Qwen ---------------------------------------------------------------------------------------


def _without_recurrent_layers(body: nn.Module) -> None:
    body.ssm_idx = None


_QWEN = Family(
    roots=(
        "mtp.",
        "model.mtp.",
        "language_model.mtp.",
        "model.language_model.mtp.",
        "language_model.model.mtp.",
    ),
    names={
        "pre_fc_norm_embedding.": "embedding_norm.",
        "pre_fc_norm_hidden.": "hidden_norm.",
        "fc.": "projection.",
        "layers.{i}.": "layers.0.",
        "norm.": "norm.",
    },
    layers=_fixed(
        num_hidden_layers=1, full_attention_interval=1, mlp_only_layers=[], decoder_sparse_step=1
    ),
    count=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
    shifted=True,
    reshape=_without_recurrent_layers,
)

# -- EXAONE: named as Qwen's, a dense layer -----------------------------------------------------


def _exaone_layers(config: dict[str, Any], index: int, stored: dict[str, Any]) -> dict[str, Any]:
    """Full attention has no rope in a model that has sliding windows too: the list says so."""
    kinds = stored.get("mtp_layer_types") or ["full_attention"]
    sliding = [kind for kind in config["layer_types"] if kind == "sliding_attention"]
    return {
        "num_hidden_layers": 1,
        "is_moe_layer": [False],
        "layer_types": [kinds[index % len(kinds)], *sliding[:1]],
    }


_EXAONE = replace(
    _QWEN,
    roots=("mtp.",),
    layers=_exaone_layers,
    count=("num_nextn_predict_layers",),
    shifted=False,
    reshape=lambda body: None,
)

# -- DeepSeek, GLM and Bailing: a NextN layer after the trunk's ---------------------------------

_DEEPSEEK = Family(
    roots=("model.layers.{n}.",),
    names=_NEXTN,
    layers=_fixed(num_hidden_layers=1, first_k_dense_replace=0, moe_layer_freq=1),
)
_GLM = replace(_DEEPSEEK, layers=_fixed(num_hidden_layers=1, first_k_dense_replace=0))
_BAILING = replace(
    _GLM,
    names={
        **_READS,
        "final_layernorm.": "norm.",
        "": "layers.0.",
    },
    layers=_fixed(num_hidden_layers=1, first_k_dense_replace=0, layer_group_size=1),
)

# -- LongCat: half of a layer of the trunk, one attention and one dense MLP ---------------------


class _HalfLayer(nn.Module):
    """The first attention and the first dense MLP of a LongCat layer, without its experts."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.self_attn, self.mlps = layer.self_attn[:1], layer.mlps[:1]
        self.input_layernorm = layer.input_layernorm[:1]
        self.post_attention_layernorm = layer.post_attention_layernorm[:1]

    def __call__(self, x: mx.array, mask: mx.array | None, cache: Any) -> mx.array:
        x = x + self.self_attn[0](self.input_layernorm[0](x), mask=mask, cache=cache[0])
        return x + self.mlps[0](self.post_attention_layernorm[0](x))


def _halve(body: nn.Module) -> None:
    body.layers = [_HalfLayer(body.layers[0])]


_LONGCAT = Family(
    roots=("model.mtp.",),
    names={
        "layers.{i}.enorm.m.": "embedding_norm.",
        "layers.{i}.hnorm.m.": "hidden_norm.",
        "layers.{i}.eh_proj.": "projection.",
        "layers.{i}.self_attn.": "layers.0.self_attn.0.",
        "layers.{i}.transformer_layer.mlp.": "layers.0.mlps.0.",
        "layers.{i}.input_layernorm.": "layers.0.input_layernorm.0.",
        "layers.{i}.post_attention_layernorm.": "layers.0.post_attention_layernorm.0.",
        "norm.": "norm.",
        "embed_tokens.": COPY,
    },
    layers=_fixed(num_layers=1),
    reshape=_halve,
)

# -- MiMo ---------------------------------------------------------------------------------------

_MIMO = Family(
    roots=("model.mtp_layers.{i}.",),
    names={
        "token_layernorm.": "embedding_norm.",
        "hidden_layernorm.": "hidden_norm.",
        "input_proj.": "projection.",
        "final_layernorm.": "norm.",
        "": "layers.0.",
    },
    layers=_fixed(num_hidden_layers=1),
    input="raw",
    hands_on="raw",
    hidden_first=True,
)


def _with_one_kind_of_layer(body: nn.Module) -> None:
    body.ga_idx = body.swa_idx = 0


_MIMO_V2 = Family(
    roots=("model.mtp.layers.{i}.",),
    names={
        **_READS,
        "final_layernorm.": "norm.",
        "pre_mlp_layernorm.": "layers.0.post_attention_layernorm.",
        "": "layers.0.",
    },
    layers=_fixed(num_hidden_layers=1, hybrid_layer_pattern=[1, 0], moe_layer_freq=[0, 0]),
    input="raw",
    hands_on="raw",
    chained=False,
    reshape=_with_one_kind_of_layer,
)

# -- Step: three NextN layers, each with an output head of its own ------------------------------


def _step_layers(config: dict[str, Any], index: int, stored: dict[str, Any]) -> dict[str, Any]:
    """The lists of a config go on behind the trunk's layers, or end with them."""

    def of_head(field: str, otherwise: Any) -> Any:
        values, at = config.get(field), config["num_hidden_layers"] + index
        if not isinstance(values, list):
            return values
        return [values[at] if at < len(values) else otherwise]

    return {
        "num_hidden_layers": 1,
        "layer_types": of_head("layer_types", "sliding_attention"),
        "partial_rotary_factors": of_head("partial_rotary_factors", 1.0),
        "rope_theta": of_head("rope_theta", 10000.0),
        "moe_layers_enum": None,
        "swiglu_limits": None,
        "swiglu_limits_shared": of_head("swiglu_limits_shared", 0),
    }


_STEP = Family(
    roots=("model.layers.{n}.",),
    names={
        **_READS,
        "transformer.shared_head.norm.": "norm.",
        "transformer.shared_head.output.": "output.",
        "embed_tokens.": COPY,
        "": "layers.0.",
    },
    layers=_step_layers,
    input="raw",
    hands_on="raw",
    shifted=True,
    own_output=True,
)

# -- Nemotron: a head is several blocks, of which the first reads the pair ----------------------


def _nemotron_layers(config: dict[str, Any], index: int, stored: dict[str, Any]) -> dict[str, Any]:
    pattern = stored.get("mtp_hybrid_override_pattern") or [
        {"attention": "*", "full_attention": "*", "moe": "E", "mlp": "-"}.get(kind, kind)
        for kind in stored.get("mtp_layers_block_type") or ("attention", "moe")
    ]
    unknown = sorted(set(pattern) - {"*", "E", "-"})
    if unknown:
        raise ValueError(f"the blocks of an MTP head are attention, moe and mlp, got {unknown}")
    return {"hybrid_override_pattern": list(pattern), "num_hidden_layers": len(pattern)}


def _without_recurrent_blocks(body: nn.Module) -> None:
    body.ssm_idx = slice(0)  # no cache, no mask


_NEMOTRON = Family(
    roots=("mtp.", "language_model.mtp."),
    names={
        "layers.0.enorm.": "embedding_norm.",
        "layers.0.hnorm.": "hidden_norm.",
        "layers.0.eh_proj.": "projection.",
        "layers.1.final_layernorm.": "norm.",
        "layers.0.final_layernorm.": "norm.",
        "layers.2.final_layernorm.": "norm.",
        "layers.3.final_layernorm.": "norm.",
        "layers.": "layers.",
    },
    layers=_nemotron_layers,
    reshape=_without_recurrent_blocks,
)

# -- ERNIE --------------------------------------------------------------------------------------

_ERNIE = Family(
    roots=("model.mtp_",),
    names={
        "emb_norm.{i}.": "embedding_norm.",
        "hidden_norm.{i}.": "hidden_norm.",
        "linear_proj.{i}.": "projection.",
        "block.{i}.": "layers.0.",
    },
    layers=_fixed(num_hidden_layers=1, moe_layer_start_index=1),
    own_norm=False,
)

FAMILIES: dict[str, Family] = {
    "bailing_hybrid": _BAILING,
    "bailing_moe_v3": _BAILING,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "ernie4_5_moe": _ERNIE,
    "exaone_moe": _EXAONE,
    "glm4_moe": _GLM,
    "glm4_moe_lite": _GLM,
    "glm_moe_dsa": _DEEPSEEK,
    "longcat_flash": _LONGCAT,
    "mimo": _MIMO,
    "mimo_v2_flash": _MIMO_V2,
    "nemotron_h": _NEMOTRON,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_next": _QWEN,
    "step3p5": _STEP,
}

#: Model types whose heads are known to exist and cannot be used, and why.
REFUSED: dict[str, str] = {
    "deepseek_v41": "its mtp.* tensors are the stages of a block drafter (DSpark), not of a head",
    "longcat_flash_ngram": "it is not published whether its head reads word or n-gram embeddings",
    "kimi_k3": "its layer leaves out the residual attention of mlx-lm's decoder layer",
    "minimax_m3_vl": "how it combines state and embedding is not published",
}
