"""Rows of different lengths in one forward: each row is what it would be by itself."""

import copy
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

import zoo
from mlx_rewind import Round, UnsupportedCacheError
from mlx_rewind.cache.members import extract, join, keep, kinds_of, rows_of
from mlx_rewind.cache.ragged import RAGGED, ROW_BY_ROW, why_row_by_row
from mlx_rewind.cache.rows import RowsCache, RowsRingCache

FAMILIES = sorted(set(zoo.FAMILIES) & RAGGED)
RINGS = [name for name in FAMILIES if zoo.INEXACT_IN_ROUNDS.get(name) == zoo.RING]
LENGTHS = [1, 5, 13]
SLACK = 9


#: `Indexer` (deepseek_v32.py): `argpartition` leaves the chosen positions in an order that depends
#: on how many slots there are, and a single step adds them up in that order.
INDEXED = {"deepseek_v32", "glm_moe_dsa"}


def tolerance(name: str) -> float:
    """Rows read a ring in the order of its slots, almost everything else as a row alone does."""
    in_slot_order = zoo.INEXACT_IN_ROUNDS.get(name) == zoo.RING
    return zoo.round_tolerance(name) if in_slot_order or name in INDEXED else 0.0


def prompt_of(length: int, row: int = 0) -> list[int]:
    return [(5 * i * i + 11 * i + 3 + 17 * row) % zoo.VOCAB for i in range(length)]


def alone(model: nn.Module, lengths: Sequence[int], bits: int = 0) -> list[list[Any]]:
    """A stock cache per row, fed its prompt in one forward."""
    caches = []
    for row, length in enumerate(lengths):
        cache = make_prompt_cache(model)
        model(mx.array([prompt_of(length, row)]), cache=cache)
        if bits:
            cache = [
                entry.to_quantized(group_size=32, bits=bits) if type(entry) is KVCache else entry
                for entry in cache
            ]
        mx.eval([entry.state for entry in cache])
        caches.append(cache)
    return caches


def together(caches: Sequence[list[Any]], slack: int = SLACK) -> list[Any]:
    """The rows of stock caches in one."""
    batch, *others = [[rows_of(entry, slack) for entry in cache] for cache in caches]
    for other in others:
        join(batch, other)
    return batch


def leaves(cache: Sequence[Any]) -> list[Any]:
    """All caches of rows in a prompt cache."""
    flat = [e.caches if isinstance(e, CacheList) else [e] for e in cache]
    return [entry for entry in itertools.chain(*flat) if isinstance(entry, RowsCache)]


def play(
    name: str,
    batch: list[Any],
    caches: list[list[Any]],
    rounds: Sequence[tuple[int, Sequence[int]]],
    model: nn.Module | None = None,
) -> None:
    """Plays (window, kept of each row) on the batch and on every row alone; compares all logits."""
    model = model or zoo.build(name)
    text = itertools.count(29, 31)
    for size, kept in rounds:
        windows = [[next(text) % zoo.VOCAB for _ in range(size)] for _ in caches]
        with Round(model, batch) as round_:
            ours = model(mx.array(windows), cache=batch)
            round_.commit(kept)
        for row, cache in enumerate(caches):
            with Round(model, cache) as round_:
                theirs = model(mx.array(windows[row : row + 1]), cache=cache)
                round_.commit(kept[row])
            problem = zoo.difference(ours[row], theirs[0], tolerance(name))
            assert problem is None, f"row {row}: {problem}"


def assert_rows(name: str, batch: list[Any], caches: list[list[Any]]) -> None:
    """Every row comes out of the batch as the stock cache that it would be alone."""
    for row, cache in enumerate(caches):
        out = extract(batch, row)
        assert [type(entry) for entry in out] == [type(entry) for entry in cache]
        zoo.assert_state_equal(out, cache, tolerance(name))


