"""NGram: prompt lookup equals a search of the whole row, at a cost that does not grow with it."""

import sys
from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_rewind
import zoo
from mlx_rewind import NGram
from mlx_rewind.draft.ngram import SuffixIndex
from mlx_rewind.target import Target

ROWS = st.lists(st.integers(0, 2), min_size=1, max_size=40)
SIZES = st.integers(1, 4).flatmap(lambda low: st.tuples(st.just(low), st.integers(low, 6)))


def searched(tokens: list[int], k: int, low: int = 2, high: int = 5) -> list[int]:
    """What NGram promises, looked for in all of the row."""
    for size in range(high, low - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                following = tokens[end:]
                while len(following) < k:
                    following = following + tokens[end:]
                return following[:k]
    return []


# --- what it proposes ------------------------------------------------------------------------


def test_the_longest_suffix_wins() -> None:
    # (1 2) was followed by 9 lately, (0 1 2) by 5 long ago.
    assert NGram().propose([0, 1, 2, 5, 7, 1, 2, 9, 0, 1, 2], 2) == [5, 7]


def test_the_latest_occurrence_wins() -> None:
    assert NGram().propose([1, 2, 5, 1, 2, 6, 1, 2], 3) == [6, 1, 2]


def test_a_longer_suffix_than_max_ngram_is_not_looked_at() -> None:
    row = [7, 0, 1, 2, 5, 8, 1, 2, 6, 7, 0, 1, 2]
    assert NGram(2, 2).propose(row, 1) == [6]
    assert NGram(2, 3).propose(row, 1) == [5]


def test_a_shorter_suffix_than_min_ngram_is_no_match() -> None:
    assert NGram(2, 5).propose([1, 2, 3, 2], 4) == []
    assert NGram(1, 5).propose([1, 2, 3, 2], 1) == [3]


@pytest.mark.parametrize("row", [[], [1], [1, 2], [1, 2, 3]])
def test_nothing_repeated_is_nothing_proposed(row: list[int]) -> None:
    assert NGram(1, 5).propose(row, 4) == []


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_a_loop_continues(k: int) -> None:
    assert NGram().propose([9, 1, 2, 3, 1, 2, 3], k) == [1, 2, 3, 1, 2, 3, 1][:k]
    assert NGram().propose([4, 4, 4, 4], k) == [4] * k


@settings(deadline=None)
@given(ROWS, SIZES, st.integers(1, 8))
def test_a_proposal_equals_a_search_of_the_row(
    row: list[int], sizes: tuple[int, int], k: int
) -> None:
    assert NGram(*sizes).propose(list(row), k) == searched(row, k, *sizes)


@settings(deadline=None)
@given(ROWS, SIZES, st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 5))
def test_a_row_that_grows_is_searched_like_a_new_one(
    row: list[int], sizes: tuple[int, int], steps: list[int], k: int
) -> None:
    drafter = NGram(*sizes)
    length = 0
    for step in steps:
        length = min(length + step, len(row))
        assert drafter.propose(row[:length], k) == searched(row[:length], k, *sizes)


def test_asking_twice_gives_the_same() -> None:
    drafter, row = NGram(), [1, 2, 3, 1, 2]
    assert drafter.propose(row, 4) == drafter.propose(row, 4) == [3, 1, 2, 3]


def test_the_row_is_left_alone() -> None:
    row = [1, 2, 3, 1, 2]
    NGram().propose(row, 4)
    assert row == [1, 2, 3, 1, 2]


# --- rows ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(ROWS, ROWS, st.integers(1, 5))
def test_another_row_is_read_anew(first: list[int], second: list[int], k: int) -> None:
    drafter = NGram()
    drafter.propose([*first, 7], k)  # no row of this test has a 7
    assert drafter.propose(list(second), k) == searched(second, k)
    assert drafter.propose([*first, 8], k) == searched([*first, 8], k)


def test_a_shorter_row_is_read_anew() -> None:
    drafter = NGram()
    drafter.propose([1, 2, 3, 1, 2, 4, 1, 2], 1)
    assert drafter.propose([1, 2, 3, 1, 2], 1) == [3]


def test_start_gives_a_proposer_of_its_own() -> None:
    drafter = NGram(1, 3)
    one, other = (drafter.start(Target(zoo.build("llama"))) for _ in range(2))
    assert one is not other
    rows = [[1, 2, 1], [1, 3, 1]]
    for _ in range(3):  # in turn, each with what its own row has seen
        assert list(one.propose(rows[0], 2)) == searched(rows[0], 2, 1, 3)
        assert list(other.propose(rows[1], 2)) == searched(rows[1], 2, 1, 3)
        rows = [[*row, row[-2]] for row in rows]
    assert drafter.propose([5, 6, 5], 1) == [6]


@pytest.mark.parametrize("sizes", [(0, 3), (-1, 3), (4, 3), (0, 0)])
def test_bad_sizes_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"min {sizes[0]}, max {sizes[1]}"):
        NGram(*sizes)


# --- cost ------------------------------------------------------------------------------------


class Counted(list[int]):
    """A row that counts its tokens as they are read."""

    read = 0

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        found = super().__getitem__(index)
        self.read += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Any:
        self.read += len(self)
        return super().__iter__()


def lines_run(action: Callable[[], object]) -> int:
    """Lines of Python that `action` runs."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def cost(row: Iterable[int]) -> tuple[int, int]:
    """Tokens read and lines run for the proposal after one more token."""
    drafter, tokens = NGram(), Counted(row)
    drafter.propose(tokens[:-1], 4)
    tokens.read = 0
    lines = lines_run(lambda: drafter.propose(tokens, 4))
    return tokens.read, lines


@pytest.mark.parametrize("pattern", [lambda i: i, lambda i: i % 7], ids=["no match", "match"])
def test_a_proposal_costs_the_same_in_a_long_row(pattern: Callable[[int], int]) -> None:
    short, long = (cost(pattern(i) for i in range(length)) for length in (70, 7000))
    assert short == long
    assert short[0] <= 16


def test_the_index_costs_the_same_at_any_length() -> None:
    short, long = SuffixIndex(2, 5), SuffixIndex(2, 5)
    short.extend(range(70))
    long.extend(range(7000))
    assert lines_run(lambda: short.extend([1])) == lines_run(lambda: long.extend([1]))
    assert lines_run(lambda: short.find([3, 4])) == lines_run(lambda: long.find([3, 4]))
    assert short.find([3, 4]) == long.find([3, 4]) == 5


# --- in the loop -----------------------------------------------------------------------------


def test_the_text_is_the_targets_own() -> None:
    model, prompt = zoo.build("qwen3_5"), zoo.PROMPTS[1]
    tokens = zoo.reference(model, prompt, 24).tokens
    again = [*prompt, *tokens[:12], *prompt]  # proposals that the model may or may not follow
    for drafter in (NGram(), NGram(1, 4)):
        steps = mlx_rewind.generate_step(mx.array(again), model, drafter=drafter, max_tokens=40)
        assert [token for token, _, _ in steps] == zoo.reference(model, again, 40).tokens
