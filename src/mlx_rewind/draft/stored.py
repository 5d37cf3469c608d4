"""Draft caches in a store: a draft model reads no prompt twice either."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

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

    def end(self, tokens: Sequence[int], cache: list[Any]) -> None:
        """Keeps the draft caches of a row that ends; they hold these tokens.

        Another thread than the one that drafted leaves nothing: some of it may not be computed.
        """
        if tokens and threading.current_thread() is self._thread:
            mx.eval([entry.state for entry in cache])
            self._store.insert(tokens, cache, model=self._model)
