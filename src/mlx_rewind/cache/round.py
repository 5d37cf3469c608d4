"""A round: forwards whose tokens can be taken back.

    with Round(model, cache) as round:
        logits = model(window, cache=cache)     # any number of forwards
        round.commit(kept)                      # 0 <= kept <= tokens fed

The life of a round is open -> sealed -> closed. Forwards are recorded while it is open. The first
`rewind` or `commit` seals it. Until it is closed, `rewind` may move the caches to any kept count.
Leaving the block without a commit takes everything back.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, RotatingKVCache

from ..errors import UnsupportedCacheError, UnsupportedModelError
from .attach import Attachment, attach
from .members import ROWS, RowsUndo, num_rows
from .probe import check_end, shape_of, walk
from .retrace import LOG, RetraceUndo, SlotsUndo
from .slots import is_recurrent, position, slots_of
from .undo import UNDOS, Undo, stock_class


class Round:
    """Undoes tokens that were fed to `model` through `cache`, as if they had never been.

    model          any mlx-lm model; its recurrent layers become recordable at the first round
    cache          its prompt cache: the list of stock objects, mutated in place by forwards
    single_steps   optional promise that at most this many tokens follow, one per forward: rings
                   then save the slots to be overwritten instead of copying themselves
    plan           what `check` returned for this model and cache, to check many rounds once
    whole          promise that one forward of one token follows, which is kept or not: nothing of
                   it is recorded, and its slots are to be evaluated with its output

    Raises `UnsupportedCacheError` or `UnsupportedModelError` before anything is fed or changed.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: list[Any],
        *,
        single_steps: int | None = None,
        plan: Plan | None = None,
        whole: bool = False,
    ) -> None:
        self._plan = plan or check(model, cache)
        self._whole, self._single_steps = whole, 1 if whole else single_steps
        if self._single_steps is None:
            self._plan.check_windows()
        self._undos: dict[str, Undo] = {}
        self._fed: int | None = None
        self._rows = self._plan.rows
        self._at = self._all(0)
        self._open = False

    # -- life -----------------------------------------------------------------------------------

    def __enter__(self) -> Round:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    def open(self) -> Round:
        """Starts recording; what `with` does on entry."""
        self._undos = {label: self._undo(label, entry) for label, entry in self._plan.leaves}
        self._open = True
        with ExitStack() as stack:
            stack.callback(self.abort)
            undos = self._undos.values()
            for undo in undos:
                undo.start()
            mx.async_eval([x for undo in undos for x in undo.saved])
            stack.pop_all()
        return self

    def _undo(self, label: str, entry: Any) -> Undo:
        calls = self._plan.calls.get(label)
        if calls is not None:
            return SlotsUndo(entry) if self._whole else RetraceUndo(entry, calls_per_forward=calls)
        if isinstance(entry, ROWS):
            return RowsUndo(entry)
        return UNDOS[stock_class(entry)](entry, self._single_steps)

    def seal(self) -> int:
        """Ends the recording and returns the number of tokens fed. Idempotent."""
        self._require_open()
        if self._fed is None:
            fed = [undo.seal() for undo in self._undos.values()]
            self._fed = max(fed, default=0)
            self._rows = self._plan.rows  # an empty recurrent cache did not tell before
            self._at = self._all(self._fed)
            self._uneven = min(fed, default=0) != self._fed
            self._missed = any(undo.missed for undo in self._undos.values())
            self._marks = self._where()
        return self._fed

    def _check_end(self) -> None:
        """Refuses to keep a part of a window that a dynamic rope turns by its end."""
        if self._plan.window_end is not None and self._single_steps is None:
            fed = self._fed or 0
            end = self._plan.offset - max(self._at) + fed
            check_end(self._plan.window_end, fed, end, "one by one, in a Round with single_steps")

    def rewind(self, kept: int | Iterable[int]) -> None:
        """Moves the caches to the state after the first `kept` tokens; the round stays open.

        kept    an int, or one int per row
        """
        self.seal()
        counts = self._check_kept(kept)
        if counts != self._at or not any(counts):
            self._require_untouched()
            self._move(counts)

    def commit(self, kept: int | Iterable[int]) -> None:
        """Keeps the first `kept` tokens and closes the round.

        kept    an int, or one int per row

        Raises ValueError, with nothing changed, for a count outside 0..tokens fed.
        """
        self.seal()
        self._require_untouched()
        self.rewind(kept)
        self._close()

    def renew(self) -> None:
        """Makes the state anew from what was recorded and computed, for a thread to go on.

        What is still lazy in a cache belongs to the thread that fed it.
        """
        self.seal()
        for undo in self._undos.values():
            undo.renew()
        self._move(self._at)

    def release(self) -> None:
        """Closes a sealed round as it stands, with later forwards already on top of it."""
        self._close()

    def abort(self) -> None:
        """Takes back everything that was fed and closes the round; without effect when closed."""
        if self._open:
            self.seal()
            self._move(self._all(0))
            self._close()

    # -- parts ----------------------------------------------------------------------------------

    def _move(self, kept: tuple[int, ...]) -> None:
        moved = False
        try:
            for label, siblings in self._plan.siblings.items():
                self._retrace(label, siblings, kept)
            for label, undo in self._undos.items():
                if label not in self._plan.siblings:
                    _rewind(undo, kept)
            self._at = kept
            self._marks = self._where()
            moved = True
        finally:
            if not moved:
                for undo in self._undos.values():
                    undo.rewind(0)
                self._at, self._marks = self._all(0), self._where()

    def _retrace(self, label: str, siblings: list[str], counts: tuple[int, ...]) -> None:
        """Rewinds a recurrent cache whose layer is given attention caches too: as they were."""
        undo, kept = self._undos[label], counts[0]
        if len(set(counts)) > 1:
            raise RuntimeError("a layer with recurrent and attention caches keeps rows together")
        if kept:
            before = undo.tape.forward_of(kept)[1] if isinstance(undo, RetraceUndo) else 0
            for sibling in siblings:
                self._undos[sibling].rewind(before)
        undo.rewind(kept)

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def slots(self) -> list[mx.array]:
        """What recurrent caches hold."""
        recurrent = (entry for label, entry in self._plan.leaves if label in self._plan.calls)
        values = (value for entry in recurrent for value in slots_of(entry).values())
        return [value for value in values if isinstance(value, mx.array)]

    def _where(self) -> list[Any]:
        """Slots and offsets, which tell whether a cache was touched since."""
        marks: list[Any] = []
        for _, entry in self._plan.leaves:
            if is_recurrent(entry):
                marks += slots_of(entry).values()
            else:
                marks.append(tuple(entry.lengths) if isinstance(entry, ROWS) else entry.offset)
        return marks

    def _close(self) -> None:
        self._open = False
        self._undos = {}

    def _require_open(self) -> None:
        if not self._open:
            raise RuntimeError("this Round is closed: open a new one for the next window")

    def _require_untouched(self) -> None:
        if not _same(self._where(), self._marks):
            raise RuntimeError(
                "the prompt cache was fed or changed after this Round was sealed; "
                "open a new Round for the next window"
            )

    def _check_kept(self, kept: int | Iterable[int]) -> tuple[int, ...]:
        """One count per row, each within what was fed."""
        counts = tuple(kept) if isinstance(kept, Iterable) else self._all(kept)
        if len(counts) != self._rows:
            raise ValueError(
                f"this prompt cache has {self._rows} row(s), got {len(counts)} kept counts"
            )
        for count in counts:
            try:
                fits = 0 <= operator.index(count) <= (self._fed or 0)
            except TypeError:
                raise ValueError(f"kept must be an int, got {count!r}") from None
            if not fits:
                raise ValueError(
                    f"kept must be within 0..{self._fed} (the tokens fed), got {count}"
                )
        if self._missed:
            raise RuntimeError(
                "a recurrent cache was written by a forward that was not recorded: the model was "
                "detached, or the cache was fed through another one"
            )
        if self._uneven and any(counts):
            raise RuntimeError("the caches were fed different numbers of tokens in this Round")
        if any(counts):
            self._check_end()
        return tuple(operator.index(count) for count in counts)

    def _all(self, kept: int) -> tuple[int, ...]:
        return (kept,) * self._rows


