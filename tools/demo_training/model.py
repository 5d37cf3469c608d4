"""The `qwen3_5` hybrid in torch, module by module under the parameter names of mlx-lm.

The layer formulas are those of mlx_lm.models.qwen3_5 (GatedDeltaNet, DecoderLayer) and
mlx_lm.models.qwen3_next (Qwen3NextAttention, Qwen3NextMLP, Qwen3NextRMSNormGated).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_training.config import ModelConfig
from demo_training.delta import gated_delta


@dataclass
class LayerState:
    """What a layer keeps between forwards; a forward replaces the fields in place.

    recurrent: (last inputs of the convolution  [B, 3, C],  matrix  [B, Hv, Dk, Dv])
    attention: (keys  [B, Hkv, T, D],  values  [B, Hkv, T, D])
    """

    first: Tensor | None = None
    second: Tensor | None = None


def rotate(x: Tensor, start: int, config: ModelConfig) -> Tensor:
    """Rotary positions `start`.. on the first `rotary_dim` features; x  [B, H, T, D]."""
    half = config.rotary_dim // 2
    positions = torch.arange(start, start + x.shape[2], dtype=torch.float32)
    rates = config.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = positions[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class GatedDeltaNet(nn.Module):
    """Convolution, gated delta rule, gated norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        hidden, heads = config.hidden_size, config.linear_num_value_heads
        self.in_proj_qkv = nn.Linear(hidden, config.conv_dim, bias=False)
        self.in_proj_z = nn.Linear(hidden, config.value_dim, bias=False)
        self.in_proj_b = nn.Linear(hidden, heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, heads, bias=False)
        self.conv1d = nn.Conv1d(
            config.conv_dim,
            config.conv_dim,
            config.linear_conv_kernel_dim,
            groups=config.conv_dim,
            bias=False,
        )
        self.dt_bias = nn.Parameter(torch.linspace(-4.0, 0.0, heads))
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.norm = RMSNorm(config.linear_value_head_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(config.value_dim, hidden, bias=False)

    def forward(self, x: Tensor, state: LayerState) -> Tensor:
        c = self.config
        batch, length, _ = x.shape
        mixed, tail = self._convolve(self.in_proj_qkv(x), state.first)
        q, k, v = mixed.split([c.key_dim, c.key_dim, c.value_dim], dim=-1)
        q, k = (self._keys_per_value_head(t) for t in (q, k))
        v = v.unflatten(-1, (c.linear_num_value_heads, -1)).transpose(1, 2)
        beta = self.in_proj_b(x).sigmoid().transpose(1, 2)
        g = -self.A_log.exp() * functional.softplus(self.in_proj_a(x) + self.dt_bias)

        matrix = state.second
        if matrix is None:
            matrix = x.new_zeros(batch, v.shape[1], q.shape[-1], v.shape[-1])
        scale = c.linear_key_head_dim**-0.5
        out, matrix = gated_delta(q * scale, k, v, g.transpose(1, 2), beta, matrix)
        state.first, state.second = tail, matrix

        z = self.in_proj_z(x).unflatten(-1, (c.linear_num_value_heads, -1))
        gated = functional.silu(z) * self.norm(out.transpose(1, 2))
        return self.out_proj(gated.reshape(batch, length, -1))

    def _convolve(self, qkv: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        """Causal depthwise convolution of  [B, T, C]; the tail is the 3 inputs before it.

        Written as a sum of shifted products, which a CPU runs faster than a grouped Conv1d.
        """
        width = self.config.linear_conv_kernel_dim
        if tail is None:
            tail = qkv.new_zeros(qkv.shape[0], width - 1, qkv.shape[2])
        padded = torch.cat([tail, qkv], dim=1)
        length = qkv.shape[1]
        taps = self.conv1d.weight[:, 0].unbind(-1)
        out = sum(padded[:, i : i + length] * tap for i, tap in enumerate(taps))
        return functional.silu(out), padded[:, length:]

    def _keys_per_value_head(self, x: Tensor) -> Tensor:
        """Unit keys, repeated for the value heads that share them:  [B, Hv, T, Dk]."""
        c = self.config
        x = x.unflatten(-1, (c.linear_num_key_heads, -1)).transpose(1, 2)
        x = x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        return x.repeat_interleave(c.linear_num_value_heads // c.linear_num_key_heads, dim=1)


class Attention(nn.Module):
    """Gated attention with normed queries and keys and partial rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        hidden, width = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * width * 2, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * width, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * width, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * width, hidden, bias=False)
        self.q_norm = RMSNorm(width, config.rms_norm_eps)
        self.k_norm = RMSNorm(width, config.rms_norm_eps)

    def project(self, x: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries  [B, H, T, D], keys and values  [B, Hkv, T, D], gate  [B, T, H*D]."""
        c = self.config
        mixed = self.q_proj(x).unflatten(-1, (c.num_attention_heads, -1))
        queries, gate = mixed.chunk(2, dim=-1)
        keys = self.k_proj(x).unflatten(-1, (c.num_key_value_heads, -1))
        values = self.v_proj(x).unflatten(-1, (c.num_key_value_heads, -1)).transpose(1, 2)
        queries = rotate(self.q_norm(queries).transpose(1, 2), start, c)
        keys = rotate(self.k_norm(keys).transpose(1, 2), start, c)
        return queries, keys, values, gate.flatten(2)

    def output(self, attended: Tensor, gate: Tensor) -> Tensor:
        """attended  [B, H, T, D]."""
        return self.o_proj(attended.transpose(1, 2).flatten(2) * gate.sigmoid())

    def forward(self, x: Tensor, state: LayerState) -> Tensor:
        """A prefix in `state` is followed by one token, or by none at all before the first."""
        start = 0 if state.first is None else state.first.shape[2]
        queries, keys, values, gate = self.project(x, start)
        if state.first is not None:
            keys = torch.cat([state.first, keys], dim=2)
            values = torch.cat([state.second, values], dim=2)
        state.first, state.second = keys, values
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=start == 0, enable_gqa=True
        )
        return self.output(attended, gate)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, *, linear: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if linear:
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.linear = linear

    def forward(self, x: Tensor, state: LayerState) -> Tensor:
        mixer = self.linear_attn if self.linear else self.self_attn
        x = x + mixer(self.input_layernorm(x), state)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Embedding, layers, final norm; the output head is the embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, linear=config.is_linear(i))
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.apply(initialise)

    def new_state(self) -> list[LayerState]:
        return [LayerState() for _ in self.layers]

    def forward(self, tokens: Tensor, states: list[LayerState] | None = None) -> Tensor:
        """tokens  [B, T]  ->  hidden states after the final norm  [B, T, hidden].

        With `states` the tokens follow what was fed before, and the states move on.
        """
        x = self.embed_tokens(tokens)
        for layer, state in zip(self.layers, states or self.new_state(), strict=True):
            x = layer(x, state)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.embed_tokens.weight)


def initialise(module: nn.Module) -> None:
    """Uniform by fan-in for inputs, zero for whatever writes to the residual stream."""
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    for name, child in module.named_children():
        if name in ("out_proj", "o_proj", "down_proj"):
            nn.init.zeros_(child.weight)
