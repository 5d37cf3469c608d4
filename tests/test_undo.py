"""Every undo against the obvious: a cache of the same class that never saw the rejected tokens.

Keys and values are made from (position, token), so that any mix-up of entries shows.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

import zoo
from mlx_rewind import Round

WINDOW = 8
MAKERS: dict[str, Callable[[], Any]] = {
    "KVCache": KVCache,
    "QuantizedKVCache-4": lambda: QuantizedKVCache(group_size=32, bits=4),
    "QuantizedKVCache-8": lambda: QuantizedKVCache(group_size=32, bits=8),
    "ConcatenateKVCache": ConcatenateKVCache,
    "ChunkedKVCache": lambda: ChunkedKVCache(WINDOW),
    "RotatingKVCache": lambda: RotatingKVCache(WINDOW),
    "RotatingKVCache-keep2": lambda: RotatingKVCache(WINDOW, keep=2),
    "RotatingKVCache-keep4": lambda: RotatingKVCache(WINDOW, keep=4),
    "CacheList": lambda: CacheList(KVCache(), RotatingKVCache(WINDOW)),
}
SIZES = st.lists(st.integers(1, 12), max_size=5)


class Model(nn.Module):
    """Has one cache of a kind, and does nothing but feed it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def make_cache(self) -> list[Any]:
        return [MAKERS[self.kind]()]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        append(cache[0], [tokens.shape[1]], mark=0)
        return tokens


def append(cache: Any, sizes: list[int], mark: int) -> None:
    """Feeds forwards of the given sizes, as a model with chunked attention would."""
    for size in sizes:
        for leaf in cache.caches if isinstance(cache, CacheList) else (cache,):
            if isinstance(leaf, ChunkedKVCache):
                leaf.maybe_trim_front()
            places = mx.arange(leaf.offset, leaf.offset + size, dtype=mx.float32)
            channels = mx.sin(places[:, None] * 3 + mark + mx.arange(32) * 0.1)
            keys = mx.stack([channels, channels + 1])[None]
            leaf.update_and_fetch(keys, -keys)


def cut(sizes: list[int], kept: int) -> list[int]:
    """The forwards that feed only the first `kept` tokens of `sizes`."""
    result = []
    for size in sizes:
        if kept <= 0:
            break
        result.append(min(size, kept))
        kept -= size
    return result


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=60, deadline=None)
@given(history=SIZES, window=SIZES, data=st.data())
def test_commit_equals_never_fed(
    kind: str, history: list[int], window: list[int], data: st.DataObject
) -> None:
    kept = data.draw(st.integers(0, sum(window)), label="kept")
    detours = data.draw(st.lists(st.integers(0, sum(window)), max_size=2), label="detours")
    cache, expected = MAKERS[kind](), MAKERS[kind]()
    append(cache, history, mark=0)
    append(expected, history, mark=0)
    with Round(Model(kind), [cache]) as round_:
        append(cache, cut(window, kept), mark=1)
        append(cache, rest(window, kept), mark=2)
        for stop in detours:
            round_.rewind(stop)
        round_.commit(kept)
    append(expected, cut(window, kept), mark=1)
    zoo.assert_state_equal([cache], [expected])
    for more in ([3], [1, 1], [9, 1]):
        append(cache, more, mark=3)
        append(expected, more, mark=3)
        zoo.assert_state_equal([cache], [expected])


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("first", [WINDOW - 1, WINDOW, WINDOW + 1])
def test_single_steps_after_the_first_window_of_an_empty_cache(kind: str, first: int) -> None:
    """A ring that was empty writes into the very array that it was given."""
    for steps, kept in itertools.product((1, 3), (first, first - 2)):
        cache, expected = MAKERS[kind](), MAKERS[kind]()
        with Round(Model(kind), [cache]) as round_:
            append(cache, [first], mark=1)
            append(cache, [1] * steps, mark=2)
            round_.commit(kept)
        given = MAKERS[kind]()
        append(given, [first], mark=1)
        with Round(Model(kind), [expected]) as round_:
            append(expected, [first], mark=1)
            round_.commit(kept)
        zoo.assert_state_equal([cache], [expected])
        if kept == first:
            zoo.assert_state_equal([cache], [given])


def rest(sizes: list[int], kept: int) -> list[int]:
    """The forwards of `sizes` after its first `kept` tokens; a split forward goes on as one."""
    result = []
    for size in sizes:
        left = size - max(0, min(kept, size))
        kept -= size
        if left:
            result.append(left)
    return result


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if "Rotating" in kind])
@settings(max_examples=80, deadline=None)
@given(history=SIZES, steps=st.integers(1, WINDOW - 4), data=st.data())
def test_saved_slots_equal_a_saved_ring(
    kind: str, history: list[int], steps: int, data: st.DataObject
) -> None:
    kept = data.draw(st.integers(0, steps), label="kept")
    hinted, plain = MAKERS[kind](), MAKERS[kind]()
    for cache, hint in ((hinted, steps), (plain, None)):
        append(cache, history, mark=0)
        with Round(Model(kind), [cache], single_steps=hint) as round_:
            append(cache, [1] * steps, mark=1)
            round_.rewind(0)
            round_.rewind(steps)
            round_.commit(kept)
    zoo.assert_state_equal([hinted], [plain])
    assert (hinted.offset, hinted.keys is None) == (plain.offset, plain.keys is None)
    append(hinted, [1, 4, 1], mark=3)
    append(plain, [1, 4, 1], mark=3)
    zoo.assert_state_equal([hinted], [plain])


def test_a_broken_promise_of_single_steps_is_refused() -> None:
    for sizes in ([1, 1, 1], [2]):
        cache = RotatingKVCache(WINDOW)
        append(cache, [7, 1, 1, 1], mark=0)
        before = copy.deepcopy(cache)
        with (
            pytest.raises(RuntimeError, match="2 single-token steps"),
            Round(Model("RotatingKVCache"), [cache], single_steps=2),
        ):
            append(cache, sizes, mark=1)
        zoo.assert_state_equal([cache], [before])


def test_a_ring_levels_off() -> None:
    """Fed singly and in blocks of 4, a ring never stores more than max_size + 4 - 1 entries."""
    cache = RotatingKVCache(WINDOW)
    for sizes in ([1] * 10, [4] * 5, [1, 4] * 6):
        for size in sizes:
            with Round(Model("RotatingKVCache"), [cache]) as round_:
                append(cache, [size], mark=0)
                round_.commit(max(1, size - 2))
            assert cache.keys.shape[2] <= WINDOW + 4 - 1


@pytest.mark.parametrize("kind", MAKERS)
def test_a_snapshot_is_safe_from_later_rounds(kind: str) -> None:
    cache = MAKERS[kind]()
    append(cache, [9, 1, 1], mark=0)
    snapshot = copy.deepcopy(cache)
    frozen = copy.deepcopy(snapshot)
    for _ in range(3):
        with Round(Model(kind), [cache]) as round_:
            append(cache, [1, 1, 3], mark=4)
            round_.commit(2)
    zoo.assert_state_equal([snapshot], [frozen])
