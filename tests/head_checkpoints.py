"""Tiny checkpoints with multi-token prediction heads, laid out as the published ones are.

Written from what is known of the checkpoints (docs/mtp.md), not from `mlx_rewind.draft.families`:
the independent side of the tests. The trunks are those of `zoo` with random norms, taken back to
the layout that the `sanitize` of mlx-lm expects; the heads are random, under their published names.
"""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

import zoo
from mlx_rewind.load import SHIPPED

__all__ = [
    "FAMILIES",
    "MINUS_ONE",
    "Checkpoint",
    "Tensors",
    "build",
    "config_of",
    "head_tensors",
    "is_norm",
    "raw",
    "write",
]

Tensors = dict[str, mx.array]
Shapes = dict[str, tuple[int, ...]]

#: How many heads are published; one where it is not here.
_HEADS = {"mimo_v2_flash": 3, "step3p5": 3}

#: Where the zoo's configuration is not like a published one.
_STEP_LISTS = {
    "layer_types": ["full_attention", "sliding_attention"] * 2 + ["sliding_attention"] * 3,
    "partial_rotary_factors": [0.5, 1.0] * 2 + [1.0] * 3,
    "rope_theta": [100000.0, 10000.0] * 2 + [10000.0, 20000.0, 40000.0],
    "swiglu_limits": [0.0, 0.0, 0.0, 7.0, 0.0, 0.0, 0.0],
    "swiglu_limits_shared": [7.0, 0.0, 0.0, 7.0, 0.0, 0.0, 0.0],
}
_PLAIN = {"attention_bias": False}
_OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"use_bias": False, "use_qkv_bias": False},
    "deepseek_v3": _PLAIN,
    "deepseek_v32": _PLAIN,
    "ernie4_5_moe": {"use_bias": False, "tie_word_embeddings": True},
    "glm4_moe_lite": _PLAIN,
    "glm_moe_dsa": _PLAIN,
    "longcat_flash": _PLAIN,
    "nemotron_h": {**_PLAIN, "mamba_proj_bias": False, "mlp_bias": False, "use_bias": False},
    "qwen3_next": {"mlp_only_layers": []},
    "step3p5": _STEP_LISTS,
}

