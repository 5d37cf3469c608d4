"""What a worker's requests, its model and its store come to, as plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import mlx.core as mx

from ..cache.store import PromptCacheStore
from ..draft.auto import Auto, choice_of
from ..draft.protocol import kind_of
from ..request import Handle, Request
from .jobs import Memory, Usage


def size(request: Request) -> int:
    """Tokens that a request may come to."""
    return len(request.prompt) + request.max_tokens


def choices(handles: Iterable[Handle | None]) -> dict[str, int]:
    """Of the requests that choose their drafts: what they do now, and how many do the same."""
    known = [handle for handle in handles if handle is not None]
    choosing = [handle for handle in known if isinstance(handle.request.drafter, Auto)]
    return Counter(choice_of(handle.stats.reason) for handle in choosing)


def memory(store: PromptCacheStore | None) -> Memory:
    active = mx.get_active_memory()
    if store is None:
        return Memory(active)
    stats = store.stats
    return Memory(active, stats.bytes, stats.entries, stats.hits, stats.evictions)


def usage(handle: Handle) -> Usage:
    stats, drafter = handle.stats, handle.request.drafter
    return Usage(
        len(handle.request.prompt),
        len(handle.tokens),
        handle.cached_tokens,
        stats.drafted,
        stats.accepted,
        stats.rounds,
        kind_of(drafter),
        stats.reason if isinstance(drafter, Auto) else "",
        handle.exactness,
        handle.seed,
        tuple(stats.drafted_per_position),
        tuple(stats.accepted_per_position),
    )
