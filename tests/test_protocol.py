"""Drafters of one's own: what the loop asks of them, refuses from them and lets through."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_rewind
import zoo
from mlx_rewind import DraftMismatchError, NGram
from mlx_rewind.draft.protocol import kind_of

PROMPT = zoo.PROMPTS[1]
K = 4


class Custom:
    """Proposes what a function of (generated tokens, tokens asked for) says."""

    def __init__(self, guess: Callable[[list[int], int], Any]) -> None:
        self.guess = guess
        self.asked: list[tuple[list[int], int]] = []

    def propose(self, tokens: list[int], num_draft_tokens: int) -> Any:
        self.asked.append((list(tokens), num_draft_tokens))
        return self.guess(tokens[len(PROMPT) :], num_draft_tokens)


class Late(Custom):
    """Right for a number of calls, then whatever it is made to do."""

    def __init__(self, name: str, calls: int, then: Callable[[], Any]) -> None:
        truth = zoo.reference(name, PROMPT, 40).tokens

        def guess(generated: list[int], k: int) -> Any:
            if len(self.asked) > calls:
                return then()
            return truth[len(generated) : len(generated) + k // 2]

        super().__init__(guess)


def tokens_of(drafter: Any, n: int = 24, **options: Any) -> list[int]:
    model = zoo.build("qwen3_5")
    steps = mlx_rewind.generate_step(
        PROMPT, model, drafter=drafter, num_draft_tokens=K, max_tokens=n, **options
    )
    return [token for token, _, _ in steps]


def raising() -> Any:
    raise LookupError("the drafter's own trouble")


# --- what a drafter is asked -----------------------------------------------------------------


def test_it_sees_the_row_and_is_never_asked_for_more_than_can_be_used() -> None:
    expected = zoo.reference("qwen3_5", PROMPT, 24).tokens
    drafter = Custom(lambda generated, k: expected[len(generated) : len(generated) + k - 1])
    assert tokens_of(drafter) == expected
    assert drafter.asked[0] == (PROMPT, K)
    for tokens, k in drafter.asked:
        generated = len(tokens) - len(PROMPT)
        assert tokens == [*PROMPT, *expected[:generated]]
        assert 1 <= k <= min(K, 24 - generated - 1)


@pytest.mark.parametrize(
    "form", [list, tuple, np.array, mx.array], ids=["list", "tuple", "numpy", "mlx"]
)
def test_any_sequence_of_ids_will_do(form: Callable[[list[int]], Any]) -> None:
    expected = zoo.reference("qwen3_5", PROMPT, 24).tokens
    drafter = Custom(lambda generated, k: form(expected[len(generated) : len(generated) + k]))
    assert tokens_of(drafter) == expected
    assert len(drafter.asked) == 5  # 24 tokens in blocks of 5, the last one of 4


def test_numpy_ids_are_ids() -> None:
    expected = zoo.reference("qwen3_5", PROMPT, 12).tokens
    drafter = Custom(lambda generated, k: [np.int64(i) for i in expected[len(generated) :][:k]])
    assert tokens_of(drafter, 12) == expected


@pytest.mark.parametrize("nothing", [[], (), mx.array([], mx.uint32)], ids=["list", "tuple", "mlx"])
def test_nothing_for_ever_is_plain_decoding(nothing: Any) -> None:
    model, cache = zoo.build("qwen3_5"), make_prompt_cache(zoo.build("qwen3_5"))
    expected = zoo.reference(model, PROMPT, 24)
    drafter = Custom(lambda generated, k: nothing)
    steps = list(
        mlx_rewind.generate_step(PROMPT, model, drafter=drafter, max_tokens=24, prompt_cache=cache)
    )
    assert [token for token, _, _ in steps] == expected.tokens
    assert all(mx.array_equal(a, b) for (_, a, _), b in zip(steps, expected.logprobs, strict=True))
    assert not any(from_draft for _, _, from_draft in steps)
    zoo.assert_state_equal(cache, zoo.feed(model, [*PROMPT, *expected.tokens[:-1]]))


def test_it_may_stop_and_go_on() -> None:
    expected = zoo.reference("qwen3_5", PROMPT, 40).tokens
    drafter = zoo.Scripted(expected, [3, None, 0, None, 1, None], prompt_length=len(PROMPT))
    assert tokens_of(drafter, 40) == expected


def test_kinds() -> None:
    drafters = [None, NGram(), mlx_rewind.Prediction([1]), Custom(lambda generated, k: [])]
    assert [kind_of(drafter) for drafter in drafters] == ["none", "ngram", "prediction", "custom"]


# --- what is refused -------------------------------------------------------------------------


BAD = {
    "too many": ([1] * (K + 1), r"proposed 5 tokens, at most 4"),
    "one past the last id": ([3, zoo.VOCAB], r"token 97.*ids are 0\.\.96"),
    "far past the last id": ([2**40], r"token 1099511627776.*ids are 0\.\.96"),
    "negative": ([-1], r"token -1.*ids are 0\.\.96"),
    "a float": ([1.0], r"1\.0"),
    "text": (["a"], r"'a'"),
    "a string": ("ab", r"'a"),
    "None inside": ([1, None], r"None"),
    "None": (None, r"None"),
    "a number": (7, r"7|int"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("calls", [0, 3])
def test_bad_proposals_are_refused(kind: str, calls: int) -> None:
    proposal, message = BAD[kind]
    with pytest.raises(DraftMismatchError, match=message):
        tokens_of(Late("qwen3_5", calls, lambda: proposal))


@pytest.mark.parametrize("n", [6, 24])
def test_an_array_of_too_many_is_refused(n: int) -> None:
    """Also if all of it is right: the budget would be passed."""
    expected = zoo.reference("qwen3_5", PROMPT, 40).tokens
    drafter = Custom(lambda generated, k: mx.array(expected[len(generated) :][: k + 4], mx.uint32))
    with pytest.raises(DraftMismatchError, match=r"proposed \d+ tokens, at most \d"):
        tokens_of(drafter, n)


def test_an_array_with_an_id_that_the_target_has_not_is_refused() -> None:
    with pytest.raises(DraftMismatchError, match=r"token 97.*ids are 0\.\.96"):
        tokens_of(Custom(lambda generated, k: mx.array([zoo.VOCAB], mx.uint32)))


def test_an_array_of_floats_is_refused() -> None:
    with pytest.raises(DraftMismatchError):
        tokens_of(Custom(lambda generated, k: mx.array([1.5])))


@pytest.mark.parametrize("drafter", [object(), "ngram", [1, 2], lambda tokens, k: []])
def test_an_object_that_cannot_propose_is_refused_at_the_call(drafter: Any) -> None:
    with pytest.raises(DraftMismatchError, match=rf"propose.*{type(drafter).__name__} has none"):
        mlx_rewind.generate_step(PROMPT, zoo.build("qwen3_5"), drafter=drafter)


def test_a_mismatch_is_a_value_error() -> None:
    assert issubclass(DraftMismatchError, ValueError)


# --- what is left behind ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
@pytest.mark.parametrize("calls", [0, 1, 4])
@pytest.mark.parametrize("then", [raising, lambda: [zoo.VOCAB]], ids=["raises", "bad id"])
def test_a_failing_drafter_leaves_the_cache_at_what_was_emitted(
    name: str, calls: int, then: Callable[[], Any]
) -> None:
    model = zoo.build(name)
    cache = make_prompt_cache(model)
    expected = zoo.reference(model, PROMPT, 40).tokens
    drafter = Late(name, calls, then)
    steps = mlx_rewind.generate_step(
        PROMPT, model, drafter=drafter, num_draft_tokens=K, prompt_cache=cache, max_tokens=40
    )
    emitted = []
    with pytest.raises(LookupError if then is raising else DraftMismatchError):
        emitted.extend(token for token, _, _ in steps)
    assert emitted == expected[: 3 * calls]  # two right ones and the target's own per call
    held = [*PROMPT, *emitted][:-1]
    zoo.assert_state_equal(cache, zoo.feed(model, held), zoo.tolerance(name))

    # What is left can be gone on from, with the last token still to be fed.
    last = ([*PROMPT, *emitted])[-1:]
    steps = mlx_rewind.generate_step(last, model, prompt_cache=cache, max_tokens=8)
    assert [token for token, _, _ in steps] == expected[len(emitted) : len(emitted) + 8]


def test_the_drafters_exception_is_its_own() -> None:
    with pytest.raises(LookupError, match="the drafter's own trouble"):
        tokens_of(Late("qwen3_5", 2, raising))
