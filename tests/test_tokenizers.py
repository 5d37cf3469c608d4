"""check_tokenizers: two tokenizers are compared by content, not by size or name."""

from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import mlx_rewind
import zoo
from mlx_rewind import DraftMismatchError, DraftModel
from mlx_rewind.draft.model import check_tokenizers

WORDS = ["<unk>", "<end>", "<pad>", "the", "cat", "sat", "on", "a", "mat", "."]


def tokenizer(words: list[str] = WORDS, *, eos: str = "<end>", **options: Any) -> TokenizerWrapper:
    """Ids in the order of `words`. `eos_token_ids` are more ids that end a text."""
    eos_token_ids = options.pop("eos_token_ids", None)
    vocabulary = {word: i for i, word in enumerate(words)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", pad_token="<pad>", eos_token=eos, **options
    )
    return TokenizerWrapper(fast, eos_token_ids=eos_token_ids)


def swapped(i: int, j: int) -> list[str]:
    words = list(WORDS)
    words[i], words[j] = words[j], words[i]
    return words


def test_the_fixture_is_a_tokenizer() -> None:
    tok = tokenizer()
    assert tok.encode("the cat sat") == [3, 4, 5]
    assert tok.decode([3, 4, 5]) == "the cat sat"
    assert tok.eos_token_ids == {1}


# --- accepted --------------------------------------------------------------------------------


def test_equal_tokenizers_pass() -> None:
    check_tokenizers(tokenizer(), tokenizer())


def test_a_tokenizer_passes_against_itself() -> None:
    tok = tokenizer()
    check_tokenizers(tok, tok)


def test_an_end_that_is_special_to_both_may_differ() -> None:
    """As with a base model and its chat model: the drafter never ends a text."""
    check_tokenizers(tokenizer(eos="<end>"), tokenizer(eos="<pad>", sep_token="<end>"))


def test_an_end_that_the_user_added_to_the_target_is_no_difference() -> None:
    target = tokenizer()
    target.add_eos_token(".")
    check_tokenizers(target, tokenizer())


def test_differently_padded_models_are_no_difference() -> None:
    """The vocabulary of the models is 97 and 128, that of both tokenizers 10."""
    target = zoo.build("llama")
    draft = DraftModel(zoo.build("llama", vocab_size=128), tokenizer())
    text = mlx_rewind.generate(target, tokenizer(), "the cat", drafter=draft, max_tokens=12)
    assert text == mlx_rewind.generate(target, tokenizer(), "the cat", max_tokens=12)


# --- refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("i", "j"), [(3, 4), (8, 5), (9, 0)])
def test_the_first_id_that_differs_is_named(i: int, j: int) -> None:
    first = min(i, j)
    other = swapped(i, j)
    with pytest.raises(DraftMismatchError) as error:
        check_tokenizers(tokenizer(), tokenizer(other))
    message = str(error.value)
    assert f"id {first} is {WORDS[first]!r} for the target" in message
    assert f"{other[first]!r} for the draft" in message
    assert "same family" in message
    assert "\n" not in message


def test_a_token_more_is_named_from_both_sides() -> None:
    longer = tokenizer([*WORDS, "dog", "ran"])
    with pytest.raises(DraftMismatchError, match="id 10 is None for the target and 'dog' for the"):
        check_tokenizers(tokenizer(), longer)
    with pytest.raises(DraftMismatchError, match="id 10 is 'dog' for the target and None for the"):
        check_tokenizers(longer, tokenizer())


def test_an_added_token_is_named() -> None:
    target = tokenizer()
    target.add_tokens(["<tool>"])
    with pytest.raises(DraftMismatchError, match="id 10 is '<tool>' for the target and None"):
        check_tokenizers(target, tokenizer())


def test_a_token_that_is_special_to_one_is_named() -> None:
    with pytest.raises(DraftMismatchError, match=r"special tokens: ids \[8\]"):
        check_tokenizers(tokenizer(), tokenizer(sep_token="mat"))


def test_an_end_token_that_one_side_added_is_no_difference() -> None:
    check_tokenizers(tokenizer(), tokenizer(eos_token_ids=[9]))
    check_tokenizers(tokenizer(eos_token_ids=[9]), tokenizer())


def test_a_draft_with_another_tokenizer_is_refused_at_the_call() -> None:
    model = zoo.build("llama")
    drafter = DraftModel(model, tokenizer(swapped(4, 8)))
    with pytest.raises(DraftMismatchError, match="id 4 is 'cat' for the target"):
        mlx_rewind.stream_generate(model, tokenizer(), "the cat", drafter=drafter)