@dataclass(frozen=True)
class Plan:
    """A prompt cache that rounds can undo.

    leaves      (label, cache object), children of a `CacheList` in its place, without unused ones
    calls       label of a recurrent cache -> layer calls that write it in one forward
    siblings    label of a recurrent cache -> labels of the caches that the same calls are given
    fault       why windows of the model are not what its single steps are; None if they are
    window_end  tokens that a window may reach up to, see `probe.window_end`
    """

    leaves: list[tuple[str, Any]]
    calls: dict[str, int]
    siblings: dict[str, list[str]]
    fault: str | None
    window_end: int | None

    @property
    def offset(self) -> int:
        """Tokens in the attention caches; 0 if there are none."""
        attention = (cache for _, cache in self.leaves if not is_recurrent(cache))
        return max((_length(cache) for cache in attention), default=0)

    @cached_property
    def draft_end(self) -> int | None:
        """Tokens that a verify may reach up to; None for no limit.

        mlx-lm's mask of a window slides over the first tokens, which a ring with `keep` shows to
        single steps for ever.
        """
        ends = [c.max_size for _, c in self.leaves if stock_class(c) is RotatingKVCache and c.keep]
        return min([*ends, *([] if self.window_end is None else [self.window_end])], default=None)

    @property
    def rows(self) -> int:
        """Rows that may keep different counts; a stock attention cache keeps its rows together."""
        caches = [cache for _, cache in self.leaves]
        if any(not is_recurrent(cache) and not isinstance(cache, ROWS) for cache in caches):
            return 1
        return next((n for n in (num_rows(cache) for cache in caches) if n), 1)

    def check_windows(self) -> None:
        """Raises `UnsupportedModelError` for a model that computes windows wrongly in mlx-lm."""
        if self.fault is not None:
            raise UnsupportedModelError(
                "mlx-lm computes windows of this model otherwise than single tokens: "
                f"{self.fault}. Feed it single tokens only: decode without a drafter, or open a "
                "Round with single_steps."
            )


