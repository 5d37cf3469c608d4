"""Which model and which tokenizer an entry on disk belongs to: by content, never by name."""

from __future__ import annotations

import hashlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

#: Numbers of each weight that take part.
_SAMPLES = 64


def model_fingerprint(model: nn.Module) -> str:
    """A digest of the model's file, its configuration and its weights.

    The weights take part with their names, shapes, types and some numbers of each, spread over the
    whole, so that another seed, fine-tune or quantisation is another model.
    """
    digest = hashlib.sha256(f"{type(model).__module__}\n".encode())
    digest.update(f"{vars(model).get('args', model.get('args'))}\n".encode())
    pairs: Any = tree_flatten(model.parameters())
    samples = []
    for name, weight in sorted(pairs):
        digest.update(f"{name} {weight.dtype} {weight.shape}\n".encode())
        samples.append(_sample(weight))
    mx.eval(samples)
    for sample in samples:
        digest.update(raw(sample))
    return digest.hexdigest()


def _sample(weight: mx.array) -> mx.array:
    flat = weight.reshape(-1)
    return mx.contiguous(flat[:: max(1, flat.size // _SAMPLES)][:_SAMPLES])


def raw(x: mx.array) -> memoryview:
    """The bytes of an array, whatever its type."""
    buffer: Any = x.reshape(-1).view(mx.uint8) if x.size else b""
    return memoryview(buffer)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A digest of the vocabulary and the special ids."""
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
    special = sorted(tokenizer.all_special_ids)
    return hashlib.sha256(repr((vocab, special)).encode()).hexdigest()
