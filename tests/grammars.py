"""Tokenizers, grammars and an oracle for the tests of grammars."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import llguidance
import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_rewind import Grammar

#: Ids that a model has and its tokenizer does not.
PADDING = 7

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}

SUMS = r"""
start: sum ";"
sum: term ("+" term)*
term: /[0-9]+/ | "(" sum ")"
"""

GRAMMARS: dict[str, Callable[[Any], Grammar]] = {
    "schema": lambda tokenizer: Grammar.json_schema(PERSON, tokenizer),
    "compact": lambda tokenizer: Grammar.json_schema(PERSON, tokenizer, compact=True),
    "object": Grammar.json_object,
    "regex": lambda tokenizer: Grammar.regex("(ab|[0-9]{2,4}é)*;", tokenizer),
    "open": lambda tokenizer: Grammar.regex("[a-z ]*", tokenizer),
    "choice": lambda tokenizer: Grammar.choice(["yes", "yes, sir", "no"], tokenizer),
    "lark": lambda tokenizer: Grammar.lark(SUMS, tokenizer),
}


def byte_level(eos_token_ids: Sequence[int] = ()) -> TokenizerWrapper:
    """One token per byte, a few longer ones, and two special ones of which `<end>` ends a text."""
    return _wrapped(
        [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", '{"', '":', "na", "me", "name"],
        [("a", "b"), ("{", '"'), ('"', ":"), ("n", "a"), ("m", "e"), ("na", "me")],
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
        eos_token_ids,
    )


def sentencepiece(*, spells_bytes: bool = True) -> TokenizerWrapper:
    """Like Llama 2: spaces are U+2581, and what has no token is spelled in bytes."""
    spelled = [f"<0x{i:02X}>" for i in range(256)] if spells_bytes else []
    letters = [chr(i) for i in range(33, 127)]
    return _wrapped(
        [*spelled, "▁", *letters, "ab", "▁n", "ye", "yes", "12"],
        [("a", "b"), ("▁", "n"), ("y", "e"), ("ye", "s"), ("1", "2")],
        None,
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
        byte_fallback=True,
    )


def _wrapped(
    words: list[str],
    merges: list[tuple[str, str]],
    pre_tokenizer: Any,
    decoder: Any,
    eos_token_ids: Sequence[int] = (),
    **options: Any,
) -> TokenizerWrapper:
    words = ["<start>", "<end>", *words]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges, **options))
    core.decoder = decoder
    if pre_tokenizer is None:
        core.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        core.pre_tokenizer = pre_tokenizer
    core.add_special_tokens(["<start>", "<end>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<start>", eos_token="<end>")
    return TokenizerWrapper(fast, eos_token_ids=eos_token_ids)


@dataclass
class Oracle:
    """What llguidance says after tokens that it reads from the first, with a lexer of its own."""

    matcher: Any
    ends: frozenset[int]
    size: int

    @classmethod
    def of(cls, grammar: Grammar, text: str) -> "Oracle":
        """For llguidance's own form of a grammar."""
        tokenizer = grammar._vocabulary.tokenizer
        matcher = llguidance.LLMatcher(tokenizer, text)
        assert not matcher.is_error()
        return cls(matcher, frozenset(tokenizer.eos_tokens), tokenizer.vocab_size)

    def after(self, tokens: Sequence[int]) -> Any:
        """A matcher that has read `tokens`, which hold no end; None if one is not allowed."""
        matcher = self.matcher.deep_copy()
        return matcher if matcher.try_consume_tokens(list(tokens)) == len(tokens) else None

    def allowed(self, tokens: Sequence[int]) -> set[int]:
        if self.ends & set(tokens):
            return set(self.ends)
        row = np.frombuffer(self.after(tokens).compute_bitmask(), np.uint8)
        return set(np.flatnonzero(np.unpackbits(row, bitorder="little")[: self.size]).tolist())

    def takes(self, tokens: Sequence[int]) -> bool:
        """Whether the last of the tokens may follow the others, which may follow each other."""
        *known, last = tokens
        if last in self.allowed(known):
            return True  # llguidance masks all but one spelling of what is bound to follow
        return not self.ends & set(tokens) and last < self.size and self.after(tokens) is not None


def written(name: str) -> str:
    """The grammars above as llguidance writes them, without mlx_rewind."""
    make = llguidance.LLMatcher
    return {
        "schema": make.grammar_from_json_schema(PERSON),
        "compact": make.grammar_from_json_schema(PERSON, overrides={"whitespace_flexible": False}),
        "object": make.grammar_from_json_schema({"type": "object"}),
        "regex": make.grammar_from_regex("(ab|[0-9]{2,4}é)*;"),
        "open": make.grammar_from_regex("[a-z ]*"),
        "choice": make.grammar_from_lark('start: "yes" | "yes, sir" | "no"'),
        "lark": make.grammar_from_lark(SUMS),
    }[name]


def allowed(logits: mx.array) -> list[set[int]]:
    """The ids of each row that are not masked."""
    assert logits.dtype == mx.float32
    return [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in np.array(logits)]
