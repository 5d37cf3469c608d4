"""A radix tree over tokens: what two prompts share is kept once.

    root ── "t0 .. t19" ──┬── "t20 .. t39"          an edge is a node's label
                          └── "u20 .. u24"          a boundary may lie at the end of a node

Every node has the pages of its own tokens. A boundary inside a label splits the node.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from .snapshot import Pages, State, cut


@dataclass
class Boundary:
    """The states at the end of a node, in the order of the caches that cannot be cut.

    used    when it was stored or last started from, on the store's clock
    pins    how often it was pinned
    """

    states: tuple[State, ...]
    used: int = 0
    pins: int = 0

    def __post_init__(self) -> None:
        self.nbytes = sum(state.nbytes for state in self.states)


@dataclass(eq=False)
class Node:
    """Some tokens after those of its parent.

    start    tokens before its label
    pages    one for each growing cache, of the tokens of the label
    """

    label: array[int]
    start: int
    parent: Node | None
    pages: tuple[Pages, ...] = ()
    boundary: Boundary | None = None
    children: dict[int, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.page_bytes = _bytes(self.pages)

    @property
    def end(self) -> int:
        return self.start + len(self.label)

    @property
    def path(self) -> list[Node]:
        """The nodes from the root, which has no label, to this one."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    @property
    def tokens(self) -> array[int]:
        """All tokens up to its end."""
        key = token_array(())
        for node in self.path:
            key += node.label
        return key

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays and its label."""
        states = 0 if self.boundary is None else self.boundary.nbytes
        return self.page_bytes + states + len(self.label) * self.label.itemsize


def token_array(tokens: Sequence[int]) -> array[int]:
    return array("I", tokens)


class RadixTree:
    """Nodes by their tokens."""

    def __init__(self) -> None:
        self.root = Node(token_array(()), 0, None)

    def __iter__(self) -> Iterator[Node]:
        """All nodes, parents first."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node

    def match(self, tokens: array[int]) -> tuple[Node, int]:
        """The deepest node that shares a token with `tokens`, and how many tokens are shared."""
        node, depth = self.root, 0
        while depth < len(tokens):
            child = node.children.get(tokens[depth])
            if child is None:
                break
            node = child
            shared = _shared(node.label, tokens, depth)
            depth += shared
            if shared < len(node.label):
                break
        return node, depth

    def find(self, tokens: array[int]) -> Node | None:
        """The node that ends with the last of `tokens`."""
        node, depth = self.match(tokens)
        return node if depth == len(tokens) == node.end else None

    def add(self, tokens: array[int], depth: int, pages: tuple[Pages, ...]) -> Node:
        """The node of `tokens`, of which the tree has the first `depth`; `pages` are of the rest.

        Splits a node where they part, or where they end.
        """
        node, found = self.match(tokens)
        assert found == depth
        if depth < node.end:
            node = self._split(node, depth - node.start)
        if depth < len(tokens):
            child = Node(tokens[depth:], depth, node, pages)
            node.children[tokens[depth]] = child
            node = child
        return node

    def prune(self, node: Node) -> int:
        """Removes a node that nothing needs, and parents that nothing needs then. Returns bytes."""
        freed = 0
        while node.parent is not None and node.boundary is None and not node.children:
            freed += node.nbytes
            del node.parent.children[node.label[0]]
            node = node.parent
        return freed

    def _split(self, node: Node, at: int) -> Node:
        """Cuts a node in two, both in memory of their own. Returns the first."""
        assert node.parent is not None
        size = len(node.label)
        first = Node(
            node.label[:at],
            node.start,
            node.parent,
            tuple(cut(pages, 0, at) for pages in node.pages),
        )
        rest = tuple(cut(pages, at, size) for pages in node.pages)
        mx.eval(first.pages, rest)
        first.children[node.label[at]] = node
        node.parent.children[node.label[0]] = first
        node.label, node.start, node.parent, node.pages = node.label[at:], first.end, first, rest
        node.page_bytes = _bytes(rest)
        return first


def _bytes(pages: tuple[Pages, ...]) -> int:
    return sum(x.nbytes for part in pages for x in part)


def _shared(label: array[int], tokens: array[int], start: int) -> int:
    """How many tokens of `label` are those of `tokens` from `start` on."""
    part = tokens[start : start + len(label)]
    if part == label[: len(part)]:
        return len(part)
    return next(i for i, (a, b) in enumerate(zip(label, part, strict=False)) if a != b)
