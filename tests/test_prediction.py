"""Prediction: follows expected text, and finds its place again after the row has left it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_rewind
import zoo
from mlx_rewind import DraftMismatchError, Prediction
from mlx_rewind.target import Target

PROMPT = [90, 91]
K = 4


def proposals(drafter: Prediction, row: list[int], k: int = K) -> list[list[int]]:
    """What is proposed after the prompt and after each token of `row`."""
    proposer = drafter.start(Target(zoo.build("llama")))
    return [list(proposer.propose([*PROMPT, *row[:length]], k)) for length in range(len(row) + 1)]


# --- following -------------------------------------------------------------------------------


def test_it_follows_while_the_row_agrees() -> None:
    expected = list(range(10))
    for length, proposal in enumerate(proposals(Prediction(expected), expected)):
        assert proposal == expected[length : length + K]


def test_it_follows_blocks_of_any_length() -> None:
    expected = list(range(12))
    proposer = Prediction(expected).start(Target(zoo.build("llama")))
    for length in (0, 3, 4, 9, 12):
        assert proposer.propose([*PROMPT, *expected[:length]], 5) == expected[length : length + 5]


def test_it_is_quiet_after_a_divergence() -> None:
    assert proposals(Prediction(range(10)), [0, 1, 50, 51, 52])[2:] == [[2, 3, 4, 5], [], [], []]


def test_it_goes_on_where_the_row_takes_it_up_again() -> None:
    proposed = proposals(Prediction(range(20)), [0, 1, 50, 10, 11, 12])
    assert proposed[3:] == [[], [], [12, 13, 14, 15], [13, 14, 15, 16]]


def test_of_two_places_the_nearer_is_taken() -> None:
    expected = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 30]
    assert proposals(Prediction(expected), [50, 1, 2])[-1][:1] == [3]
    assert proposals(Prediction(expected), [1, 2, 3, 4, 5, 6, 7, 8, 50, 1, 2])[-1][:1] == [30]


def test_a_longer_agreement_is_better_than_a_nearer_one() -> None:
    expected = [5, 1, 2, 9, 2, 3, 40, 41, 42, 1, 2, 3, 60]
    assert proposals(Prediction(expected), [5, 50, 1, 2, 3])[-1][:1] == [60]


def test_the_prompt_is_not_taken_for_the_row() -> None:
    proposer = Prediction([1, 2, 3, 4]).start(Target(zoo.build("llama")))
    assert proposer.propose([1, 2, 3], 4) == [1, 2, 3, 4]


@pytest.mark.parametrize("expected", [[], [7]])
def test_a_short_prediction_ends(expected: list[int]) -> None:
    assert proposals(Prediction(expected), [7, 8]) == [expected, [], []]


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20))
def test_a_proposal_is_a_piece_of_the_prediction(expected: list[int], row: list[int]) -> None:
    """Also for text so repetitive that the place is often guessed wrong; never past the end."""
    pieces = [expected[i : i + K] for i in range(len(expected) + 1)]
    for proposal in proposals(Prediction(expected, 1, 3), row):
        assert proposal in [*pieces, []]


# --- realigning ------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.data())
def test_it_realigns_after_an_edit(data: st.DataObject) -> None:
    """One token inserted, deleted or replaced: right again `min_ngram` tokens after the edit."""
    length = data.draw(st.integers(6, 20), "length")
    expected = data.draw(st.permutations(range(length)), "expected")
    low = data.draw(st.integers(1, 3), "min_ngram")
    edit = data.draw(st.sampled_from(["insert", "delete", "replace"]), "edit")
    at = data.draw(st.integers(0, length - 1), "at")
    other = data.draw(st.integers(60, 80), "new token")
    new = [] if edit == "delete" else [other]
    rest = expected[at:] if edit == "insert" else expected[at + 1 :]
    row = [*expected[:at], *new, *rest]

    proposed = proposals(Prediction(expected, low, 6), row)

    edited = at + len(new)
    for position in range(at + 1):
        assert proposed[position] == expected[position : position + K]
    for position in range(edited + low, len(row) + 1):
        assert proposed[position] == row[position : position + K]


@settings(deadline=None)
@given(st.data())
def test_it_realigns_after_every_edit_of_a_script(data: st.DataObject) -> None:
    """Edits at least eight tokens apart, of one to three tokens each."""
    expected = list(range(40))
    row: list[int] = []
    right_from: list[tuple[int, int]] = []  # positions of the row between which all is right
    for start in range(0, 40, 10):
        begin = len(row)
        row += expected[start : start + 5]
        right_from.append((begin + 2, len(row)))
        deleted = data.draw(st.integers(0, 3), "deleted")
        row += data.draw(st.lists(st.integers(50, 80), max_size=3), "inserted")
        row += expected[start + 5 + deleted : start + 10]
    proposed = proposals(Prediction(expected), row, 1)
    for begin, end in right_from:
        for position in range(begin, end):
            assert proposed[position] == row[position : position + 1]


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize("token", [zoo.VOCAB, 5000, -1])
def test_tokens_that_the_target_has_not_are_refused_at_the_call(token: int) -> None:
    with pytest.raises(DraftMismatchError, match=rf"token {token}.*0\.\.96"):
        mlx_rewind.generate_step(
            zoo.PROMPTS[1], zoo.build("llama"), drafter=Prediction([1, 2, token])
        )


@pytest.mark.parametrize("sizes", [(0, 3), (4, 3)])
def test_bad_sizes_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"min {sizes[0]}, max {sizes[1]}"):
        Prediction([1, 2], *sizes)


# --- in the loop -----------------------------------------------------------------------------


def edited(tokens: list[int], edit: str) -> list[int]:
    """A prediction that is one edit away from what the model says."""
    if edit == "insert":
        return [*tokens[:10], (tokens[10] + 1) % zoo.VOCAB, *tokens[10:]]
    if edit == "delete":
        return [*tokens[:10], *tokens[11:]]
    if edit == "replace":
        return [*tokens[:10], (tokens[10] + 1) % zoo.VOCAB, *tokens[11:]]
    return tokens


@pytest.mark.parametrize("edit", ["none", "insert", "delete", "replace"])
def test_generation_is_exact_and_mostly_predicted(edit: str) -> None:
    model = zoo.build("qwen3_5")
    tokens = zoo.reference(model, zoo.PROMPTS[1], 40).tokens
    drafter = Prediction(edited(tokens, edit))
    for _ in range(2):  # one drafter serves many rows
        steps = list(
            mlx_rewind.generate_step(zoo.PROMPTS[1], model, drafter=drafter, max_tokens=40)
        )
        assert [token for token, _, _ in steps] == tokens
        predicted = sum(from_draft for _, _, from_draft in steps)
        assert predicted == 32 if edit == "none" else predicted >= 26
