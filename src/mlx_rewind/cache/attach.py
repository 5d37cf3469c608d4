"""Finding the layers that write recurrent slots, and making them recordable.

    attach(model)     finds these layers and swaps the class of the instances for a subclass
    detach(model)     gives every instance its own class back

Class and module objects of mlx and mlx-lm are never changed, so other models of the class are as
they were, and so are this model's parameter names, quantisation and saving.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache as memoize
from typing import Any

import mlx.nn as nn

from .calls import conv_call, linear_call
from .probe import has_compiled_step, has_window_formula, probe
from .retrace import recorded_call

_LINEAR = (nn.Linear, nn.QuantizedLinear)
_attachments: dict[int, Attachment] = {}
_lock = threading.RLock()


@dataclass
class Attachment:
    """What is known of one model instance and its caches.

    calls       label of a recurrent cache -> how many layer calls write it in one forward
    siblings    label of a recurrent cache -> labels of the caches that the same calls are given
    shapes      label of every other cache -> see `probe.shape_of`
    unused      labels of caches that a forward leaves empty
    fault       why windows of the model are not what its single steps are; None if they are
    window_end  tokens that a window may reach up to, see `probe.window_end`
    swapped     instances whose class was swapped
    """

    calls: dict[str, int]
    siblings: dict[str, list[str]]
    shapes: dict[str, tuple[int, ...]]
    unused: frozenset[str]
    fault: str | None
    window_end: int | None
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
        found = probe(model, _swap, _restore)
        writers: dict[int, nn.Module] = {}
        for calls in found.owners.values():
            writers.update((id(call.module), call.module) for call in calls)
            if calls:
                vars(calls[-1].module)["_rewind_counts"] = True
        for writer in writers.values():
            if has_window_formula(writer):
                vars(writer)["_rewind_steps"] = True
            if has_compiled_step(writer):
                vars(writer)["_rewind_compiled"] = True
        within = {id(m): m for writer in writers.values() for m in writer.modules()}
        linears = [module for module in within.values() if isinstance(module, _LINEAR)]
        convs = [module for module in within.values() if isinstance(module, nn.Conv1d)]
        _swap(writers.values(), recorded_call)
        _swap(linears, linear_call)
        _swap(convs, conv_call)
        attachment = Attachment(
            calls={label: len(calls) or 1 for label, calls in found.owners.items()},
            siblings=found.siblings,
            shapes=found.shapes,
            unused=found.unused,
            fault=found.fault,
            window_end=found.window_end,
            swapped=[*writers.values(), *linears, *convs],
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
