"""The trim protocol: `cache.trim(n)` undoes exactly, for engines that are built around it.

    start_speculation(model, cache)
    model(window, cache=cache)                   # any number of forwards
    for entry in cache: entry.trim(rejected)     # or mlx_lm's trim_prompt_cache
    stop_speculation(cache)

Each cache keeps a log of its last forwards, each with the undo that a `Round` would use for it:

    log   [ forward of 5 | forward of 1 | forward of 3 ]        trim(2): the last one keeps 1
            `---------------- window ---------------'

A cache need not hold its state before every forward: it follows from the forward before.
"""

from __future__ import annotations

import operator
from functools import cache as memoize
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from ..errors import UnsupportedModelError
from .calls import Stock, window_of
from .probe import walk
from .retrace import LOG, OwnUndo, RetraceUndo, is_recorded
from .round import check
from .slots import is_recurrent
from .undo import UNDOS, RingUndo, TrimUndo, Undo, stock_class

#: Tokens between two states that the log of a recurrent cache, a ring or a chunk keeps.
_SPACING = 16


def start_speculation(model: nn.Module, cache: list[Any], window: int = 64) -> None:
    """Makes every cache of a prompt cache of `model` trimmable until `stop_speculation`.

    Between the two, `is_trimmable()` is true and `trim(n)` takes back the last n tokens exactly,
    across any number of forwards, up to `window` of them. Beyond it `trim` raises ValueError and
    changes nothing. A forward of more than `window` tokens (prefill) is not recorded and cannot be
    taken back. The objects stay what they are: they can be saved, copied (the copy is stock again)
    and fed as before.

    Raises `UnsupportedCacheError` or `UnsupportedModelError`, with nothing changed, where a `Round`
    would, and for a prompt cache that speculates already.
    """
    if operator.index(window) < 1:
        raise ValueError(f"window must be at least 1 token, got {window}")
    plan = check(model, cache)
    plan.check_windows()
    if any(is_recorded(entry) for _, entry in plan.leaves):
        raise RuntimeError("this prompt cache is inside an open Round: end it first")
    logs = {
        label: _RecurrentLog(entry, window, plan.calls[label])
        if is_recurrent(entry)
        else _Log(entry, window)
        for label, entry in plan.leaves
    }
    for label, log in logs.items():
        log.group = list(logs.values())
        log.window_end = plan.window_end
        log.siblings = [logs[sibling] for sibling in plan.siblings.get(label, ())]
        log.watch(log.cache)


def stop_speculation(cache: list[Any]) -> None:
    """Makes the caches stock again and drops what was recorded. Without effect on stock caches."""
    for _, entry in walk(cache):
        if vars(entry).pop(LOG, None) is not None:
            entry.__class__ = stock_class(entry)


def speculative_prompt_cache(
    model: nn.Module, draft_model: nn.Module, window: int = 64
) -> list[Any]:
    """A prompt cache for mlx-lm's own speculative decoding, exact for every model.

        cache = speculative_prompt_cache(model, draft_model)
        speculative_generate_step(prompt, model, draft_model, prompt_cache=cache)   # mlx_lm's

    It holds fresh caches of the model, then of the draft model, all of them speculating.

    Raises what `start_speculation` raises.
    """
    ours, drafts = make_prompt_cache(model), make_prompt_cache(draft_model)
    start_speculation(model, ours, window)
    start_speculation(draft_model, drafts, window)
    return _TwoCaches(ours, drafts, boundary=len(model.layers))


class _TwoCaches(list[Any]):
    """mlx-lm cuts the list at the number of the model's layers, not of its caches."""

    def __init__(self, ours: list[Any], drafts: list[Any], boundary: int) -> None:
        super().__init__([*ours, *drafts])
        self._count, self._boundary = len(ours), boundary

    def __getitem__(self, index: Any) -> Any:
        if index == slice(None, self._boundary):
            index = slice(None, self._count)
        elif index == slice(self._boundary, None):
            index = slice(self._count, None)
        return super().__getitem__(index)