def uneven(rows: int, rounds: int, longest: int = 6, seed: int = 0) -> list[tuple[int, list[int]]]:
    """Rounds of windows 1..longest, with kept counts 0..window, at random but always the same."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, longest) for _ in range(rounds)]
    return [(size, [draw.randint(0, size) for _ in range(rows)]) for size in sizes]


# --- every model file ------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(zoo.CONFIGS) - set(ROW_BY_ROW)))
def test_every_row_is_as_if_alone(name: str) -> None:
    model = zoo.build(name)
    assert why_row_by_row(model) is None
    caches = alone(model, LENGTHS)
    batch = together(caches)
    play(name, batch, caches, [*uneven(3, 5), (6, [0, 3, 6])])
    assert_rows(name, batch, caches)


def test_every_model_file_is_ragged_or_row_by_row() -> None:
    assert not RAGGED & ROW_BY_ROW.keys()
    assert set(zoo.CONFIGS) | set(zoo.NOT_BUILT) >= RAGGED | ROW_BY_ROW.keys()
    assert set(zoo.CONFIGS) == RAGGED | ROW_BY_ROW.keys()
    assert set(zoo.REFUSED) <= ROW_BY_ROW.keys()


@pytest.mark.parametrize("name", ["gemma2", "internlm2", "gpt_bigcode", "afm7"])
def test_a_file_that_runs_row_by_row_has_to(name: str) -> None:
    model = zoo.build(name)
    assert why_row_by_row(model) == ROW_BY_ROW[name]
    caches = alone(model, LENGTHS)
    batch = together(caches)
    with pytest.raises((AssertionError, ValueError, TypeError)):
        play(name, batch, caches, [(3, [0, 3, 1]), (2, [1, 0, 2])])


def test_a_file_that_nobody_measured_runs_row_by_row() -> None:
    class Homemade(nn.Module):
        pass

    assert "not tested" in str(why_row_by_row(Homemade()))


# --- what lies beyond a row ------------------------------------------------------------------


def slots_held(entry: RowsCache, row: int) -> list[int]:
    """The slots that a row needs: all of its tokens, or those in a window's reach."""
    length = entry.lengths[row]
    if isinstance(entry, RowsRingCache):
        return [p % entry.size for p in range(max(0, length - entry.max_size), length)]
    return list(range(length))


def poison(entry: RowsCache, value: float) -> None:
    """Fills every slot that no row needs."""
    slots = tree_flatten(entry.keys)[0][1].shape[2]
    needed = [slots_held(entry, row) for row in range(len(entry.lengths))]
    mask = mx.array([[slot in held for slot in range(slots)] for held in needed])

    def fill(x: mx.array) -> mx.array:
        bad = mx.array(value if mx.issubdtype(x.dtype, mx.floating) else 2**32 - 1, x.dtype)
        return mx.where(mask[:, None, :, None], x, bad)

    entry.keys, entry.values = tree_map(fill, entry.keys), tree_map(fill, entry.values)


def test_poison_in_a_slot_that_is_needed_shows() -> None:
    model = zoo.build("llama")
    batch = together(alone(model, LENGTHS))
    poisoned = copy.deepcopy(batch)
    for entry in leaves(poisoned):
        entry.lengths = [length - (length == 13) for length in entry.lengths]
        poison(entry, 1e4)
        entry.lengths = LENGTHS
    ours, theirs = (model(mx.array([[7]] * 3), cache=cache) for cache in (poisoned, batch))
    assert [mx.array_equal(a, b) for a, b in zip(ours, theirs, strict=True)] == [True, True, False]


