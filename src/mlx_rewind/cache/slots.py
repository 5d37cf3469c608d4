"""Recurrent caches: what their slots are, and how many tokens they hold.

A recurrent cache keeps the past in a few slots. A layer re-binds them in every forward and never
writes them in place, so the arrays that they held before are their state before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache as memoize
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

from .undo import stock_of

#: The slots of an `ArraysCache` by index, or the attributes of a class of `OWN_CLASSES` by name.
Slots = dict[Any, Any]

#: Classes that model files define for themselves. Their attributes are slots.
OWN_CLASSES = frozenset({"mlx_lm.models.deepseek_v41.LayerCache"})


def is_recurrent(entry: Any) -> bool:
    kind: Any = type(entry)
    return _is_recurrent_class(kind)


@memoize
def _is_recurrent_class(kind: type) -> bool:
    stock = stock_of(kind)
    return stock is ArraysCache or is_own_class(stock)


def is_own_class(kind: type) -> bool:
    return f"{kind.__module__}.{kind.__qualname__}" in OWN_CLASSES


def slots_of(entry: Any) -> Slots:
    if isinstance(entry, ArraysCache):
        return dict(enumerate(entry.cache))
    return {name: value for name, value in vars(entry).items() if not name.startswith("_rewind")}


def set_slots(entry: Any, slots: Slots) -> None:
    if isinstance(entry, ArraysCache):
        entry.cache = list(slots.values())
    else:
        vars(entry).update(slots)


def holds(entry: Any, slots: Slots) -> bool:
    """Whether its slots are still these very arrays."""
    now = slots_of(entry)
    return all(now[name] is slot for name, slot in slots.items())


def leaves_of(value: Any) -> tuple[Any, ...]:
    """The children of a `CacheList`, or the value itself."""
    return tuple(value.caches) if isinstance(value, CacheList) else (value,)


# -- positions ------------------------------------------------------------------------------------

#: Tokens in each `ArraysCache`, and the last slot that they were counted for.
_positions: weakref.WeakKeyDictionary[Any, tuple[int, Callable[[], mx.array | None]]] = (
    weakref.WeakKeyDictionary()
)


def position(entry: Any) -> int | None:
    """Tokens in a recurrent cache, None if unknown: slots do not tell, attached layers count.

    The count holds only for the very array it was noted for, so a restored or edited cache is
    unknown rather than wrong.
    """
    if not isinstance(entry, ArraysCache):
        return int(entry.offset)
    last = _last(entry)
    if last is None:
        return 0
    tokens, slot = _positions.get(entry, (None, None))
    return tokens if slot is not None and slot() is last else None


def _last(entry: Any) -> mx.array | None:
    """The last slot that holds anything; a model need not use all of them."""
    return next((slot for slot in reversed(entry.cache) if slot is not None), None)


def note_position(entry: Any, tokens: int) -> None:
    last = _last(entry) if isinstance(entry, ArraysCache) else None
    if last is not None:
        _positions[entry] = tokens, weakref.ref(last)
