"""A second, smaller model as drafter. It keeps a cache of its own and rolls it back with rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ..cache.members import extract
from ..cache.round import Round, check
from ..cache.store import PromptCacheStore
from ..errors import DraftMismatchError
from ..target import Target
from ..types import Guess
from .drawing import Drafting, check_drafting
from .group import CachedGroup, Member
from .protocol import Drafter, Session
from .stored import StoredDrafts


class DraftModel(Drafter):
    """Drafting with any mlx-lm model: dense, hybrid or sliding-window.

    model        the draft model
    tokenizer    its tokenizer, when it is to be compared with the target's (`check_tokenizers`)
    drafting     how it draws for rows that sample by `SamplingParams`, see `draft.drawing`

    Raises `UnsupportedCacheError` or `UnsupportedModelError` for what cannot be rolled back.
    """

    kind: ClassVar[str] = "model"

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        prefill_step_size: int = 2048,
        drafting: Drafting = "coupled",
    ) -> None:
        check_drafting(drafting)
        check(model, make_prompt_cache(model))
        if prefill_step_size < 1:
            raise ValueError(f"prefill_step_size must be positive, got {prefill_step_size}")
        self.model = model
        self.tokenizer = tokenizer
        self.prefill_step_size = prefill_step_size
        self.drafting: Drafting = drafting
        self.forward = Target(model)
        self.vocab_size = self.forward.vocab_size

    def start(self, target: Target) -> Session:
        return _Session(self, target.vocab_size)


class _Session(Member):
    """One row of a group."""

    group: _Group

    def __init__(self, drafter: DraftModel, target_vocab: int) -> None:
        self.group = _Group(drafter, self, target_vocab)

    @property
    def may_join(self) -> bool:
        return 0 not in self.group.cached

    @property
    def cache(self) -> list[Any]:
        """The draft cache, with those of the other rows of its group."""
        return self.group.cache

    def use_store(
        self, store: PromptCacheStore, prompt: Sequence[int], reused: int, boundaries: Sequence[int]
    ) -> None:
        self.group.stored = [StoredDrafts(store, self.group._model, boundaries)]

    def keep(self, tokens: Sequence[int]) -> None:
        self.group.store(self, tokens)


class _Group(CachedGroup):
    """The draft caches of some rows.

        tokens                t0 t1 ... tn | pending
        cache after catch-up  └──────┴─────┘ then d1 .. d(K-1), one per forward, in a round
        the last draft token is proposed without being fed

    cached    tokens of each row in the cache when no round is open
    stored    what each row takes from a store and leaves there, None for a row without one
    """

    def __init__(self, drafter: DraftModel, member: Session, target_vocab: int) -> None:
        super().__init__(drafter, member, target_vocab)
        self.cache = make_prompt_cache(drafter.model)
        self.cached = [0]
        self._shared_vocab = min(target_vocab, drafter.vocab_size)
        self.stored: list[StoredDrafts | None] = [None]
        self._is_whole = True  # but while drafting, or after a failure in it
        self._fed: list[mx.array] = []
        self._last = mx.zeros((1, self._shared_vocab))  # logits after each row's cached tokens

    def propose(self, tokens: Sequence[list[int]], limits: Sequence[int]) -> list[Guess]:
        with mx.stream(generation_stream):
            self._settle(tokens)
            self._is_whole = False
            self._begin(tokens)
            self._catch_up(tokens)
            drawing, longest = self._drawing(tokens), max(limits)
            draft = drawing.pick(self._last)
            if longest > 1:
                model = self._drafter.model
                self._round = Round(model, self.cache, single_steps=longest - 1).open()
            for _ in range(longest - 1):
                self._fed.append(draft)
                draft = drawing.pick(self._shared(self._forward(draft[:, None])))
            self._is_whole = True
            return drawing.guesses(limits)

    # -- rows come and go -----------------------------------------------------------------------

    @property
    def _model(self) -> nn.Module:
        return self._drafter.model

    @property
    def _prompt_caches(self) -> list[list[Any]]:
        return [self.cache]

    def fits(self, other: CachedGroup) -> bool:
        if not isinstance(other, _Group) or 0 in (*self.cached, *other.cached):
            return False  # not asked yet: a recurrent cache is still empty
        return super().fits(other)

    def _take(self, other: _Group) -> None:
        self.cached += other.cached
        self.stored += other.stored
        self._last = mx.concatenate([self._last, other._last])

    def _keep(self, rows: Sequence[int]) -> None:
        self.cached = [self.cached[b] for b in rows]
        self.stored = [self.stored[b] for b in rows]
        self._last = self._last[mx.array(list(rows))]

    def store(self, member: Session, tokens: Sequence[int]) -> None:
        """Leaves in the store what the caches hold of a row's tokens."""
        b = next(b for b, known in enumerate(self.members) if known is member)
        stored, held = self.stored[b], self.cached[b]
        if stored is not None and held and self._is_whole:
            self._abort()
            ids = [self._known(token) for token in tokens[:held]]
            stored.keep(ids, extract(self.cache, b) if self._has_rows else self.cache)

    def _abort(self) -> None:
        if self._round is not None:
            self._round.abort()
            self._round, self._fed = None, []

    # -- the draft caches -----------------------------------------------------------------------

    def _settle(self, tokens: Sequence[list[int]]) -> None:
        """Keeps those of the fed draft tokens that the rows have committed since."""
        if self._round is None:
            return
        fed: Any = mx.stack(self._fed, axis=1).tolist()
        rows = zip(fed, self.cached, tokens, strict=True)
        kept = [_agreed(guesses, row[known:]) for guesses, known, row in rows]
        self._round.commit(kept)
        self._round, self._fed = None, []
        self.cached = [known + count for known, count in zip(self.cached, kept, strict=True)]

    def _begin(self, tokens: Sequence[list[int]]) -> None:
        """Starts the fresh caches of one row from what a store has."""
        stored = self.stored[0]
        if stored is not None and self.cached == [0]:
            known = [self._known(token) for token in tokens[0]]
            done = stored.begin(known, self.cache, lambda part: self._read([list(part)]))
            self.cached = [done]

    def _catch_up(self, tokens: Sequence[list[int]]) -> None:
        """Feeds what the rows have and the cache has not."""
        new = [
            [self._known(token) for token in row[known:]]
            for row, known in zip(tokens, self.cached, strict=True)
        ]
        self._read(new)
        self.cached = [len(row) for row in tokens]

    def _read(self, new: list[list[int]]) -> None:
        """Feeds tokens of each row in chunks."""
        step = min(self._drafter.prefill_step_size, self._longest)
        longest = max(len(row) for row in new)
        for start in range(0, longest, step):  # none if it is asked again for the same tokens
            if start:
                mx.eval([entry.state for entry in self.cache])
            self._feed([row[start : start + step] for row in new])

    def _feed(self, new: list[list[int]]) -> None:
        """Feeds tokens of each row, the shorter ones padded, and notes the last logits."""
        lengths = [len(row) for row in new]
        if min(lengths) == max(lengths):
            self._last = self._shared(self._forward(mx.array(new, mx.uint32)))
            return
        padded = mx.array([row + [0] * (max(lengths) - len(row)) for row in new], mx.uint32)
        with Round(self._drafter.model, self.cache) as window:
            logits = self._forward(padded)
            window.commit(lengths)
        fed = mx.array(lengths)
        last = mx.maximum(fed - 1, 0)[:, None, None]
        new_last = self._shared(mx.take_along_axis(logits, last, axis=1))
        self._last = mx.where(fed[:, None] > 0, new_last, self._last)

    def _forward(self, window: mx.array) -> mx.array:
        return self._drafter.forward(window, self.cache).logits

    def _shared(self, logits: mx.array) -> mx.array:
        """The last position of logits [B, S, V], for the tokens that both models have."""
        return logits[:, -1, : self._shared_vocab]

    def _known(self, token: int) -> int:
        """A target's padding id that the draft model has no embedding for is fed as id 0."""
        return token if token < self._drafter.vocab_size else 0


def _agreed(guesses: Sequence[int], tokens: Sequence[int]) -> int:
    """How many guesses are the tokens that came."""
    count = 0
    for guess, token in zip(guesses, tokens, strict=False):
        if guess != token:
            break
        count += 1
    return count


def check_tokenizers(target: Any, draft: Any) -> None:
    """Compares two tokenizers by content: the same ids for the same tokens, the same special ids.

    Raises `DraftMismatchError` naming the first id that differs. Embeddings padded to different
    sizes are no difference, nor are end tokens that a caller added.
    """
    ours, theirs = ({i: token for token, i in t.get_vocab().items()} for t in (target, draft))
    for i in sorted(ours.keys() | theirs.keys()):
        if ours.get(i) != theirs.get(i):
            raise DraftMismatchError(
                f"the draft model has another tokenizer: id {i} is {ours.get(i)!r} for the target "
                f"and {theirs.get(i)!r} for the draft. Use a draft model of the same family."
            )
    special, other = (set(t.all_special_ids) for t in (target, draft))
    if special != other:
        raise DraftMismatchError(
            f"the draft model has other special tokens: ids {sorted(special ^ other)} are special "
            "for only one of the two. Use a draft model of the same family."
        )