class _Log:
    """The last forwards of one cache: each undo, and the tokens of it that are in the cache.

    fed           tokens that went into the cache since the start, whatever was trimmed
    group         the logs of all caches of the list, which are fed the same
    siblings      those of the attention caches that a recurrent layer is given too
    window_end    tokens that a window may reach up to, see `probe.window_end`
    """

    def __init__(self, cache: Any, window: int) -> None:
        self.cache, self.window = cache, window
        self.fed = 0
        self.group: list[_Log] = []
        self.window_end: int | None = None
        self.siblings: list[_Log] = []
        self._stock: Any = type(cache)
        self._forwards: list[tuple[Any, int]] = []
        self._opened: Undo | None = None

    def watch(self, cache: Any) -> None:
        """Swaps the class of a cache object for one that tells this log."""
        self.cache, self._stock = cache, type(cache)
        cache.__class__ = _speculating(self._stock)
        vars(cache)[LOG] = self

    @property
    def depth(self) -> int:
        return min(sum(kept for _, kept in self._forwards), self.window)

    # -- forwards -------------------------------------------------------------------------------

    def open(self) -> Undo:
        """The undo of the next forward, also where a model touches the cache before it appends."""
        self._opened = self._opened or UNDOS[self._stock](self.cache)
        return self._opened

    def append(self, keys: Any, values: Any) -> Any:
        fed = keys.shape[2]
        self._check_end(fed)
        undo, self._opened = self._opened, None
        self.fed += fed
        if fed > self.window:
            self._forwards.clear()
            return self._stock.update_and_fetch(self.cache, keys, values)
        undo = undo or self._undo_of(fed)
        undo.start()
        append = vars(self.cache).get("update_and_fetch")  # where the undo wants to see it
        try:
            if append is None:
                return self._stock.update_and_fetch(self.cache, keys, values)
            return append(keys, values)
        finally:
            self._push(undo, undo.seal())

    def _check_end(self, fed: int) -> None:
        end = self.cache.offset + fed
        if self.window_end is not None and 1 < fed <= self.window and end > self.window_end:
            raise UnsupportedModelError(
                f"a window of {fed} tokens ends at {end}: beyond {self.window_end} this model's "
                "DynamicNTKScalingRoPE turns a window otherwise than single tokens. Feed them one "
                "by one, or stop_speculation(cache)."
            )

    def _undo_of(self, fed: int) -> Undo:
        link = self._link() if self._stock is RotatingKVCache and fed == 1 else None
        if link is not None:  # a single step would have to copy a ring that is held
            return RingUndo(self.cache, link=link)
        return UNDOS[self._stock](self.cache)

    def _link(self, *, before_last: bool = False) -> tuple[Undo, int] | None:
        """The last forward (or the one before it), unless it is time to keep a state."""
        forwards = self._forwards[:-1] if before_last else self._forwards
        since = 0
        for undo, kept in reversed(forwards):
            since += kept
            if undo.stands_alone:
                break
        return forwards[-1] if forwards and since < _SPACING and not self.siblings else None

    def _push(self, undo: Undo, fed: int) -> None:
        """Adds a forward. The last one so far lets go of what follows from its neighbours."""
        if self._forwards:
            last, _ = self._forwards[-1]
            last.settle()
            link = self._link(before_last=True)
            if link is not None:
                last.chain(*link)
        self._forwards.append((undo, fed))
        self._forget()

    def _forget(self) -> None:
        """Drops the oldest forwards that the window does not need."""
        held = 0
        for i, (undo, kept) in reversed(list(enumerate(self._forwards))):
            held += kept
            if held >= self.window and undo.stands_alone:
                del self._forwards[:i]
                return

    def follow(self, cache: Any) -> Any:
        """Goes on with the quantised form of the cache."""
        for undo, _ in self._forwards:
            undo.follow(cache)
        self.watch(cache)
        return cache

    # -- trim -----------------------------------------------------------------------------------

    def trim(self, n: int) -> int:
        n = operator.index(n)
        if not 0 <= n <= self.depth:
            raise ValueError(
                f"trim(n) can undo 0 to {self.depth} tokens here, got {n}: "
                f"start_speculation(model, cache, window={self.window}) keeps so many, and does "
                "not record a longer forward"
            )
        if n and any(log.fed != self.fed for log in self.group):
            raise RuntimeError(
                "the caches were fed different numbers of tokens since start_speculation: a "
                "forward failed half-way, or the model was detached. Start from a fresh cache."
            )
        left = n
        while left:
            undo, fed = self._forwards.pop()
            kept = max(fed - left, 0)
            left -= fed - kept
        if n:
            for sibling in self.siblings:
                sibling.rewind_whole(n + kept)
            undo.rewind(kept)
            self._forwards += [(undo, kept)] * (kept > 0)
        return n

    def rewind_whole(self, n: int) -> None:
        """Takes back the last n tokens, whole forwards, of which the log still knows."""
        for undo, fed in reversed(self._forwards):
            n -= fed
            if n == 0:
                undo.rewind(0)


