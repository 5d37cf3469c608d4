"""A store of prompt caches: no prompt is read twice, by recurrent models neither.

    store = PromptCacheStore(model)
    cache, reused = store.fetch(tokens)           # stock caches that hold tokens[:reused]
    model(tokens[reused:], cache=cache)
    store.insert(tokens, cache)

Boundaries are kept with all that the caches hold there. A prompt starts from the longest one that
it begins with; where every cache can be cut, from any token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from .attach import attach
from .describe import inspect
from .disk import LoadReport, Owner, load_nodes, save_nodes
from .fingerprint import model_fingerprint, tokenizer_fingerprint
from .radix import Node, token_array
from .round import check
from .snapshot import LeafKind, check_whole, kinds_of
from .space import Found, Space, SpaceKey


@dataclass(frozen=True)
class StoreStats:
    """Counters of a store, the target's only but for the last four.

    requests, hits      prompts that asked, and that found a boundary
    tokens_asked, tokens_reused
                        tokens of these prompts, and those that needed no forward
    entries, bytes      boundaries now, and bytes of all that is kept, drafters' included
    evictions, refused  boundaries that had to go, and that did not fit
    """

    requests: int = 0
    hits: int = 0
    tokens_asked: int = 0
    tokens_reused: int = 0
    entries: int = 0
    bytes: int = 0
    evictions: int = 0
    refused: int = 0


@dataclass(frozen=True)
class StoreEntry:
    """A boundary of the target.

    nbytes    bytes that are its own: its states, and the pages that it shares with no shorter one
    """

    tokens: tuple[int, ...]
    nbytes: int
    is_pinned: bool


class PromptCacheStore:
    """Snapshots of the prompt caches of one model and of its drafters, by their tokens.

    model          the target
    tokenizer      its tokenizer, which entries on disk are then checked against
    max_bytes      most bytes of all entries
    max_entries    most boundaries, None for no limit
    interval       tokens between the boundaries that a prefill leaves; None: chosen by the size of
                   the state, 0: none but those asked for

    Entries are copies and never change; what is fetched is the caller's own. The entry that was not
    used for longest goes first, unless it is pinned. May be used by several threads.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        max_bytes: int = 4 << 30,
        max_entries: int | None = None,
        interval: int | None = None,
    ) -> None:
        if max_bytes < 0 or (max_entries or 0) < 0 or (interval or 0) < 0:
            raise ValueError(
                "max_bytes, max_entries and interval must be 0 or more, got "
                f"{max_bytes}, {max_entries} and {interval}"
            )
        self.model, self.tokenizer = model, tokenizer
        self.max_bytes, self.max_entries, self._interval = max_bytes, max_entries, interval
        self._spaces: dict[SpaceKey, Space] = {}
        self._fingerprints: dict[int, tuple[nn.Module, str]] = {}
        self._stats = StoreStats()
        self._clock = self._bytes = self._entries = 0
        self._lock = threading.RLock()

    # -- fetching -------------------------------------------------------------------------------

    def fetch(self, tokens: Sequence[int]) -> tuple[list[Any], int]:
        """Stock caches that hold the longest stored start of `tokens`, and how many that are.

        The last token is never among them: it has to be fed to know what follows it. Without a
        stored start the caches are fresh ones, and the number is 0.
        """
        cache = make_prompt_cache(self.model)
        return cache, self.resume(tokens, cache)

    def resume(
        self,
        tokens: Sequence[int],
        cache: list[Any],
        *,
        model: nn.Module | None = None,
        kinds: Sequence[tuple[tuple[LeafKind, ...], int | None]] = (),
        allows: Callable[[int], bool] = lambda length: True,
    ) -> int:
        """Fills fresh caches with the longest stored start of `tokens`; returns its length.

        model     whose caches they are, if not the target's
        kinds     quantised kinds of cache that will do as well, with the tokens before they were
        allows    tells for a number of tokens whether to start there
        """
        with self._lock:
            owner = self._owner_of(model)
            keys = [SpaceKey(owner, kinds_of(cache))]
            keys += [SpaceKey(owner, *kind) for kind in kinds]
            best = self._longest(token_array(tokens), keys, allows)
            length = 0 if best is None else best.length
            if best is not None:
                best.space.put(best, cache)
                self._touch(best.node)
            if model is None or model is self.model:
                self._count(
                    requests=1, hits=length > 0, tokens_asked=len(tokens), tokens_reused=length
                )
            return length

    def _longest(
        self, tokens: Any, keys: Sequence[SpaceKey], allows: Callable[[int], bool]
    ) -> Found | None:
        found = [
            self._spaces[key].longest(tokens, len(tokens) - 1, allows)
            for key in keys
            if key in self._spaces
        ]
        hits = [hit for hit in found if hit is not None]
        return max(hits, key=lambda hit: hit.length, default=None)

    # -- inserting ------------------------------------------------------------------------------

    def insert(
        self,
        tokens: Sequence[int],
        cache: list[Any],
        *,
        model: nn.Module | None = None,
        quantized_at: int | None = None,
    ) -> bool:
        """Keeps a copy of a prompt cache that holds exactly `tokens`. False if it does not fit.

        model           whose caches they are, if not the target's
        quantized_at    tokens that they held when they were quantised

        Raises `UnsupportedCacheError` for a cache that holds other numbers of tokens, is in the
        middle of a round, or is of a class that cannot be stored; ValueError for an empty key.
        """
        if not len(tokens):
            raise ValueError("a boundary needs at least one token")
        with self._lock:
            check(self.model if model is None else model, cache)
            check_whole(cache, len(tokens))
            key = SpaceKey(self._owner_of(model), kinds_of(cache), quantized_at)
            return self._insert(key, token_array(tokens), cache)

    def give(self, owner: str, tokens: Sequence[int], cache: list[Any]) -> None:
        """Keeps caches of a drafter that are no model's prompt cache, under a name of its own."""
        with self._lock:
            self._insert(SpaceKey(owner, kinds_of(cache)), token_array(tokens), cache)

    def take(self, owner: str, tokens: Sequence[int], cache: list[Any]) -> bool:
        """Fills fresh caches with what `give` kept for exactly these tokens, if it did."""
        with self._lock:
            space = self._spaces.get(SpaceKey(owner, kinds_of(cache)))
            node = None if space is None else space.tree.find(token_array(tokens))
            if space is None or node is None or node.boundary is None:
                return False
            space.put(Found(space, node, node.end), cache)
            self._touch(node)
            return True

    def _insert(self, key: SpaceKey, tokens: Any, cache: list[Any]) -> bool:
        space = self._spaces.setdefault(key, Space(key))
        node = space.tree.find(tokens)
        if node is not None and node.boundary is not None:
            self._touch(node)
            return True
        return self._keep(space, space.take(tokens, cache))

    def _keep(self, space: Space, node: Node) -> bool:
        """Accounts for a new boundary and makes room for it; lets go of it if there is none."""
        self._recount()
        self._touch(node)
        self._make_room(node)
        if self._fits():
            return True
        self._drop(space, node)
        self._count(refused=1)
        return False

    # -- limits ---------------------------------------------------------------------------------

    def _fits(self) -> bool:
        most = self.max_entries
        return self._bytes <= self.max_bytes and (most is None or self._entries <= most)

    def _make_room(self, newest: Node) -> None:
        """Lets go of the boundaries that were not used for longest, but for the newest one."""
        if self._fits():
            return
        boundaries = [
            (node.boundary.used, space, node)
            for space in self._spaces.values()
            for node in space.tree
            if node.boundary and not node.boundary.pins and node is not newest
        ]
        for _, space, node in sorted(boundaries, key=lambda item: item[0]):
            self._drop(space, node)
            self._count(evictions=1)
            if self._fits():
                return

    def _drop(self, space: Space, node: Node) -> None:
        assert node.boundary is not None
        self._bytes -= node.boundary.nbytes
        self._entries -= 1
        node.boundary = None
        self._bytes -= space.tree.prune(node)

    def _recount(self) -> None:
        nodes = [node for space in self._spaces.values() for node in space.tree]
        self._bytes = sum(node.nbytes for node in nodes)
        self._entries = sum(node.boundary is not None for node in nodes)

    def pin(self, tokens: Sequence[int]) -> None:
        """Keeps the boundary of exactly these tokens until `unpin`, as often as it is pinned.

        Raises KeyError if it is not stored.
        """
        with self._lock:
            for node in self._stored(tokens):
                assert node.boundary is not None
                node.boundary.pins += 1

    def unpin(self, tokens: Sequence[int]) -> None:
        """Takes back one `pin`. Raises KeyError if the boundary is not stored, or not pinned."""
        with self._lock:
            for node in self._stored(tokens):
                assert node.boundary is not None
                if not node.boundary.pins:
                    raise KeyError(f"the boundary of these {len(tokens)} tokens is not pinned")
                node.boundary.pins -= 1

    def _stored(self, tokens: Sequence[int]) -> list[Node]:
        ids = token_array(tokens)
        found = [space.tree.find(ids) for space in self._of_target()]
        nodes = [node for node in found if node is not None and node.boundary is not None]
        if not nodes:
            raise KeyError(f"no boundary of these {len(tokens)} tokens is stored")
        return nodes

    def _of_target(self) -> Iterator[Space]:
        target = self.fingerprint(None)
        return (space for key, space in self._spaces.items() if key.model == target)

    # -- looking --------------------------------------------------------------------------------

    @property
    def stats(self) -> StoreStats:
        with self._lock:
            return replace(self._stats, entries=self._entries, bytes=self._bytes)

    @property
    def entries(self) -> list[StoreEntry]:
        """The boundaries of the target, the one that was used last at the end."""
        with self._lock:
            nodes = [n for space in self._of_target() for n in space.tree if n.boundary]
            nodes.sort(key=lambda node: node.boundary.used if node.boundary else 0)
            return [
                StoreEntry(tuple(n.tokens), n.nbytes, bool(n.boundary and n.boundary.pins))
                for n in nodes
            ]

    @cached_property
    def fault(self) -> str | None:
        """Why chunks of a prompt are not what its tokens are, by a fault of mlx-lm; else None."""
        return attach(self.model).fault

    @cached_property
    def interval(self) -> int:
        """Tokens between the boundaries that a prefill leaves; 0: none but those asked for.

        By default so many that the states weigh no more than the pages between them.
        """
        return default_interval(self.model) if self._interval is None else self._interval

    def clear(self) -> None:
        """Lets go of everything, pinned or not. Counters stay."""
        with self._lock:
            self._spaces.clear()
            self._recount()

    # -- disk -----------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> int:
        """Makes a folder hold what the store holds now. Returns the number of files written.

        Each file appears whole or not at all; files of other entries are removed last. Others may
        read the folder meanwhile.

        Raises OSError, and ValueError for a path that is not a folder of such files.
        """
        with self._lock:
            return save_nodes(Path(directory), self._spaces.values(), self._owner)

    def load(self, directory: str | Path) -> LoadReport:
        """Takes in the entries of a folder, as far as they fit. Says of every other file why not.

        Refused, and never used: files of another format version, model, tokenizer or kind of cache,
        truncated or damaged ones, and those whose beginning is missing.

        Raises FileNotFoundError for a folder that is not there.
        """
        with self._lock:
            report = load_nodes(Path(directory), self._spaces, self._owner)
            self._recount()
            for node in report.nodes:
                self._touch(node)
            if report.nodes:
                self._make_room(report.nodes[-1])
            return report

    @property
    def _owner(self) -> Owner:
        tokenizer = None if self.tokenizer is None else tokenizer_fingerprint(self.tokenizer)
        return Owner(self.fingerprint(None), attach(self.model).unused, tokenizer)

    def _owner_of(self, model: nn.Module | None) -> str:
        """The name of a model's spaces; a draft model with the target's weights has its own."""
        is_target = model is None or model is self.model
        return self.fingerprint() if is_target else f"draft:{self.fingerprint(model)}"

    # -- parts ----------------------------------------------------------------------------------

    def fingerprint(self, model: nn.Module | None = None) -> str:
        """That of a model, the target by default; looked up after the first time."""
        model = self.model if model is None else model
        known = self._fingerprints.get(id(model))
        if known is None:
            known = self._fingerprints[id(model)] = model, model_fingerprint(model)
        return known[1]

    def _touch(self, node: Node) -> None:
        """Notes that a boundary was used; of a cut, the next one below it."""
        while node.boundary is None and node.children:
            node = next(iter(node.children.values()))
        if node.boundary is not None:
            self._clock += 1
            node.boundary.used = self._clock

    def _count(self, **more: int) -> None:
        old = vars(self._stats)
        self._stats = replace(self._stats, **{name: old[name] + n for name, n in more.items()})


#: Tokens between boundaries by default: at least, at most, and where nothing grows with them.
_CLOSEST, _FARTHEST, _WITHOUT_PAGES = 512, 8192, 2048


def default_interval(model: nn.Module) -> int:
    """So many tokens that a boundary weighs no more than the pages of the tokens since the last.

    0 if every token is a boundary anyhow.
    """
    records = inspect(model)
    states = sum(record.bytes for record in records if record.mechanism not in ("trim", "cut"))
    per_token = sum(record.bytes for record in records if record.mechanism in ("trim", "cut"))
    if not states:
        return 0
    if not per_token:
        return _WITHOUT_PAGES
    tokens = -(-states // per_token)
    return min(max(-(-tokens // _CLOSEST) * _CLOSEST, _CLOSEST), _FARTHEST)
