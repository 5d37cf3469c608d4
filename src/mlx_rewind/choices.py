"""What the target says at the positions of a verify, row by row.

    position   0         1    ...  K
    follows    pending   d1   ...  dK

Rows whose draws depend on nothing but logits, seed and history are drawn at once, all rows and
positions in one operation. A sampler or processor of the caller's own is called in order and never
further than asked, just as in plain decoding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from . import accept
from .batch import Batch, Row, WindowProcessor
from .sampling import Draw, Draws, draw, gumbel, laws
from .types import Draft, Verdict


class Choices(ABC):
    """The target's choices for one row."""

    @property
    @abstractmethod
    def lazy(self) -> list[mx.array]:
        """What is still on the device."""

    @property
    @abstractmethod
    def first(self) -> mx.array:
        """The token after the pending one, [1], still on the device."""

    @abstractmethod
    def verdict(self, guesses: list[int]) -> Verdict:
        """Reads back which draft tokens stay, and what follows them."""

    @abstractmethod
    def logprobs(self, position: int) -> mx.array:
        """The logprobs at a position that was reached, [V]."""


@dataclass
class Verify:
    """A verify of all rows.

    logits     [B, K + 1, V]
    window     [B, K + 1] the pending tokens and the drafts
    ahead      1 if the pending token is not among the rows' tokens yet, else 0
    """

    batch: Batch
    logits: mx.array
    window: mx.array
    draft: Draft
    ahead: int

    def choices(self) -> list[Choices | None]:
        """One per row, None for a row that failed."""
        chosen: list[Choices | None] = [None] * len(self.batch.rows)
        eager: dict[int, mx.array | None] = {}
        for b, row in enumerate(self.batch.rows):
            with self.batch.guard(row):
                if row.is_eager:
                    eager[b] = self._changed(b)
                else:
                    chosen[b] = Stepwise(row, self._logits(b), self._history(b), self._position(b))
        if eager:
            self._draw(eager, chosen)
        return chosen

    # -- drawn at once --------------------------------------------------------------------------

    def _draw(self, eager: dict[int, mx.array | None], chosen: list[Choices | None]) -> None:
        changed = any(logits is not None for logits in eager.values())
        logits = self.logits
        if changed or len(eager) < logits.shape[0]:
            given = [self.logits[b] if own is None else own for b, own in eager.items()]
            logits = mx.stack(given)
        logprobs = _normalised(logits)
        draws = self._draws(eager)
        if any(draws):
            tokens = draw(draws, logprobs.flatten(0, 1))[0].reshape(logprobs.shape[:2])
        else:
            tokens = mx.argmax(logprobs, axis=-1)
        drawn = _Drawn(tokens, logprobs)
        results = self._judge({b: logprobs[i] for i, b in enumerate(eager) if self._judges(b)})
        for i, (b, own) in enumerate(eager.items()):
            draws_of = self.batch.rows[b].draws
            raw = own is not None and draws_of is not None and draws_of.params.raw_logprobs
            told = _normalised(self.logits[b]) if raw else None
            if b in results:
                chosen[b] = _Judged(results[b], logprobs[i] if told is None else told)
            else:
                chosen[b] = _Member(drawn, i, told)

    def _judges(self, b: int) -> bool:
        """Whether the drafts of a row are accepted by ratios."""
        own = self.batch.rows[b].draws
        return own is not None and own.acceptance != "match" and self.draft.lengths[b] > 0

    def _draws(self, eager: dict[int, mx.array | None]) -> list[Draw]:
        """One draw per position of every row; what lies beyond a row's draft is greedy."""
        draws: list[Draw] = []
        for b in eager:
            own, at, size = self.batch.rows[b].draws, self._position(b), self.draft.lengths[b] + 1
            rest = self.logits.shape[1] - size
            if own is None or own.params.is_greedy or self._judges(b):
                draws += [None] * self.logits.shape[1]
            else:
                draws += [*((own, at + i) for i in range(size)), *[None] * rest]
        return draws

    def _judge(self, logprobs: dict[int, mx.array]) -> dict[int, mx.array]:
        """Results of the rules for rows, by rows of one kind; logprobs [K + 1, V] of each."""
        kinds: dict[Any, list[int]] = {}
        for b in logprobs:
            own, count = self._drawing(b), self.draft.lengths[b]
            is_certain = self.draft.laws[b] is None
            kind = own.acceptance, count, own.params.filters, is_certain
            kinds.setdefault(kind, []).append(b)
        results: dict[int, mx.array] = {}
        for (acceptance, count, _, is_certain), rows in kinds.items():
            together = mx.stack([logprobs[b][: count + 1] for b in rows])
            guesses = mx.stack([self.draft.tokens[b, :count] for b in rows])
            rule = accept.rejection if acceptance == "rejection" else accept.block
            given = [self._law(rows, together), guesses, *self._noise(rows, together.shape)]
            theirs: Any = [self.draft.laws[b] for b in rows]
            judged = mx.vmap(rule)(*given, *(() if is_certain else (mx.stack(theirs),)))
            results |= {b: judged[i] for i, b in enumerate(rows)}
        return results

    def _law(self, rows: list[int], logprobs: mx.array) -> mx.array:
        """Laws of the target for logprobs [R, n, V]."""
        count = logprobs.shape[1]
        places = [(self._drawing(b), self._position(b) + i) for b in rows for i in range(count)]
        return laws(places, logprobs.flatten(0, 1)).reshape(logprobs.shape)

    def _noise(self, rows: list[int], shape: tuple[int, ...]) -> tuple[mx.array, mx.array]:
        """Lots [R, n - 1] and Gumbel noise [R, n, V] of this round, which its start tells apart."""
        lots: list[list[float]] = []
        keys: list[list[int]] = []
        for b in rows:
            own = self._drawing(b)
            first = self._position(b) - own.start
            lots.append([own.uniform("accept", first, i) for i in range(shape[1] - 1)])
            keys += [own.key("rest", first, i) for i in range(shape[1])]
        return mx.array(lots, mx.float32), gumbel(keys, shape[-1]).reshape(shape)

    def _drawing(self, b: int) -> Draws:
        own = self.batch.rows[b].draws
        assert own is not None
        return own

    def _changed(self, b: int) -> mx.array | None:
        """Logits [K + 1, V] of an eager row after its processors; None for a row without any."""
        row, at, size = self.batch.rows[b], self._position(b), self.draft.lengths[b] + 1
        own, logits, changed = row.draws, self._logits(b), bool(row.processors)
        if own is not None and own.params.penalties:
            logits, changed = self._penalised(b, own, logits), True
        if row.processors:
            guesses: Any = self.draft.tokens[b, : size - 1].tolist() if size > 1 else []
            for processor in row.processors:
                assert isinstance(processor, WindowProcessor)
                logits = processor.window(row.tokens, guesses, logits)
        banned = [i for i in range(size) if own is not None and own.bans(at + i)]
        if own is not None and banned:  # the first positions
            parts = [own.without_ends(logits[i : i + 1]) for i in banned]
            logits, changed = mx.concatenate([*parts, logits[len(banned) :]]), True
        return mx.concatenate([logits, self.logits[b, size:]]) if changed else None

    def _penalised(self, b: int, own: Draws, logits: mx.array) -> mx.array:
        row, at, size = self.batch.rows[b], self._position(b), logits.shape[0]
        known = mx.array(row.tokens[max(0, at - 1 - own.reach) : at - 1], mx.int32)
        history = mx.concatenate([known, self.window[b, :size].astype(mx.int32)])
        ends = [known.size + i + 1 for i in range(size)]
        each = [own.penalised(logits[i : i + 1], history[: ends[i]]) for i in range(size)]
        return mx.concatenate(each)

    # -- one row --------------------------------------------------------------------------------

    def _position(self, b: int) -> int:
        """Index, in the row's tokens, of the token that follows its pending one."""
        return len(self.batch.rows[b].tokens) + self.ahead

    def _logits(self, b: int) -> mx.array:
        return self.logits[b, : self.draft.lengths[b] + 1]

    def _history(self, b: int) -> mx.array | None:
        """The row's tokens, then the draft, [n + K]; None if nobody asks."""
        row = self.batch.rows[b]
        if not row.processors:
            return None
        known = row.tokens if self.ahead else row.tokens[:-1]
        size = self.draft.lengths[b] + 1
        return mx.concatenate([mx.array(known, mx.int32), self.window[b, :size]])


