"""Multi-token prediction: the head in the target's own checkpoint as drafter.

A head reads pairs: the target's hidden state at a position, and the token after it. What it puts
out stands for the state one position later, so the chain goes on with its own outputs.

    position        0    1    2  ...  n-2  | n-1    n
    state           h0   h1   h2      h    | s      s'      outputs of the head in place of states
    token after     t1   t2   t3      t    | d1     d2
                    └── committed ──────┘    └ draft, in a round that is taken back ┘
    proposed                          d1     d2     d3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from ..cache.members import extract
from ..cache.probe import walk
from ..cache.round import Plan, Round
from ..cache.store import PromptCacheStore
from ..errors import DraftMismatchError
from ..target import HiddenState, Target, Trunk
from ..types import Guess
from .checkpoint import Norms, folder_of
from .drawing import Drafting, Drawing, check_drafting
from .group import CachedGroup, Member
from .heads import Head
from .loading import HeadReport, load_heads
from .protocol import Drafter, Session
from .stored import StoredHead


class MTP(Drafter):
    """Drafting with one head or several, to any depth.

    heads     head k predicts one token further than head k - 1; deeper drafts go round them again
    target    the model whose embedding and output head they share
    input     the state of the target that the first head reads, "normed" or "raw"
    report    what was found in the checkpoint, None if they were not read from one
    drafting  how it draws for rows that sample by `SamplingParams`, see `draft.drawing`
    """

    kind: ClassVar[str] = "mtp"

    def __init__(
        self,
        heads: Sequence[Head],
        target: nn.Module,
        *,
        input: HiddenState | None = None,  # noqa: A002
        report: HeadReport | None = None,
        drafting: Drafting = "coupled",
    ) -> None:
        if not heads:
            raise ValueError("MTP needs at least one head")
        check_drafting(drafting)
        self.drafting: Drafting = drafting
        if input not in (None, "normed", "raw"):
            raise ValueError(f'input must be "normed" or "raw", got {input!r}')
        self.heads = list(heads)
        self.target = target
        self.report = report
        self.input: HiddenState = input or heads[0].family.input
        trunk = Trunk.of(target)
        self.embed = trunk.inner(target)[trunk.embedding]
        self._output_head = trunk.output_head(target)

    @classmethod
    def load(
        cls,
        path: str | Path,
        target: nn.Module,
        *,
        norms: Norms | None = None,
        input: HiddenState | None = None,  # noqa: A002
        drafting: Drafting = "coupled",
        lazy: bool = False,
    ) -> MTP:
        """Loads the heads of a checkpoint for `target`.

        path     the folder of the target's checkpoint, or of a head by itself
        norms    how the norm weights of the head are stored, where the checkpoint does not tell:
                 "raw" (minus one, as the authors do) or "converted"
        input    the state that the head reads, in place of the family's (docs/mtp.md)
        drafting    how it draws for rows that sample, see `draft.drawing`
        lazy     leave the tensors on disk until they are used, by the same thread

        Raises `UnsupportedModelError` for a family whose head is not known, FileNotFoundError for
        a folder without a head, `DraftMismatchError` for the head of another model, ValueError
        for tensors that are missing, or stored in a way that cannot be told.
        """
        heads, report = load_heads(folder_of(path), target, norms)
        if not lazy:
            mx.eval([head.parameters() for head in heads])  # type: ignore[no-untyped-call]
        return cls(heads, target, input=input, report=report, drafting=drafting)

    def start(self, target: Target) -> Session:
        if target.model is not self.target:
            raise DraftMismatchError(
                "this MTP head was loaded for another model object: it shares that one's embedding "
                "and output head. Load it for the model that generates."
            )
        target.watch(self.input)
        return _Session(self, target.vocab_size)

    def logits(self, k: int, normed: mx.array) -> mx.array:
        """From the normed output of head `k`, [..., H], to logits [..., V]."""
        head = self.heads[k]
        return (head.output if head.family.own_output else self._output_head)(normed)


#: Pairs that a row keeps for a forward with others, while none of them drafts.
_MOST_WAITING = 64


@dataclass
class _Reading:
    """What the heads have yet to read of one row.

    tokens       [n] the token after each position, from position `start` on
    fed[k]       rows in the cache of head k: row i holds the token k + 1 after position i
    inputs[k]    [1, m, H] the states that head k reads next, from row fed[k] on; None before any
    last         state and normed output of the first head's last row, both [1, 1, H]
    pending      [1, 1, H] the last state of the target, for a row of which `stored` keeps some
    """

    fed: list[int]
    inputs: list[mx.array | None]
    chained: bool
    tokens: mx.array = field(default_factory=lambda: mx.zeros((0,), mx.int32))
    start: int = 0
    last: tuple[mx.array, mx.array] | None = None
    pending: mx.array | None = None
    stored: StoredHead | None = None

    def copy(self) -> _Reading:
        return replace(self, fed=list(self.fed), inputs=list(self.inputs))

    def add(self, tokens: mx.array, states: mx.array | None = None) -> None:
        """Adds tokens [n], and states of the target or what stands for them, [1, n, H]."""
        self.tokens = mx.concatenate([self.tokens, tokens])
        if states is not None:
            self.queue(states)

    def queue(self, states: mx.array, after: int | None = None) -> None:
        """Queues states for the first head, or for all that read the target's; or one head's."""
        heads = range(1 if self.chained else len(self.fed)) if after is None else [after + 1]
        for k in heads:
            queued = self.inputs[k]
            self.inputs[k] = states if queued is None else mx.concatenate([queued, states], axis=1)

    def readable(self, k: int) -> int:
        """Queued states of head `k` whose token is known."""
        queued = self.inputs[k]
        known = self.start + self.tokens.size - (self.fed[k] + k)
        return 0 if queued is None else max(0, min(queued.shape[1], known))

    def take(self, k: int, count: int) -> tuple[mx.array, mx.array]:
        """The next `count` pairs of head `k`: tokens [count] and states [1, count, H]."""
        first, queued = self.fed[k] + k - self.start, self.inputs[k]
        assert queued is not None
        self.fed[k] += count
        self.inputs[k] = queued[:, count:]
        return self.tokens[first : first + count], queued[:, :count]

    def trim(self) -> None:
        """Lets go of tokens that every head has read."""
        read = min(fed + k for k, fed in enumerate(self.fed))
        self.tokens, self.start = self.tokens[read - self.start :], read


class _Session(Member):
    """One row of a group."""

    group: _Group

    def __init__(self, drafter: MTP, vocab: int) -> None:
        self.group = _Group(drafter, self, vocab)

    @property
    def caches(self) -> list[list[Any]]:
        """The caches of each head, with those of the other rows of its group."""
        return self.group.caches

    @property
    def fed(self) -> list[int]:
        """Rows in the cache of each head."""
        return self.group.reading(self).fed

    def absorb(self, tokens: Sequence[int], hidden: mx.array) -> None:
        self.group.absorb(self, tokens, hidden)

    def use_store(
        self, store: PromptCacheStore, prompt: Sequence[int], reused: int, boundaries: Sequence[int]
    ) -> None:
        self.group.begin(store, prompt, reused)

    def keep(self, tokens: Sequence[int]) -> None:
        self.group.store(self, tokens)


class _Group(CachedGroup):
    """The head caches of some rows, and what is to be read of each row."""

    def __init__(self, drafter: MTP, member: Session, vocab: int) -> None:
        super().__init__(drafter, member, vocab)
        self.caches = [head.make_cache() for head in drafter.heads]
        depth, chained = len(drafter.heads), drafter.heads[0].family.chained
        self._rows = [_Reading([0] * depth, [None] * depth, chained)]
        self._before: list[_Reading] = []

    def reading(self, member: Session) -> _Reading:
        return self._rows[next(b for b, known in enumerate(self.members) if known is member)]

    def absorb(self, member: Session, tokens: Sequence[int], hidden: mx.array) -> None:
        """Takes committed pairs. Alone, a row reads them at once; several read them together."""
        self._abort()
        self.reading(member).add(mx.array(list(tokens), mx.int32), hidden[None])
        self.reading(member).pending = hidden[None, -1:]
        reads_alone = len(self.members) == 1 and not member.is_idle
        if reads_alone or self.reading(member).readable(0) >= _MOST_WAITING:
            self._read_committed()
            mx.async_eval([entry.state for cache in self.caches for entry in cache])

    def begin(self, store: PromptCacheStore, prompt: Sequence[int], reused: int) -> None:
        """Starts the fresh caches of one row from what a store has after `reused` tokens.

        Where heads wait for each other, or have caches that cannot be cut, nothing is stored.
        """
        (head, *others), (row,) = self._drafter.heads, self._rows
        if others or not StoredHead.can_keep(head):
            return
        row.stored = StoredHead(store, head, prompt[0])
        found = row.stored.fetch(prompt[:reused]) if reused > 1 else None
        if found is not None:
            self.caches[0], pending = found
            row.fed, row.start = [reused - 1], reused - 1
            self.absorb(self.members[0], prompt[reused : reused + 1], pending[0])

    def store(self, member: Session, tokens: Sequence[int]) -> None:
        """Leaves in the store what the head has of a row's tokens."""
        self._abort()
        row = self.reading(member)
        if row.stored is None or row.pending is None:
            return
        self._read_committed()
        if row.fed[0] == len(tokens):  # not if it started later than the row
            b = self.members.index(member)
            cache = extract(self.caches[0], b) if self._has_rows else self.caches[0]
            row.stored.keep(tokens, cache, row.pending)

    def propose(self, tokens: Sequence[list[int]], limits: Sequence[int]) -> list[Guess]:
        self._abort()
        with mx.stream(generation_stream):
            self._read_committed()
            outputs = [row.last for row in self._rows if row.last is not None]
            if len(outputs) < len(self._rows):  # a prompt of one token: no state was seen yet
                return [Guess.none()] * len(limits)
            if max(limits) > 1:
                self._open(max(limits) - 1)
            drawing = self._drawing(tokens)
            self._chain(outputs, drawing, max(limits))
            return drawing.guesses(limits)

    def _chain(
        self, outputs: list[tuple[mx.array, mx.array]], drawing: Drawing, count: int
    ) -> None:
        """Draws `count` tokens per row from the last outputs of the first head on."""
        states: list[mx.array] = []
        for step in range(count):
            k = step % len(self.caches)
            states.append(mx.concatenate([state for state, _ in outputs]))
            normed = mx.concatenate([normed for _, normed in outputs])
            draft = drawing.pick(self._drafter.logits(k, normed[:, -1]))
            if step + 1 == count:
                return
            once_round = None
            if k + 1 == len(self.caches):  # go on from what the heads put out
                once_round, states = mx.concatenate(states, axis=1), []
            for b, row in enumerate(self._rows):
                known = None if once_round is None else once_round[b : b + 1]
                row.add(draft[b : b + 1], known)
            outputs = [output for output in self._read((k + 1) % len(self.caches)) if output]

    # -- reading --------------------------------------------------------------------------------

    def _read_committed(self) -> None:
        """Reads all pairs that are known, in one forward per head."""
        for k in range(len(self.caches)):
            while any(row.readable(k) for row in self._rows):
                for row, output in zip(self._rows, self._read(k), strict=True):
                    row.last = (output or row.last) if k == 0 else row.last
        for row in self._rows:
            row.trim()

    def _read(self, k: int) -> list[tuple[mx.array, mx.array] | None]:
        """Lets head `k` read what it can of every row, and hands its outputs on.

        Returns the state and the normed output of each row's last pair, both [1, 1, H].
        """
        counts = [min(row.readable(k), self._longest) for row in self._rows]
        if not any(counts):
            return [None] * len(counts)
        pairs = [row.take(k, n) if n else None for row, n in zip(self._rows, counts, strict=True)]
        states, normed = self._forward(k, pairs, counts)
        outputs: list[tuple[mx.array, mx.array] | None] = []
        for b, (row, n) in enumerate(zip(self._rows, counts, strict=True)):
            state = states[b : b + 1, :n]
            if n and row.chained and k + 1 < len(self.caches):
                row.queue(state, after=k)
            outputs.append((state[:, -1:], normed[b : b + 1, n - 1 : n]) if n else None)
        return outputs

    def _forward(
        self, k: int, pairs: list[tuple[mx.array, mx.array] | None], counts: list[int]
    ) -> tuple[mx.array, mx.array]:
        """One forward of head `k` over the pairs of all rows, the shorter ones padded."""
        longest, size = max(counts), self._drafter.heads[k].projection.weight.shape[0]

        def padded(x: mx.array, axis: int) -> mx.array:
            missing = longest - x.shape[axis]
            return mx.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])

        none = mx.zeros((0,), mx.int32), mx.zeros((1, 0, size))
        tokens = mx.stack([padded((pair or none)[0], 0) for pair in pairs])
        states = mx.concatenate([padded((pair or none)[1], 1) for pair in pairs])
        embedded, head = self._drafter.embed(tokens), self._drafter.heads[k]
        if min(counts) == longest:
            return head(embedded, states, self.caches[k])
        leaves = [leaf for _, leaf in walk(self.caches[k])]
        before = [leaf.lengths for leaf in leaves]
        outputs = head(embedded, states, self.caches[k])
        for leaf, lengths in zip(leaves, before, strict=True):
            if leaf.lengths != lengths:  # LongCat leaves one cache unused
                leaf.lengths = [n + count for n, count in zip(lengths, counts, strict=True)]
        return outputs

    # -- drafts, and rows that come and go ------------------------------------------------------

    def _open(self, steps: int) -> None:
        single = steps if len(self.caches) == 1 and not self._has_rows else None
        plan = _plan(self.caches)
        self._round = Round(self._drafter.heads[0], [], single_steps=single, plan=plan).open()
        self._before = [row.copy() for row in self._rows]

    def _abort(self) -> None:
        if self._round is not None:
            self._round.abort()
            self._round, self._rows = None, self._before

    @property
    def _model(self) -> nn.Module:
        return self._drafter.target

    @property
    def _prompt_caches(self) -> list[list[Any]]:
        return self.caches

    def _take(self, other: _Group) -> None:
        self._rows += other._rows

    def _keep(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[b] for b in rows]


def _plan(caches: list[list[Any]]) -> Plan:
    """Rounds over the caches of heads, which hold nothing recurrent."""
    labelled = enumerate(caches)
    leaves = [(f"{k}.{label}", leaf) for k, cache in labelled for label, leaf in walk(cache)]
    return Plan(leaves, calls={}, siblings={}, fault=None, window_end=None)