@pytest.mark.parametrize(
    ("name", "bits"),
    [*((name, 0) for name in FAMILIES), ("llama", 8), ("llama", 4), ("qwen3_5", 8), ("qwen3_5", 4)],
)
def test_what_lies_beyond_a_row_is_not_read(name: str, bits: int) -> None:
    model = quantizable(name) if bits else zoo.build(name)
    batch = together(alone(model, [1, 5, 23], bits))
    results = []
    for value in (None, 1e4, -3e3):
        cache, logits = copy.deepcopy(batch), []
        for size, kept in uneven(3, 5):
            if value is not None:
                for entry in leaves(cache):
                    poison(entry, value)
            with Round(model, cache) as round_:
                logits.append(model(mx.array([prompt_of(size, row) for row in range(3)]), cache))
                round_.commit(kept)
        results.append((logits, cache))
    clean, *poisoned = results
    for logits, cache in poisoned:
        assert all(mx.array_equal(a, b) for a, b in zip(logits, clean[0], strict=True))
        for row in range(3):
            zoo.assert_state_equal(extract(cache, row), extract(clean[1], row))


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_of_a_ragged_window_changes_nothing(name: str) -> None:
    model = zoo.build(name)
    batch = together(alone(model, [2, 9, 17]))
    sizes = [1, 6, 3]
    results = []
    for padding in (0, 41, 96):
        cache = copy.deepcopy(batch)
        windows = [prompt_of(n, 5)[:n] + [padding] * (6 - n) for n in sizes]
        with Round(model, cache) as round_:
            logits = model(mx.array(windows), cache=cache)
            round_.commit([1, 4, 3])
        following = model(mx.array([[8], [9], [10]]), cache=copy.deepcopy(cache))
        results.append((logits, following, [extract(cache, row) for row in range(3)]))
    for logits, following, rows in results[1:]:
        for row, size in enumerate(sizes):
            assert mx.array_equal(logits[row, :size], results[0][0][row, :size])
            zoo.assert_state_equal(rows[row], results[0][2][row])
        assert mx.array_equal(following, results[0][1])


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "falcon_h1"])
def test_slots_without_a_token_are_zero(name: str) -> None:
    """What is masked must be finite: a weight of 0 times nan is nan."""
    model = zoo.build(name)
    batch = together(alone(model, [1, 2, 250, 5]))
    for _ in range(3):  # past a buffer's first 256 slots
        model(mx.array([prompt_of(5, row) for row in range(4)]), cache=batch)
    for entry in leaves(batch):
        for x in (entry.keys, entry.values):
            assert x.shape[2] in (512, getattr(entry, "size", 512))
            for row, length in enumerate(entry.lengths):
                assert not mx.any(x[row, :, length:]).item()
            assert mx.all(mx.isfinite(x)).item()


# --- sliding windows -------------------------------------------------------------------------


@pytest.mark.parametrize("name", RINGS)
@pytest.mark.parametrize("lengths", [[1, 8, 20], [7, 9, 8], [3, 33, 5], [1, 1, 2]], ids=str)
def test_windows_wrap_in_some_rows_only(name: str, lengths: list[int]) -> None:
    caches = alone(zoo.build(name), lengths)
    batch = together(caches)
    for rounds in ([(3, [3, 0, 1])], [(1, [1, 1, 1])] * 3, uneven(3, 8, 6, seed=7)):
        play(name, batch, caches, rounds)
        assert_rows(name, batch, caches)


@pytest.mark.parametrize("name", RINGS)
@pytest.mark.parametrize("slack", [1, 3, 6])
def test_a_window_as_long_as_the_slack(name: str, slack: int) -> None:
    caches = alone(zoo.build(name), [2, 9, 21])
    batch = together(caches, slack)
    for kept in ([0, 0, 0], [0, slack, 1], [slack, 0, 0], [1, 1, 0], [0, 0, slack]) * 2:
        play(name, batch, caches, [(slack, kept)])
        assert_rows(name, batch, caches)


