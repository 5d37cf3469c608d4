"""MTP heads of every family: what they compute, what they read along, and that the text stays."""

import dataclasses
import functools
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import (
    bailing_hybrid,
    bailing_moe_v3,
    deepseek_v3,
    deepseek_v32,
    ernie4_5_moe,
    exaone_moe,
    glm4_moe,
    glm4_moe_lite,
    longcat_flash,
    mimo,
    mimo_v2_flash,
    nemotron_h,
    step3p5,
)
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import CacheList, make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load_model

import head_checkpoints
import mlx_rewind
import zoo
from head_checkpoints import MINUS_ONE, Checkpoint, Tensors, is_norm
from mlx_rewind import DraftMismatchError
from mlx_rewind.draft.families import FAMILIES
from mlx_rewind.draft.mtp import MTP
from mlx_rewind.draft.protocol import Drafter, Session
from mlx_rewind.load import classes_without_heads, head_is_missing
from mlx_rewind.target import Target

NAMES = sorted(FAMILIES)
SEVERAL = [("mimo_v2_flash", 3), ("step3p5", 3), ("mimo", 2)]
TEXT = zoo.PROMPTS[2]

every_family = pytest.mark.parametrize("name", NAMES)


class Setup(NamedTuple):
    """A checkpoint, the trunk and the heads that were loaded from it, and who knows better."""

    checkpoint: Checkpoint
    model: Any
    mtp: MTP
    oracle: "Oracle"


def load_trunk(folder: Path) -> Any:
    return load_model(folder, get_model_classes=classes_without_heads)[0]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Setup]:
    """The checkpoint of a family with its heads embedded, written and loaded once."""

    @functools.cache
    def of(name: str, heads: int | None = None) -> Setup:
        folder = tmp_path_factory.mktemp(name) / "checkpoint"
        checkpoint = head_checkpoints.write(name, folder, heads=heads)
        model = load_trunk(folder)
        mtp = MTP.load(folder, model)
        return Setup(checkpoint, model, mtp, Oracle(checkpoint, model))

    return of


# --- the heads once more ---------------------------------------------------------------------
#
# From the raw tensors and without caches: whole sequences, B = 1.


class Facts(NamedTuple):
    """Names of the parts, and the layer: (arguments, head, its tensors) -> a function of [1, S, H].

    {n} is the number of layers of the trunk and the index of the head, {i} the index.
    """

    embedding: str
    hidden: str
    projection: str
    norm: str | None
    layer: str
    build: Callable[[Any, int, Tensors], Callable[[mx.array], mx.array]]
    reads: str = "normed"
    hands_on: str = "normed"
    hidden_first: bool = False
    chained: bool = True
    output: str | None = None


class Oracle:
    """The heads of a checkpoint, as the facts have them."""

    def __init__(self, checkpoint: Checkpoint, model: Any) -> None:
        self.facts = FACTS[checkpoint.name]
        self.args = args_of(model)
        trunk = dict(tree_flatten(model.parameters()))
        self.embedding = one(
            trunk, "embed_tokens.weight", "word_embeddings.weight", "embeddings.weight"
        )
        self.final_norm = one(trunk, "model.norm.weight", "norm_f.weight")
        tied = not any(name.endswith("lm_head.weight") for name in trunk)
        self.output = self.embedding if tied else one(trunk, "lm_head.weight")
        self.eps = next(
            vars(self.args)[field]
            for field in ("rms_norm_eps", "layernorm_epsilon", "layer_norm_epsilon")
            if field in vars(self.args)
        )
        self.layers = len(model.layers)
        tensors = checkpoint.tensors
        if checkpoint.name in MINUS_ONE:
            tensors = {k: v + 1.0 if is_norm(k, v) else v for k, v in tensors.items()}
        self.tensors, self.count = tensors, checkpoint.count
        self.bodies = [self._body(k) for k in range(self.count)]

    def _name(self, template: str, k: int) -> str:
        return template.format(n=self.layers + k, i=k) + ".weight"

    def _body(self, k: int) -> Callable[[mx.array], mx.array]:
        prefix = self.facts.layer.format(n=self.layers + k, i=k)
        mine = {n.removeprefix(prefix): v for n, v in self.tensors.items() if n.startswith(prefix)}
        return self.facts.build(self.args, k, mine)

    def read(
        self, k: int, tokens: Sequence[int], states: mx.array, *, swapped: bool = False
    ) -> tuple[mx.array, mx.array]:
        """What head k makes of the pairs: its states before and after its final norm."""
        facts, get = self.facts, self.tensors
        embedded = rms(
            self.embedding[mx.array(tokens)][None], get[self._name(facts.embedding, k)], self.eps
        )
        hidden = rms(states, get[self._name(facts.hidden, k)], self.eps)
        pair = [hidden, embedded] if facts.hidden_first != swapped else [embedded, hidden]
        x = mx.concatenate(pair, axis=-1) @ get[self._name(facts.projection, k)].T
        raw = self.bodies[k](x)
        norm = self.final_norm if facts.norm is None else get[self._name(facts.norm, k)]
        return raw, rms(raw, norm, self.eps)

    def handed_on(self, raw: mx.array, normed: mx.array) -> mx.array:
        return normed if self.facts.hands_on == "normed" else raw

    def logits(self, k: int, normed: mx.array) -> mx.array:
        own = self.facts.output
        return normed @ (self.tensors[self._name(own, k)] if own else self.output).T

    def propose(self, tokens: list[int], states: mx.array, n: int) -> list[int]:
        """n drafts after `tokens`, everything computed anew for each. states: [1, S - 1, H]."""
        known, drafts, cycle = list(tokens), [], []
        while True:
            k = len(drafts) % self.count
            rows = states
            for j in range(k + 1):  # head j reads the token j + 1 after the position of its state
                after = known[j + 1 : j + 1 + rows.shape[1]]
                raw, normed = self.read(j, after, rows)
                state = self.handed_on(raw, normed)
                rows = state if self.facts.chained else states
            cycle.append(state[:, -1:])
            drafts.append(int(mx.argmax(self.logits(k, normed[0, -1])).item()))
            if len(drafts) == n:
                return drafts
            known.append(drafts[-1])
            if k + 1 == self.count:
                states, cycle = mx.concatenate([states, *cycle], axis=1), []


def one(tensors: Tensors, *ends: str) -> mx.array:
    (found,) = [v for name, v in tensors.items() if name.endswith(ends) and "layers" not in name]
    return found