#: The config fields that announce the heads; {} where none does.
_ANNOUNCED: dict[str, dict[str, Any]] = {
    "exaone_moe": {
        "num_nextn_predict_layers": 1,
        "mtp_layer_types": ["full_attention"],
        "mtp_sliding_windows": [0],
    },
    "longcat_flash": {},
    "mimo_v2_flash": {},
    "nemotron_h": {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"},
    "qwen3_5": {"mtp_num_hidden_layers": 1},
    "qwen3_5_moe": {"mtp_num_hidden_layers": 1},
    "qwen3_next": {},
}


class Checkpoint(NamedTuple):
    """What was written.

    folder   the trunk, and the heads unless they are separate
    heads    the folder to load the heads from
    model    the model that the trunk has to become
    count    how many heads there are
    tensors  the tensors of the heads, as they are called in the files
    """

    name: str
    folder: Path
    heads: Path
    model: nn.Module
    count: int
    tensors: Tensors


# --- trunks ----------------------------------------------------------------------------------


#: Of the random norms; chosen for the margin guard (`zoo.guard`) on all prompts of the zoo.
_NORM_SEEDS: dict[str, int] = {
    "bailing_hybrid": 13,
    "bailing_moe_v3": 9,
    "deepseek_v3": 32,
    "deepseek_v32": 7,
    "ernie4_5_moe": 5,
    "exaone_moe": 1,
    "glm4_moe": 12,
    "glm4_moe_lite": 4,
    "glm_moe_dsa": 4,
    "longcat_flash": 0,
    "mimo": 0,
    "mimo_v2_flash": 0,
    "nemotron_h": 8,
    "qwen3_5": 0,
    "qwen3_5_moe": 9,
    "qwen3_next": 3,
    "step3p5": 5,
}


def build(name: str, **overrides: Any) -> nn.Module:
    """The trunk in memory. Its final norm varies strongly: from -2 to 2, channel by channel.

    Every norm weight is a multiple of 2^-10, so that minus one and plus one gives the same bits.
    """
    return _build(name, json.dumps({**_OVERRIDES.get(name, {}), **overrides}))


@functools.cache
def _build(name: str, overrides: str) -> nn.Module:
    model = zoo.build(name, fresh=True, **json.loads(overrides))
    mx.random.seed(_NORM_SEEDS[name])
    weights = []
    for path, weight in tree_flatten(model.parameters()):
        if is_norm(path, weight):
            final = path.endswith(("model.norm.weight", "norm_f.weight"))
            low, high = (-2.0, 2.0) if final else (0.5, 1.5)
            weights.append((path, _multiples(mx.random.uniform(low, high, weight.shape))))
        elif path.endswith(("correction_bias", "expert_bias", "router_bias", "sink_bias")):
            weights.append((path, 0.3 * mx.random.normal(weight.shape)))
    model.load_weights(weights, strict=False)
    mx.eval(model.parameters())
    return model


def config_of(name: str) -> dict[str, Any]:
    """The fields of the text model, as the head is described by them."""
    return {**zoo.CONFIGS[name], **_OVERRIDES.get(name, {})}


def is_norm(path: str, weight: mx.array) -> bool:
    return "norm" in path and path.endswith("weight") and weight.ndim == 1


def _multiples(x: mx.array) -> mx.array:
    return mx.round(x * 1024) / 1024


def raw(name: str, model: nn.Module) -> Tensors:
    """The tensors of `model` as its authors store them: mlx-lm's `sanitize`, backwards."""
    weights = dict(tree_flatten(model.parameters()))
    if name != "step3p5":
        fused = name == "qwen3_5_moe"
        weights = _experts_fused(weights) if fused else _experts_one_by_one(weights)
    weights = _conv1d_as_in_torch(_kv_b_joined(weights))
    return _LAST_CHANGES.get(name, lambda weights: weights)(weights)


def _experts_one_by_one(weights: Tensors) -> Tensors:
    found: Tensors = {}
    for name, weight in weights.items():
        if ".switch_mlp." in name:
            mlp, rest = name.split(".switch_mlp.")
            rest = rest.replace("fc1.", "up_proj.").replace("fc2.", "down_proj.")
            found |= {f"{mlp}.experts.{e}.{rest}": expert for e, expert in enumerate(weight)}
        else:
            found[name] = weight
    return found


def _experts_fused(weights: Tensors) -> Tensors:
    found = dict(weights)
    for name in weights:
        if name.endswith(".switch_mlp.gate_proj.weight"):
            mlp = name.removesuffix(".switch_mlp.gate_proj.weight")
            gate, up, down = (
                found.pop(f"{mlp}.switch_mlp.{kind}_proj.weight") for kind in ("gate", "up", "down")
            )
            found[f"{mlp}.experts.gate_up_proj"] = mx.concatenate([gate, up], axis=1)
            found[f"{mlp}.experts.down_proj"] = down
    return found


def _kv_b_joined(weights: Tensors) -> Tensors:
    found = dict(weights)
    for name in weights:
        if name.endswith(".embed_q.weight"):
            attention = name.removesuffix(".embed_q.weight")
            keys, values = found.pop(name), found.pop(f"{attention}.unembed_out.weight")
            joined = mx.concatenate([keys.swapaxes(-1, -2), values], axis=1)
            found[f"{attention}.kv_b_proj.weight"] = joined.reshape(-1, joined.shape[-1])
    return found


def _conv1d_as_in_torch(weights: Tensors) -> Tensors:
    return {
        name: weight.moveaxis(1, 2) if name.endswith("conv1d.weight") else weight
        for name, weight in weights.items()
    }


def _minus_one(weights: Tensors, *ends: str) -> Tensors:
    return {
        name: weight - 1.0 if is_norm(name, weight) and name.endswith(ends) else weight
        for name, weight in weights.items()
    }


_QWEN_NORMS = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)


def _renamed(weights: Tensors, *pairs: tuple[str, str]) -> Tensors:
    found = {}
    for name, weight in weights.items():
        for old, new in pairs:
            name = name.replace(old, new)
        found[name] = weight
    return found


def _qwen3_5(weights: Tensors) -> Tensors:
    names = ("language_model.model.", "model.language_model."), ("language_model.lm", "lm")
    return _renamed(_minus_one(weights, *_QWEN_NORMS), *names)


