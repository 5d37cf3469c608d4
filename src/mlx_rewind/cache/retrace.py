"""Recurrent layers: record a window, then call the layer's own forward again on its kept part.

A recurrent layer keeps its past in a few slots of an `ArraysCache` and re-binds them in every
forward. To keep m of S fed tokens, the old slots are put back and the layer runs once more on its
first m inputs. The outputs of its Linear children were recorded and are handed back. MLX is lazy
and only the slots are read afterwards, so what really runs is the convolution and the recurrence.
No formula is written here and no model is named.

    attach(model)     finds the layers that write slots and swaps the class of these instances
    Tape              the calls of one cache during one round, and the way back into them
    detach(model)     restores the instances
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache as memoize
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache
from mlx_lm.models.ssm import ssm_update

from ..errors import UnsupportedCacheError, UnsupportedModelError

Slots = list[Any]

_LINEAR = (nn.Linear, nn.QuantizedLinear)
_PROBE_WINDOW = 3
_local = threading.local()
_tapes: dict[int, Tape] = {}
_attachments: dict[int, Attachment] = {}
_lock = threading.RLock()


def walk(cache: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yields (label, cache object) of every leaf, children of a `CacheList` in its place."""
    for i, entry in enumerate(cache):
        if type(entry) is CacheList:
            yield from ((f"{i}[{j}]", child) for j, child in enumerate(entry.caches))
        else:
            yield str(i), entry


# -- attaching ---------------------------------------------------------------------------------


@dataclass
class Attachment:
    """The recurrent layers of one model instance.

    calls           label of a cache -> how many layer calls write it in one forward
    swapped         instances whose class was swapped
    block_formula   a layer uses `ssm_update`, whose window formula differs from its step
    """

    calls: dict[str, int]
    swapped: list[nn.Module]
    block_formula: bool


@memoize
def _subclass(base: type, wrapper: Callable[..., Any]) -> type:
    """A subclass of a layer's class whose call goes through `wrapper(stock call, layer, ...)`."""
    stock: Any = vars(base).get("__call__") or base.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return wrapper(stock, self, *args, **kwargs)

    names = {"__call__": call, "__module__": base.__module__, "_rewind_base": base}
    return type(base.__name__, (base,), names)


def _swap(modules: Iterable[nn.Module], wrapper: Callable[..., Any]) -> None:
    for module in modules:
        module.__class__ = _subclass(type(module), wrapper)


