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
from pathlib import Path
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from ..cache.probe import walk
from ..cache.round import Plan, Round
from ..errors import DraftMismatchError
from ..target import HiddenState, Target, Trunk
from .checkpoint import Norms, folder_of
from .heads import Head
from .loading import HeadReport, load_heads
from .protocol import Drafter, Session


class MTP(Drafter):
    """Greedy drafting with one head or several, to any depth.

    heads     head k predicts one token further than head k - 1; deeper drafts go round them again
    target    the model whose embedding and output head they share
    input     the state of the target that the first head reads, "normed" or "raw"
    report    what was found in the checkpoint, None if they were not read from one
    """

    kind: ClassVar[str] = "mtp"

    def __init__(
        self,
        heads: Sequence[Head],
        target: nn.Module,
        *,
        input: HiddenState | None = None,  # noqa: A002
        report: HeadReport | None = None,
    ) -> None:
        if not heads:
            raise ValueError("MTP needs at least one head")
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
        lazy: bool = False,
    ) -> MTP:
        """Loads the heads of a checkpoint for `target`.

        path     the folder of the target's checkpoint, or of a head by itself
        norms    how the norm weights of the head are stored, where the checkpoint does not tell:
                 "raw" (minus one, as the authors do) or "converted"
        input    the state that the head reads, in place of the family's (docs/mtp.md)
        lazy     leave the tensors on disk until they are used, by the same thread

        Raises `UnsupportedModelError` for a family whose head is not known, FileNotFoundError for
        a folder without a head, `DraftMismatchError` for the head of another model, ValueError
        for tensors that are missing, or stored in a way that cannot be told.
        """
        heads, report = load_heads(folder_of(path), target, norms)
        if not lazy:
            mx.eval([head.parameters() for head in heads])  # type: ignore[no-untyped-call]
        return cls(heads, target, input=input, report=report)

    def start(self, target: Target) -> Session:
        if target.model is not self.target:
            raise DraftMismatchError(
                "this MTP head was loaded for another model object: it shares that one's embedding "
                "and output head. Load it for the model that generates."
            )
        target.watch(self.input)
        return _Session(self)

    def logits(self, k: int, normed: mx.array) -> mx.array:
        """From the normed output of head `k`, [..., H], to logits [..., V]."""
        head = self.heads[k]
        return (head.output if head.family.own_output else self._output_head)(normed)


class _Session(Session):
    """One row's head caches, and what each head has yet to read.

    tokens       [n] the token after each position, from position `start` on
    fed[k]       rows in the cache of head k: row i holds the token k + 1 after position i
    inputs[k]    [1, m, H] the states that head k reads next, from row fed[k] on
    """

    def __init__(self, drafter: MTP) -> None:
        self._drafter = drafter
        self._chained = drafter.heads[0].family.chained
        self.caches = [head.make_cache() for head in drafter.heads]
        labelled = enumerate(self.caches)
        leaves = [(f"{k}.{label}", leaf) for k, cache in labelled for label, leaf in walk(cache)]
        self._plan = Plan(leaves, calls={}, siblings={}, fault=None, window_end=None)
        self._round: Round | None = None
        self._tokens, self._start = mx.zeros((0,), mx.int32), 0
        self._fed = [0] * len(self.caches)
        self._inputs: list[mx.array | None] = [None] * len(self.caches)
        self._last: tuple[mx.array, mx.array] | None = None

    def absorb(self, tokens: Sequence[int], hidden: mx.array) -> None:
        """Reads the committed pairs, in one forward per head."""
        self.close()
        self._extend(mx.array(list(tokens), mx.int32))
        self._queue_states(hidden[None])
        self._last = self._read(0)
        for k in range(1, len(self.caches)):
            if self._readable(k) > 0:
                self._read(k)
        read = min(fed + k for k, fed in enumerate(self._fed))
        self._tokens, self._start = self._tokens[read - self._start :], read
        mx.async_eval([entry.state for cache in self.caches for entry in cache])

    def propose(self, tokens: list[int], num_draft_tokens: int) -> mx.array:
        self.close()
        if self._last is None:
            return mx.zeros((0,), mx.uint32)
        with mx.stream(generation_stream):
            if num_draft_tokens > 1:
                self._open(num_draft_tokens - 1)
            drafts: list[mx.array] = []
            states: list[mx.array] = []
            output = self._last
            while True:
                state, normed = output
                k = len(drafts) % len(self.caches)
                states.append(state)
                drafts.append(mx.argmax(self._drafter.logits(k, normed[:, -1]), axis=-1))
                if len(drafts) == num_draft_tokens:
                    return mx.concatenate(drafts).astype(mx.uint32)
                self._extend(drafts[-1])
                if k + 1 == len(self.caches):  # once round: go on from what the heads put out
                    self._queue_states(mx.concatenate(states, axis=1))
                    states = []
                output = self._read((k + 1) % len(self.caches))

    def close(self) -> None:
        if self._round is not None:
            self._round.abort()
            self._round = None
            self._tokens, self._fed, self._inputs = self._before

    def _open(self, steps: int) -> None:
        single = steps if len(self.caches) == 1 else None
        self._round = Round(self._drafter.heads[0], [], single_steps=single, plan=self._plan).open()
        self._before = self._tokens, list(self._fed), list(self._inputs)

    def _extend(self, tokens: mx.array) -> None:
        self._tokens = mx.concatenate([self._tokens, tokens])

    def _queue_states(self, states: mx.array) -> None:
        """Queues states of the target, or what stands for them, [1, m, H]."""
        for k in range(1 if self._chained else len(self.caches)):
            self._queue(k, states)

    def _queue(self, k: int, states: mx.array) -> None:
        queued = self._inputs[k]
        self._inputs[k] = states if queued is None else mx.concatenate([queued, states], axis=1)

    def _readable(self, k: int) -> int:
        """Queued states of head `k` whose token is known."""
        queued = self._inputs[k]
        known = self._start + self._tokens.size - (self._fed[k] + k)
        return 0 if queued is None else min(queued.shape[1], known)

    def _read(self, k: int) -> tuple[mx.array, mx.array]:
        """Lets head `k` read what it can, in one forward, and hands its outputs on.

        Returns the state and the normed output of the last row, both [1, 1, H].
        """
        rows, queued = self._readable(k), self._inputs[k]
        assert queued is not None
        first = self._fed[k] + k - self._start
        embedded = self._drafter.embed(self._tokens[None, first : first + rows])
        state, normed = self._drafter.heads[k](embedded, queued[:, :rows], self.caches[k])
        self._fed[k] += rows
        self._inputs[k] = queued[:, rows:]
        if self._chained and k + 1 < len(self.caches):
            self._queue(k + 1, state)
        return state[:, -1:], normed[:, -1:]
