"""What one speculating cache went through lately, see `trim`.

    log   [ forward of 5 | forward of 1 | forward of 3 ]        trim(2): the last one keeps 1
            `---------------- window ---------------'

Each forward has the undo that a `Round` would use for it. A cache need not hold its state before
every forward: it follows from the forward before.
"""

from __future__ import annotations

import operator
from functools import cache as memoize
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache

from .calls import Stock, window_of
from .probe import check_end
from .retrace import LOG, OwnUndo, RetraceUndo
from .slots import Slots, holds, set_slots, slots_of
from .undo import UNDOS, WATCH, RingUndo, TrimUndo, Undo, as_stock, stock_class

_BEHIND = (
    "the cache was fed or changed behind the log of start_speculation: the model was detached, or "
    "the cache was edited or fed through another one. Start from a fresh cache."
)
#: What a log has trimmed when a trim of it failed half-way.
_BROKEN = -1
#: Tokens between two states that the log of a recurrent cache, a ring or a chunk keeps.
_SPACING = 16


class Log:
    """The last forwards of one cache: each undo, and the tokens of it that are in the cache.

    depth         tokens that `trim` can take back
    fed           tokens that went into the cache since the start
    trimmed       tokens that were taken back since then
    group         the logs of all caches of the list, which are fed and trimmed the same
    siblings      those of the attention caches that a recurrent layer is given too
    window_end    tokens that a window may reach up to, see `probe.window_end`
    ahead         the log of a draft cache that is fed a prompt first, see `RecurrentLog`
    """

    def __init__(self, cache: Any, window: int) -> None:
        self.cache, self.window = cache, window
        self.depth = self.fed = self.trimmed = 0
        self.group: list[Log] = []
        self.siblings: list[Log] = []
        self.window_end: int | None = None
        self.ahead: Log | None = None
        self._stock: Any = type(cache)
        self._forwards: list[tuple[Any, int]] = []
        self._opened: Undo | None = None

    def watch(self, cache: Any) -> None:
        """Swaps the class of a cache object for one that tells this log."""
        self.cache, self._stock = cache, type(cache)
        cache.__class__ = _speculating(self._stock)
        vars(cache)[LOG] = self
        self._note()

    def _note(self) -> None:
        """Remembers where the cache is, to notice what is done to it behind the log."""
        self._mark: Any = self.cache.offset

    def _check_mark(self) -> None:
        if self._mark != self.cache.offset:
            raise RuntimeError(_BEHIND)

    # -- forwards -------------------------------------------------------------------------------

    def open(self) -> None:
        """Makes the undo of the next forward, where a model touches the cache before it appends."""
        self._check_mark()
        self._opened = UNDOS[self._stock](self.cache)

    def append(self, keys: Any, values: Any) -> Any:
        fed = keys.shape[2]
        self._check_mark()
        self._check_end(fed)
        undo, self._opened = self._opened, None
        if fed > self.window:
            fetched = self._stock.update_and_fetch(self.cache, keys, values)
            self._forwards.clear()
        else:
            undo = undo or self._undo_of(fed)
            undo.start()
            try:
                # The undo may have swapped the class once more, to see what is appended.
                watching: Any = type(self.cache) if WATCH in vars(self.cache) else self._stock
                fetched = watching.update_and_fetch(self.cache, keys, values)
            finally:
                undo.seal()
            self._push(undo, fed)
        self._count(fed)
        return fetched

    def _count(self, fed: int) -> None:
        self.fed += fed
        self.depth = min(self.depth + fed, self.window) if fed <= self.window else 0
        self._note()

    def _check_end(self, fed: int) -> None:
        if fed <= self.window:
            end = self.cache.offset + fed
            check_end(self.window_end, fed, end, "one by one, or stop_speculation(cache)")

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
        held = 0
        for i, (known, kept) in reversed(list(enumerate(self._forwards))):
            held += kept
            if held >= self.window and known.stands_alone:  # the window needs no older ones
                del self._forwards[:i]
                return

    def follow(self, cache: Any) -> Any:
        """Goes on with the quantised form of the cache."""
        for undo, _ in self._forwards:
            undo.follow(cache)
        unwatch(self.cache)
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
        if n:
            self._check_group(n)
            self._check_mark()
            self._take_back(n)
        return n

    def _check_group(self, n: int) -> None:
        before, after = self.trimmed, self.trimmed + n
        for log in self.group:
            if log.fed != self.fed or log.trimmed not in (before, after):
                raise RuntimeError(
                    "the caches of this list were fed or trimmed by different numbers of tokens: "
                    "a forward or a trim failed half-way, or reached only some of them. Start "
                    "from a fresh cache."
                )

    def _take_back(self, n: int) -> None:
        rest, left, kept = list(self._forwards), n, 0
        while left:
            undo, fed = rest.pop()
            kept = max(fed - left, 0)
            left -= fed - kept
        trimmed, self.trimmed = self.trimmed, _BROKEN
        if kept:
            for sibling in self.siblings:
                sibling.rewind_whole(n + kept)
        undo.rewind(kept)
        self._forwards = [*rest, (undo, kept)] if kept else rest
        self._opened = None
        self.trimmed = trimmed + n
        self.depth -= n
        self._note()

    def rewind_whole(self, n: int) -> None:
        """Takes back the last n tokens, whole forwards, until this cache is trimmed itself."""
        for undo, fed in reversed(self._forwards):
            n -= fed
            if n == 0:
                undo.rewind(0)
                self._note()