def _restore(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        module.__class__ = type(module)._rewind_base  # type: ignore[attr-defined]


def attach(model: nn.Module) -> Attachment:
    """Finds the layers that write recurrent slots and makes them recordable. Idempotent.

    One lazy forward over three tokens on a fresh cache shows which layer writes which slots; nothing
    of it is ever computed. Then these layers and their Linear children get a subclass of their own
    class, per instance: parameter names, quantisation and saving stay as they are.

    Raises `UnsupportedModelError`, before any change, if a layer cannot be recorded.
    """
    with _lock:
        known = _attachments.get(id(model))
        if known is not None:
            return known
        owners = _find_owners(model)
        writers: dict[int, nn.Module] = {}
        for calls in owners.values():
            writers.update((id(call.module), call.module) for call in calls)
            vars(calls[-1].module)["_rewind_counts"] = True
        linears = {
            id(child): child
            for writer in writers.values()
            for child in writer.modules()
            if isinstance(child, _LINEAR)
        }
        taken = _swapped_elsewhere()
        _swap((m for key, m in writers.items() if key not in taken), _recorded_call)
        _swap((m for key, m in linears.items() if key not in taken), _linear_call)
        attachment = Attachment(
            calls={label: len(calls) for label, calls in owners.items()},
            swapped=[*writers.values(), *linears.values()],
            block_formula=any(_uses(writer, ssm_update) for writer in writers.values()),
        )
        _attachments[id(model)] = attachment
        weakref.finalize(model, _attachments.pop, id(model), None)
        return attachment


def detach(model: nn.Module) -> None:
    """Gives every instance that `attach` swapped its own class back."""
    with _lock:
        attachment = _attachments.pop(id(model), None)
        if attachment is not None:
            taken = _swapped_elsewhere()
            _restore(module for module in attachment.swapped if id(module) not in taken)


def _swapped_elsewhere() -> set[int]:
    """Layers that an attached model shares with another, such as a model and its wrapper."""
    return {id(module) for known in _attachments.values() for module in known.swapped}


def _uses(module: nn.Module, function: Callable[..., Any]) -> bool:
    namespace = vars(sys.modules[type(module).__module__])
    return any(value is function for value in namespace.values())


# -- probing: which layer writes which slots ------------------------------------------------------


@dataclass(eq=False)
class _ProbedCall:
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parent: _ProbedCall | None


class _ProbedCache(ArraysCache):  # type: ignore[misc]
    """A scratch cache that notes which call writes its slots."""

    def __setitem__(self, index: int, value: Any) -> None:
        super().__setitem__(index, value)
        vars(self).setdefault("noted", {})[index] = value
        writers = vars(self).setdefault("writers", [])
        call = getattr(_local, "probed", None)
        if call not in writers:
            writers.append(call)


def _probed_call(stock: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not getattr(_local, "probing", False):
        return stock(layer, *args, **kwargs)  # another thread's forward
    parent = getattr(_local, "probed", None)
    _local.probed = _ProbedCall(layer, args, kwargs, parent)
    try:
        return stock(layer, *args, **kwargs)
    finally:
        _local.probed = parent


def _find_owners(model: nn.Module) -> dict[str, list[_ProbedCall]]:
    cache = make_prompt_cache(model)
    recurrent = {label: c for label, c in walk(cache) if type(c) is ArraysCache}
    if not recurrent:
        return {}
    for entry in recurrent.values():
        entry.__class__ = _ProbedCache
    modules = [m for m in model.modules() if m is not model and callable(m)]
    _swap(modules, _probed_call)
    _local.probing = True
    try:
        model(mx.zeros((1, _PROBE_WINDOW), mx.int32), cache=cache)
    finally:
        _local.probing = False
        _restore(modules)
    return {label: _check_owners(label, entry) for label, entry in recurrent.items()}


def _check_owners(label: str, cache: Any) -> list[_ProbedCall]:
    """Refuses what a tape could not record; returns the calls that write the slots of `cache`."""
    writers = vars(cache).get("writers", [])
    noted = vars(cache).get("noted", {})

    def refuse(layer: str, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"cache {label} (ArraysCache) of layer {layer} cannot be rolled back: {reason}. "
            "Use this model without a drafter."
        )

    if not writers or any(noted.get(i) is not slot for i, slot in enumerate(cache.cache)):
        raise refuse("unknown", "its slots are bound in a way that cannot be observed")
    for call in writers:
        if call is None:
            raise refuse("unknown", "its slots are written outside any layer")
        name = type(call.module).__name__
        if not any(a is cache for a in (*call.args, *call.kwargs.values())):
            raise refuse(name, "the layer does not receive the cache as an argument of its own")
        if _window(call.args, call.kwargs) != _PROBE_WINDOW:
            raise refuse(name, "the layer receives no array with the window on its second axis")
        parent = call.parent
        while parent is not None:
            if parent in writers:
                raise refuse(name, f"{type(parent.module).__name__} around it writes them too")
            parent = parent.parent
    return list(writers)


def _window(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Tokens in a layer call: the second axis of its first array of two or more axes."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, mx.array) and value.ndim >= 2:
            return int(value.shape[1])
    return 0


# -- recording and replaying ------------------------------------------------------------------------


def _recorded_call(stock: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    cache = next((a for a in (*args, *kwargs.values()) if isinstance(a, ArraysCache)), None)
    if cache is None:
        return stock(layer, *args, **kwargs)
    known = position(cache)
    tape = _tapes.get(id(cache))
    if tape is None:
        output = stock(layer, *args, **kwargs)
    else:
        output = tape.record(stock, layer, args, kwargs)
    if known is not None:
        counts = "_rewind_counts" in vars(layer)
        note_position(cache, known + counts * _window(args, kwargs))
    return output


def _linear_call(stock: Callable[..., Any], linear: nn.Module, x: mx.array) -> mx.array:
    linears: _Linears | None = getattr(_local, "linears", None)
    return stock(linear, x) if linears is None else linears(stock, linear, x)


class _Linears:
    """The Linear outputs of one layer call: recorded first, handed back in a replay."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.outputs: dict[int, list[mx.array]] = {}
        self._replay: dict[int, deque[mx.array]] | None = None
        self._kept = 0

    def replay(self, kept: int) -> None:
        self._replay = {key: deque(outputs) for key, outputs in self.outputs.items()}
        self._kept = kept

    def __call__(self, stock: Callable[..., Any], linear: nn.Module, x: mx.array) -> mx.array:
        windowed = x.ndim >= 3 and x.shape[1] == (self._kept or self.window)
        recorded = self._replay.get(id(linear)) if self._replay else None
        if windowed and recorded:
            return recorded.popleft()[:, : self._kept]
        output: mx.array = stock(linear, x)
        if windowed and self._replay is None:
            self.outputs.setdefault(id(linear), []).append(output)
        return output


@dataclass
class _Call:
    """One recorded call of a layer, and the slots before it."""

    stock: Callable[..., Any]
    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: Slots
    window: int
    linears: _Linears

    def replay(self, kept: int) -> None:
        """Runs the layer on its first `kept` inputs; what counts is what it does to the slots."""

        def cut(value: Any) -> Any:
            windowed = isinstance(value, mx.array) and value.ndim >= 2
            return value[:, :kept] if windowed and value.shape[1] == self.window else value

        args, kwargs = tree_map(cut, [list(self.args), self.kwargs])
        self.linears.replay(kept)
        _local.linears = self.linears
        try:
            self.stock(self.layer, *args, **kwargs)
        finally:
            _local.linears = None


@dataclass
class Tape:
    """What one `ArraysCache` went through in one round.

    calls_per_forward   layer calls that write it in one forward
    """

    cache: Any
    calls_per_forward: int
    calls: list[_Call] = field(default_factory=list)

    def start(self) -> None:
        if id(self.cache) in _tapes:
            raise RuntimeError("this prompt cache is already inside an open Round")
        _tapes[id(self.cache)] = self

    def stop(self) -> None:
        _tapes.pop(id(self.cache), None)

    def record(
        self, stock: Callable[..., Any], layer: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        window = _window(args, kwargs)
        linears = _Linears(window)
        before = list(self.cache.cache)
        self.calls.append(_Call(stock, layer, args, kwargs, before, window, linears))
        _local.linears = linears if window > 1 else None
        try:
            return stock(layer, *args, **kwargs)
        finally:
            _local.linears = None

    @property
    def fed(self) -> int:
        return sum(call.window for call in self.calls) // self.calls_per_forward

    def seek(self, kept: int) -> None:
        """Sets the slots to what they are after `kept` of the recorded tokens, one or more."""
        first = 0
        while kept > self.calls[first].window:
            kept -= self.calls[first].window
            first += self.calls_per_forward
        forward = self.calls[first : first + self.calls_per_forward]
        following = self.calls[first + self.calls_per_forward :]
        if kept == forward[0].window and following:
            self.cache.cache = list(following[0].before)
            return
        self.cache.cache = list(forward[0].before)
        for call in forward:
            call.replay(kept)


class RetraceUndo:
    """The undo of an `ArraysCache`: old slots, and the layer's own forward over the kept part."""

    mechanism = "retrace"

    def __init__(self, cache: Any, calls_per_forward: int) -> None:
        if cache.left_padding is not None or cache.lengths is not None:
            raise UnsupportedCacheError(
                "an ArraysCache with left_padding or lengths belongs to a batch; "
                "extract its rows and open one Round per row"
            )
        self._cache = cache
        self._tape = Tape(cache, calls_per_forward)
        self._before = (list(cache.cache), position(cache))
        self._tape.start()

    def seal(self) -> int:
        self._tape.stop()
        self._fed = self._tape.fed
        self._after = list(self._cache.cache)
        return self._fed

    def rewind(self, kept: int) -> None:
        slots, start = self._before
        if kept == 0:
            self._cache.cache = list(slots)
        elif kept == self._fed:
            self._cache.cache = list(self._after)
        else:
            self._tape.seek(kept)
        if start is not None:
            note_position(self._cache, start + kept)


# -- positions ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Position:
    tokens: int
    slots: tuple[Callable[[], mx.array | None], ...]


_positions: weakref.WeakKeyDictionary[Any, _Position] = weakref.WeakKeyDictionary()


def position(cache: Any) -> int | None:
    """Tokens in an `ArraysCache`, None if unknown: slots do not tell, attached layers count.

    The count holds only for the very arrays it was noted for, so a restored or edited cache is
    unknown rather than wrong.
    """
    if all(slot is None for slot in cache.cache):
        return 0
    noted = _positions.get(cache)
    if noted is None or len(noted.slots) != len(cache.cache):
        return None
    same = all(ref() is slot for ref, slot in zip(noted.slots, cache.cache, strict=True))
    return noted.tokens if same else None


def note_position(cache: Any, tokens: int) -> None:
    _positions[cache] = _Position(tokens, tuple(map(_reference, cache.cache)))


def _reference(slot: mx.array | None) -> Callable[[], mx.array | None]:
    return (lambda: None) if slot is None else weakref.ref(slot)
