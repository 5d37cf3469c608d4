"""A second, smaller model as drafter. It keeps a cache of its own and rolls it back with rounds."""

from __future__ import annotations

from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ..cache.round import Round, check
from ..errors import DraftMismatchError
from ..target import Target
from .protocol import Drafter, Session


class DraftModel(Drafter):
    """Greedy drafting with any mlx-lm model: dense, hybrid or sliding-window.

    model        the draft model
    tokenizer    its tokenizer, when it is to be compared with the target's (`check_tokenizers`)

    Raises `UnsupportedCacheError` or `UnsupportedModelError` for what cannot be rolled back.
    """

    kind: ClassVar[str] = "model"

    def __init__(
        self, model: nn.Module, tokenizer: Any = None, *, prefill_step_size: int = 2048
    ) -> None:
        check(model, make_prompt_cache(model))
        if prefill_step_size < 1:
            raise ValueError(f"prefill_step_size must be positive, got {prefill_step_size}")
        self.model = model
        self.tokenizer = tokenizer
        self.prefill_step_size = prefill_step_size
        self.forward = Target(model)
        self.vocab_size = self.forward.vocab_size

    def start(self, target: Target) -> Session:
        return _Session(self, target.vocab_size)


class _Session(Session):
    """One row's draft cache.

    tokens           t0 t1 ... tn | pending
    cache after catch-up  └──────┴─────┘ then d1 .. d(K-1), one per forward, in a round
    the last draft token is proposed without being fed
    """

    def __init__(self, drafter: DraftModel, target_vocab: int) -> None:
        self._drafter = drafter
        self._shared_vocab = min(target_vocab, drafter.vocab_size)
        self.cache = make_prompt_cache(drafter.model)
        self._cached = 0
        self._round: Round | None = None
        self._fed: list[mx.array] = []

    def propose(self, tokens: list[int], num_draft_tokens: int) -> mx.array:
        with mx.stream(generation_stream):
            self._settle(tokens)
            token = self._catch_up(tokens)
            drafts = [token]
            if num_draft_tokens > 1:
                model = self._drafter.model
                self._round = Round(model, self.cache, single_steps=num_draft_tokens - 1).open()
            while len(drafts) < num_draft_tokens:
                self._fed.append(token)
                token = self._feed(token[None])
                drafts.append(token)
            return mx.concatenate(drafts)

    def close(self) -> None:
        if self._round is not None:
            self._round.abort()
            self._round = None

    def _settle(self, tokens: list[int]) -> None:
        """Keeps those of the fed draft tokens that the row has committed since."""
        if self._round is None:
            return
        kept = 0
        for fed, committed in zip(self._fed, tokens[self._cached :], strict=False):
            if fed.item() != committed:
                break
            kept += 1
        self._round.commit(kept)
        self._round, self._fed = None, []
        self._cached += kept

    def _catch_up(self, tokens: list[int]) -> mx.array:
        """Feeds what the row has and the cache has not; returns the first draft token, [1]."""
        new = mx.array([self._known(token) for token in tokens[self._cached :]], mx.uint32)
        step = self._drafter.prefill_step_size
        while new.size > step:
            self._drafter.forward(new[None, :step], self.cache)
            mx.eval([entry.state for entry in self.cache])
            new = new[step:]
        self._cached = len(tokens)
        return self._feed(new[None])

    def _feed(self, window: mx.array) -> mx.array:
        logits = self._drafter.forward(window, self.cache).logits
        return mx.argmax(logits[:, -1, : self._shared_vocab], axis=-1).astype(mx.uint32)

    def _known(self, token: int) -> int:
        """A target's padding id that the draft model has no embedding for is fed as id 0."""
        return token if token < self._drafter.vocab_size else 0


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