@pytest.mark.parametrize("name", RINGS)
@pytest.mark.parametrize("slack", [0, 1, 6])
def test_a_window_one_longer_than_the_slack(name: str, slack: int) -> None:
    """It may write over the oldest token of a full window, which no later token sees."""
    model = zoo.build(name)
    caches = alone(model, [2, 9, 21])
    batch = together(caches, slack)
    for kept in ([0, 0, 0], [0, slack, 1], [slack + 1, 0, 0], [1, 1, 0], [0, 0, slack + 1]):
        play(name, batch, caches, [(slack + 1, kept)])
        for row, cache in enumerate(caches):
            for following in ([3], [3, 50, 8, 91]):
                ours, theirs = (
                    model(mx.array([following]), cache=copy.deepcopy(rows))
                    for rows in (extract(batch, row), cache)
                )
                assert zoo.difference(ours, theirs, tolerance(name)) is None


@pytest.mark.parametrize("name", RINGS)
def test_a_longer_window_is_refused(name: str) -> None:
    model = zoo.build(name)
    caches = alone(model, [2, 9, 21])
    batch = together(caches, 3)
    with pytest.raises(ValueError, match="a window of 5 tokens is longer"), Round(model, batch):
        model(mx.array([prompt_of(5)] * 3), cache=batch)
    assert_rows(name, batch, caches)
    play(name, batch, caches, [(3, [1, 0, 3])])
    assert_rows(name, batch, caches)


# --- from stock caches and back --------------------------------------------------------------


