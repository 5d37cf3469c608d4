"""Looking at a model through one lazy forward: which layer writes which slots.

The forward feeds three tokens to a fresh cache; nothing of it is ever computed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache as memoize
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, RotatingKVCache, make_prompt_cache
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE
from mlx_lm.models.ssm import ssm_update

from ..errors import UnsupportedModelError
from .calls import Stock, window_of
from .retrace import LOG, OwnUndo
from .slots import Slots, is_recurrent, leaves_of, slots_of
from .undo import UNDOS

#: Model files whose attention of a window is not that of its tokens, in mlx-lm itself.
_FAULTY = {
    "mlx_lm.models.phi3small": "its block-sparse attention adds a mask of booleans, "
    "so that a token sees later ones"
}
_WINDOW = 3
_COMPILED = type(mx.compile(lambda x: x))
_local = threading.local()

Wrapper = Callable[..., Any]


def walk(cache: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yields (label, cache object) of every leaf, children of a `CacheList` in its place."""
    for i, entry in enumerate(cache):
        if type(entry) is CacheList:
            yield from ((f"{i}[{j}]", child) for j, child in enumerate(entry.caches))
        else:
            yield str(i), entry


def shape_of(cache: Any) -> tuple[int, ...]:
    """Heads and head sizes of an attention cache's keys and values; () if empty or quantised."""
    keys, values = vars(cache).get("keys"), vars(cache).get("values")
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
        return ()
    return keys.shape[1], keys.shape[-1], values.shape[-1]


def has_window_formula(layer: nn.Module) -> bool:
    """Whether the layer's file computes windows and single steps by different formulas."""
    return vars(sys.modules[type(layer).__module__]).get("ssm_update") is ssm_update


def has_compiled_step(layer: nn.Module) -> bool:
    """Whether the layer compiles a part of itself: what runs there must not be recorded."""
    return any(isinstance(value, _COMPILED) for value in vars(layer).values())


def window_end(model: nn.Module) -> int | None:
    """Tokens that a window may reach up to; a later token has to be fed alone. None: no limit.

    `DynamicNTKScalingRoPE` turns all positions of a forward by the base of the last one, once that
    lies beyond the positions it was trained for.
    """
    ropes = (m for m in model.modules() if isinstance(m, DynamicNTKScalingRoPE))
    return min((rope.max_position_embeddings for rope in ropes), default=None)


def check_end(limit: int | None, fed: int, end: int, way_out: str) -> None:
    """Raises `UnsupportedModelError` for a window of `fed` tokens that ends beyond `window_end`."""
    if limit is not None and fed > 1 and end > limit:
        raise UnsupportedModelError(
            f"a window of {fed} tokens ends at {end}: beyond {limit} this model's "
            "DynamicNTKScalingRoPE turns a window otherwise than single tokens. Feed them "
            f"{way_out}."
        )


@dataclass
class Found:
    """What a probe saw; keys are labels of caches.

    owners      recurrent cache -> calls that write it; none if it brings its own undo
    siblings    recurrent cache -> the attention caches that these calls are given too
    shapes      attention cache -> see `shape_of`
    unused      caches that the forward left empty
    fault       why windows of this model are not what its single steps are, by a fault of mlx-lm
    window_end  see `window_end`
    """

    owners: dict[str, list[ProbedCall]]
    siblings: dict[str, list[str]]
    shapes: dict[str, tuple[int, ...]]
    unused: frozenset[str]
    fault: str | None
    window_end: int | None


@dataclass(eq=False)
class ProbedCall:
    """A call of a module in the probe, and the call that it was made in."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parent: ProbedCall | None
    output: Any = None

    @property
    def caches(self) -> list[Any]:
        """The cache objects that it was given, children of a `CacheList` in its place."""
        given = (leaf for value in (*self.args, *self.kwargs.values()) for leaf in leaves_of(value))
        return [leaf for leaf in given if is_recurrent(leaf) or type(leaf) in UNDOS]


class _Notes:
    """What a recurrent cache went through in the probe."""

    def __init__(self) -> None:
        self.bound: dict[Any, Any] = {}
        self.writers: list[ProbedCall | None] = []
        self.has_own_undo = False

    def bind(self, slot: Any, value: Any) -> None:
        self.bound[slot] = value
        call = getattr(_local, "call", None)
        if call not in self.writers:
            self.writers.append(call)

    def record(self, stock: Stock, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return stock(layer, *args, **kwargs)

    def record_own(self, window: int, fn: OwnUndo, before: list[Any]) -> None:
        self.has_own_undo = window == _WINDOW


@memoize
def _noting(base: Any) -> type:
    """A subclass of a recurrent cache's class that notes which call writes its slots."""

    def set_item(self: Any, index: int, value: Any) -> None:
        self.cache[index] = value
        vars(self)[LOG].bind(index, value)

    def set_attribute(self: Any, name: str, value: Any) -> None:
        vars(self)[name] = value
        vars(self)[LOG].bind(name, value)

    hook = {"__setitem__": set_item} if base is ArraysCache else {"__setattr__": set_attribute}
    return type(base.__name__, (base,), {**hook, "_rewind_base": base})