_LAST_CHANGES: dict[str, Callable[[Tensors], Tensors]] = {
    "bailing_hybrid": lambda w: _renamed(w, (".mlp.gate.gate_proj.", ".mlp.gate.")),
    "exaone_moe": lambda w: _renamed(w, (".mlp.gate.e_score", ".mlp.e_score")),
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5,
    "qwen3_next": lambda w: _minus_one(w, *_QWEN_NORMS),
    "step3p5": lambda w: _renamed(
        _minus_one(w, "weight"),
        (".mlp.switch_mlp.", ".moe."),
        (".mlp.gate.gate.", ".moe.gate."),
        (".mlp.gate.router_bias", ".moe.router_bias"),
        (".mlp.share_expert.", ".share_expert."),
    ),
}


# --- heads: names and shapes -----------------------------------------------------------------


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def _norms(size: int, *names: str) -> Shapes:
    return {f"{name}.weight": (size,) for name in names}


def _glue(size: int, embedding: str, hidden: str, projection: str) -> Shapes:
    return {f"{projection}.weight": (size, 2 * size), **_norms(size, embedding, hidden)}


def _mlp(size: int, inner: int, gated: bool = True) -> Shapes:
    gate = {"gate_proj.weight": (inner, size)} if gated else {}
    return {**gate, "up_proj.weight": (inner, size), "down_proj.weight": (size, inner)}


def _experts(size: int, inner: int, count: int, gated: bool = True) -> Shapes:
    each = _mlp(size, inner, gated)
    return {f"experts.{e}.{name}": shape for e in range(count) for name, shape in each.items()}


def _moe(c: Any, count: int, shared: int, bias: str) -> Shapes:
    return {
        "gate.weight": (count, c.hidden_size),
        f"gate.{bias}": (count,),
        **_experts(c.hidden_size, c.moe_intermediate_size, count),
        **_under("shared_experts.", _mlp(c.hidden_size, shared)),
    }


def _attention(size: int, heads: tuple[int, int], width: tuple[int, int]) -> Shapes:
    """heads: of queries, of keys and values; width: of queries and keys, of values."""
    return {
        "q_proj.weight": (heads[0] * width[0], size),
        "k_proj.weight": (heads[1] * width[0], size),
        "v_proj.weight": (heads[1] * width[1], size),
        "o_proj.weight": (size, heads[0] * width[1]),
    }


def _qkv_bias(shapes: Shapes) -> Shapes:
    biases = {
        name.replace("weight", "bias"): shape[:1]
        for name, shape in shapes.items()
        if not name.startswith("o_proj")
    }
    return {**shapes, **biases}


def _latent_attention(c: Any, out: str = "o_proj") -> Shapes:
    n, nope, rope = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim
    return {
        "q_a_proj.weight": (c.q_lora_rank, c.hidden_size),
        "q_b_proj.weight": (n * (nope + rope), c.q_lora_rank),
        "kv_a_proj_with_mqa.weight": (c.kv_lora_rank + rope, c.hidden_size),
        "kv_b_proj.weight": (n * (nope + c.v_head_dim), c.kv_lora_rank),
        f"{out}.weight": (c.hidden_size, n * c.v_head_dim),
        **_norms(c.q_lora_rank, "q_a_layernorm"),
        **_norms(c.kv_lora_rank, "kv_a_layernorm"),
    }


def _indexer(c: Any) -> Shapes:
    return {
        "wq_b.weight": (c.index_n_heads * c.index_head_dim, c.q_lora_rank),
        "wk.weight": (c.index_head_dim, c.hidden_size),
        "weights_proj.weight": (c.index_n_heads, c.hidden_size),
        "k_norm.weight": (c.index_head_dim,),
        "k_norm.bias": (c.index_head_dim,),
    }


def _layer(size: int, attention: Shapes, mlp: Shapes, name: str = "self_attn") -> Shapes:
    return {
        **_norms(size, "input_layernorm", "post_attention_layernorm"),
        **_under(f"{name}.", attention),
        **_under("mlp.", mlp),
    }


def _nextn(c: Any, attention: Shapes) -> Shapes:
    """DeepSeek and GLM: a layer behind the trunk's, and the trunk's embedding and output again."""
    h = c.hidden_size
    moe = _moe(c, c.n_routed_experts, c.moe_intermediate_size, "e_score_correction_bias")
    return {
        **_glue(h, "enorm", "hnorm", "eh_proj"),
        **_norms(h, "shared_head.norm"),
        "embed_tokens.weight": (c.vocab_size, h),
        "shared_head.head.weight": (c.vocab_size, h),
        **_layer(h, attention, moe),
    }


