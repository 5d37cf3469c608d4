"""The round, on one page. Plain decoding is the same round with zero draft tokens.

    invariant at every emission: the target's caches hold exactly tokens[:-1]; the last is pending
    1 draft     each row's proposer guesses up to K tokens
    2 verify    one forward of the target over [pending, d1..dK], inside a Round
    3 accept    keep draft tokens while they equal what the target draws
    4 emit      the caller takes the block token by token, and may stop anywhere in it
    5 commit    the caches keep exactly what was emitted

A row without a proposer knows its next window before its token is read: the next forward is
launched first, so the device never waits for the host.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream, maybe_quantize_kv_cache
from mlx_lm.models.cache import KVCache

from . import ties
from .batch import Batch, Row
from .cache.checkpoint import Checkpoint
from .cache.members import extract
from .cache.reuse import Reuse
from .cache.round import Round, check
from .choices import Choices, Verify
from .draft.auto import Auto, AutoSession, note_round
from .draft.protocol import Drafter, Proposer, Session, start
from .drafting import draft_for
from .target import Target, check_quantizable
from .types import Draft, StepOutput


@dataclass
class Flight:
    """A verify that was launched: its round is sealed, its results are lazy.

    choices     one per row, None for a row that failed
    hidden      [B, K + 1, H] the states of the window, if a proposer reads them
    accepted    draft tokens of each row that the target agreed with
    gaps        [B, K + 1] between the two best logits, if a row wants to know (`Row.recheck`)
    """

    draft: Draft
    round: Round
    choices: list[Choices | None]
    hidden: mx.array | None
    accepted: list[int]
    gaps: mx.array | None = None


class Decoder:
    """Runs rounds over the rows of a batch.

    quantize    (quantized_kv_start, kv_group_size, kv_bits), or None

    emitted     tokens of each row's current block that went out; the caller counts them

    Per round: `step`, then `show` as tokens go out if anybody looks at the caches, then `commit`.
    `close` ends at any point, also after an exception, with the invariant restored.
    """

    def __init__(self, batch: Batch, quantize: tuple[int, int, int] | None = None) -> None:
        self.plan = check(batch.model, batch.cache)
        if quantize:
            check_quantizable(batch.model, batch.cache, *quantize[1:])
        self.target = Target(batch.model)
        for row in batch.rows:
            self.target.check_tokens(row.tokens)
        self.batch = batch
        self._quantize_at = quantize
        self._flights: list[Flight] = []  # the current one, and the one launched ahead of it
        self.emitted = [0] * len(batch.rows)
        self._rounds, self._seconds = 0, 0.0
        self._has_rows = self._is_fed = False

    def start(self, drafter: Drafter | Proposer) -> None:
        """Lets the one row draft. `Auto` decodes plainly where windows are refused.

        Raises `UnsupportedModelError` for a model of which mlx-lm computes windows wrongly,
        `DraftMismatchError` for a drafter that does not fit.
        """
        (row,) = self.batch.rows
        if isinstance(drafter, Auto) and self.plan.fault is not None:
            row.stats.reason = f"plain: {self.plan.fault}"
            return
        self.plan.check_windows()
        row.proposer = start(drafter, self.target, row.draws)

    @property
    def may_join(self) -> bool:
        """Whether every cache holds something, and none is still due to be quantised."""
        due = self._quantize_at and any(type(cache) is KVCache for cache in self.batch.cache)
        sessions = (row.proposer for row in self.batch.rows if isinstance(row.proposer, Session))
        is_ready = self._rounds > 0 or (
            self._is_fed and all(session.may_join for session in sessions)
        )
        return is_ready and not due

    # -- prefill --------------------------------------------------------------------------------

    def prefill(
        self,
        step_size: int,
        progress: Callable[[int, int], None],
        reuse: Reuse | None = None,
    ) -> Iterator[None]:
        """Feeds the one row's prompt but for its last token, in chunks, exactly as mlx-lm does.

        reuse    starts from what a store has, and leaves boundaries there

        Yields after every chunk. progress(processed, total) is called before and after each. An
        exception, or the end of the iterator before it is through, leaves the caches as they were.
        """
        (row,) = self.batch.rows
        prompt, total, done = mx.array(row.tokens), len(row.tokens), 0
        with ExitStack() as undo:
            undo.callback(Checkpoint(self.batch.cache).restore)
            if reuse is not None:
                done = reuse.start(row.tokens, self.batch.cache)
                self.plan = check(self.batch.model, self.batch.cache)
                if isinstance(row.proposer, Session):
                    row.proposer.use_store(reuse.store, row.tokens, done, reuse.boundaries)
            progress(done, total)
            while total - done > 1:
                end = min(done + step_size, total - 1) if reuse is None else reuse.chunk_end(done)
                chunk = prompt[None, done:end]
                with mx.stream(generation_stream):
                    hidden = self.target(chunk, self.batch.cache).hidden
                    known = row.tokens[done + 1 : end + 1]
                    row.absorb(None if hidden is None else hidden[0], known)
                    if reuse is not None and reuse.reached(end, self.batch.cache):
                        row.keep(end)
                    if reuse is None or reuse.is_chunk_end(end):
                        self._quantize()
                    mx.eval([entry.state for entry in self.batch.cache])
                done += chunk.size
                progress(done, total)
                mx.clear_cache()
                if total - done > 1:
                    yield
            undo.pop_all()
        self._is_fed = self._is_fed or total > 1

    # -- the round ------------------------------------------------------------------------------

    def step(self) -> list[StepOutput | None]:
        """Drafts, verifies and accepts; returns each row's block. The caches are mid-round.

        A row that failed has no block; see `Batch.isolates`.
        """
        began = time.perf_counter()
        if not self._flights:
            limits = [max(0, self._limit(row)) for row in self.batch.rows]
            self._launch(self.batch.pending, draft_for(self.batch, limits, self.target.vocab_size))
        self._thread = threading.current_thread()
        flight = self._flights[0]
        if self._knows_next_windows(flight):
            firsts = [choices.first for choices in flight.choices if choices]
            self._launch(mx.stack(firsts), Draft.empty(len(firsts)))
        blocks = self._accept(flight)
        self._seconds = time.perf_counter() - began
        return blocks

    def show(self, emitted: int) -> None:
        """Makes the caches what they are after `emitted` tokens of the block, for onlookers."""
        flight, *ahead = self._flights
        with mx.stream(generation_stream):
            if ahead:
                ahead[0].round.rewind(0)
            else:
                flight.round.rewind(emitted)

    def commit(self) -> None:
        """Ends the round: the caches keep what was emitted of each block, maybe nothing."""
        flight, *ahead = self._flights
        kept = self.emitted
        with mx.stream(generation_stream):
            if ahead:
                ahead[0].round.rewind(1)
                flight.round.release()
            else:
                flight.round.commit(kept)
            self._flights, self.emitted = ahead, [0] * len(kept)
            self._quantize()
            self._learn(flight, kept)
            for b, row in enumerate(self.batch.rows):
                hidden = None if flight.hidden is None else flight.hidden[b]
                drafted, accepted = flight.draft.lengths[b], flight.accepted[b]
                row.stats.count(drafted, accepted, kept[b], row.is_cut)
                with self.batch.guard(row):
                    row.absorb(hidden, row.tokens[len(row.tokens) - kept[b] :])
        self._rounds += 1
        if self._rounds % 256 == 0:
            mx.clear_cache()

    def _learn(self, flight: Flight, kept: Sequence[int]) -> None:
        """Tells rows that choose their drafts what a round took and gave."""
        rows = self.batch.rows
        choosing = {
            b: row.proposer for b, row in enumerate(rows) if isinstance(row.proposer, AutoSession)
        }
        note_round([*choosing.values()], len(rows), flight.draft.num_tokens, self._seconds)
        for b, session in choosing.items():
            session.learn(flight.draft.lengths[b], min(flight.accepted[b], kept[b]))
            rows[b].stats.reason = session.reason

    # -- rows come and go, between two rounds ---------------------------------------------------

    def join(self, other: Decoder, slack: int) -> None:
        """Takes over the rows of another decoder of the same model.

        slack    the longest window that will be verified, for sliding windows
        """
        self.target.watch_as(other.target)  # refuses before anything is changed
        for decoder in (self, other):
            decoder._settle()
            if not decoder._has_rows:
                decoder.batch.open(slack)
                decoder._has_rows = True
        theirs = [row.proposer for row in other.batch.rows]
        for ours in [row.proposer for row in self.batch.rows]:
            for proposer in theirs:
                if isinstance(ours, Session) and isinstance(proposer, Session):
                    ours.join(proposer, slack)
        self.batch.join(other.batch)
        self.plan = check(self.batch.model, self.batch.cache)
        self.emitted = [0] * len(self.batch.rows)

    def row_cache(self, row: int) -> list[Any]:
        """The caches of one row as stock caches."""
        self._settle()
        return extract(self.batch.cache, row) if self._has_rows else self.batch.cache

    def leave(self, rows: Sequence[int]) -> None:
        """Lets rows go, and frees what only they needed."""
        self._settle()
        for row in rows:
            self.batch.rows[row].close()
        stay = [b for b in range(len(self.batch.rows)) if b not in set(rows)]
        if stay:
            self.batch.keep(stay)
        else:
            self.batch.rows, self.batch.cache = [], []
        self.emitted = [0] * len(stay)

    def _settle(self) -> None:
        """Takes back what was launched ahead."""
        while self._flights:
            self._flights.pop().round.abort()

    def close(self) -> None:
        """Ends the decoding after what was emitted of the current block.

        The caches are computed before it returns, so another thread may go on with them.
        """
        for flight in self._flights[1:]:
            flight.round.abort()
        self._flights = [flight for flight in self._flights[:1] if flight.round.is_open]
        if self._flights:
            if threading.current_thread() is not self._thread:
                with mx.stream(generation_stream):
                    self._flights[0].round.renew()
            self.commit()
        mx.eval([entry.state for entry in self.batch.cache])

    # -- parts ----------------------------------------------------------------------------------

    def _limit(self, row: Row) -> int:
        """Most draft tokens of a row in the next round."""
        if row.is_cut:
            return 0
        limit = min(row.num_draft_tokens, row.remaining - 1, self._until_quantized())
        if self.plan.draft_end is not None:
            limit = min(limit, self.plan.draft_end - 1 - self.plan.offset)
        return limit

    def _launch(self, pending: mx.array, draft: Draft) -> None:
        """Verifies `draft` [B, K] after `pending` [B, 1]; nothing is read back."""
        batch = self.batch
        with mx.stream(generation_stream), ExitStack() as undo:
            verify = Round(batch.model, batch.cache, plan=self.plan, whole=not draft.num_tokens)
            undo.callback(verify.abort)
            verify.open()
            window = pending
            if draft.num_tokens:
                window = mx.concatenate([pending, draft.tokens], axis=1)
            output = self.target(window, batch.cache)
            verify.seal()
            ahead = len(self._flights)
            choices = Verify(batch, output.logits, window, draft, ahead).choices()
            rechecks = draft.num_tokens and any(row.recheck for row in batch.rows)
            gaps = ties.gaps(output.logits) if rechecks else None
            lazy = [x for choice in choices if choice for x in choice.lazy]
            mx.async_eval(window, lazy, verify.slots)
            none_yet = [0] * len(batch.rows)
            self._flights.append(Flight(draft, verify, choices, output.hidden, none_yet, gaps))
            undo.pop_all()

    def _accept(self, flight: Flight) -> list[StepOutput | None]:
        outputs: list[StepOutput | None] = [None] * len(flight.choices)
        with mx.stream(generation_stream):
            for b, guesses in enumerate(flight.draft.read()):
                row, choices = self.batch.rows[b], flight.choices[b]
                if choices is None or row.error is not None:
                    continue
                with self.batch.guard(row):
                    verdict = choices.verdict(guesses)
                    logprobs = tuple(choices.logprobs(i) for i in range(len(verdict.tokens)))
                    output = self._cut(flight, b, StepOutput(verdict.tokens, logprobs))
                    outputs[b], row.is_cut = output, output.is_cut
                    flight.accepted[b] = verdict.accepted
        return outputs

    def _cut(self, flight: Flight, b: int, output: StepOutput) -> StepOutput:
        """Leaves a row's first near-tie to the next round, a single step."""
        if flight.gaps is None:
            return output
        gaps: Any = flight.gaps[b].tolist()
        bound = self.batch.rows[b].recheck
        near = (i for i in range(len(output.tokens)) if gaps[i] < bound)
        return next((output.before(i) for i in near), output)

    def _knows_next_windows(self, flight: Flight) -> bool:
        """Whether the next round needs nothing from the host: no drafter, and one more to come."""
        if flight.draft.num_tokens or self._until_quantized() < 0 or None in flight.choices:
            return False
        rows = self.batch.rows
        if self.batch.isolates and not all(row.is_eager for row in rows):
            return False  # rows come and go, and no sampler or processor is asked twice
        if any(row.processors and row.has_windows for row in rows):
            return False  # they want the tokens on the host
        if any(row.error or row.remaining <= 1 for row in rows):
            return False
        return all(row.proposer is None or _rests(row.proposer) for row in rows)

    # -- quantised caches -----------------------------------------------------------------------

    def _quantize(self) -> None:
        if self._quantize_at and not self._flights:
            before = list(self.batch.cache)
            maybe_quantize_kv_cache(self.batch.cache, *self._quantize_at)
            if any(new is not old for new, old in zip(self.batch.cache, before, strict=True)):
                self.plan = check(self.batch.model, self.batch.cache)

    def _until_quantized(self) -> int:
        """Draft tokens that fit before a cache is due to be quantised; negative: due now.

        Every position of a window must see the caches as plain decoding would: all before the
        switch, or all after it.
        """
        if not self._quantize_at:
            return sys.maxsize
        start = self._quantize_at[0]
        plain = [c.offset for c in self.batch.cache if type(c) is KVCache]
        return min((start - 1 - offset for offset in plain), default=sys.maxsize)


def _rests(proposer: Proposer) -> bool:
    """Whether the round after the current one is known to have no draft."""
    return isinstance(proposer, AutoSession) and proposer.rests_after(1)