def check(model: nn.Module, cache: list[Any]) -> Plan:
    """Plans the rounds over a prompt cache.

    Raises `UnsupportedCacheError` for a class without an undo, for a cache of another model, for
    one that is speculating already, and for caches that hold different numbers of tokens;
    `UnsupportedModelError` as `attach` does.
    """
    leaves = list(walk(cache))
    for label, entry in leaves:
        _check_class(label, entry)
    attachment = attach(model)
    _check_layout(attachment, dict(leaves))
    used = [(label, entry) for label, entry in leaves if label not in attachment.unused]
    check_positions(used)
    siblings = {label: others for label, others in attachment.siblings.items() if others}
    return Plan(used, attachment.calls, siblings, attachment.fault, attachment.window_end)


def _check_class(label: str, entry: Any) -> None:
    name = type(entry).__name__
    if LOG in vars(entry):
        raise UnsupportedCacheError(
            f"cache {label} ({name}) is speculating: call stop_speculation(cache) first"
        )
    if not (stock_class(entry) in UNDOS or is_recurrent(entry) or isinstance(entry, ROWS)):
        known = ", ".join(sorted(c.__name__ for c in (*UNDOS, ArraysCache)))
        raise UnsupportedCacheError(
            f"cache {label} is a {name}, which cannot be rolled back (supported: {known})"
        )
    if type(entry) is ArraysCache and (entry.left_padding is not None or entry.lengths is not None):
        raise UnsupportedCacheError(
            f"cache {label} (ArraysCache) has left_padding or lengths: it belongs to a batch; "
            "extract its rows and open one Round per row"
        )


def _check_layout(attachment: Attachment, leaves: dict[str, Any]) -> None:
    """Refuses a prompt cache with other parts than the model makes, or parts of other shapes."""
    expected = attachment.calls.keys() | attachment.shapes.keys()
    recurrent = {label for label, entry in leaves.items() if is_recurrent(entry)}
    if leaves.keys() != expected or recurrent != attachment.calls.keys():
        raise UnsupportedCacheError(
            f"the prompt cache is not one of this model's: caches at {sorted(leaves)}, recurrent "
            f"at {sorted(recurrent)}; the model has them at {sorted(expected)}, recurrent at "
            f"{sorted(attachment.calls)}"
        )
    for label, shape in attachment.shapes.items():
        got = shape_of(leaves[label])
        if shape and got and got != shape:
            raise UnsupportedCacheError(
                f"the prompt cache is not one of this model's: cache {label} has heads and head "
                f"sizes {got}, the model's are {shape}"
            )


def check_positions(leaves: list[tuple[str, Any]]) -> None:
    """Refuses a prompt cache whose parts are known to hold different numbers of tokens."""
    known: dict[int, str] = {}
    for label, entry in leaves:
        if isinstance(entry, ROWS):
            continue
        tokens = position(entry) if is_recurrent(entry) else entry.offset
        if tokens is not None:
            known.setdefault(int(tokens), f"cache {label} ({type(entry).__name__})")
    if len(known) > 1:
        (a, first), (b, second) = list(known.items())[:2]
        raise UnsupportedCacheError(
            f"{first} holds {a} tokens but {second} holds {b}: these are not halves of one state"
        )


def _length(cache: Any) -> int:
    """Tokens in an attention cache; in its longest row."""
    return max(cache.lengths) if isinstance(cache, ROWS) else int(cache.offset)


def _rewind(undo: Undo, kept: tuple[int, ...]) -> None:
    if len(set(kept)) == 1:
        undo.rewind(kept[0])
    else:
        undo.rewind_rows(kept)


def _same(ours: list[Any], theirs: list[Any]) -> bool:
    """Equal offsets and identical arrays."""
    pairs = zip(ours, theirs, strict=True)
    return all(x == y if isinstance(x, (int, tuple)) else x is y for x, y in pairs)
