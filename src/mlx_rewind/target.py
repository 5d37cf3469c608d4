"""The target model: its forward, its parts, its vocabulary, and how exact a verify of it is."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.mla import MultiLinear

from .cache.probe import has_window_formula, walk
from .cache.slots import is_own_class
from .cache.undo import stock_class
from .errors import UnsupportedCacheError, UnsupportedModelError
from .types import TargetOutput

#: The levels of exactness, strictest first; see docs/exactness.md.
BITWISE, TOKEN, NEAR_TIE, LAW = "bitwise", "token", "near-tie", "law"

#: A hidden state of the target: after its final norm, or before.
HiddenState = Literal["normed", "raw"]


@dataclass(frozen=True)
class Trunk:
    """Where a model keeps its inner model, the module that owns embedding, layers and final norm.

    path        names of the modules from the model down to the inner one
    embedding   name of the embedding in the inner model
    norm        name of the final norm in the inner model
    """

    path: tuple[str, ...]
    embedding: str
    norm: str

    @classmethod
    def of(cls, model: nn.Module) -> Trunk:
        """Raises `UnsupportedModelError` for a model that is not built like that."""
        for name, module in sorted(model.named_modules(), key=lambda pair: pair[0].count(".")):
            norm = next((norm for norm in ("norm", "norm_f") if norm in module), None)
            kinds = (nn.Embedding, nn.QuantizedEmbedding)
            embedding = [key for key, child in module.items() if isinstance(child, kinds)]
            if norm and "layers" in module and embedding:
                return cls(tuple(name.split(".")) if name else (), embedding[0], norm)
        raise UnsupportedModelError(
            f"a {getattr(model, 'model_type', type(model).__name__)} has no inner model with an "
            "embedding, layers and a final norm, so its hidden states cannot be read"
        )

    def inner(self, model: nn.Module) -> nn.Module:
        for name in self.path:
            model = model[name]
        return model

    def output_head(self, model: nn.Module) -> Callable[[mx.array], mx.array]:
        """From states after the final norm, [..., H], to logits [..., V]."""
        outer = model
        for name in self.path[:-1]:
            outer = outer[name]
        if outer.get("lm_head") is not None:
            return outer["lm_head"]
        return self.inner(model)[self.embedding].as_linear

    def graft(self, model: nn.Module, **parts: Any) -> nn.Module:
        """A twin of `model` that shares all of it but `parts` of the inner model."""
        twin = root = copy.copy(model)
        for name in self.path:
            twin[name] = copy.copy(twin[name])
            twin = twin[name]
        for name, part in parts.items():
            twin[name] = part
        return root


class Target:
    """A model as the loop and the drafters see it.

    `watch` makes its forward tell the hidden states too. The model itself is not changed by that:
    the forward runs on a twin that shares every layer and in which only the final norm is wrapped,
    so the logits are the model's own, to the bit.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = self._forward = model
        self._tap: _Tap | None = None

    def watch(self, state: HiddenState) -> None:
        """From here on every output has `hidden`. Raises `UnsupportedModelError` as `Trunk.of`."""
        if self._tap is not None and self._tap.state != state:
            raise UnsupportedModelError(
                f"two drafters read different states of the target: {self._tap.state} and {state}"
            )
        trunk = Trunk.of(self.model)
        self._tap = _Tap(trunk.inner(self.model)[trunk.norm], state)
        self._forward = trunk.graft(self.model, **{trunk.norm: self._tap})

    @property
    def watched(self) -> HiddenState | None:
        """The hidden state that every output tells."""
        return None if self._tap is None else self._tap.state

    def watch_as(self, other: Target) -> None:
        """Tells what `other` tells, too."""
        if other._tap is not None:
            self.watch(other._tap.state)

    def __call__(self, window: mx.array, cache: list[Any]) -> TargetOutput:
        """Feeds `window` [B, S]. Mutates `cache`."""
        logits = self._forward(window, cache=cache)
        return TargetOutput(logits, self._tap.take() if self._tap else None)

    @functools.cached_property
    def vocab_size(self) -> int:
        """Entries of the logits. Read off a forward that stays lazy."""
        logits = self.model(mx.zeros((1, 1), mx.int32), cache=make_prompt_cache(self.model))
        return int(logits.shape[-1])

    @functools.cached_property
    def token_end(self) -> int:
        """The first id that the embedding does not have."""
        try:
            trunk = Trunk.of(self.model)
        except UnsupportedModelError:
            return self.vocab_size
        return int(trunk.inner(self.model)[trunk.embedding].weight.shape[0])

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raises ValueError for an id that the model lacks; mlx would read whatever lies there."""
        if max(tokens) >= self.token_end:
            raise ValueError(
                f"the prompt has token {max(tokens)}, the model's ids are 0..{self.token_end - 1}: "
                "encode it with the model's own tokenizer"
            )


class _Tap:
    """Stands in for a final norm and keeps what went through."""

    def __init__(self, norm: Callable[[mx.array], mx.array], state: HiddenState) -> None:
        self._norm, self.state = norm, state
        self._seen: mx.array | None = None

    def __call__(self, x: mx.array) -> mx.array:
        normed = self._norm(x)
        self._seen = normed if self.state == "normed" else x
        return normed

    def take(self) -> mx.array:
        seen, self._seen = self._seen, None
        assert seen is not None
        return seen


def check_quantizable(model: nn.Module, cache: list[Any], group_size: int, bits: int) -> None:
    """Refuses what would fail only when the cache is due to be quantised, tokens later.

    Raises `UnsupportedCacheError` for a sliding window and for a model whose attention cannot read
    a quantised cache, ValueError for sizes that MLX lacks or that do not divide the model's heads.
    """
    if any(type(entry) is RotatingKVCache for entry in cache):
        raise UnsupportedCacheError(
            "kv_bits needs caches that can be quantised; a RotatingKVCache (sliding window) "
            "cannot be. Leave kv_bits out for this model."
        )
    if bits not in (2, 4, 8) or group_size not in (32, 64, 128):
        raise ValueError(
            f"kv_bits must be 2, 4 or 8 and kv_group_size 32, 64 or 128, "
            f"got {bits} and {group_size}"
        )
    probe = make_prompt_cache(model)
    model(mx.zeros((1, 1), mx.int32), cache=probe)
    for entry in probe:
        if type(entry) is KVCache and entry.keys is not None:
            heads = (entry.keys.shape[-1], entry.values.shape[-1])  # type: ignore[union-attr]
            odd = next((size for size in heads if size % group_size), None)
            if odd is not None:
                raise ValueError(f"kv_group_size {group_size} does not divide the head size {odd}")
    maybe_quantize_kv_cache(probe, 0, group_size, bits)
    try:
        model(mx.zeros((1, 2), mx.int32), cache=probe)
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise UnsupportedCacheError(
            f"this model cannot read a quantised cache in mlx-lm ({error}). Leave kv_bits out."
        ) from error


def exactness(model: nn.Module, cache: list[Any], *, in_chunks: bool = False) -> str:
    """The level at which speculative and plain decoding of `model` agree on this machine.

    in_chunks    whether the prompt is read in other chunks than those of plain decoding, because a
                 store has its beginning or keeps boundaries of it

    bitwise    tokens, logprobs and caches are equal to the bit
    token      tokens are equal, values agree to 1e-5: a layer whose window formula is not its
               step formula, or a sliding window that is read in another order
    near-tie   windows round differently, by the precision of the kernels or of the weights, or
               before a cache rounds what it stores (deepseek_v41): a token may differ where the
               two best logits are within that rounding
    """
    if not row_invariant():
        return NEAR_TIE
    kinds = {stock_class(entry) for _, entry in walk(cache)}
    if any(is_own_class(kind) for kind in kinds):
        return NEAR_TIE
    by_formula = _has_window_formula(model) or (in_chunks and _sums_chunks(model))
    if RotatingKVCache not in kinds and not by_formula:
        return BITWISE
    return TOKEN if _is_float32(model) else NEAR_TIE


def _is_float32(model: nn.Module) -> bool:
    weights: Any = tree_flatten(model.parameters())
    floats = {x.dtype for _, x in weights if mx.issubdtype(x.dtype, mx.floating)}
    return floats == {mx.float32}


def _has_window_formula(model: nn.Module) -> bool:
    """Whether a layer computes a window otherwise than single steps.

    That is latent attention (`MultiLinear`): it projects the query of a single step, but the keys
    and values of a window. Recurrent layers of that kind are recorded by steps (`cache.retrace`).
    """
    return any(isinstance(module, MultiLinear) for module in model.modules())


def _sums_chunks(model: nn.Module) -> bool:
    """Whether a layer's numbers depend on the chunks that a prompt is read in, in the last bits."""
    layers = (m for m in model.modules() if type(m).__module__ in sys.modules)
    return any(has_window_formula(layer) for layer in layers)


@functools.cache
def row_invariant() -> bool:
    """Whether this machine's matmul gives a row the same bits alone and in a window.

    Measured once per process, on the CPU only: GPU kernels promise nothing of the kind.
    """
    if mx.default_device() != mx.Device(mx.cpu):
        return False
    x, w = (mx.sin(mx.arange(rows * 512) * 0.7).reshape(rows, 512) for rows in (8, 512))
    alone = mx.concatenate([x[i : i + 1] @ w.T for i in range(8)])
    return bool(mx.array_equal(x @ w.T, alone))
