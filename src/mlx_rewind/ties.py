"""Near-ties: how far apart the two best candidates are."""

from __future__ import annotations

import mlx.core as mx


def ulp(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """The unit in the last place of each of x, float32, in a floating dtype."""
    size = mx.maximum(mx.abs(x.astype(mx.float32)), 2.0**-100)
    return mx.power(2.0, mx.floor(mx.log2(size))) * float(mx.finfo(dtype).eps)


def gaps(logits: mx.array) -> mx.array:
    """Between the two best of logits [..., V], in units in the last place of the larger; [...]."""
    best = mx.sort(mx.topk(logits, 2, axis=-1).astype(mx.float32), axis=-1)
    larger = mx.max(mx.abs(best), axis=-1)
    return (best[..., 1] - best[..., 0]) / ulp(larger, logits.dtype)
