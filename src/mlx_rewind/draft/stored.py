"""Draft caches in a store: draft models and heads read no prompt twice either."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from ..cache.snapshot import kinds_of, shortened
from ..cache.store import PromptCacheStore


class StoredDrafts:
    """What a row's draft caches take from a store and leave there.

    store         the store of the request
    model         the draft model
    boundaries    tokens of the prompt after which others may go on differently
    """

    def __init__(
        self, store: PromptCacheStore, model: nn.Module, boundaries: Sequence[int]
    ) -> None:
        self._store, self._model = store, model
        self._boundaries = sorted(boundaries)
        self._thread: threading.Thread | None = None

    def begin(
        self, tokens: Sequence[int], cache: list[Any], feed: Callable[[Sequence[int]], object]
    ) -> int:
        """Fills fresh draft caches with all of the prompt but its last token.

        feed    feeds tokens to the caches, for those that the store has not

        Returns how many tokens they hold.
        """
        self._thread = threading.current_thread()
        last = len(tokens) - 1
        done = self._store.resume(tokens, cache, model=self._model)
        for stop in [*(b for b in self._boundaries if b < last), last]:
            if done < stop:
                feed(tokens[done:stop])
                self._store.insert(tokens[:stop], cache, model=self._model)
                done = stop
        return done

    def keep(self, tokens: Sequence[int], cache: list[Any]) -> None:
        """Keeps the draft caches of a row; they hold these tokens.

        Another thread than the one that drafted leaves nothing: some of it may not be computed.
        """
        if tokens and threading.current_thread() is self._thread:
            mx.eval([entry.state for entry in cache])
            self._store.insert(tokens, cache, model=self._model)


class StoredHead:
    """The same for the one head of a checkpoint, whose row i holds state i and token i + 1.

        key      t1 t2 ... tk-1       of the boundary after k tokens, in a space of t0's own
        rows     h0 h1 ... hk-2       of the caches, and
        pending  hk-1                 [1, 1, H], whose token is not known yet

    store    the store of the request
    head     the head
    """

    def __init__(self, store: PromptCacheStore, head: Any, first: int) -> None:
        self._store, self._head = store, head
        self._owner = f"{store.fingerprint()}:{store.fingerprint(head)}:{first}"
        self._thread = threading.current_thread()

    def fetch(self, tokens: Sequence[int]) -> tuple[list[Any], mx.array] | None:
        """Caches of the head and the pending state after these tokens, if they were kept."""
        cache = [*self._head.make_cache(), ArraysCache(1)]
        if not self._store.take(self._owner, tokens[1:], cache):
            return None
        return cache[:-1], cache[-1][0]

    @staticmethod
    def can_keep(head: Any) -> bool:
        """Whether the caches of a head can be cut, as they are one row behind a boundary."""
        return all(kind.is_growing for kind in kinds_of(head.make_cache()))

    def keep(self, tokens: Sequence[int], cache: list[Any], pending: mx.array) -> None:
        """Keeps the rows that come with these tokens, and the state after the last."""
        rows = len(tokens) - 1
        if rows < 1 or threading.current_thread() is not self._thread:
            return
        state = ArraysCache(1)
        state[0] = pending
        self._store.give(self._owner, tokens[1:], [*shortened(cache, rows), state])
