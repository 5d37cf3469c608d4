"""The boundaries of one model and one kind of prompt cache."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .radix import Boundary, Node, RadixTree
from .snapshot import (
    LeafKind,
    Pages,
    State,
    fill,
    leaves,
    make_like,
    put_state,
    take_pages,
    take_state,
)


@dataclass(frozen=True)
class SpaceKey:
    """What two entries must share to be of use for the same request.

    model           fingerprint of the model whose caches these are
    kinds           their classes and settings
    quantized_at    tokens that were cached when they were quantised; None if they are not

    The last one matters: tokens that came after it saw rounded keys and values, the ones before it
    did not.
    """

    model: str
    kinds: tuple[LeafKind, ...]
    quantized_at: int | None = None


@dataclass(frozen=True)
class Found:
    """A boundary that a prompt starts with: its first `length` tokens."""

    space: Space
    node: Node
    length: int


class Space:
    """A radix tree, and how its nodes are made from prompt caches and put into them."""

    def __init__(self, key: SpaceKey) -> None:
        self.key = key
        self.tree = RadixTree()
        self._grows = [kind.is_growing for kind in key.kinds]

    @property
    def can_cut(self) -> bool:
        """Whether every token is a boundary, because all caches can be cut."""
        return all(self._grows)

    def longest(self, tokens: array[int], most: int, allows: Callable[[int], bool]) -> Found | None:
        """The longest boundary of at most `most` tokens that `tokens` start with."""
        node, depth = self.tree.match(tokens)
        if self.can_cut:
            length = min(depth, most)
            while length and not allows(length):
                length -= 1
            return Found(self, node, length) if length else None
        for known in reversed(node.path):
            if known.end <= min(depth, most) and known.boundary and allows(known.end):
                return Found(self, known, known.end)
        return None

    def put(self, found: Found, cache: list[Any]) -> None:
        """Fills the fresh caches of the model with what was found."""
        make_like(self.key.kinds, cache)
        path = [node for node in found.node.path[1:] if node.start < found.length]
        parts = [self._pages(node, found.length) for node in path]
        states = iter(() if found.node.boundary is None else found.node.boundary.states)
        growing = 0
        for entry, grows in zip(leaves(cache), self._grows, strict=True):
            if grows:
                fill(entry, [pages[growing] for pages in parts], found.length)
                growing += 1
            else:
                put_state(entry, next(states), found.length)

    @staticmethod
    def _pages(node: Node, length: int) -> tuple[Pages, ...]:
        """Its pages up to a token."""
        if node.end <= length:
            return node.pages
        stop = length - node.start
        return tuple(tuple(x[..., :stop, :] for x in pages) for pages in node.pages)

    def take(self, tokens: array[int], cache: list[Any]) -> Node:
        """Keeps what a prompt cache with these tokens holds. Everything is computed."""
        _, depth = self.tree.match(tokens)
        pages: list[Pages] = []
        states: list[State] = []
        for entry, grows in zip(leaves(cache), self._grows, strict=True):
            if grows:
                pages.append(take_pages(entry, depth, len(tokens)))
            else:
                states.append(take_state(entry))
        mx.eval(pages, [state.arrays for state in states])
        return self.add(tokens, depth, pages, states)

    def add(
        self, tokens: array[int], depth: int, pages: Sequence[Pages], states: Sequence[State]
    ) -> Node:
        """Keeps a boundary of which the tree has the pages of the first `depth` tokens."""
        node = self.tree.add(tokens, depth, tuple(pages))
        if node.boundary is None:
            node.boundary = Boundary(tuple(states))
        return node
