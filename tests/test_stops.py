"""Stop strings: the text ends before the first one, however it arrives."""

from itertools import pairwise

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from mlx_rewind.stops import StopStrings

TEXT = st.text("abc", max_size=14)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


def cut_up(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def streamed(stops: StopStrings, segments: list[str]) -> list[str]:
    """What goes out, piece by piece, and what is released at the end."""
    pieces = []
    for segment in segments:
        pieces.append(stops.feed(segment))
        if stops.stopped:
            return pieces
    return [*pieces, stops.flush()]


@settings(deadline=None)
@given(TEXT, STOPS, st.lists(st.integers(0, 14), max_size=8))
def test_the_text_is_cut_at_the_first_stop_string(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    assume(not any(a != b and a in b for a in stop for b in stop))  # see the next test
    found = [text.index(s) for s in stop if s in text]
    stops = StopStrings(stop)
    assert "".join(streamed(stops, cut_up(text, cuts))) == text[: min(found, default=len(text))]
    assert stops.stopped == bool(found)


@settings(deadline=None)
@given(TEXT, STOPS, st.lists(st.integers(0, 14), max_size=8))
@example("abca", ["abca", "c"], [3])
@example("aab", ["aa", "ab"], [2])
def test_the_text_does_not_depend_on_its_segments(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    """Also with a stop string inside another one."""
    whole, pieces = StopStrings(stop), StopStrings(stop)
    expected = "".join(streamed(whole, [text]))
    assert "".join(streamed(pieces, cut_up(text, cuts))) == expected
    assert pieces.stopped == whole.stopped


@settings(deadline=None)
@given(TEXT, STOPS)
def test_only_the_start_of_a_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    stops = StopStrings(stop)
    out = ""
    for length, character in enumerate(text, 1):
        out += stops.feed(character)
        if stops.stopped:
            return
        held = text[len(out) : length]
        assert text[:length] == out + held
        assert not held or any(s.startswith(held) and s != held for s in stop)


def test_what_was_held_back_is_released_once() -> None:
    stops = StopStrings("END")
    assert [stops.feed("the EN"), stops.flush(), stops.flush()] == ["the ", "EN", ""]
    assert not stops.stopped


def test_a_held_start_that_goes_on_otherwise_goes_out() -> None:
    stops = StopStrings(["aab"])
    assert [stops.feed(c) for c in "aaac"] == ["", "", "a", "aac"]


def test_a_stop_string_over_three_segments() -> None:
    stops = StopStrings("\n\n#")
    assert [stops.feed("a\n"), stops.feed("\n"), stops.feed("# b")] == ["a", "", ""]
    assert stops.stopped
    assert stops.flush() == ""


def test_without_stop_strings_everything_passes() -> None:
    stops = StopStrings()
    assert [stops.feed("a"), stops.feed(""), stops.feed("bc"), stops.flush()] == ["a", "", "bc", ""]
    assert not stops.stopped


def test_one_string_is_one_stop_string() -> None:
    stops = StopStrings("ab")
    assert stops.feed("b a ab") == "b a "
    assert stops.stopped


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [1], [None], ["a", b"b"]])
def test_what_is_no_stop_string_is_refused(stop: list[str]) -> None:
    with pytest.raises(ValueError, match="non-empty strings"):
        StopStrings(stop)