def _deepseek(c: Any, i: int) -> Shapes:
    attention = _latent_attention(c)
    if hasattr(c, "index_topk"):
        attention |= _under("indexer.", _indexer(c))
    return _under(f"model.layers.{c.num_hidden_layers + i}.", _nextn(c, attention))


def _glm4_moe(c: Any, i: int) -> Shapes:
    kinds = (c.num_attention_heads, c.num_key_value_heads), (c.head_dim, c.head_dim)
    attention = _qkv_bias(_attention(c.hidden_size, *kinds))
    attention |= _norms(c.head_dim, "q_norm", "k_norm")
    return _under(f"model.layers.{c.num_hidden_layers + i}.", _nextn(c, attention))


def _bailing(c: Any, i: int) -> Shapes:
    h = c.hidden_size
    attention = _latent_attention(c, "dense")
    if c.model_type == "bailing_moe_v3":
        attention["g_proj.weight"] = (c.num_attention_heads, h)
    shapes = {
        **_glue(h, "enorm", "hnorm", "eh_proj"),
        **_norms(h, "final_layernorm"),
        **_layer(
            h,
            attention,
            _moe(c, c.num_experts, c.moe_intermediate_size, "expert_bias"),
            "attention",
        ),
    }
    return _under(f"model.layers.{c.num_hidden_layers + i}.", shapes)


def _longcat(c: Any, i: int) -> Shapes:
    h = c.hidden_size
    return {
        "model.mtp.embed_tokens.weight": (c.vocab_size, h),
        **_norms(h, "model.mtp.norm"),
        **_under(
            f"model.mtp.layers.{i}.",
            {
                **_glue(h, "enorm.m", "hnorm.m", "eh_proj"),
                **_norms(h, "input_layernorm", "post_attention_layernorm"),
                **_under("self_attn.", _latent_attention(c)),
                **_under("transformer_layer.mlp.", _mlp(h, c.ffn_hidden_size)),
            },
        ),
    }


def _mimo(c: Any, i: int) -> Shapes:
    h, d = c.hidden_size, c.hidden_size // c.num_attention_heads
    attention = _attention(h, (c.num_attention_heads, c.num_key_value_heads), (d, d))
    shapes = {
        **_glue(h, "token_layernorm", "hidden_layernorm", "input_proj"),
        **_norms(h, "final_layernorm"),
        **_layer(h, _qkv_bias(attention), _mlp(h, c.intermediate_size)),
    }
    return _under(f"model.mtp_layers.{i}.", shapes)


def _mimo_v2(c: Any, i: int) -> Shapes:
    h = c.hidden_size
    heads = c.swa_num_attention_heads, c.swa_num_key_value_heads
    attention = _attention(h, heads, (c.swa_head_dim, c.swa_v_head_dim))
    attention["attention_sink_bias"] = (c.swa_num_attention_heads,)
    shapes = {
        **_glue(h, "enorm", "hnorm", "eh_proj"),
        **_norms(h, "input_layernorm", "pre_mlp_layernorm", "final_layernorm"),
        **_under("self_attn.", attention),
        **_under("mlp.", _mlp(h, c.intermediate_size)),
    }
    return _under(f"model.mtp.layers.{i}.", shapes)


def _step(c: Any, i: int) -> Shapes:
    h, other = c.hidden_size, c.attention_other_setting
    heads = other["num_attention_heads"], other["num_attention_groups"]
    attention = {
        **_attention(h, heads, (c.head_dim, c.head_dim)),
        **_norms(c.head_dim, "q_norm", "k_norm"),
        "g_proj.weight": (heads[0], h),
    }
    shapes = {
        **_glue(h, "enorm", "hnorm", "eh_proj"),
        **_norms(h, "transformer.shared_head.norm"),
        "transformer.shared_head.output.weight": (c.vocab_size, h),
        **_layer(h, attention, _mlp(h, c.intermediate_size)),
    }
    return _under(f"model.layers.{c.num_hidden_layers + i}.", shapes)