def rms(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    return x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def args_of(model: Any) -> Any:
    return getattr(model, "language_model", model).args


def states_of(model: Any, tokens: Sequence[int], kind: str) -> mx.array:
    """The states of the trunk at every position, [1, S, H], by the inner model itself."""
    inner = model.backbone if hasattr(model, "backbone") else model.model
    name = "norm_f" if "norm_f" in inner else "norm"
    norm = inner[name]
    if kind == "raw":
        inner[name] = lambda x: x
    try:
        return inner(mx.array([list(tokens)]), cache=make_prompt_cache(model))
    finally:
        inner[name] = norm


# --- layers of the heads, of mlx-lm's own classes --------------------------------------------


def loaded(module: nn.Module, tensors: Tensors) -> Any:
    module.load_weights(list(tensors.items()))  # strict: every name, and no other
    return module


def stacked(tensors: Tensors, names: dict[str, str] | None = None) -> Tensors:
    """Experts of one kind as one tensor. `names`: what mlx-lm calls the kinds."""
    found, experts = {}, {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            mlp, rest = name.split(".experts.")
            e, kind, _ = rest.split(".")
            stack = f"{mlp}.switch_mlp.{(names or {}).get(kind, kind)}.weight"
            experts.setdefault(stack, {})[int(e)] = tensor
        else:
            found[name] = tensor
    return found | {k: mx.stack([v[e] for e in range(len(v))]) for k, v in experts.items()}


def split(args: Any, tensors: Tensors) -> Tensors:
    """kv_b_proj as two tensors, one matrix for each attention head."""
    found = dict(tensors)
    for name in tensors:
        if name.endswith("kv_b_proj.weight"):
            start = name.removesuffix("kv_b_proj.weight")
            heads = mx.split(found.pop(name), args.num_attention_heads)
            nope = args.qk_nope_head_dim
            found[f"{start}embed_q.weight"] = mx.stack([head[:nope].T for head in heads])
            found[f"{start}unembed_out.weight"] = mx.stack([head[nope:] for head in heads])
    return found


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


def without(tensors: Tensors, *starts: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(starts)}


GLUE = ("enorm", "hnorm", "eh_proj", "shared_head", "transformer.shared", "embed_tokens", "final_")


def causal(x: mx.array, window: int | None = None) -> mx.array:
    return create_causal_mask(x.shape[1], window_size=window)


def latent(layer: Any, args: Any, tensors: Tensors) -> Any:
    module = loaded(layer, split(args, stacked(without(tensors, *GLUE))))
    return lambda x: module(x, causal(x))


def deepseek_layer(args: Any, k: int, tensors: Tensors) -> Any:
    return latent(deepseek_v3.DeepseekV3DecoderLayer(args, args.num_hidden_layers), args, tensors)


def deepseek_v32_layer(args: Any, k: int, tensors: Tensors) -> Any:
    layer = deepseek_v32.DeepseekV32DecoderLayer(args, args.num_hidden_layers)
    return latent(layer, args, tensors)


def glm_lite_layer(args: Any, k: int, tensors: Tensors) -> Any:
    layer = glm4_moe_lite.Glm4MoeLiteDecoderLayer(args, args.num_hidden_layers)
    return latent(layer, args, tensors)


def bailing_hybrid_layer(args: Any, k: int, tensors: Tensors) -> Any:
    layer = bailing_hybrid.DecoderLayer(args, args.num_hidden_layers)
    return latent(layer, args, renamed(tensors, "mlp.gate.weight", "mlp.gate.gate_proj.weight"))


def bailing_v3_layer(args: Any, k: int, tensors: Tensors) -> Any:
    layer = bailing_moe_v3.BailingDecoderLayer(args, args.num_hidden_layers)
    return latent(layer, args, tensors)


def glm_layer(args: Any, k: int, tensors: Tensors) -> Any:
    layer = glm4_moe.DecoderLayer(args, args.num_hidden_layers)
    module = loaded(layer, stacked(without(tensors, *GLUE)))
    return lambda x: module(x, causal(x))


def longcat_layer(args: Any, k: int, tensors: Tensors) -> Any:
    tensors = split(args, without(tensors, *GLUE))

    def of(module: Any, start: str) -> Any:
        mine = {n.removeprefix(start): v for n, v in tensors.items() if n.startswith(start)}
        return loaded(module, mine)

    attention = of(longcat_flash.LongcatFlashMLA(args), "self_attn.")
    mlp = of(longcat_flash.LongcatFlashMLP(args, False), "transformer_layer.mlp.")
    before, after = (
        functools.partial(rms, weight=tensors[f"{name}_layernorm.weight"], eps=args.rms_norm_eps)
        for name in ("input", "post_attention")
    )

    def layer(x: mx.array) -> mx.array:
        x = x + attention(before(x), causal(x))
        return x + mlp(after(x))

    return layer


def mimo_layer(args: Any, k: int, tensors: Tensors) -> Any:
    module = loaded(
        mimo.TransformerBlock(args),
        without(tensors, "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    )
    return lambda x: module(x, causal(x))


def mimo_v2_layer(args: Any, k: int, tensors: Tensors) -> Any:
    module = loaded(
        mimo_v2_flash.DecoderLayer(args, is_moe=False, is_sliding_window=True),
        renamed(without(tensors, *GLUE), "pre_mlp_layernorm", "post_attention_layernorm"),
    )
    return lambda x: module(x, causal(x, args.sliding_window_size))


def step_layer(args: Any, k: int, tensors: Tensors) -> Any:
    layer = step3p5.Step3p5DecoderLayer(args, args.num_hidden_layers + k)
    assert layer.is_sliding
    assert not layer.is_moe_layer
    module = loaded(layer, without(tensors, *GLUE))
    return lambda x: module(x, causal(x, args.sliding_window))


def ernie_layer(args: Any, k: int, tensors: Tensors) -> Any:
    module = loaded(ernie4_5_moe.Ernie4_5_DecoderLayer(args, -1), tensors)  # -1 is dense
    return lambda x: module(x, causal(x))


def exaone_layer(args: Any, k: int, tensors: Tensors, kind: str = "full_attention") -> Any:
    dense = dataclasses.replace(args, is_moe_layer=[False] * args.num_hidden_layers)
    layer = exaone_moe.DecoderLayer(dense, args.layer_types.index(kind))
    assert layer.self_attn.use_rope == layer.is_sliding_window == (kind == "sliding_attention")
    module = loaded(layer, tensors)
    window = args.sliding_window if layer.is_sliding_window else None
    return lambda x: module(x, causal(x, window))


def nemotron_layer(args: Any, k: int, tensors: Tensors) -> Any:
    glue = [f"0.{name}" for name in GLUE] + ["1.final_layernorm"]
    tensors = stacked(without(tensors, *glue), {"up_proj": "fc1", "down_proj": "fc2"})

    def of(start: str, kind: str) -> Any:
        mine = {n.removeprefix(start): v for n, v in tensors.items() if n.startswith(start)}
        return loaded(nemotron_h.NemotronHBlock(args, kind), mine)

    attention, experts = of("0.", "*"), of("1.", "E")
    return lambda x: experts(attention(x, causal(x)))


def qwen_layer(args: Any, k: int, tensors: Tensors) -> Any:
    """Written out: gated full attention, and a dense MLP or experts with a shared one."""
    n, groups, d = args.num_attention_heads, args.num_key_value_heads, args.head_dim

    def linear(name: str, x: mx.array) -> mx.array:
        return x @ tensors[f"{name}.weight"].T

    def norm(name: str, x: mx.array) -> mx.array:
        return rms(x, tensors[f"{name}.weight"], args.rms_norm_eps)

    def mlp(name: str, x: mx.array) -> mx.array:
        gate = linear(f"{name}.gate_proj", x)
        return linear(f"{name}.down_proj", gate * mx.sigmoid(gate) * linear(f"{name}.up_proj", x))

    def turned(name: str, x: mx.array) -> mx.array:
        x = norm(f"self_attn.{name}", x).transpose(0, 2, 1, 3)
        dims = int(d * args.partial_rotary_factor)
        return mx.fast.rope(x, dims, traditional=False, base=args.rope_theta, scale=1.0, offset=0)

    def attention(x: mx.array) -> mx.array:
        _, s, _ = x.shape
        both = linear("self_attn.q_proj", x).reshape(1, s, n, 2 * d)
        queries = turned("q_norm", both[..., :d])
        keys = turned("k_norm", linear("self_attn.k_proj", x).reshape(1, s, groups, d))
        values = linear("self_attn.v_proj", x).reshape(1, s, groups, d).transpose(0, 2, 1, 3)
        keys, values = (mx.repeat(each, n // groups, axis=1) for each in (keys, values))
        scores = queries @ keys.swapaxes(-1, -2) * d**-0.5
        weights = mx.softmax(mx.where(causal(x), scores, -mx.inf), axis=-1)
        mixed = (weights @ values).transpose(0, 2, 1, 3).reshape(1, s, n * d)
        gate = mx.sigmoid(both[..., d:].reshape(1, s, n * d))
        return linear("self_attn.o_proj", mixed * gate)

    def experts(x: mx.array) -> mx.array:
        scores = mx.softmax(linear("mlp.gate", x), axis=-1)
        least = mx.sort(scores, axis=-1)[..., -args.num_experts_per_tok, None]
        scores = mx.where(scores >= least, scores, 0)
        scores = scores / scores.sum(axis=-1, keepdims=True)
        each = [mlp(f"mlp.experts.{e}", x) for e in range(args.num_experts)]
        routed = (mx.stack(each, axis=-1) * scores[..., None, :]).sum(axis=-1)
        gate = mx.sigmoid(linear("mlp.shared_expert_gate", x))
        return routed + gate * mlp("mlp.shared_expert", x)

    def layer(x: mx.array) -> mx.array:
        x = x + attention(norm("input_layernorm", x))
        after = norm("post_attention_layernorm", x)
        return x + (experts(after) if "mlp.gate.weight" in tensors else mlp("mlp", after))

    return layer


NEXTN = "model.layers.{n}."
DEEPSEEK = Facts(
    f"{NEXTN}enorm", f"{NEXTN}hnorm", f"{NEXTN}eh_proj", f"{NEXTN}shared_head.norm", NEXTN,
    deepseek_layer,
)  # fmt: skip
BAILING = DEEPSEEK._replace(norm=f"{NEXTN}final_layernorm")
QWEN = Facts(
    "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.{i}.",
    qwen_layer,
)  # fmt: skip
LONGCAT, MIMO, MIMO_V2 = "model.mtp.layers.{i}.", "model.mtp_layers.{i}.", "model.mtp.layers.{i}."
FACTS: dict[str, Facts] = {
    "bailing_hybrid": BAILING._replace(build=bailing_hybrid_layer),
    "bailing_moe_v3": BAILING._replace(build=bailing_v3_layer),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": DEEPSEEK._replace(build=deepseek_v32_layer),
    "ernie4_5_moe": Facts(
        "model.mtp_emb_norm.{i}",
        "model.mtp_hidden_norm.{i}",
        "model.mtp_linear_proj.{i}",
        None,
        "model.mtp_block.{i}.",
        ernie_layer,
    ),
    "exaone_moe": QWEN._replace(build=exaone_layer),
    "glm4_moe": DEEPSEEK._replace(build=glm_layer),
    "glm4_moe_lite": DEEPSEEK._replace(build=glm_lite_layer),
    "glm_moe_dsa": DEEPSEEK._replace(build=deepseek_v32_layer),
    "longcat_flash": Facts(
        f"{LONGCAT}enorm.m",
        f"{LONGCAT}hnorm.m",
        f"{LONGCAT}eh_proj",
        "model.mtp.norm",
        LONGCAT,
        longcat_layer,
    ),
    "mimo": Facts(
        f"{MIMO}token_layernorm",
        f"{MIMO}hidden_layernorm",
        f"{MIMO}input_proj",
        f"{MIMO}final_layernorm",
        MIMO,
        mimo_layer,
        reads="raw",
        hands_on="raw",
        hidden_first=True,
    ),
    "mimo_v2_flash": Facts(
        f"{MIMO_V2}enorm",
        f"{MIMO_V2}hnorm",
        f"{MIMO_V2}eh_proj",
        f"{MIMO_V2}final_layernorm",
        MIMO_V2,
        mimo_v2_layer,
        reads="raw",
        hands_on="raw",
        chained=False,
    ),
    "nemotron_h": Facts(
        "mtp.layers.0.enorm",
        "mtp.layers.0.hnorm",
        "mtp.layers.0.eh_proj",
        "mtp.layers.1.final_layernorm",
        "mtp.layers.",
        nemotron_layer,
    ),
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "qwen3_next": QWEN,
    "step3p5": DEEPSEEK._replace(
        norm=f"{NEXTN}transformer.shared_head.norm",
        build=step_layer,
        reads="raw",
        hands_on="raw",
        output=f"{NEXTN}transformer.shared_head.output",
    ),
}


def test_every_family_is_written_and_known_here() -> None:
    assert set(head_checkpoints.FAMILIES) == set(FAMILIES) == set(FACTS)


# --- what a head computes --------------------------------------------------------------------


def inputs_of(setup: Setup, tokens: list[int], k: int) -> tuple[list[int], mx.array]:
    """The pairs of head k: the tokens after the positions, and the states that it reads."""
    oracle = setup.oracle
    states = states_of(setup.model, tokens[:-1], oracle.facts.reads)
    for j in range(k if oracle.facts.chained else 0):
        after = tokens[j + 1 :]
        states = oracle.handed_on(*oracle.read(j, after, states[:, : len(after)]))
    return tokens[k + 1 :], states[:, : len(tokens) - k - 1]


def product(
    mtp: MTP, k: int, tokens: list[int], states: mx.array, cuts: Sequence[int]
) -> tuple[mx.array, mx.array]:
    """States and logits of head k, read in pieces."""
    cache, made = mtp.heads[k].make_cache(), []
    for start, end in pairwise([0, *cuts, len(tokens)]):
        embedded = mtp.embed(mx.array([tokens[start:end]]))
        state, normed = mtp.heads[k](embedded, states[:, start:end], cache)
        made.append((state, mtp.logits(k, normed)))
    handed_on, logits = (mx.concatenate(parts, axis=1) for parts in zip(*made, strict=True))
    return handed_on, logits


def off(a: mx.array, b: mx.array) -> float:
    return mx.abs(a - b).max().item()


@every_family
def test_a_head_computes_what_the_facts_say(setup: Any, name: str) -> None:
    this = setup(name)
    for k in range(this.oracle.count):
        tokens, states = inputs_of(this, TEXT, k)
        raw, normed = this.oracle.read(k, tokens, states)
        logits, handed_on = this.oracle.logits(k, normed), this.oracle.handed_on(raw, normed)
        for cuts in ([], [1], [5, 6, 7, 8, 20], range(1, len(tokens))):
            ours, our_logits = product(this.mtp, k, tokens, states, cuts)
            assert off(our_logits, logits) < 1e-4, f"head {k}, cut at {list(cuts)}"
            assert off(ours, handed_on) < 1e-4


@every_family
def test_and_not_what_other_conventions_say(setup: Any, name: str) -> None:
    this = setup(name)
    facts, oracle = this.oracle.facts, this.oracle
    assert this.mtp.input == facts.reads
    tokens, states = inputs_of(this, TEXT, 0)
    ours, logits = product(this.mtp, 0, tokens, states, [])
    swapped = oracle.read(0, tokens, states, swapped=True)[1]
    assert off(logits, oracle.logits(0, swapped)) > 0.1
    other = states_of(this.model, TEXT[:-1], "raw" if facts.reads == "normed" else "normed")
    assert off(logits, oracle.logits(0, oracle.read(0, tokens, other)[1])) > 0.1
    raw, normed = oracle.read(0, tokens, states)
    assert off(ours, raw if facts.hands_on == "normed" else normed) > 0.1


@every_family
def test_the_input_can_be_overridden(setup: Any, name: str) -> None:
    this = setup(name)
    other = "raw" if this.mtp.input == "normed" else "normed"
    mtp = MTP.load(this.checkpoint.folder, this.model, input=other)
    target = Target(this.model)
    mtp.start(target)
    seen = target(mx.array([TEXT]), make_prompt_cache(this.model)).hidden
    assert off(seen, states_of(this.model, TEXT, other)) == 0


@every_family
@pytest.mark.parametrize("state", ["normed", "raw"])
def test_a_watched_target_says_the_same_and_shows_its_states(
    setup: Any, name: str, state: str
) -> None:
    model, oracle = setup(name).model, setup(name).oracle
    target, cache, plain = Target(model), make_prompt_cache(model), make_prompt_cache(model)
    target.watch(state)
    seen = []
    for window in (TEXT[:9], TEXT[9:10], TEXT[10:14]):
        output = target(mx.array([window]), cache)
        assert mx.array_equal(output.logits, model(mx.array([window]), cache=plain))
        seen.append(output.hidden)
    zoo.assert_state_equal(cache, plain)
    hidden = mx.concatenate(seen, axis=1)
    assert hidden.shape == (1, 14, oracle.final_norm.size)
    normed = states_of(model, TEXT[:14], "normed")
    ours = hidden if state == "normed" else rms(hidden, oracle.final_norm, oracle.eps)
    assert off(ours, normed) < 1e-4
    first = states_of(model, TEXT[:9], state)
    assert mx.array_equal(seen[0], first)


# --- what is proposed ------------------------------------------------------------------------


def read_along(this: Setup, tokens: Sequence[int], cuts: Sequence[int] = ()) -> Any:
    """A session that has absorbed all of `tokens`, in pieces."""
    session = this.mtp.start(Target(this.model))
    states = states_of(this.model, tokens[:-1], this.oracle.facts.reads)[0]
    for start, end in pairwise([0, *cuts, len(tokens) - 1]):
        session.absorb(list(tokens[start + 1 : end + 1]), states[start:end])
    return session


def assert_in_step(this: Setup, session: Any, tokens: Sequence[int]) -> None:
    """Between rounds the caches of the heads hold the committed pairs, without gaps."""
    fresh = read_along(this, tokens)
    rows = [max(0, len(tokens) - 1 - k) for k in range(this.oracle.count)]
    assert session.fed == fresh.fed == rows
    for k, (cache, expected) in enumerate(zip(session.caches, fresh.caches, strict=True)):
        zoo.assert_state_equal(cache, expected, 1e-4)
        used = [entry for entry in leaves(cache) if entry.keys is not None]
        assert [entry.offset for entry in used] == [rows[k]] * len(used)
        assert used or not rows[k]


def leaves(cache: Sequence[Any]) -> list[Any]:
    found = []
    for entry in cache:
        found += leaves(entry.caches) if isinstance(entry, CacheList) else [entry]
    return found


@pytest.mark.parametrize(("name", "heads"), [*((name, None) for name in NAMES), ("mimo", 2)])
def test_proposals_are_those_of_the_slow_way(setup: Any, name: str, heads: int | None) -> None:
    """From one pair on, at every depth, whatever was proposed before."""
    this = setup(name, heads)
    assert len(this.mtp.heads) == this.oracle.count
    depths = (1, 2, 3, 4, 7) if this.oracle.count > 1 else (1, 4)
    for n in (2, 4, 25):
        tokens = TEXT[:n]
        states = states_of(this.model, tokens[:-1], this.oracle.facts.reads)
        session = read_along(this, tokens, [c for c in (1, 3, 14, 15) if c < n - 1])
        expected = this.oracle.propose(tokens, states, max(depths))
        for depth in (*depths, *reversed(depths)):
            assert session.propose(tokens, depth).tolist() == expected[:depth]
        session.close()
        assert_in_step(this, session, tokens)


# --- the text --------------------------------------------------------------------------------


class Guided(Drafter):
    """Lets the heads propose, then proposes right tokens as often as planned.

    truth     prompt and text, to be right
    plan      as for `zoo.Scripted`: right tokens of each call, wrong ones after them; None for
              what the heads say
    watched   called with the session and the row after everything that the session has absorbed
    """

    kind = "guided"

    def __init__(
        self,
        mtp: MTP,
        truth: Sequence[int],
        plan: Sequence[int | None],
        watched: Callable[[Any, list[int]], None] = lambda session, row: None,
    ) -> None:
        self.mtp, self.truth, self.plan, self.watched = mtp, list(truth), plan, watched
        self.own: list[tuple[list[int], list[int]]] = []

    def start(self, target: Target) -> Session:
        return _Guided(self, self.mtp.start(target))


class _Guided(Session):
    def __init__(self, drafter: Guided, session: Session) -> None:
        self.drafter, self.session = drafter, session
        self.row = drafter.truth[:1]

    def absorb(self, tokens: Sequence[int], hidden: mx.array) -> None:
        self.session.absorb(tokens, hidden)
        self.row += tokens
        self.drafter.watched(self.session, self.row)

    def propose(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
        drafter = self.drafter
        own = self.session.propose(tokens, num_draft_tokens).tolist()
        right = drafter.plan[len(drafter.own) % len(drafter.plan)]
        drafter.own.append((list(tokens), own))
        if right is None:
            return own
        upcoming = drafter.truth[len(tokens) : len(tokens) + num_draft_tokens]
        return [t if i < right else (t + 1 + i) % zoo.VOCAB for i, t in enumerate(upcoming)]

    def close(self) -> None:
        self.session.close()


def generate(model: Any, prompt: list[int], drafter: Any, k: int, n: int, **more: Any) -> list[int]:
    steps = mlx_rewind.generate_step(
        prompt,
        model,
        drafter=drafter,
        num_draft_tokens=k,
        max_tokens=n,
        prefill_step_size=16,
        **more,
    )
    return [token for token, _, _ in steps]


@every_family
@pytest.mark.parametrize("k", range(1, 6))
def test_the_text_is_that_of_plain_decoding(setup: Any, name: str, k: int) -> None:
    this, prompt = setup(name), zoo.PROMPTS[k % 3]
    truth = prompt + zoo.reference(this.model, prompt, 24).tokens
    assert generate(this.model, prompt, this.mtp, k, 7) == truth[len(prompt) :][:7]
    drafter = Guided(this.mtp, truth, [k, 0, None, k - 1])
    assert generate(this.model, prompt, drafter, k, 18) == truth[len(prompt) :][:18]


@every_family
def test_so_it_is_with_a_sampler(setup: Any, name: str) -> None:
    this, prompt = setup(name), zoo.PROMPTS[1]
    mx.random.seed(6)
    plain = generate_step(
        mx.array(prompt), this.model, max_tokens=16, sampler=make_sampler(temp=0.8)
    )
    expected = [token for token, _ in plain]
    for drafter in (this.mtp, Guided(this.mtp, prompt + expected, [3, 1, 0, None, 2])):
        mx.random.seed(6)
        sampler = make_sampler(temp=0.8)
        assert generate(this.model, prompt, drafter, 3, 16, sampler=sampler) == expected


@every_family
def test_max_tokens_may_end_inside_a_block(setup: Any, name: str) -> None:
    this, prompt = setup(name), zoo.PROMPTS[1]
    truth = prompt + zoo.reference(this.model, prompt, 24).tokens
    for n in (1, 2, 4, 7):
        drafter = Guided(this.mtp, truth, [4])
        assert generate(this.model, prompt, drafter, 4, n) == truth[len(prompt) :][:n]


@every_family
def test_the_heads_read_along(setup: Any, name: str) -> None:
    """After every chunk of the prompt and after every round."""
    this, prompt, seen = setup(name), zoo.PROMPTS[2], []
    truth = prompt + zoo.reference(this.model, prompt, 24).tokens

    def watched(session: Any, row: list[int]) -> None:
        assert row == truth[: len(row)]
        assert_in_step(this, session, row)
        seen.append(len(row))

    drafter = Guided(this.mtp, truth, [3, 0, None, 1, 2], watched)
    assert generate(this.model, prompt, drafter, 3, 18) == truth[len(prompt) :][:18]
    assert seen[:3] == [17, 33, 40]
    assert seen[-1] == len(prompt) + 18
    for row, own in drafter.own[::3]:
        states = states_of(this.model, row[:-1], this.oracle.facts.reads)
        assert own == this.oracle.propose(row, states, 3)[: len(own)]


@pytest.mark.parametrize("name", ["qwen3_5", "deepseek_v3", "step3p5", "mimo_v2_flash"])
def test_they_still_do_after_a_long_text(setup: Any, name: str) -> None:
    this, prompt = setup(name), zoo.PROMPTS[1]
    truth = prompt + zoo.reference(this.model, prompt, 120).tokens
    sessions = []
    drafter = Guided(this.mtp, truth, [0, 2, None, 1, 0, 4], lambda *seen: sessions.append(seen[0]))
    assert generate(this.model, prompt, drafter, 4, 120) == truth[len(prompt) :]
    assert len(drafter.own) > 40  # rounds; two of three end with a rejection
    for row, own in drafter.own[-6:]:
        again = read_along(this, row).propose(row, 4).tolist()
        assert own == again[: len(own)]
    session = sessions[-1]
    session.close()
    assert_in_step(this, session, truth[: 1 + session.fed[0]])


def test_one_set_of_heads_serves_rows_in_turn_and_at_once(setup: Any) -> None:
    this = setup("step3p5")
    streams = [
        mlx_rewind.generate_step(prompt, this.model, drafter=this.mtp, max_tokens=12)
        for prompt in zoo.PROMPTS[1:]
    ]
    rows = list(zip(*streams, strict=True))
    for i, prompt in enumerate(zoo.PROMPTS[1:]):
        expected = zoo.reference(this.model, prompt, 24).tokens[:12]
        assert [row[i][0] for row in rows] == expected


@pytest.mark.parametrize("name", ["qwen3_5", "mimo_v2_flash"])
def test_a_history_that_the_heads_have_not_seen(setup: Any, name: str) -> None:
    this, history, prompt = setup(name), zoo.PROMPTS[2], zoo.PROMPTS[1]
    expected = zoo.reference(this.model, [*history, *prompt], 20).tokens
    cache = make_prompt_cache(this.model)
    mx.eval(this.model(mx.array([history]), cache=cache))
    drafter = Guided(this.mtp, [*prompt, *expected], [2, None, 0, 3])
    assert generate(this.model, prompt, drafter, 3, 20, prompt_cache=cache) == expected


def test_heads_may_be_loaded_in_one_thread_and_used_in_another(setup: Any) -> None:
    this, prompt = setup("qwen3_5"), zoo.PROMPTS[1]
    mtp = MTP.load(this.checkpoint.folder, this.model)
    for _ in range(2):
        with ThreadPoolExecutor(1) as thread:
            text = thread.submit(generate, this.model, prompt, mtp, 3, 12).result()
        assert text == zoo.reference(this.model, prompt, 24).tokens[:12]


# --- tensors ---------------------------------------------------------------------------------


def logits_of(mtp: MTP, model: Any) -> mx.array:
    """What the heads say about a text, one after the other, [n, S, V]."""
    states = states_of(model, TEXT[:-1], mtp.input)
    return mx.concatenate([product(mtp, k, TEXT[1:], states, [])[1] for k in range(len(mtp.heads))])


def writer(folder: Path, name: str) -> Callable[..., Checkpoint]:
    return functools.partial(head_checkpoints.write, name, folder / name)


def dropping(*ends: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: v for n, v in tensors.items() if not n.endswith(ends)}


def with_names(*pairs: tuple[str, str]) -> Callable[[Tensors], Tensors]:
    def edit(tensors: Tensors) -> Tensors:
        for old, new in pairs:
            tensors = {
                new + name.removeprefix(old) if name.startswith(old) else name: tensor
                for name, tensor in tensors.items()
            }
        return tensors

    return edit


def plus_one(tensors: Tensors) -> Tensors:
    return {n: v + 1.0 if is_norm(n, v) else v for n, v in tensors.items()}


@every_family
def test_every_tensor_is_used_or_listed(setup: Any, name: str) -> None:
    this = setup(name)
    tensors, report = this.checkpoint.tensors, this.mtp.report
    copies = [n for n in tensors if n.endswith(("embed_tokens.weight", "shared_head.head.weight"))]
    assert report.copies == tuple(sorted(copies))
    assert report.unused == ()
    assert report.heads == this.checkpoint.count
    assert report.layout == "embedded"
    assert len(report.files) == 1
    assert report.files[0].endswith("-00003-of-00003.safetensors")
    assert report.norms == ("raw" if name in MINUS_ONE else "plain")
    parameters = [v.size for head in this.mtp.heads for _, v in tree_flatten(head.parameters())]
    assert sum(parameters) == sum(v.size for n, v in tensors.items() if n not in copies)


@every_family
def test_what_belongs_to_no_part_is_listed(tmp_path: Path, name: str) -> None:
    layer = FACTS[name].layer.format(n=layers_of(name), i=0)
    if name == "nemotron_h":
        layer += "0."
    extra = {f"{layer}unknown.weight": mx.ones(3)}
    extra[f"{layer}self_attn.rotary_emb.inv_freq"] = mx.ones(4)  # in many old checkpoints
    checkpoint = writer(tmp_path, name)(edit=lambda tensors: {**tensors, **extra})
    model = load_trunk(checkpoint.folder)
    assert sorted(MTP.load(checkpoint.folder, model).report.unused) == sorted(extra)


def layers_of(name: str) -> int:
    config = head_checkpoints.config_of(name)
    return config.get("num_hidden_layers", config.get("num_layers", 0))


@every_family
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    facts, model = FACTS[name], head_checkpoints.build(name)
    gone = {
        facts.embedding: "embedding_norm",
        facts.hidden: "hidden_norm",
        facts.projection: "projection",
        f"{facts.layer}mlp.up_proj": "",
        f"{facts.layer}self_attn.o_proj": "",
        f"{facts.layer}attention.dense": "",
        f"{facts.layer}0.mixer.o_proj": "",
    }
    for template, part in gone.items():
        missing = template.format(n=layers_of(name), i=0) + ".weight"
        if missing in head_checkpoints.head_tensors(name, model):
            writer(tmp_path, name)(edit=dropping(missing))
            end = ".".join(missing.split(".")[-2:])
            with pytest.raises(ValueError, match=f"lacks .*({part or end})"):
                MTP.load(tmp_path / name, model)


@every_family
def test_a_missing_expert_is_named(tmp_path: Path, name: str) -> None:
    model = head_checkpoints.build(name)
    tensors = head_checkpoints.head_tensors(name, model)
    for expert in (0, 2):
        gone = [key for key in tensors if key.endswith(f"experts.{expert}.up_proj.weight")]
        if gone:
            writer(tmp_path, name)(edit=dropping(gone[0]))
            with pytest.raises(ValueError, match=r"experts|switch_mlp"):
                MTP.load(tmp_path / name, model)


@every_family
@pytest.mark.parametrize("size", ["hidden_size", "num_attention_heads"])
def test_the_head_of_another_model_is_refused(tmp_path: Path, name: str, size: str) -> None:
    model, config = head_checkpoints.build(name), head_checkpoints.config_of(name)
    changed: dict[str, Any] = {size: config[size] // 2}
    if size == "num_attention_heads":
        changed["swa_num_attention_heads"] = 2
        changed["attention_other_setting"] = {"num_attention_heads": 4, "num_attention_groups": 4}
        changed["moe_latent_size"] = 16
    other = head_checkpoints.head_tensors(name, model, **changed)
    writer(tmp_path, name)(edit=lambda tensors: other)
    with pytest.raises(DraftMismatchError, match="belongs to another model"):
        MTP.load(tmp_path / name, model)


def fused(tensors: Tensors) -> Tensors:
    """Experts of a head as Qwen3.5 stores those of its trunk."""
    found = {name: v for name, v in tensors.items() if ".experts." not in name}
    for name, stack in stacked(tensors).items():
        if name.endswith(".switch_mlp.gate_proj.weight"):
            mlp = name.removesuffix("switch_mlp.gate_proj.weight")
            up = stacked(tensors)[f"{mlp}switch_mlp.up_proj.weight"]
            found[f"{mlp}experts.gate_up_proj"] = mx.concatenate([stack, up], axis=1)
            found[f"{mlp}experts.down_proj"] = stacked(tensors)[f"{mlp}switch_mlp.down_proj.weight"]
    return found


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize("edit", [fused, stacked])
def test_experts_may_be_stored_otherwise(
    setup: Any, tmp_path: Path, name: str, edit: Callable[[Tensors], Tensors]
) -> None:
    checkpoint = writer(tmp_path, name)(edit=edit)
    model = load_trunk(checkpoint.folder)
    mtp = MTP.load(checkpoint.folder, model)
    assert mtp.report.unused == ()
    assert mx.array_equal(logits_of(mtp, model), logits_of(setup(name).mtp, model))


def test_a_transposed_projection_is_turned(setup: Any, tmp_path: Path) -> None:
    """As the large ERNIE was first published."""
    name = "model.mtp_linear_proj.0.weight"
    edit: Any = lambda tensors: {**tensors, name: mx.contiguous(tensors[name].T)}  # noqa: E731
    checkpoint = writer(tmp_path, "ernie4_5_moe")(edit=edit)
    model = load_trunk(checkpoint.folder)
    ours = logits_of(MTP.load(checkpoint.folder, model), model)
    assert off(ours, logits_of(setup("ernie4_5_moe").mtp, model)) < 1e-4


def test_a_tied_output_head(tmp_path: Path) -> None:
    assert_as_the_oracle(writer(tmp_path, "qwen3_5")(tie_word_embeddings=True))


def test_lists_of_a_config_may_end_with_the_trunk(tmp_path: Path) -> None:
    """The layers of Step's heads are then sliding, turned in full, with a base of 10000."""
    lists = ("layer_types", "partial_rotary_factors", "rope_theta", "swiglu_limits_shared")
    config = head_checkpoints.config_of("step3p5")
    checkpoint = writer(tmp_path, "step3p5")(**{field: config[field][:4] for field in lists})
    model = load_trunk(checkpoint.folder)
    mtp = MTP.load(checkpoint.folder, model)
    for field, further in zip(lists, ("sliding_attention", 1.0, 10000.0, 0.0), strict=True):
        setattr(model.args, field, [*config[field][:4], *[further] * 3])
    oracle = Oracle(checkpoint, model)
    states = states_of(model, TEXT[:-1], "raw")
    expected = [oracle.logits(k, oracle.read(k, TEXT[1:], states)[1]) for k in range(3)]
    assert off(logits_of(mtp, model), mx.concatenate(expected)) < 1e-4


def assert_as_the_oracle(checkpoint: Checkpoint, build: Any = None) -> None:
    model = load_trunk(checkpoint.folder)
    mtp, oracle = MTP.load(checkpoint.folder, model), Oracle(checkpoint, model)
    if build is not None:
        oracle.facts = oracle.facts._replace(build=build)
        oracle.bodies = [oracle._body(k) for k in range(oracle.count)]
    assert mtp.report.unused == ()
    states = states_of(model, TEXT[:-1], mtp.input)
    expected = oracle.logits(0, oracle.read(0, TEXT[1:], states)[1])
    assert off(logits_of(mtp, model), expected) < 1e-4


def test_the_layer_of_exaone_is_of_the_kind_that_the_config_tells(tmp_path: Path) -> None:
    write = writer(tmp_path, "exaone_moe")
    assert_as_the_oracle(write(announce=False))  # older configs do not tell: full attention
    folder = (checkpoint := write()).folder
    change_config(folder, mtp_layer_types=["sliding_attention"])
    assert_as_the_oracle(checkpoint, functools.partial(exaone_layer, kind="sliding_attention"))


def test_the_blocks_of_nemotron_may_be_told_as_a_list(tmp_path: Path) -> None:
    write = writer(tmp_path, "nemotron_h")
    assert_as_the_oracle(write(announce=False))  # not told
    folder = (checkpoint := write(announce=False)).folder
    change_config(folder, mtp_layers_block_type=["attention", "moe"])
    assert_as_the_oracle(checkpoint)


def test_experts_of_nemotron_without_a_latent_space(tmp_path: Path) -> None:
    assert_as_the_oracle(writer(tmp_path, "nemotron_h")(moe_latent_size=None))


# --- quantised as published ------------------------------------------------------------------


def to_fp8(tensors: Tensors) -> Tensors:
    """Matrices of the layer in blocks of 128, each with the inverse of its scale."""
    found = {}
    for name, v in tensors.items():
        found[name] = v
        if v.ndim == 2 and ("_proj" in name and "eh_proj" not in name):
            rows, columns = ((size + 127) // 128 for size in v.shape)
            scale = 0.5 * mx.ones((rows, columns))
            found[name] = mx.to_fp8(v * 2)
            found[name.replace("weight", "weight_scale_inv")] = scale
    return found


def from_fp8(tensors: Tensors) -> Tensors:
    found = {}
    for name, v in to_fp8(tensors).items():
        if v.dtype == mx.uint8:
            v = mx.from_fp8(v, dtype=mx.bfloat16).astype(mx.float32) * 0.5
        if "scale_inv" not in name:
            found[name] = v
    return found


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa", "mimo_v2_flash"])
def test_a_head_in_fp8_is_read_where_the_trunk_would_be(tmp_path: Path, name: str) -> None:
    checkpoint = writer(tmp_path, name)(edit=to_fp8)
    model = load_trunk(checkpoint.folder)
    mtp = MTP.load(checkpoint.folder, model)
    assert mtp.report.unused == ()
    plain = head_checkpoints.head_tensors(name, model)
    oracle = Oracle(checkpoint._replace(tensors=from_fp8(plain)), model)
    states = states_of(model, TEXT[:-1], mtp.input)
    for k in range(checkpoint.count):
        expected = oracle.logits(k, oracle.read(k, TEXT[1:], states)[1])
        assert off(product(mtp, k, TEXT[1:], states, [])[1], expected) < 1e-4


@pytest.mark.parametrize("name", ["glm4_moe", "longcat_flash", "qwen3_5", "step3p5"])
def test_and_refused_elsewhere(tmp_path: Path, name: str) -> None:
    checkpoint = writer(tmp_path, name)(edit=to_fp8)
    model = load_trunk(checkpoint.folder)
    with pytest.raises(ValueError, match="weight_scale_inv"):
        MTP.load(checkpoint.folder, model)


# --- where heads are -------------------------------------------------------------------------

SIDE = {"format": "pt"}
ELSEWHERE = [
    ("mtp.safetensors", "side file"),
    ("model-mtp.safetensors", "side file"),
    ("mtp/weights.safetensors", "side file"),
    ("separate", "separate"),
]


@every_family
@pytest.mark.parametrize(("layout", "named"), ELSEWHERE)
def test_heads_elsewhere(setup: Any, tmp_path: Path, name: str, layout: str, named: str) -> None:
    checkpoint = writer(tmp_path, name)(layout=layout, metadata=SIDE)
    model = load_trunk(checkpoint.folder)
    mtp = MTP.load(checkpoint.heads, model)
    assert (mtp.report.layout, mtp.report.heads) == (named, checkpoint.count)
    assert mx.array_equal(logits_of(mtp, model), logits_of(setup(name).mtp, setup(name).model))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize("root", ["model.mtp.", "language_model.mtp.", "model.language_model.mtp."])
def test_qwen_heads_by_other_names(setup: Any, tmp_path: Path, name: str, root: str) -> None:
    for layout in ("embedded", "model-mtp.safetensors", "separate"):
        write = writer(tmp_path / layout, name)
        checkpoint = write(layout=layout, metadata=SIDE, edit=with_names(("mtp.", root)))
        model = load_trunk(checkpoint.folder)
        assert_equal_weights(model, checkpoint.model)
        mtp = MTP.load(checkpoint.heads, model)
        assert mtp.report.unused == ()
        assert mx.array_equal(logits_of(mtp, model), logits_of(setup(name).mtp, model))


@pytest.mark.parametrize(
    "name", ["exaone_moe", "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_next"]
)
def test_a_separate_head_without_a_prefix(setup: Any, tmp_path: Path, name: str) -> None:
    edit = with_names(("mtp.", ""))
    checkpoint = writer(tmp_path, name)(layout="separate", metadata=SIDE, edit=edit)
    model = load_trunk(checkpoint.folder)
    mtp = MTP.load(checkpoint.heads, model)
    assert mtp.report.unused == ()
    assert mx.array_equal(logits_of(mtp, model), logits_of(setup(name).mtp, model))


def test_a_separate_head_of_another_family_is_refused(tmp_path: Path) -> None:
    heads = writer(tmp_path, "deepseek_v3")(layout="separate", metadata=SIDE).heads
    with pytest.raises(DraftMismatchError, match=r"deepseek_v3_mtp.*qwen3_5_mtp"):
        MTP.load(heads, head_checkpoints.build("qwen3_5"))


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text("utf-8")) if file.exists() else {}
    file.write_text(json.dumps({**config, **changes}), "utf-8")


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_a_head_that_mlx_vlm_split_off(setup: Any, tmp_path: Path, name: str) -> None:
    """All of them are called qwen3_5_mtp there, without a prefix, with experts in stacks."""
    edit: Any = lambda tensors: stacked(plus_one(with_names(("mtp.", ""))(tensors)))  # noqa: E731
    write = writer(tmp_path, name)
    heads = write(layout="separate", metadata={"format": "mlx"}, edit=edit).heads
    change_config(heads, model_type="qwen3_5_mtp")
    with pytest.raises(ValueError, match="cannot tell"):
        MTP.load(heads, setup(name).model)
    assert_read_as(setup(name), MTP.load(heads, setup(name).model, norms="converted"), "converted")


def test_a_file_that_the_config_names(setup: Any, tmp_path: Path) -> None:
    """As OptiQ and MTPLX note it."""
    this = setup("qwen3_5")
    write = writer(tmp_path, "qwen3_5")
    folder = write(layout="optiq/mtp.safetensors", metadata=SIDE).folder
    with pytest.raises(FileNotFoundError):
        MTP.load(folder, this.model)
    change_config(folder, mlx_lm_extra_tensors={"mtp_file": "optiq/mtp.safetensors"})
    assert_read_as(this, MTP.load(folder, this.model), "raw")
    folder = write(layout="mtp.safetensors", metadata=SIDE).folder
    shutil.rmtree(folder / "optiq")
    change_config(folder, mlx_lm_extra_tensors={"mtp_file": "mtp.safetensors"})
    assert_read_as(this, MTP.load(folder, this.model), "raw")


UNANNOUNCED = ("longcat_flash", "mimo_v2_flash", "qwen3_next")  # as published


@every_family
def test_a_head_that_is_announced_and_absent(tmp_path: Path, name: str) -> None:
    checkpoint = writer(tmp_path, name)(layout="none")
    model = load_trunk(checkpoint.folder)
    assert_equal_weights(model, checkpoint.model)
    line = head_is_missing(checkpoint.folder, model)
    assert (line is None) == (name in UNANNOUNCED)
    expected = "none" if line is None else rf"no MTP head in .*announces {checkpoint.count}"
    with pytest.raises(FileNotFoundError, match=expected):
        MTP.load(checkpoint.folder, model)


@pytest.mark.parametrize("name", ["qwen3_5", "deepseek_v3", "longcat_flash"])
def test_one_line_says_so_and_the_model_decodes(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = writer(tmp_path, name)(layout="none")
    with caplog.at_level(logging.INFO, logger="mlx_rewind"):
        model, _ = mlx_rewind.load(checkpoint.folder)
    lines = [record.getMessage() for record in caplog.records if record.name == "mlx_rewind"]
    assert len(lines) == (name not in UNANNOUNCED)
    assert all("no MTP head" in line and "\n" not in line for line in lines)
    expected = zoo.reference(checkpoint.model, zoo.PROMPTS[1], 24).tokens[:6]
    assert generate(model, zoo.PROMPTS[1], None, 3, 6) == expected


@every_family
def test_a_head_that_is_not_announced_is_used(setup: Any, tmp_path: Path, name: str) -> None:
    checkpoint = writer(tmp_path, name)(announce=False)
    model = load_trunk(checkpoint.folder)
    mtp = MTP.load(checkpoint.folder, model)
    assert mtp.report.announced is None
    assert mx.array_equal(logits_of(mtp, model), logits_of(setup(name).mtp, model))


def test_a_tensor_in_two_files_is_an_error(tmp_path: Path) -> None:
    checkpoint = writer(tmp_path, "qwen3_5")()
    (source,) = checkpoint.folder.glob("*-00003-of-00003.safetensors")
    shutil.copy(source, checkpoint.folder / "mtp.safetensors")
    with pytest.raises(ValueError, match=r"mtp\.\S* twice.*safetensors"):
        MTP.load(checkpoint.folder, checkpoint.model)


def assert_equal_weights(model: Any, expected: Any) -> None:
    ours, theirs = (dict(tree_flatten(each.parameters())) for each in (model, expected))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not mx.array_equal(ours[name], theirs[name])] == []


@every_family
def test_the_trunk_is_what_it_is_with_heads_or_without(
    setup: Any, tmp_path: Path, name: str
) -> None:
    """Raw or converted: four checkpoints, one model. The raw ones also judge the writer."""
    assert_equal_weights(setup(name).model, setup(name).checkpoint.model)
    for is_raw, layout in ((True, "none"), (False, "none"), (False, "embedded")):
        write = writer(tmp_path / f"{layout}-{is_raw}", name)
        checkpoint = write(is_raw=is_raw, layout=layout)
        model = load_trunk(checkpoint.folder)
        assert_equal_weights(model, checkpoint.model)
    window = mx.array([TEXT])
    assert mx.array_equal(model(window), setup(name).model(window))


# --- norms minus one, or as they are used ----------------------------------------------------

minus_one = pytest.mark.parametrize("name", MINUS_ONE)


def assert_read_as(this: Setup, mtp: MTP, norms: str) -> None:
    assert mtp.report.norms == norms
    assert mx.array_equal(logits_of(mtp, this.model), logits_of(this.mtp, this.model))


def test_who_stores_norms_minus_one() -> None:
    assert set(MINUS_ONE) == {name for name in FAMILIES if FAMILIES[name].shifted}


@every_family
def test_a_converted_trunk_does_not_tell(setup: Any, tmp_path: Path, name: str) -> None:
    this = setup(name)
    folder = writer(tmp_path, name)(is_raw=False).folder
    if name not in MINUS_ONE:
        assert_read_as(this, MTP.load(folder, this.model), "plain")
        return
    with pytest.raises(ValueError, match=r"cannot tell how \S*norm\S*\.weight") as error:
        MTP.load(folder, this.model)
    assert any(tensor in str(error.value) for tensor in this.checkpoint.tensors)
    assert_read_as(this, MTP.load(folder, this.model, norms="raw"), "raw")
    wrong = MTP.load(folder, this.model, norms="converted")
    assert off(logits_of(wrong, this.model), logits_of(this.mtp, this.model)) > 0.1


@minus_one
def test_converted_norms_are_taken_as_they_are(setup: Any, tmp_path: Path, name: str) -> None:
    this = setup(name)
    folder = writer(tmp_path, name)(is_raw=False, edit=plus_one).folder
    with pytest.raises(ValueError, match="cannot tell"):
        MTP.load(folder, this.model)
    assert_read_as(this, MTP.load(folder, this.model, norms="converted"), "converted")
    folder = writer(tmp_path / "raw", name)(edit=plus_one).folder  # a raw trunk: asked is asked
    assert_read_as(this, MTP.load(folder, this.model, norms="converted"), "converted")


@minus_one
@pytest.mark.parametrize(("norms", "edit"), [("raw", dict), ("converted", plus_one)])
@pytest.mark.parametrize("layout", ["embedded", "mtp/weights.safetensors", "separate"])
def test_the_record_of_a_converter_tells(
    setup: Any, tmp_path: Path, name: str, norms: str, edit: Any, layout: str
) -> None:
    this = setup(name)
    checkpoint = writer(tmp_path, name)(is_raw=False, edit=edit, layout=layout)
    place = checkpoint.heads / "mtp" if "/" in layout else checkpoint.heads
    change_config(place, mlx_rewind_mtp={"norms": norms})
    assert_read_as(this, MTP.load(checkpoint.heads, this.model), norms)


@minus_one
@pytest.mark.parametrize("layout", ["mtp.safetensors", "model-mtp.safetensors", "separate"])
def test_a_file_that_pytorch_wrote_is_raw(
    setup: Any, tmp_path: Path, name: str, layout: str
) -> None:
    this = setup(name)
    checkpoint = writer(tmp_path, name)(is_raw=False, layout=layout, metadata=SIDE)
    assert_read_as(this, MTP.load(checkpoint.heads, this.model), "raw")


@minus_one
@pytest.mark.parametrize("metadata", [None, {"format": "mlx"}])
@pytest.mark.parametrize("is_raw", [True, False])
def test_a_side_file_of_unknown_origin(
    setup: Any, tmp_path: Path, name: str, metadata: Any, is_raw: bool
) -> None:
    this = setup(name)
    write = writer(tmp_path, name)
    checkpoint = write(is_raw=is_raw, layout="mtp.safetensors", metadata=metadata)
    if is_raw and metadata is None:
        assert_read_as(this, MTP.load(checkpoint.folder, this.model), "raw")
        return
    with pytest.raises(ValueError, match="cannot tell"):
        MTP.load(checkpoint.folder, this.model)
