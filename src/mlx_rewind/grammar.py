"""Grammars: text that is constrained to a JSON schema, a regular expression or a Lark grammar.

A `Grammar` is compiled once by llguidance (the extra `grammar`), never changes, and may be shared
by requests and threads. Each request takes a processor of its own.

    tokens   prompt ············ | emitted ········ |
    taken                        | emitted ········ | draft ·· |     what the parser has read
                                              ^ where the history disagrees, it is rolled back
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: As much of a prompt is compared in every call; the grammar depends on none of it.
_TAIL = 32

_log = logging.getLogger("mlx_rewind")


@dataclass(frozen=True, eq=False)
class Grammar:
    """What a text has to match, compiled for the vocabulary of one tokenizer.

    kind      "json_schema", "regex" or "lark"
    source    the schema as JSON, the pattern or the Lark text

    Every constructor raises ValueError for a grammar that is malformed or cannot be rolled back,
    and for a tokenizer whose tokens are not known as bytes or that has no end token; ImportError
    without the extra. `tokenizer` is mlx-lm's TokenizerWrapper or a fast Hugging Face tokenizer.
    """

    kind: str
    source: str
    _vocabulary: _Vocabulary = field(repr=False)
    _matcher: LLMatcher = field(repr=False)

    @classmethod
    def json_schema(
        cls, schema: dict[str, Any] | str, tokenizer: Any, *, compact: bool = False
    ) -> Grammar:
        """JSON that a schema describes; keywords that llguidance does not enforce are refused.

        compact    no white space between the tokens of JSON. Without it a model may go on with
                   blanks and line breaks for ever.
        """
        source, matchers = _schema_text(schema), _llguidance().LLMatcher
        options = {"whitespace_flexible": False} if compact else None
        grammar = matchers.grammar_from_json_schema(source, overrides=options)
        return cls._compiled("json_schema", source, grammar, tokenizer)

    @classmethod
    def json_object(cls, tokenizer: Any, *, compact: bool = False) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, tokenizer, compact=compact)

    @classmethod
    def regex(cls, pattern: str, tokenizer: Any) -> Grammar:
        """A text that the whole pattern matches. No look-around, no back-references."""
        grammar = _llguidance().LLMatcher.grammar_from_regex(pattern)
        return cls._compiled("regex", pattern, grammar, tokenizer)

    @classmethod
    def choice(cls, choices: Sequence[str], tokenizer: Any) -> Grammar:
        """One of several texts."""
        if isinstance(choices, str) or not choices:
            raise ValueError(f"choices must be a list of at least one text, got {choices!r}")
        return cls.regex("|".join(re.escape(text) for text in choices), tokenizer)

    @classmethod
    def lark(cls, text: str, tokenizer: Any) -> Grammar:
        """The rule `start` of a grammar in llguidance's variant of Lark.

        Rules with `max_tokens=` or `stop=` are refused, since llguidance cannot roll them back.
        """
        grammar = json.dumps({"grammars": [{"lark_grammar": text}]})
        return cls._compiled("lark", text, grammar, tokenizer)

    @classmethod
    def _compiled(cls, kind: str, source: str, grammar: str, tokenizer: Any) -> Grammar:
        matchers, vocabulary = _llguidance().LLMatcher, _vocabulary(tokenizer)
        matcher = matchers(vocabulary.tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"not a usable {kind} grammar: {_message(matcher)}")
        for warning in matcher.get_grammar_warnings():
            _log.warning("%s grammar: %s", kind, " ".join(warning.split()))
        made = cls(kind, source, vocabulary, matcher)
        made._check()
        return made

    def _check(self) -> None:
        """Raises if no token can begin the text, or if a token cannot be taken back."""
        row = _next_tokens(self._matcher.deep_copy(), self._vocabulary)
        allowed = np.flatnonzero(_bits(row, self._vocabulary.size))
        starts = [int(t) for t in allowed if int(t) not in self._vocabulary.ends]
        trial = self._matcher.deep_copy()
        if starts and trial.try_consume_tokens(starts[:1]) and not trial.rollback(1):
            raise ValueError(f"not a usable {self.kind} grammar: {_message(trial)}")

    def processor(self) -> GrammarProcessor:
        """A processor for one request."""
        return GrammarProcessor(self._vocabulary, self._matcher.deep_copy())


class GrammarProcessor:
    """Masks the tokens that a grammar does not allow; a logits processor of one request.

    The first call's tokens are the prompt, which the grammar does not see. Later calls begin with
    it; what comes after may have grown, shrunk or changed, and the state follows. Once an end
    token was emitted, or nothing but an end is possible, only end tokens are allowed.

    Raises ValueError for tokens that do not begin with the prompt, emitted tokens that the grammar
    does not allow, and a text that has become too complex for llguidance's limits.
    """

    def __init__(self, vocabulary: _Vocabulary, matcher: LLMatcher) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._prompt: tuple[int, list[int]] | None = None  # its length and its end
        self._taken: list[int] = []
        self._parsed = 0  # of the taken tokens; the parser never reads an end token

    def __call__(self, tokens: mx.array | Sequence[int], logits: mx.array) -> mx.array:
        """As mlx-lm calls it. tokens [n], logits [1, V]; returns [1, V], masked."""
        return self.window(tokens, (), logits)

    def legal(self, tokens: mx.array | Sequence[int], draft: Sequence[int]) -> int:
        """How many leading draft tokens the grammar allows after `tokens`."""
        self._follow(tokens)
        return self._take(draft)

    def window(
        self, tokens: mx.array | Sequence[int], draft: Sequence[int], logits: mx.array
    ) -> mx.array:
        """Masks every position of a window.

        draft     tokens that are all legal
        logits    [len(draft) + 1, V]; row i follows tokens + draft[:i]
        """
        if logits.ndim != 2 or logits.shape[0] != len(draft) + 1:
            raise ValueError(
                f"logits must have the shape [{len(draft) + 1}, V] for {len(draft)} draft tokens, "
                f"got {list(logits.shape)}"
            )
        self._follow(tokens)
        rows = [self._row()]
        for i, token in enumerate(draft):
            if not self._take((token,)):
                raise ValueError(
                    f"draft token {i} ({token}) is not allowed by the grammar; "
                    f"verify only as many as `legal` says"
                )
            rows.append(self._row())
        return _masked(np.stack(rows), self._vocabulary.size, logits)

    def _follow(self, tokens: mx.array | Sequence[int]) -> None:
        """Brings the state to the end of `tokens`."""
        if self._prompt is None:
            self._prompt = len(tokens), _host(tokens[-_TAIL:])
        start, tail = self._prompt
        recent = _host(tokens[start - len(tail) :])
        if recent[: len(tail)] != tail:
            raise ValueError(
                f"the tokens no longer begin with the prompt of {start} tokens: a processor serves "
                f"one request, take another one with `grammar.processor()`"
            )
        emitted = recent[len(tail) :]
        same = _common(emitted, self._taken)
        self._rewind(same)
        taken = same + self._take(emitted[same:])
        if taken < len(emitted):
            raise ValueError(
                f"emitted token {taken} ({emitted[taken]}) is not allowed by the grammar; tokens "
                f"must be drawn from the logits that this processor returned"
            )

    def _rewind(self, kept: int) -> None:
        """Takes back all but the first `kept` tokens."""
        back = self._parsed - min(kept, self._parsed)
        if back and not self._matcher.rollback(back):
            raise ValueError(f"the grammar cannot be rolled back: {_message(self._matcher)}")
        self._parsed -= back
        del self._taken[kept:]

    def _take(self, tokens: Sequence[int]) -> int:
        """Reads tokens up to the first that is not allowed; returns how many."""
        for count, token in enumerate(tokens):
            if not self._parse(token):
                return count
            self._taken.append(token)
        return len(tokens)

    def _parse(self, token: int) -> bool:
        vocabulary = self._vocabulary
        if self._ended:
            return token in vocabulary.ends
        if token in vocabulary.ends:
            return bool(_bits(self._row(), vocabulary.size)[token])
        if not 0 <= token < vocabulary.size or not self._matcher.try_consume_tokens([token]):
            if self._matcher.is_error():
                raise ValueError(f"llguidance cannot read token {token}: {_message(self._matcher)}")
            return False
        self._parsed += 1
        return True

    @property
    def _ended(self) -> bool:
        return len(self._taken) > self._parsed

    def _row(self) -> NDArray[np.uint8]:
        """The allowed tokens, one bit each, least significant first."""
        if self._ended:
            return self._vocabulary.end_row
        return _next_tokens(self._matcher, self._vocabulary)


@dataclass(frozen=True, eq=False)
class _Vocabulary:
    """A tokenizer as llguidance reads it.

    size         tokens; a model's vocabulary may be larger, its other ids are never allowed
    ends         ids that end a text
    end_row      the same, one bit per token
    text_row     those of them that are not special tokens, so that they also stand for text
    """

    tokenizer: LLTokenizer
    size: int
    ends: frozenset[int]
    end_row: NDArray[np.uint8]
    text_row: NDArray[np.uint8]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast, ends: Sequence[int]) -> _Vocabulary:
        from llguidance.hf import from_tokenizer

        size = tokenizer.backend_tokenizer.get_vocab_size(with_added_tokens=True)
        highest = max(tokenizer.get_vocab().values(), default=-1)
        known = [token for token in ends if token < size]
        if highest + 1 != size:
            raise ValueError(
                f"grammars need a tokenizer whose ids have no gaps, got {size} tokens with ids up "
                f"to {highest}"
            )
        if not known:
            raise ValueError(
                f"grammars need a tokenizer with an end token, got {list(ends)} for {size} tokens; "
                f"wrap it as mlx_lm's TokenizerWrapper(tokenizer, eos_token_ids=[...])"
            )
        try:
            made = from_tokenizer(tokenizer, eos_token=known)
        except ValueError as error:
            raise ValueError(
                f"llguidance cannot use this tokenizer: {_line(str(error))}"
            ) from error
        text = [token for token in known if not made.is_special_token(token)]
        return cls(made, size, frozenset(known), _row_of(known, size), _row_of(text, size))


#: The vocabularies of tokenizers that are still in use; building one takes up to a second.
_built: WeakKeyDictionary[Any, dict[Any, _Vocabulary]] = WeakKeyDictionary()
_building = threading.Lock()


def _vocabulary(tokenizer: Any) -> _Vocabulary:
    """Built once for each tokenizer, number of its tokens and set of its end tokens."""
    if isinstance(tokenizer, TokenizerWrapper):
        tokenizer, found = tokenizer._tokenizer, tokenizer.eos_token_ids
    elif isinstance(tokenizer, PreTrainedTokenizerFast):
        found = tokenizer.eos_token_id
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"grammars need a fast Hugging Face tokenizer (or mlx-lm's wrapper of one), got "
            f"{type(tokenizer).__name__}"
        )
    several = found if isinstance(found, (list, tuple, set)) else [found]
    ends = sorted({int(token) for token in several if token is not None})
    with _building:
        known = _built.setdefault(tokenizer, {})
        key = (len(tokenizer), *ends)
        if key not in known:
            known[key] = _Vocabulary.of(tokenizer, ends)
        return known[key]


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ImportError(
            "grammars need llguidance: pip install 'mlx-rewind[grammar]'", name="llguidance"
        ) from error
    return llguidance


def _schema_text(schema: dict[str, Any] | str) -> str:
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        value = json.loads(text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the JSON schema is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"a JSON schema must be an object, got {text}")
    return text


def _next_tokens(matcher: LLMatcher, vocabulary: _Vocabulary) -> NDArray[np.uint8]:
    """The tokens that may come next, one bit each."""
    row = np.frombuffer(matcher.compute_bitmask(), np.uint8)[: vocabulary.end_row.size]
    if matcher.is_error():
        raise ValueError(f"the grammar allows no token here: {_message(matcher)}")
    if vocabulary.text_row.any() and not matcher.is_accepting():
        row = row & ~vocabulary.text_row  # it would end the text here
    return row


def _masked(rows: NDArray[np.uint8], size: int, logits: mx.array) -> mx.array:
    """logits [N, V], -inf where rows [N, bytes] have no bit."""
    allowed = np.zeros(logits.shape, np.bool_)
    common = min(size, logits.shape[1])
    allowed[:, :common] = _bits(rows, common)
    if not allowed.any(axis=1).all():
        raise ValueError("the grammar allows no token of the model's vocabulary here")
    return mx.where(mx.array(allowed), logits, -mx.inf)


def _bits(rows: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    return np.unpackbits(rows, axis=-1, bitorder="little", count=size)


def _row_of(tokens: Sequence[int], size: int) -> NDArray[np.uint8]:
    bits = np.zeros(size, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little")


def _host(tokens: mx.array | Sequence[int]) -> list[int]:
    return tokens.tolist() if isinstance(tokens, mx.array) else list(tokens)  # type: ignore[return-value]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    return next(i for i in range(size) if a[i] != b[i])


def _message(matcher: LLMatcher) -> str:
    """What llguidance says, without the dump of its state."""
    return _line(matcher.get_error().partition("\n<")[0])


def _line(text: str) -> str:
    """One line, without the lines that only hold a caret."""
    return " ".join(" ".join(line for line in text.splitlines() if line.strip() != "^").split())