def _ernie(c: Any, i: int) -> Shapes:
    h = c.hidden_size
    heads = c.num_attention_heads, c.num_key_value_heads
    attention = _attention(h, heads, (c.head_dim, c.head_dim))
    return {
        **_glue(
            h, f"model.mtp_emb_norm.{i}", f"model.mtp_hidden_norm.{i}", f"model.mtp_linear_proj.{i}"
        ),
        **_under(f"model.mtp_block.{i}.", _layer(h, attention, _mlp(h, c.intermediate_size))),
    }


def _qwen(c: Any, i: int) -> Shapes:
    h, d = c.hidden_size, c.head_dim
    attention = {
        **_attention(h, (c.num_attention_heads, c.num_key_value_heads), (d, d)),
        "q_proj.weight": (2 * c.num_attention_heads * d, h),  # and the gate
        **_norms(d, "q_norm", "k_norm"),
    }
    mlp = _mlp(h, c.intermediate_size)
    if getattr(c, "num_experts", 0):
        mlp = {
            "gate.weight": (c.num_experts, h),
            "shared_expert_gate.weight": (1, h),
            **_experts(h, c.moe_intermediate_size, c.num_experts),
            **_under("shared_expert.", _mlp(h, c.shared_expert_intermediate_size)),
        }
    return {
        **_glue(h, "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc"),
        **_norms(h, "mtp.norm"),
        **_under(f"mtp.layers.{i}.", _layer(h, attention, mlp)),
    }


def _exaone(c: Any, i: int) -> Shapes:
    h, d = c.hidden_size, c.head_dim
    attention = {
        **_attention(h, (c.num_attention_heads, c.num_key_value_heads), (d, d)),
        **_norms(d, "q_norm", "k_norm"),
    }
    return {
        **_glue(h, "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc"),
        **_norms(h, "mtp.norm"),
        **_under(f"mtp.layers.{i}.", _layer(h, attention, _mlp(h, c.intermediate_size))),
    }


def _nemotron(c: Any, i: int) -> Shapes:
    h = c.hidden_size
    heads = c.num_attention_heads, c.num_key_value_heads
    latent = c.moe_latent_size
    projections = {"fc1_latent_proj.weight": (latent, h), "fc2_latent_proj.weight": (h, latent)}
    width = latent or h
    return {
        **_under("mtp.layers.0.", _glue(h, "enorm", "hnorm", "eh_proj")),
        **_norms(h, "mtp.layers.0.norm", "mtp.layers.1.norm", "mtp.layers.1.final_layernorm"),
        **_under("mtp.layers.0.mixer.", _attention(h, heads, (c.head_dim, c.head_dim))),
        **_under(
            "mtp.layers.1.mixer.",
            {
                "gate.weight": (c.n_routed_experts, h),
                "gate.e_score_correction_bias": (c.n_routed_experts,),
                **(projections if latent else {}),
                **_experts(width, c.moe_intermediate_size, c.n_routed_experts, gated=False),
                **_under(
                    "shared_experts.", _mlp(h, c.moe_shared_expert_intermediate_size, gated=False)
                ),
            },
        ),
    }


_SHAPES: dict[str, Callable[[Any, int], Shapes]] = {
    "bailing_hybrid": _bailing,
    "bailing_moe_v3": _bailing,
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek,
    "ernie4_5_moe": _ernie,
    "exaone_moe": _exaone,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _deepseek,
    "glm_moe_dsa": _deepseek,
    "longcat_flash": _longcat,
    "mimo": _mimo,
    "mimo_v2_flash": _mimo_v2,
    "nemotron_h": _nemotron,
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen3_next": _qwen,
    "step3p5": _step,
}

#: Every model type that can be written here.
FAMILIES = tuple(_SHAPES)

#: Families that store norm weights minus one.
MINUS_ONE = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "step3p5")

_FINAL = ("mtp.norm.weight", "shared_head.norm.weight", "final_layernorm.weight")


def head_tensors(name: str, model: nn.Module, heads: int | None = None, **changed: Any) -> Tensors:
    """The tensors of `heads` heads for the trunk `model`, with `changed` fields of the config."""
    config = SimpleNamespace(**{**config_of(name), **changed})
    trunk = dict(tree_flatten(model.parameters()))
    mx.random.seed(23)
    found: Tensors = {}
    for i in range(heads or _HEADS.get(name, 1)):
        for path, shape in sorted(_SHAPES[name](config, i).items()):
            found[path] = _values(path, shape, zoo.SPREAD[name], trunk)
    mx.eval(found)
    return {k: v - 1.0 if name in MINUS_ONE and is_norm(k, v) else v for k, v in found.items()}


