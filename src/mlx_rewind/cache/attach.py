"""Finding the layers that write recurrent slots, and making them recordable.

    attach(model)     finds these layers and swaps the class of the instances for a subclass
    detach(model)     gives every instance its own class back

Class and module objects of mlx and mlx-lm are never changed, so other models of the class are as
they were, and so are this model's parameter names, quantisation and saving.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache as memoize
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache
from mlx_lm.models.ssm import ssm_update

from ..errors import UnsupportedModelError
from .retrace import linear_call, recorded_call, window_of
from .undo import UNDOS

_LINEAR = (nn.Linear, nn.QuantizedLinear)
_PROBE_WINDOW = 3
_local = threading.local()
_attachments: dict[int, Attachment] = {}
_lock = threading.RLock()


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


@dataclass
class Attachment:
    """What is known of one model instance and its caches.

    calls      label of a recurrent cache -> how many layer calls write it in one forward
    shapes     label of every other cache -> see `shape_of`
    swapped    instances whose class was swapped
    """

    calls: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    swapped: list[nn.Module]


@memoize
def _subclass(base: type, wrapper: Callable[..., Any]) -> type:
    """A subclass of a layer's class whose call goes through `wrapper(stock call, layer, ...)`."""
    stock: Any = vars(base).get("__call__") or base.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return wrapper(stock, self, *args, **kwargs)

    names = {"__call__": call, "__module__": base.__module__}
    return type(base.__name__, (base,), {**names, "_rewind_base": base, "_rewind_call": wrapper})


def _swap(modules: Iterable[nn.Module], wrapper: Callable[..., Any]) -> None:
    for module in modules:
        if vars(type(module)).get("_rewind_call") is not wrapper:
            module.__class__ = _subclass(type(module), wrapper)


def _restore(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        module.__class__ = type(module)._rewind_base  # type: ignore[attr-defined]


def attach(model: nn.Module) -> Attachment:
    """Finds the layers that write recurrent slots and makes them recordable. Idempotent.

    One lazy forward over three tokens on a fresh cache shows which layer writes which slots;
    nothing of it is ever computed.

    Raises `UnsupportedModelError`, before any change, if a layer cannot be recorded.
    """
    with _lock:
        known = _attachments.get(id(model))
        if known is not None:
            return known
        owners, shapes = _probe(model)
        writers: dict[int, nn.Module] = {}
        for calls in owners.values():
            writers.update((id(call.module), call.module) for call in calls)
            vars(calls[-1].module)["_rewind_counts"] = True
        for writer in writers.values():
            if _has_window_formula(writer):
                vars(writer)["_rewind_steps"] = True
        linears = {
            id(child): child
            for writer in writers.values()
            for child in writer.modules()
            if isinstance(child, _LINEAR)
        }
        _swap(writers.values(), recorded_call)
        _swap(linears.values(), linear_call)
        attachment = Attachment(
            calls={label: len(calls) for label, calls in owners.items()},
            shapes=shapes,
            swapped=[*writers.values(), *linears.values()],
        )
        _attachments[id(model)] = attachment
        weakref.finalize(model, _attachments.pop, id(model), None)
        return attachment


def detach(model: nn.Module) -> None:
    """Gives every instance that `attach` swapped its own class back."""
    with _lock:
        attachment = _attachments.pop(id(model), None)
        if attachment is not None:
            # A model and its wrapper, both attached, share their layers.
            shared = {id(module) for known in _attachments.values() for module in known.swapped}
            _restore(module for module in attachment.swapped if id(module) not in shared)


def _has_window_formula(layer: nn.Module) -> bool:
    """Whether the layer's file computes windows and single steps by different formulas."""
    return vars(sys.modules[type(layer).__module__]).get("ssm_update") is ssm_update


# -- probing: which layer writes which slots ------------------------------------------------------


@dataclass(eq=False)
class _ProbedCall:
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parent: _ProbedCall | None
    output: Any = None


class _ProbedCache(ArraysCache):
    """A scratch cache that notes which call writes its slots."""

    def __setitem__(self, index: int, value: Any) -> None:
        self.cache[index] = value
        vars(self).setdefault("noted", {})[index] = value
        writers = vars(self).setdefault("writers", [])
        call = getattr(_local, "probed", None)
        if call not in writers:
            writers.append(call)


def _probed_call(stock: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not getattr(_local, "probing", False):
        return stock(layer, *args, **kwargs)  # another thread's forward
    parent = getattr(_local, "probed", None)
    _local.probed = call = _ProbedCall(layer, args, kwargs, parent)
    try:
        call.output = stock(layer, *args, **kwargs)
    finally:
        _local.probed = parent
    return call.output


def _probe(model: nn.Module) -> tuple[dict[str, list[_ProbedCall]], dict[str, tuple[int, ...]]]:
    """Runs the lazy forward. Returns who writes each recurrent cache, and the others' shapes."""
    cache = make_prompt_cache(model)
    leaves = dict(walk(cache))
    recurrent = {label: leaf for label, leaf in leaves.items() if type(leaf) is ArraysCache}
    for entry in recurrent.values():
        entry.__class__ = _ProbedCache
    unique = {id(m): m for m in model.modules() if m is not model and callable(m)}
    modules = list(unique.values()) if recurrent else []
    _swap(modules, _probed_call)
    _local.probing = True
    try:
        model(mx.zeros((1, _PROBE_WINDOW), mx.int32), cache=cache)
    finally:
        _local.probing = False
        _restore(modules)
    owners = {label: _check_owners(label, entry) for label, entry in recurrent.items()}
    attention = ((label, leaf) for label, leaf in leaves.items() if type(leaf) in UNDOS)
    return owners, {label: shape_of(leaf) for label, leaf in attention}


def _check_owners(label: str, cache: Any) -> list[_ProbedCall]:
    """Refuses what a tape could not record; returns the calls that write the slots of `cache`."""
    writers = vars(cache).get("writers", [])
    noted = vars(cache).get("noted", {})

    def refuse(layer: str, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"cache {label} (ArraysCache) of layer {layer} cannot be rolled back: {reason}. "
            "Decode this model with mlx_lm itself."
        )

    if not writers or any(noted.get(i) is not slot for i, slot in enumerate(cache.cache)):
        raise refuse("unknown", "its slots are bound in a way that cannot be observed")
    for call in writers:
        if call is None:
            raise refuse("unknown", "its slots are written outside any layer")
        name = type(call.module).__name__
        if not any(a is cache for a in (*call.args, *call.kwargs.values())):
            raise refuse(name, "the layer does not receive the cache as an argument of its own")
        if window_of(call.args, call.kwargs) != _PROBE_WINDOW:
            raise refuse(name, "the layer receives no array with the window on its second axis")
        if _has_window_formula(call.module) and not isinstance(call.output, mx.array):
            raise refuse(name, "it computes windows by a formula of its own and returns no array")
        parent = call.parent
        while parent is not None:
            if parent in writers:
                raise refuse(name, f"{type(parent.module).__name__} around it writes them too")
            parent = parent.parent
    return list(writers)