class RecurrentLog(Log):
    """The same for slots, whose forwards are layer calls.

    The first forward into an empty cache is taken for the prompt: it stays the window that it is in
    plain decoding. Where a draft cache is `ahead`, a longer one than that was fed is a verify.
    """

    def __init__(self, cache: Any, window: int, calls_per_forward: int) -> None:
        super().__init__(cache, window)
        self._calls_per_forward = calls_per_forward
        self._calls = 0

    def _note(self) -> None:
        self._mark = slots_of(self.cache)

    def _check_mark(self) -> None:
        if self._mark is not None and not holds(self.cache, self._mark):
            raise RuntimeError(_BEHIND)

    def record(self, stock: Stock, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        fed = window_of(args, kwargs)
        undo = self._next(fed)
        before, finished = slots_of(self.cache), False
        try:
            if undo is None:
                output = stock(layer, *args, **kwargs)
            else:
                output = undo.tape.record(stock, layer, args, kwargs)
            finished = True
        finally:
            if not finished:
                self._give_up(undo, before)
        self._finish(undo, fed)
        return output

    def _give_up(self, undo: RetraceUndo | None, before: Slots) -> None:
        """As if this layer had not been called; the other caches know what they were fed."""
        if undo is None:
            set_slots(self.cache, before)
        else:
            undo.rewind(0)
        self._opened, self._calls = None, 0
        self._note()

    def record_own(self, fed: int, fn: OwnUndo, before: list[Any]) -> None:
        undo = self._next(fed)
        if undo is not None:
            undo.record_own(fed, fn, before)
        self._finish(undo, fed)
        self._mark = None  # the slots are bound before or after this call

    def _next(self, fed: int) -> RetraceUndo | None:
        self._check_mark()
        if fed > self.window:
            return None
        if self._opened is None:
            is_prompt = self.fed == 0 and (self.ahead is None or fed <= self.ahead.fed)
            self._opened = RetraceUndo(
                self.cache,
                calls_per_forward=self._calls_per_forward,
                chained=True,
                is_prompt=is_prompt,
            )
        assert isinstance(self._opened, RetraceUndo)
        return self._opened

    def _finish(self, undo: RetraceUndo | None, fed: int) -> None:
        self._note()
        self._calls += 1
        if self._calls < self._calls_per_forward:
            return
        self._opened, self._calls = None, 0
        if undo is None:
            self._forwards.clear()
        else:
            undo.seal()
            self._push(undo, fed)
        self._count(fed)


@memoize
def _speculating(base: Any) -> type:
    """A subclass of a stock cache class whose instances tell their log of every forward."""

    def is_trimmable(self: Any) -> bool:
        return True

    def trim(self: Any, n: int) -> int:
        trimmed: int = vars(self)[LOG].trim(n)
        return trimmed

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


def unwatch(entry: Any) -> None:
    del vars(entry)[LOG]
    entry.__class__ = stock_class(entry)