def greedy(model: nn.Module, cache: list[Any], n: int = 12) -> list[int]:
    return [
        token for token, _ in generate_step(mx.array([3]), model, max_tokens=n, prompt_cache=cache)
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_stock_generation_goes_on_from_a_row(name: str, tmp_path: Path) -> None:
    model, lengths = zoo.build(name), [1, 5, 21]
    caches = alone(model, lengths)
    batch = together(caches)
    play(name, batch, caches, [(3, [1, 0, 3]), (4, [0, 1, 2])])  # 2, 6 and 26 tokens
    before = [extract(batch, row) for row in range(3)]
    loaded = []
    for row, cache in enumerate(caches):
        path = str(tmp_path / f"{row}.safetensors")
        save_prompt_cache(path, extract(batch, row))
        loaded.append(load_prompt_cache(path))
        expected = greedy(model, copy.deepcopy(cache))
        assert greedy(model, extract(batch, row)) == expected
        assert greedy(model, load_prompt_cache(path)) == expected
    for row in range(3):  # nothing that was fed to a row's copy shows in the batch
        zoo.assert_state_equal(extract(batch, row), before[row])
    again = together(loaded)
    play(name, again, caches, uneven(3, 3, seed=2))
    assert_rows(name, again, caches)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_row_and_the_stock_cache_it_came_from_go_their_own_ways(name: str, rows: int) -> None:
    model = zoo.build(name)
    caches = alone(model, LENGTHS[-rows:])
    copies, untouched = copy.deepcopy(caches), copy.deepcopy(caches)
    batch = together(caches)
    play(name, batch, copies, [(4, [2, 4, 1][:rows])])
    for row, cache in enumerate(caches):
        model(mx.array([prompt_of(3, row)]), cache=cache)
    assert_rows(name, batch, copies)
    for row, (cache, expected) in enumerate(zip(caches, untouched, strict=True)):
        model(mx.array([prompt_of(3, row)]), cache=expected)
        zoo.assert_state_equal(cache, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_row_is_a_batch_too(name: str) -> None:
    caches = alone(zoo.build(name), [12])
    batch = together(caches)
    play(name, batch, caches, uneven(1, 5))
    assert_rows(name, batch, caches)


@pytest.mark.parametrize("name", RINGS)
def test_a_ring_written_step_by_step_becomes_a_row(name: str) -> None:
    model = zoo.build(name)
    caches = [zoo.feed(model, prompt_of(length)) for length in (1, 7, 8, 9, 27)]
    batch = together(caches)
    assert_rows(name, batch, caches)
    play(name, batch, caches, uneven(5, 4))
    assert_rows(name, batch, caches)


def quantizable(name: str) -> nn.Module:
    """A model whose heads can be quantised in groups of 32."""
    return zoo.build(name, head_dim=64) if name == "qwen3_5" else zoo.build(name)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_rows(name: str, bits: int, tmp_path: Path) -> None:
    model = quantizable(name)
    caches = alone(model, LENGTHS, bits)
    batch = together(caches)
    assert sum(getattr(entry, "bits", None) == bits for entry in batch) >= 1
    play(name, batch, caches, uneven(3, 6), model)
    assert_rows(name, batch, caches)
    for row, cache in enumerate(caches):
        path = str(tmp_path / f"{row}.safetensors")
        save_prompt_cache(path, extract(batch, row))
        assert greedy(model, load_prompt_cache(path)) == greedy(model, copy.deepcopy(cache))


# --- joining and leaving ---------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_join_and_leave_in_any_order(name: str) -> None:
    model, lengths = zoo.build(name), [4, 1, 19, 9]
    caches = alone(model, lengths)
    left, right = together(caches[:2]), together(caches[2:])
    play(name, left, caches[:2], [(4, [0, 3])])
    play(name, right, caches[2:], [(6, [6, 2])])
    join(right, left)
    order = [2, 3, 0, 1]
    assert_rows(name, right, [caches[row] for row in order])
    play(name, right, [caches[row] for row in order], uneven(4, 2))
    keep(right, [3, 0, 2])
    order = [order[row] for row in (3, 0, 2)]
    play(name, right, [caches[row] for row in order], uneven(3, 2, seed=1))
    assert_rows(name, right, [caches[row] for row in order])
    (late,) = alone(model, [300])  # longer than any buffer so far
    join(right, together([late]))
    order, caches = [*order, 4], [*caches, late]
    play(name, right, [caches[row] for row in order], uneven(4, 2, seed=2))
    keep(right, [1, 3])
    order = [order[1], order[3]]
    assert_rows(name, right, [caches[row] for row in order])
    keep(right, [0])
    play(name, right, [caches[order[0]]], [(3, [2])])
    assert_rows(name, right, [caches[order[0]]])


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_rows_join_and_leave(bits: int) -> None:
    model = zoo.build("llama")
    caches = alone(model, [4, 1, 300], bits)
    batch = together(caches[1:])
    play("llama", batch, caches[1:], [(4, [0, 3])])
    join(batch, together(caches[:1]))
    keep(batch, [2, 0])
    play("llama", batch, caches[:2], uneven(2, 3))
    assert_rows("llama", batch, caches[:2])


@pytest.mark.parametrize("bits", [0, 8])
def test_a_row_that_leaves_frees_its_memory(bits: int) -> None:
    batch = together(alone(zoo.build("llama"), [1, 300, 9, 4], bits))
    before = sum(entry.nbytes for entry in batch)
    keep(batch, [2, 1])
    assert sum(entry.nbytes for entry in batch) == before // 2
    keep(batch, [0])  # the long one goes, and with it the slots that only it needed
    assert sum(entry.nbytes for entry in batch) == before // 8


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1"])
@pytest.mark.parametrize("empty_first", [False, True])
def test_recurrent_rows_without_tokens_do_not_join_others(name: str, empty_first: bool) -> None:
    model = zoo.build(name)
    empty = [rows_of(entry, SLACK) for entry in make_prompt_cache(model)]
    filled = together(alone(model, [5]))
    ours, theirs = (empty, filled) if empty_first else (filled, empty)
    with pytest.raises(ValueError, match="feed them first"):
        join(ours, theirs)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
@pytest.mark.parametrize("empty_first", [False, True])
def test_rows_without_tokens_join_others(name: str, empty_first: bool) -> None:
    model = zoo.build(name)
    caches = alone(model, [5])
    caches.insert(0 if empty_first else 1, make_prompt_cache(model))
    batch = together(caches)
    play(name, batch, caches, [(4, [0, 3]), (2, [2, 1])])
    assert_rows(name, batch, caches)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5"])
def test_fresh_recurrent_rows_keep_some_or_none(name: str) -> None:
    model = zoo.build(name)
    batch = together([make_prompt_cache(model) for _ in range(2)])
    with Round(model, batch) as window:
        model(mx.array([[1, 2], [3, 4]]), cache=batch)
        with pytest.raises(ValueError, match="all keep some or none"):
            window.commit([0, 2])
    assert all(entry.empty() for entry in batch if isinstance(entry, ArraysCache))


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_may_start_together_from_nothing(name: str) -> None:
    model = zoo.build(name)
    caches = [make_prompt_cache(model) for _ in range(2)]
    batch = together(caches)
    play(name, batch, caches, [(4, [1, 3]), (3, [2, 0]), (2, [0, 1])])
    assert_rows(name, batch, caches)


def test_kinds_tell_what_can_join() -> None:
    llama, qwen = (make_prompt_cache(zoo.build(name)) for name in ("llama", "qwen3_5"))
    assert kinds_of(llama) == kinds_of([rows_of(entry, 1) for entry in llama])
    assert kinds_of(llama) != kinds_of(qwen)
    quantised = [
        [rows_of(entry.to_quantized(group_size=32, bits=bits), 1) for entry in alone_[0]]
        for bits, alone_ in ((bits, alone(zoo.build("llama"), [3])) for bits in (8, 4))
    ]
    assert len({kinds_of(llama), *map(kinds_of, quantised)}) == 3
    nested = make_prompt_cache(zoo.build("falcon_h1"))
    assert kinds_of(nested) == kinds_of([rows_of(entry, 1) for entry in nested])


class Homemade(KVCache):
    """A cache class that nobody has rows for."""


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (Homemade(), "a Homemade cannot be a row"),
        (ChunkedKVCache(8), "a ChunkedKVCache cannot"),
        (BatchKVCache([0, 0]), "a BatchKVCache cannot"),
        (RotatingKVCache(max_size=8, keep=2), "a RotatingKVCache with keep cannot"),
        (CacheList(KVCache(), Homemade()), "a Homemade cannot"),
    ],
    ids=["subclass", "chunked", "batch", "keep", "nested"],
)
def test_a_class_without_rows_is_refused_by_name(entry: Any, message: str) -> None:
    with pytest.raises(UnsupportedCacheError, match=message):
        rows_of(entry, SLACK)