def _values(path: str, shape: tuple[int, ...], spread: float, trunk: Tensors) -> mx.array:
    if path.endswith("embed_tokens.weight"):
        return trunk["model.embed_tokens.weight"]
    if path.endswith("shared_head.head.weight"):
        return trunk["lm_head.weight"]
    if len(shape) == 2:
        return mx.random.normal(shape) * (spread / shape[-1] ** 0.5)
    if path.endswith("weight"):
        low, high = (-2.0, 2.0) if path.endswith(_FINAL) else (0.5, 1.5)
        return _multiples(mx.random.uniform(low, high, shape))
    return 0.3 * mx.random.normal(shape)


# --- writing ---------------------------------------------------------------------------------


def write(
    name: str,
    folder: Path,
    *,
    is_raw: bool = True,
    heads: int | None = None,
    layout: str = "embedded",
    announce: bool = True,
    edit: Callable[[Tensors], Tensors] = lambda tensors: tensors,
    metadata: dict[str, str] | None = None,
    **overrides: Any,
) -> Checkpoint:
    """Writes a checkpoint of model type `name`.

    is_raw     the trunk is as its authors store it; else as mlx-lm's `convert` does
    heads      how many; None is as many as are published
    layout     embedded, a shard of the trunk; none; separate, a folder beside this one; or the
               name of a file in `folder`
    announce   config.json says that there are heads, in the families whose config does
    edit       last changes to the tensors of the heads
    metadata   of the file with the heads, where it is not a shard of the trunk
    overrides  of fields of the config
    """
    model = build(name, **overrides)
    trunk = raw(name, model) if is_raw else dict(tree_flatten(model.parameters()))
    tensors = {} if layout == "none" else edit(head_tensors(name, model, heads, **overrides))
    told = _ANNOUNCED.get(name, {"num_nextn_predict_layers": heads or _HEADS.get(name, 1)})
    fields = {**config_of(name), **overrides, **(told if announce else {})}
    if not announce:
        fields = {field: value for field, value in fields.items() if field not in told}
    folder.mkdir(parents=True, exist_ok=True)
    where = folder
    if layout == "embedded":
        _save_shards(folder, name, [*_halves(trunk), tensors], is_raw)
    else:
        _save_shards(folder, name, list(_halves(trunk)), is_raw)
    if layout == "separate":
        where = folder.with_name(f"{folder.name}-mtp")
        where.mkdir(exist_ok=True)
        mx.save_safetensors(str(where / "model.safetensors"), tensors, metadata)
        _write_config(where, name, fields, model_type=f"{name}_mtp")
    elif layout not in ("embedded", "none"):
        (folder / layout).parent.mkdir(exist_ok=True)
        mx.save_safetensors(str(folder / layout), tensors, metadata)
    _write_config(folder, name, fields, model_type=name)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((SHIPPED / file).read_bytes())
    return Checkpoint(name, folder, where, model, heads or _HEADS.get(name, 1), tensors)


def _halves(tensors: Tensors) -> Iterator[Tensors]:
    names = sorted(tensors)
    for part in (names[: len(names) // 2], names[len(names) // 2 :]):
        yield {name: tensors[name] for name in part}


def _save_shards(folder: Path, name: str, shards: list[Tensors], is_raw: bool) -> None:
    published = is_raw and name.startswith("qwen3_5")
    start = "model.safetensors" if published else "model"
    index = {}
    for i, shard in enumerate(shards):
        file = f"{start}-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        mx.save_safetensors(str(folder / file), shard, {"format": "pt" if is_raw else "mlx"})
        index |= dict.fromkeys(shard, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _write_config(folder: Path, name: str, fields: dict[str, Any], model_type: str) -> None:
    config = {**fields, "model_type": model_type}
    if name in ("qwen3_5", "qwen3_5_moe"):  # published with a vision tower
        text = {**config, "model_type": f"{name}_text"}
        config = {"model_type": model_type, "text_config": text}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