class _RecurrentLog(_Log):
    """The same for slots, whose forwards are layer calls."""

    def __init__(self, cache: Any, window: int, calls_per_forward: int) -> None:
        super().__init__(cache, window)
        self._calls_per_forward = calls_per_forward

    def record(self, stock: Stock, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        undo = self._next(window_of(args, kwargs))
        if undo is None:
            return stock(layer, *args, **kwargs)
        output = undo.tape.record(stock, layer, args, kwargs)
        self._finish(undo)
        return output

    def record_own(self, fed: int, fn: OwnUndo, before: list[Any]) -> None:
        undo = self._next(fed)
        if undo is not None:
            undo.record_own(fed, fn, before)
            self._finish(undo)

    def _next(self, fed: int) -> RetraceUndo | None:
        if self._opened is None:
            self.fed += fed
            if fed > self.window:
                self._forwards.clear()
                return None
            self._opened = RetraceUndo(
                self.cache, calls_per_forward=self._calls_per_forward, chained=True
            )
        assert isinstance(self._opened, RetraceUndo)
        return self._opened

    def _finish(self, undo: RetraceUndo) -> None:
        if len(undo.tape.calls) == self._calls_per_forward:
            self._opened = None
            self._push(undo, undo.seal())


@memoize
def _speculating(base: Any) -> type:
    """A subclass of a stock cache class whose instances tell their log of every forward."""

    def is_trimmable(self: Any) -> bool:
        return True

    def trim(self: Any, n: int) -> int:
        trimmed: int = vars(self)[LOG].trim(n)
        return trimmed

    def as_stock(self: Any, protocol: int) -> Any:
        attributes = {name: value for name, value in vars(self).items() if name != LOG}
        return _remade, (base, attributes)

    methods: dict[str, Any] = {
        "is_trimmable": is_trimmable,
        "trim": trim,
        "__reduce_ex__": as_stock,
        "__module__": base.__module__,
        "_rewind_base": base,
    }
    if base in UNDOS:

        def update_and_fetch(self: Any, keys: Any, values: Any) -> Any:
            return vars(self)[LOG].append(keys, values)

        methods["update_and_fetch"] = update_and_fetch
    if "maybe_trim_front" in vars(base):

        def maybe_trim_front(self: Any) -> None:
            vars(self)[LOG].open()
            base.maybe_trim_front(self)

        methods["maybe_trim_front"] = maybe_trim_front
    if "to_quantized" in vars(base) and UNDOS[base] is TrimUndo:

        def to_quantized(self: Any, group_size: int = 64, bits: int = 4) -> Any:
            return vars(self)[LOG].follow(base.to_quantized(self, group_size, bits))

        methods["to_quantized"] = to_quantized
    return type(base.__name__, (base,), methods)


def _remade(base: Any, attributes: dict[str, Any]) -> Any:
    """A copy of a speculating cache: stock, with attributes of its own."""
    entry = base.__new__(base)
    vars(entry).update(attributes)
    return entry
