"""The multi-token prediction head of Qwen3-Next and Qwen3.5 checkpoints.

    x_t = fc([norm(embedding of token t+1); norm(h_t)])   one attention layer   norm
    logits of token t+2 = output head of the trunk

h is the trunk's output after its final norm. To draft deeper the head is fed its own output
(after `norm`) in place of h, together with the token it has just proposed.
"""

import torch
from torch import Tensor, nn

from demo_training.config import ModelConfig
from demo_training.model import DecoderLayer, LayerState, RMSNorm, initialise


class MTPHead(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = RMSNorm(size, eps)
        self.pre_fc_norm_hidden = RMSNorm(size, eps)
        self.layers = nn.ModuleList([DecoderLayer(config, linear=False)])
        self.norm = RMSNorm(size, eps)
        self.apply(initialise)

    def mix(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Embeddings of the next tokens and hidden states, both  [B, T, hidden]."""
        pair = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        return self.fc(torch.cat(pair, dim=-1))

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The first depth at all positions; causal."""
        return self.norm(self.layers[0](self.mix(embedded, hidden), LayerState()))

    def unroll(self, embedded: Tensor, hidden: Tensor, depth: int) -> list[Tensor]:
        """Head outputs of depths 1..depth, each as a drafter would compute them.

        A chain that starts at position t attends to the pairs of the true prefix 0..t (depth 1)
        and to its own pairs at t+1, t+2, ... The tokens along it are the true ones: a later
        draft counts only where the earlier ones were right.

        embedded  [B, T, hidden]: embeddings of tokens 1..T;  hidden  [B, T, hidden]: of 0..T-1.
        Output d is  [B, T-d+1, hidden]  and predicts token t+1+d from the chain of position t.
        """
        layer = self.layers[0]
        length = hidden.shape[1]
        outputs: list[Tensor] = []
        chain: list[tuple[Tensor, Tensor]] = []
        for d in range(depth):
            span = length - d
            x = self.mix(embedded[:, d:], hidden[:, :span])
            queries, keys, values, gate = layer.self_attn.project(layer.input_layernorm(x), d)
            chain.append((keys, values))
            attended = attend_chain(queries, chain)
            x = x + layer.self_attn.output(attended, gate)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            hidden = self.norm(x)
            outputs.append(hidden)
        return outputs


def attend_chain(queries: Tensor, chain: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of the chains' last pairs.

    queries  [B, H, T, D];  chain: keys and values  [B, Hkv, >= T, D]  per depth. Of depth 1 the
    query at t sees entries 0..t, of the later depths only entry t, its own.
    """
    span, width = queries.shape[2:]
    groups = queries.shape[1] // chain[0][0].shape[1]
    per_head = [
        tuple(x[:, :, :span].repeat_interleave(groups, dim=1) for x in pair) for pair in chain
    ]
    (prefix_keys, prefix_values), *own = per_head
    future = torch.ones(span, span, dtype=torch.bool, device=queries.device).triu(1)
    scores = (queries @ prefix_keys.transpose(-1, -2)).masked_fill(future, -torch.inf)
    own_scores = [(queries * keys).sum(-1, keepdim=True) for keys, _ in own]
    weights = (torch.cat([scores, *own_scores], dim=-1) * width**-0.5).softmax(-1)
    attended = weights[..., :span] @ prefix_values
    for i, (_, values) in enumerate(own):
        attended = attended + weights[..., span + i, None] * values
    return attended