def _probed_call(stock: Stock, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not getattr(_local, "probing", False):
        return stock(layer, *args, **kwargs)  # another thread's forward
    parent = getattr(_local, "call", None)
    _local.call = call = ProbedCall(layer, args, kwargs, parent)
    try:
        call.output = stock(layer, *args, **kwargs)
    finally:
        _local.call = parent
    return call.output


def probe(
    model: nn.Module,
    swap: Callable[[Iterable[nn.Module], Wrapper], None],
    restore: Callable[[Iterable[nn.Module]], None],
) -> Found:
    """Runs the lazy forward, every module's call wrapped by `swap` until `restore`.

    Raises `UnsupportedModelError` if what writes a slot cannot be recorded.
    """
    cache = make_prompt_cache(model)
    leaves = dict(walk(cache))
    recurrent = {label: leaf for label, leaf in leaves.items() if is_recurrent(leaf)}
    before = {label: slots_of(leaf) for label, leaf in recurrent.items()}
    for entry in recurrent.values():
        vars(entry)[LOG] = _Notes()
        kind: Any = type(entry)
        entry.__class__ = _noting(kind)
    masks = [_note_masks(leaf) for leaf in leaves.values() if type(leaf) is RotatingKVCache]
    unique = {id(m): m for m in model.modules() if m is not model and callable(m)}
    modules = list(unique.values()) if recurrent else []
    if recurrent:  # a layer may compile its single step when it first meets one
        model(mx.zeros((1, 1), mx.int32), cache=make_prompt_cache(model))
    swap(modules, _probed_call)
    _local.probing = True
    try:
        model(mx.zeros((1, _WINDOW), mx.int32), cache=cache)
    finally:
        _local.probing = False
        restore(modules)
    owners = {label: _owners(label, leaf, before[label]) for label, leaf in recurrent.items()}
    labels = {id(leaf): label for label, leaf in leaves.items()}
    attention = {label: leaf for label, leaf in leaves.items() if label not in recurrent}
    return Found(
        owners=owners,
        siblings={
            label: [
                labels[id(leaf)]
                for call in calls
                for leaf in call.caches
                if labels.get(id(leaf)) in attention
            ]
            for label, calls in owners.items()
        },
        shapes={label: shape_of(leaf) for label, leaf in attention.items()},
        unused=frozenset(label for label, leaf in attention.items() if leaf.empty()),
        fault=_FAULTY.get(type(model).__module__) or _mask_fault(masks),
        window_end=window_end(model),
    )


def _note_masks(ring: RotatingKVCache) -> list[tuple[int, int]]:
    """A list that notes (tokens that a mask shows, tokens that the ring holds)."""
    noted: list[tuple[int, int]] = []

    def make_mask(n: int, window_size: int | None = None, return_array: bool = False) -> Any:
        noted.append((window_size or ring.max_size, ring.max_size))
        return RotatingKVCache.make_mask(ring, n, window_size, return_array)

    vars(ring)["make_mask"] = make_mask
    return noted


def _mask_fault(masks: list[list[tuple[int, int]]]) -> str | None:
    """A window whose mask shows more tokens than the ring holds sees more than a single step."""
    for shown, held in (pair for noted in masks for pair in noted):
        if shown > held:
            return (
                f"a window shows {shown} tokens to each of its own, but the RotatingKVCache of "
                f"{held} shows {held} to a single step"
            )
    return None


def _owners(label: str, cache: Any, before: Slots) -> list[ProbedCall]:
    """The outermost calls that write the slots of `cache`. Refuses what a tape could not record."""
    notes: _Notes = vars(cache)[LOG]
    if notes.has_own_undo:
        return []

    def refuse(layer: str, reason: str) -> UnsupportedModelError:
        name = type(cache).__name__
        return UnsupportedModelError(
            f"cache {label} ({name}) of layer {layer} cannot be rolled back: {reason}. "
            "Decode this model with mlx_lm itself, or let its file call mlx_rewind.record_rollback."
        )

    if not notes.writers or not _all_noted(notes, slots_of(cache), before):
        raise refuse("unknown", "its slots are bound in a way that cannot be observed")
    calls = [call for call in notes.writers if call is not None]
    if len(calls) < len(notes.writers):
        raise refuse("unknown", "its slots are written outside any layer")
    outermost = [call for call in calls if not any(p in calls for p in _parents(call))]
    for call in outermost:
        name = type(call.module).__name__
        given = [entry for entry in call.caches if is_recurrent(entry)]
        if not any(entry is cache for entry in given):
            raise refuse(name, "the layer does not receive the cache as an argument of its own")
        if len(given) > 1:
            raise refuse(name, f"the layer receives {len(given)} recurrent caches")
        if window_of(call.args, call.kwargs) != _WINDOW:
            raise refuse(name, "the layer receives no array with the window on its second axis")
        if has_window_formula(call.module) and not isinstance(call.output, mx.array):
            raise refuse(name, "it computes windows by a formula of its own and returns no array")
    return outermost


def _all_noted(notes: _Notes, slots: Slots, before: Slots) -> bool:
    """Whether every slot is as it was, or holds what it was seen to be bound to."""
    return all(value is notes.bound.get(slot, before[slot]) for slot, value in slots.items())


def _parents(call: ProbedCall) -> Iterator[ProbedCall]:
    while call.parent is not None:
        call = call.parent
        yield call