def _normalised(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


class _Drawn:
    """The draws of some rows: tokens [R, K + 1], logprobs [R, K + 1, V]. Read back once."""

    def __init__(self, tokens: mx.array, logprobs: mx.array) -> None:
        self.tokens, self.logprobs = tokens, logprobs
        self._read: Any = None

    def read(self, index: int) -> list[int]:
        if self._read is None:
            self._read = self.tokens.tolist()
        row: list[int] = self._read[index]
        return row


class _Member(Choices):
    """A row of `_Drawn`, and the logprobs [K + 1, V] to report if they are others."""

    def __init__(self, drawn: _Drawn, index: int, told: mx.array | None = None) -> None:
        self._drawn, self._index, self._told = drawn, index, told

    @property
    def lazy(self) -> list[mx.array]:
        told = [] if self._told is None else [self._told]
        return [self._drawn.tokens, self._drawn.logprobs, *told]

    @property
    def first(self) -> mx.array:
        return self._drawn.tokens[self._index, :1]

    def verdict(self, guesses: list[int]) -> Verdict:
        return accept.match(guesses, self._drawn.read(self._index).__getitem__)

    def logprobs(self, position: int) -> mx.array:
        if self._told is not None:
            return self._told[position]
        return self._drawn.logprobs[self._index, position]


class _Judged(Choices):
    """A row whose drafts are accepted by ratios: result as of `accept.rejection`."""

    def __init__(self, result: mx.array, logprobs: mx.array) -> None:
        self._result, self._logprobs = result, logprobs

    @property
    def lazy(self) -> list[mx.array]:
        return [self._result, self._logprobs]

    @property
    def first(self) -> mx.array:
        raise RuntimeError("a draft decides what follows the pending token")

    def verdict(self, guesses: list[int]) -> Verdict:
        result: Any = self._result.tolist()
        accepted, *follow = result
        return Verdict((*guesses[:accepted], follow[accepted]))

    def logprobs(self, position: int) -> mx.array:
        return self._logprobs[position]


class Stepwise(Choices):
    """A row that is drawn in order and never further than asked.

    logits [K + 1, V], history [n + K]: the row's tokens up to the pending one, then the draft
    """

    def __init__(self, row: Row, logits: mx.array, history: mx.array | None, position: int) -> None:
        self._row, self._logits, self._history = row, logits, history
        self._position = position
        self._tokens: list[mx.array] = []
        self._logprobs: list[mx.array] = []
        self._draw()

    @property
    def lazy(self) -> list[mx.array]:
        return self._tokens + self._logprobs

    @property
    def first(self) -> mx.array:
        return self._tokens[0]

    def verdict(self, guesses: list[int]) -> Verdict:
        return accept.match(guesses, self._token)

    def logprobs(self, position: int) -> mx.array:
        return self._logprobs[position]

    def _token(self, position: int) -> int:
        if position == len(self._tokens):
            self._draw()
        token: Any = self._tokens[position].item()
        return int(token)

    def _draw(self) -> None:
        """Draws the next position; its history ends with the draft token before it."""
        i, size, history = len(self._tokens), self._logits.shape[0], self._history
        if history is not None:
            history = history[: history.size - (size - 1 - i)]
        logits = self._logits[i : i + 1]
        token, logprobs = self._row.choose(logits, history, self._position + i)
        self._tokens.append(token)
        self._logprobs.append(logprobs)