# --- rounds over rows ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "gpt_oss", "llama"])
@pytest.mark.parametrize(
    "kept", [[1, 2], [1, 2, 3, 4], [], [0, 1, 5], [-1, 0, 0], 5, -1, [1, 2.0, 3], "123", [None] * 3]
)
def test_a_bad_count_changes_nothing(name: str, kept: Any) -> None:
    model = zoo.build(name)
    caches = alone(model, LENGTHS)
    batch = together(caches)
    with Round(model, batch) as round_:
        model(mx.array([prompt_of(4)] * 3), cache=batch)
        round_.rewind([4, 0, 2])
        before = [extract(batch, row) for row in range(3)]
        with pytest.raises(ValueError, match=r"kept|row"):
            round_.commit(kept)
        assert round_.is_open
        for row in range(3):
            zoo.assert_state_equal(extract(batch, row), before[row])
        round_.commit([0, 0, 0])
    assert_rows(name, batch, caches)


@pytest.mark.parametrize("name", FAMILIES)
def test_counts_may_be_anything_that_is_a_whole_number(name: str) -> None:
    model = zoo.build(name)
    caches = alone(model, LENGTHS)
    for given in ((1, 3, 0), iter([1, 3, 0]), mx.array([1, 3, 0]).tolist()):
        batch = together(caches)
        solo = copy.deepcopy(caches)
        windows = [prompt_of(4, row) for row in range(3)]
        with Round(model, batch) as round_:
            model(mx.array(windows), cache=batch)
            round_.commit(given)
        for cache, window, kept in zip(solo, windows, (1, 3, 0), strict=True):
            with Round(model, cache) as round_:
                model(mx.array([window]), cache=cache)
                round_.commit(kept)
        assert_rows(name, batch, solo)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("abandon", ["leave", "abort", "raise"])
