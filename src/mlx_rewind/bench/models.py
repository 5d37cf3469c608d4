"""What is measured without weights: random hybrids, and a drafter right with probability p."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models import qwen3_5

#: Tokens of the random models.
VOCAB = 4096


@dataclass(frozen=True)
class Size:
    """A hybrid of Qwen3.5's kind: three gated delta layers to one of attention.

    head    size of the heads of both kinds of layer
    """

    hidden: int
    layers: int
    head: int = 64


#: By the number of parameters that they come to.
SIZES = {
    "5M": Size(256, 4),
    "50M": Size(640, 8),
    "300M": Size(1024, 20),
    #: Eight of the 32 layers of a 2B hybrid: Hk 16, Hv 32, Dk = Dv = 128.
    "2B-block": Size(2048, 8, 128),
}


def hybrid(size: Size, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """A model with random weights. Its text means nothing; its time is that of its size."""
    heads = size.hidden // 64
    config = {
        "model_type": "qwen3_5_text",
        "hidden_size": size.hidden,
        "intermediate_size": 3 * size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.hidden // size.head,
        "num_key_value_heads": max(1, size.hidden // size.head // 4),
        "head_dim": size.head,
        "linear_num_key_heads": max(1, heads // 2),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": size.head,
        "linear_value_head_dim": size.head,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
    }
    mx.random.seed(0)
    model = qwen3_5.Model(qwen3_5.ModelArgs(model_type="qwen3_5", text_config=config))
    model.eval()
    model.update(tree_map(lambda x: x.astype(dtype), model.parameters()))
    mx.eval(model.parameters())
    return model


def random_prompts(count: int, length: int) -> list[list[int]]:
    """Prompts of `length` random tokens, the same at every call."""
    draw = random.Random(0)
    return [[draw.randrange(1, VOCAB) for _ in range(length)] for _ in range(count)]


class Scripted:
    """Proposes the known text of a row, each token right with probability `acceptance`.

    Which tokens are wrong depends on the position only, so every run has the same rounds.

    prompt    token ids of the row
    text      what the model will say after it
    """

    def __init__(self, prompt: Sequence[int], text: Sequence[int], acceptance: float) -> None:
        self._length, self._text, self._acceptance = len(prompt), list(text), acceptance

    def propose(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
        at = len(tokens) - self._length
        known = self._text[at : at + num_draft_tokens]
        luck = random.Random(at)
        return [t if luck.random() < self._acceptance else _neighbour(t) for t in known]


def _neighbour(token: int) -> int:
    """Another token, of any vocabulary."""
    return token - 1 if token else 1
