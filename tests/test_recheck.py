"""`recheck`: near-ties of a verify are computed again as single steps, and what that costs."""

import json
from typing import Any

import mlx.core as mx
import pytest

import mlx_rewind
import zoo
from mlx_rewind import SamplingParams, cli, generate_step
from mlx_rewind.generate import _Generation, _Options
from mlx_rewind.types import StepOutput
from test_audit import Halves

PROMPT = zoo.PROMPTS[1]


@pytest.fixture(scope="module")
def rounding() -> Any:
    """A model whose head rounds windows otherwise, so that caches stay equal and tokens do not."""
    model: Any = zoo.build("llama", dtype=mx.bfloat16, fresh=True)
    model.lm_head = Halves(model.lm_head)
    return model


def run(model: Any, recheck: float, plan: list[int], prompt: list[int] = PROMPT) -> Any:
    """Tokens, flags and counters of 60 tokens with a drafter as planned; -1 is a wrong draft."""
    text = zoo.reference(model, prompt, 60).tokens

    class Drafter:
        calls = 0

        def propose(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
            right, self.calls = plan[self.calls % len(plan)], self.calls + 1
            guess = text[len(tokens) - len(prompt) :][:num_draft_tokens]
            return [t if i < right else (t + 1) % 97 for i, t in enumerate(guess)]

    options = _Options(max_tokens=60, recheck=recheck)
    generation = _Generation(prompt, model, Drafter(), options)
    steps = list(generation.tokens())
    return [t for t, *_ in steps], [drafted for *_, drafted in steps], generation.stats


@pytest.mark.parametrize("plan", [[4], [0, 4, 1, 3, 2], [0]], ids=str)
def test_the_text_is_that_of_plain_decoding(rounding: Any, plan: list[int]) -> None:
    expected = zoo.reference(rounding, PROMPT, 60).tokens
    tokens, drafted, stats = run(rounding, 8.0, plan)
    assert tokens == expected
    assert stats.rechecks > 0
    assert stats.emitted == 60
    assert stats.accepted == sum(drafted)
    # Every recheck costs a step without drafts; the last token may be another such step.
    assert stats.steps - stats.rounds - stats.rechecks in (0, 1)
    tokens, _, stats = run(rounding, 0.0, plan)
    assert (stats.rechecks, tokens == expected) == (0, False)


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss", "llama"])
def test_rechecks_change_nothing_where_windows_are_exact(name: str) -> None:
    model = zoo.build(name)
    tokens, _, stats = run(model, 1e6, [0, 4, 1, 3, 2])
    assert tokens == zoo.reference(model, PROMPT, 60).tokens
    assert stats.rechecks > 5  # nearly every position is closer than that


def test_caches_are_those_of_plain_decoding() -> None:
    model = zoo.build("qwen3_5")
    text = zoo.reference(model, PROMPT, 30).tokens
    cache = zoo.feed(model, [])
    drafter = zoo.Scripted(text, [4, 0, 2], prompt_length=len(PROMPT))
    steps = generate_step(
        PROMPT, model, drafter=drafter, recheck=3e6, max_tokens=24, prompt_cache=cache
    )
    for count, _ in enumerate(steps):
        zoo.assert_state_equal(cache, zoo.feed(model, [*PROMPT, *text[:count]]), 1e-5)


@pytest.mark.parametrize("kind", ["mtp", "model"])
def test_drafters_follow(kind: str) -> None:
    """They propose nothing for the single step and go on after it."""
    model, tokenizer = mlx_rewind.load()
    drafter: Any = (
        mlx_rewind.load_mtp(None, model)
        if kind == "mtp"
        else mlx_rewind.load_draft(None, tokenizer)
    )
    prompt = tokenizer.encode("import os\n")

    def responses(**options: Any) -> list[Any]:
        return list(mlx_rewind.stream_generate(model, tokenizer, prompt, max_tokens=32, **options))

    plain = [response.token for response in responses()]
    checked = responses(drafter=drafter, recheck=8)
    assert [response.token for response in checked] == plain
    assert checked[-1].draft_rechecks > 0
    assert checked[-1].draft_n_accepted > 0
    assert responses(drafter=drafter)[-1].draft_rechecks == 0


def test_a_cut_block_is_all_drafts() -> None:
    rows = tuple(mx.zeros(3) for _ in range(3))
    whole = StepOutput((5, 6, 7), rows)
    assert [whole.from_draft(i) for i in range(3)] == [True, True, False]
    cut = whole.before(2)
    assert (cut.tokens, len(cut.logprobs), cut.is_cut) == ((5, 6), 2, True)
    assert [cut.from_draft(i) for i in range(2)] == [True, True]


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": lambda logprobs: mx.argmax(logprobs, axis=-1)},
        {"logits_processors": [lambda tokens, logits: logits]},
        {"sampling": SamplingParams(temperature=1.0)},
        {"sampling": SamplingParams(repetition_penalty=1.1)},
    ],
)
def test_only_greedy_decoding_is_rechecked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="recheck needs greedy decoding"):
        generate_step(PROMPT, zoo.build("llama"), recheck=1, **options)
    assert list(generate_step(PROMPT, zoo.build("llama"), max_tokens=2, **options))


def test_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="recheck must be 0 or more, got -1"):
        generate_step(PROMPT, zoo.build("llama"), recheck=-1)
    line = ["generate", "-p", "import os", "-m", "24", "--ignore-chat-template", "--draft", "mtp"]
    told = {}
    for bound in ("0", "8"):
        assert cli.main([*line, "--json", "--recheck", bound]) == 0
        told[bound] = json.loads(capsys.readouterr().out)
    assert told["0"]["tokens"] == told["8"]["tokens"]
    assert told["0"]["draft_rechecks"] == 0 < told["8"]["draft_rechecks"]
    assert cli.main([*line, "--recheck", "8"]) == 0
    assert f"| {told['8']['draft_rechecks']} near-ties rechecked |" in capsys.readouterr().out