def test_leaving_takes_every_row_back(name: str, abandon: str) -> None:
    model = zoo.build(name)
    caches = alone(model, [1, 7, 20])
    batch = together(caches)

    def leave() -> None:
        with Round(model, batch) as round_:
            model(mx.array([prompt_of(4, row) for row in range(3)]), cache=batch)
            round_.rewind([4, 1, 0])
            if abandon == "abort":
                round_.abort()
                assert not round_.is_open
            if abandon == "raise":
                raise LookupError

    if abandon == "raise":
        with pytest.raises(LookupError):
            leave()
    else:
        leave()
    assert_rows(name, batch, caches)
    play(name, batch, caches, [(3, [0, 3, 1])])
    assert_rows(name, batch, caches)


@pytest.mark.parametrize("name", FAMILIES)
def test_rewinding_rows_may_go_anywhere(name: str) -> None:
    model = zoo.build(name)
    caches = alone(model, [1, 7, 20])
    batch = together(caches)
    windows = [prompt_of(5, row) for row in range(3)]
    after = []  # after[kept][row]
    for kept in range(6):
        straight = copy.deepcopy(batch)
        with Round(model, straight) as round_:
            model(mx.array(windows), cache=straight)
            round_.commit(kept)
        after.append([extract(straight, row) for row in range(3)])
    with Round(model, batch) as round_:
        model(mx.array(windows), cache=batch)
        for counts in ([5, 0, 2], [0, 5, 1], [3, 3, 3], [0, 0, 0], [1, 5, 0], [5, 5, 5], [2, 1, 4]):
            round_.rewind(counts)
            for row, kept in enumerate(counts):
                zoo.assert_state_equal(extract(batch, row), after[kept][row])
        round_.commit([4, 0, 1])
    for row, kept in enumerate([4, 0, 1]):
        zoo.assert_state_equal(extract(batch, row), after[kept][row])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_round_of_several_forwards(name: str) -> None:
    """As a draft model feeds its rows: token by token, and then each row keeps its own count."""
    model = zoo.build(name)
    caches = alone(model, [1, 7, 20])
    batch = together(caches)
    text = [prompt_of(5, row) for row in range(3)]
    for single_steps, kept in ((5, [5, 0, 2]), (None, [1, 4, 0])):
        with Round(model, batch, single_steps=single_steps) as round_:
            for i in range(5):
                model(mx.array([[row[i]] for row in text]), cache=batch)
            round_.commit(kept)
        for cache, row, count in zip(caches, text, kept, strict=True):
            for token in row[:count]:
                model(mx.array([[token]]), cache=cache)
        assert_rows(name, batch, caches)


def test_stock_caches_of_one_row_take_one_count() -> None:
    model = zoo.build("llama")
    (cache,) = alone(model, [5])
    with Round(model, cache) as round_:
        model(mx.array([prompt_of(4)]), cache=cache)
        with pytest.raises(ValueError, match=r"has 1 row\(s\), got 2 kept counts"):
            round_.commit([1, 2])
        round_.commit([2])
    assert cache[0].offset == 7


def test_recurrent_rows_tell_how_many_they_are() -> None:
    model = zoo.build("mamba2")
    batch = together(alone(model, LENGTHS))
    assert all(isinstance(entry, ArraysCache) for entry in batch)
    with Round(model, batch) as round_:
        model(mx.array([prompt_of(2)] * 3), cache=batch)
        with pytest.raises(ValueError, match=r"has 3 row\(s\)"):
            round_.commit([1, 2])
