"""Grammars: the masks are llguidance's, whatever became of the drafts before."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import mlx_rewind
from grammars import GRAMMARS, PADDING, PERSON, Oracle, allowed, byte_level, sentencepiece, written
from mlx_rewind import Grammar, NGram, SamplingParams, WindowProcessor

NAMES = pytest.mark.parametrize("name", GRAMMARS)
PROMPT = [3, 4, 5]


@pytest.fixture(scope="module")
def shipped() -> tuple[Any, Any]:
    return mlx_rewind.load()


@pytest.fixture(scope="module")
def tokenizers(shipped: tuple[Any, Any]) -> dict[str, Any]:
    return {"shipped": shipped[1], "byte": byte_level(), "pieces": sentencepiece()}


def spell(tokenizer: Any, text: str) -> list[int]:
    """`text`, one token per character."""
    return [tokenizer.convert_tokens_to_ids(char) for char in text]


def ask(processor: Any, tokens: list[int], size: int) -> set[int]:
    """The ids that are allowed after the prompt and `tokens`, of a model with `size` ids."""
    return allowed(processor(mx.array(PROMPT + tokens), mx.zeros((1, size))))[0]


def answer(grammar: Grammar, tokens: list[int], size: int) -> set[int]:
    """The same from a processor that has seen nothing but the prompt."""
    processor = grammar.processor()
    processor.legal(PROMPT, [])
    return ask(processor, tokens, size)


# --- the state follows the history ------------------------------------------------------------


@NAMES
@pytest.mark.parametrize("kind", ["shipped", "byte", "pieces"])
@settings(max_examples=12, deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_any_walk_has_the_masks_of_a_fresh_processor(
    tokenizers: dict[str, Any], kind: str, name: str, data: st.DataObject
) -> None:
    """Drafts, rejections and tokens that are taken back, in any order."""
    grammar = GRAMMARS[name](tokenizers[kind])
    oracle = Oracle.of(grammar, written(name))
    size = oracle.size + PADDING
    processor, emitted = grammar.processor(), []
    assert ask(processor, [], size) == oracle.allowed([])

    def guess(tokens: list[int]) -> int:
        if data.draw(st.integers(0, 9)) == 0:
            return data.draw(st.integers(0, size - 1))
        return data.draw(st.sampled_from(sorted(oracle.allowed(tokens))))

    for _ in range(data.draw(st.integers(1, 6))):
        draft: list[int] = []
        for _ in range(data.draw(st.integers(0, 4))):
            draft.append(guess(emitted + draft))
            if not oracle.takes(emitted + draft):
                break
        legal = len(draft) if not draft or oracle.takes(emitted + draft) else len(draft) - 1
        assert processor.legal(PROMPT + emitted, draft) == legal
        logits = mx.zeros((legal + 1, size))
        masks = allowed(processor.window(PROMPT + emitted, draft[:legal], logits))
        assert masks == [oracle.allowed(emitted + draft[:i]) for i in range(legal + 1)]
        kept = data.draw(st.integers(0, legal))
        emitted = emitted + draft[:kept]
        if masks[kept]:
            emitted.append(data.draw(st.sampled_from(sorted(masks[kept]))))
        if data.draw(st.integers(0, 3)) == 0:
            emitted = emitted[: data.draw(st.integers(0, len(emitted)))]
        if data.draw(st.booleans()):
            assert ask(processor, emitted, size) == oracle.allowed(emitted)
    assert answer(grammar, emitted, size) == oracle.allowed(emitted)


def test_a_processor_is_a_window_processor(tokenizers: dict[str, Any]) -> None:
    assert isinstance(Grammar.json_object(tokenizers["byte"]).processor(), WindowProcessor)


@pytest.mark.parametrize("kind", ["byte", "pieces", "shipped"])
def test_an_end_is_for_ever(tokenizers: dict[str, Any], kind: str) -> None:
    tokenizer = tokenizers[kind]
    grammar = Grammar.choice(["no", "nope"], tokenizer)
    no, pe = spell(tokenizer, "no"), spell(tokenizer, "pe")
    ends = set(tokenizer.eos_token_ids)
    size = len(tokenizer.get_vocab()) + PADDING
    processor = grammar.processor()
    assert ask(processor, [], size) & ends == set()
    assert ask(processor, no, size) > ends
    end = min(ends)
    for history in (no + pe, [*no, *pe, end], [*no, end], [*no, end, max(ends), end]):
        assert ask(processor, history, size) == ends
        assert processor.legal(PROMPT + history, [end, max(ends), pe[0]]) == 2
    assert ask(processor, no, size) > ends


def test_a_row_keeps_its_values_and_dtype(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["byte"]
    digits = spell(tokenizer, "0123456789")
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        logits = mx.random.normal((1, 300)).astype(dtype)
        masked = Grammar.regex("[0-9];", tokenizer).processor()(mx.array(PROMPT), logits)
        assert masked.dtype == dtype
        assert mx.array_equal(masked[:, mx.array(digits)], logits[:, mx.array(digits)])
        assert mx.isfinite(masked).sum().item() == 10


def test_an_end_token_that_is_text_ends_only_where_a_text_may_end() -> None:
    """A user may add any token as an end; in the middle of a text it would cut it off."""
    tokenizer = byte_level()
    tokenizer.add_eos_token("b")
    (a, b), size = spell(tokenizer, "ab"), len(tokenizer.get_vocab())
    grammar = Grammar.regex("[ab]a", tokenizer)
    assert ask(grammar.processor(), [], size) & {a, b} == {a}
    assert answer(grammar, [a, a], size) == tokenizer.eos_token_ids >= {b}
    with pytest.raises(ValueError, match="allows no token"):
        ask(Grammar.regex("a[b]a", tokenizer).processor(), [], size)
        answer(Grammar.regex("a[b]a", tokenizer), [a], size)


# --- generation -------------------------------------------------------------------------------


def decode(shipped: tuple[Any, Any], grammar: Grammar, prompt: str, **options: Any) -> list[int]:
    model, tokenizer = shipped
    tokens = mx.array(tokenizer.encode(prompt))
    steps = generate_step(
        tokens, model, logits_processors=[grammar.processor()], max_tokens=40, **options
    )
    return [token for token, _ in steps]


def text_of(tokenizer: Any, tokens: list[int]) -> str:
    """The text up to the first end token; nothing but end tokens follows."""
    ends = tokenizer.eos_token_ids
    end = next(i for i, token in enumerate(tokens) if token in ends)
    assert set(tokens[end:]) <= ends
    return tokenizer.decode(tokens[:end])


def is_person(text: str) -> bool:
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 8
    assert type(value["age"]) is int
    assert 0 <= value["age"] <= 120
    return len(value["tags"]) <= 2 and set(value["tags"]) <= {"a", "b"}


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_plain_mlx_lm_obeys(shipped: tuple[Any, Any], seed: int | None) -> None:
    tokenizer = shipped[1]
    options: dict[str, Any] = {}
    if seed is not None:
        mx.random.seed(seed)
        options["sampler"] = mx.random.categorical
    schema = Grammar.json_schema(PERSON, tokenizer, compact=True)
    assert is_person(text_of(tokenizer, decode(shipped, schema, "A person: ", **options)))
    regex = Grammar.regex("[0-9]{3,5};", tokenizer)
    assert re.fullmatch("[0-9]{3,5};", text_of(tokenizer, decode(shipped, regex, "=", **options)))
    choice = Grammar.choice(["yes", "no (é/|.*)"], tokenizer)
    assert text_of(tokenizer, decode(shipped, choice, "So: ", **options)) in ("yes", "no (é/|.*)")


class Letters:
    """Proposes letters, which no number has."""

    def propose(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
        return [67, 68, 69, 70][:num_draft_tokens]


@pytest.mark.parametrize("drafter", [Letters, NGram, None])
@pytest.mark.parametrize("form", ["regex", "lark"])
def test_digits_then_a_semicolon_with_any_drafter(
    shipped: tuple[Any, Any], drafter: Callable[[], Any] | None, form: str
) -> None:
    """The output obeys at every token, is that of plain decoding, and so is the state."""
    model, tokenizer = shipped
    grammar = {
        "regex": lambda: Grammar.regex("([0-9];)*", tokenizer),
        "lark": lambda: Grammar.lark('start: pair*\npair: DIGIT ";"\nDIGIT: /[0-9]/', tokenizer),
    }[form]()
    prompt = tokenizer.encode("1;2;3;1;2;3;")
    made = drafter() if drafter else mlx_rewind.load_draft(None, tokenizer)
    own = grammar.processor()
    run = [
        token
        for token, _, _ in mlx_rewind.generate_step(
            mx.array(prompt), model, drafter=made, max_tokens=24, logits_processors=[own]
        )
    ]
    assert run == decode(shipped, grammar, "1;2;3;1;2;3;")[:24]
    known = [token for token in run if token not in tokenizer.eos_token_ids]
    assert re.fullmatch("([0-9];)*[0-9]?", tokenizer.decode(known))
    fresh, size = grammar.processor(), 2048 + PADDING
    fresh.legal(prompt, [])
    masks = [p(mx.array(prompt + run), mx.zeros((1, size))) for p in (own, fresh)]
    assert mx.array_equal(*masks)


@pytest.mark.parametrize("acceptance", ["match", "rejection", "block"])
def test_sampled_text_obeys_under_every_rule(shipped: tuple[Any, Any], acceptance: Any) -> None:
    model, tokenizer = shipped
    grammar = Grammar.json_schema(PERSON, tokenizer, compact=True)
    for seed in range(3):
        text = mlx_rewind.generate(
            model,
            tokenizer,
            "A person: ",
            drafter=mlx_rewind.load_draft(None, tokenizer),
            logits_processors=[grammar.processor()],
            sampling=SamplingParams(temperature=1.0, seed=seed),
            acceptance=acceptance,
            max_tokens=60,
        )
        assert is_person(text)


def test_threads_share_a_grammar(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["byte"]
    grammar = Grammar.json_schema(PERSON, tokenizer, compact=True)
    size = len(tokenizer.get_vocab())
    texts = [f'{{"name":"{"x" * n}","age":{n},"tags":[]}}' for n in range(8)]
    found: list[list[set[int]]] = [[] for _ in texts]

    def walk(index: int) -> None:
        mx.set_default_device(mx.cpu)
        processor, tokens = grammar.processor(), spell(tokenizer, texts[index])
        found[index] = [ask(processor, tokens[:i], size) for i in range(len(tokens) + 1)]

    threads = [threading.Thread(target=walk, args=(i,)) for i in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, text in enumerate(texts):
        oracle = Oracle.of(grammar, written("compact"))
        tokens = spell(tokenizer, text)
        assert found[index] == [oracle.allowed(tokens[:i]) for i in range(len(tokens) + 1)]


# --- refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: Grammar.regex("[0-9", t), "unclosed character class"),
        (lambda t: Grammar.regex("a(?=b)", t), "look-around"),
        (lambda t: Grammar.lark("start: foo", t), 'unknown name: "foo"'),
        (lambda t: Grammar.lark('start: x "c"\nx[stop="b"]: /[x-z]+/', t), "rollback not supp"),
        (lambda t: Grammar.lark("start: x\nx[max_tokens=2]: /[x-z]+/", t), "rollback not supp"),
        (lambda t: Grammar.json_schema({"not": {}}, t), "Unimplemented keys"),
        (lambda t: Grammar.json_schema({"enum": []}, t), "Unsatisfiable"),
        (lambda t: Grammar.json_schema("{", t), "is not JSON"),
        (lambda t: Grammar.json_schema({"enum": {1}}, t), "is not JSON"),  # type: ignore[dict-item]
        (lambda t: Grammar.json_schema("[]", t), "must be an object, got"),
        (lambda t: Grammar.choice([], t), "at least one text"),
        (lambda t: Grammar.choice("yes", t), "must be a list"),
    ],
)
def test_a_malformed_grammar(
    tokenizers: dict[str, Any], make: Callable[[Any], Grammar], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        make(tokenizers["byte"])
    assert "\n" not in str(error.value)


def fast(vocabulary: dict[str, int], **options: Any) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", **options)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (None, "need a fast Hugging Face tokenizer"),
        (fast({"a": 0, "<unk>": 1}), "need a tokenizer with an end token"),
        (fast({"a": 0, "<unk>": 1}, eos_token="a"), "can't determine decoder type"),
        (fast({"a": 0, "<unk>": 5}, eos_token="a"), "ids have no gaps"),
        (TokenizerWrapper(fast({"a": 0, "<unk>": 1}), eos_token_ids=[2]), "got [2] for 2 tokens"),
    ],
)
def test_a_tokenizer_that_cannot_be_used(tokenizer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        Grammar.json_object(tokenizer)
    assert "\n" not in str(error.value)


def test_a_vocabulary_that_cannot_spell_the_grammar() -> None:
    with pytest.raises(ValueError, match="allows no token"):
        Grammar.regex("é", sentencepiece(spells_bytes=False))


def test_a_plain_tokenizer_and_its_wrapper_have_one_vocabulary() -> None:
    wrapper = byte_level()
    one, other = Grammar.json_object(wrapper), Grammar.json_object(wrapper._tokenizer)
    assert one._vocabulary is other._vocabulary
    wrapper.add_eos_token("b")
    assert Grammar.json_object(wrapper)._vocabulary is not one._vocabulary


def test_a_processor_that_is_used_wrongly_says_so(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["byte"]
    one, semicolon = spell(tokenizer, "1;")
    processor = Grammar.regex("[0-9]+;", tokenizer).processor()
    ask(processor, [], 300)
    with pytest.raises(ValueError, match=r"emitted token 1 \(5\) is not allowed by"):
        ask(processor, [one, 5], 300)
    with pytest.raises(ValueError, match=r"draft token 1 \(5\) is not allowed"):
        processor.window(PROMPT, [one, 5], mx.zeros((3, 300)))
    with pytest.raises(ValueError, match=r"shape \[2, V\] for 1 draft tokens, got \[1, 300\]"):
        processor.window(PROMPT, [one], mx.zeros((1, 300)))
    with pytest.raises(ValueError, match="no longer begin with the prompt of 3 tokens"):
        processor(mx.array([3, 4]), mx.zeros((1, 300)))
    with pytest.raises(ValueError, match="a processor serves one request"):
        processor(mx.array([3, 4, 6, one]), mx.zeros((1, 300)))
    with pytest.raises(ValueError, match="no token of the model's vocabulary"):
        ask(processor, [], spell(tokenizer, "0")[0])
    assert ask(processor, [one, semicolon], 300) == {1}


def test_a_missing_extra_is_named(
    tokenizers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"pip install 'mlx-rewind\[grammar\]'"):
        Grammar.json_object(tokenizers["byte"])


def test_llguidance_is_imported_only_when_used() -> None:
    code = "import mlx_rewind, sys; mlx_rewind.Grammar; print('llguidance' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_examples_of_the_page_run() -> None:
    page = Path(__file__).resolve().parents[1] / "docs" / "grammar.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
