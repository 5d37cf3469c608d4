"""`mlx-rewind chat`, the prompts of conversations, and saved prompt caches of mlx-lm."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

import mlx_rewind
from mlx_rewind import cli
from mlx_rewind.load import SHIPPED
from mlx_rewind.messages import message_ends, prompt_after

Talk = Callable[..., list[str]]
QUESTIONS = ["What is a list?", "And a tuple?", "Which is faster?"]


@pytest.fixture
def talk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Lines that a conversation prints."""

    def talk(*lines: str, options: tuple[Any, ...] = ()) -> list[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        capsys.readouterr()
        assert cli.main(["chat", "-m", "16", *map(str, options)]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out.splitlines()

    return talk


def turns(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("sampling", [(), ("--temp", 1, "--seed", 5)], ids=["greedy", "sampled"])
def test_every_turn_says_what_plain_decoding_says(talk: Talk, sampling: tuple[Any, ...]) -> None:
    ours = turns(talk(*QUESTIONS, options=("--json", *sampling)))
    model, tokenizer = mlx_rewind.load()
    params = mlx_rewind.SamplingParams(temperature=1, seed=5) if sampling else None
    messages: list[dict[str, str]] = []
    tokens: list[int] = []
    for question, turn in zip(QUESTIONS, ours, strict=True):
        messages.append({"role": "user", "content": question})
        prompt = prompt_after(tokenizer, messages, tokens)
        plain = list(
            mlx_rewind.stream_generate(model, tokenizer, prompt, max_tokens=16, sampling=params)
        )
        assert turn["text"] == "".join(response.text for response in plain)
        assert turn["prompt_tokens"] == len(prompt)
        assert turn["cached_tokens"] == max(0, len(tokens) - 1)
        assert turn["draft_kind"] == "auto"
        tokens = [*prompt, *(response.token for response in plain)]
        messages.append({"role": "assistant", "content": turn["text"]})


def test_commands(talk: Talk, tmp_path: Path) -> None:
    folder = tmp_path / "talk"
    lines = talk(
        *QUESTIONS[:2], "/again", f"/save {folder}", "/undo", "/undo", "/undo", "/what", "/stats",
        "/help", f"/load {tmp_path}", "/quit", "never asked",
    )  # fmt: skip
    text = "\n".join(lines)
    assert text.count(" prompt tokens read, ") == 3
    assert "1 prompt tokens read, " in text  # the same question again
    assert "error: there is nothing to undo" in text
    assert "error: unknown command or missing folder: /what" in text
    assert "1 of 2 prompts found one" not in text
    assert "2 of 3 prompts found one" in text
    assert f"error: no conversation at {tmp_path}" in text
    assert "/undo " in text
    assert "never asked" not in text
    later = talk(f"/load {folder}", QUESTIONS[2], options=("--json",))
    assert "4 messages" in later[0]
    (turn,) = turns(later)
    assert turn["cached_tokens"] > 40
    (folder / "chat.json").write_text('{"role": "user"}')
    assert "is not a list of messages" in talk(f"/load {folder}")[0]


def test_a_store_outlives_the_conversation(talk: Talk, tmp_path: Path) -> None:
    options = ("--json", "--store", tmp_path / "store")
    first = turns(talk(QUESTIONS[0], options=options))
    lines = talk(QUESTIONS[0], options=options)
    assert "boundaries from" in lines[0]
    (again,) = turns(lines)
    assert again["text"] == first[0]["text"]
    assert again["cached_tokens"] == again["prompt_tokens"] - 1


def test_accepted_drafts_have_another_shade(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    question = "Count from 1 to 20."
    assert any(
        "\x1b[32m" in line for line in talk(question, options=("--show-accepted", "--draft", "mtp"))
    )
    assert not any("\x1b[32m" in line for line in talk(question))


def test_message_ends() -> None:
    _, tokenizer = mlx_rewind.load(lazy=True)
    messages = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": "Three"},
    ]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    ends = message_ends(tokenizer, messages, prompt)
    texts = [tokenizer.decode(prompt[:end]) for end in ends]
    assert [text.count("<|im_end|>") for text in texts] == [1, 2, 3]
    assert all(text.endswith("<|im_end|>\n") for text in texts)
    changed = [*messages[:1], {"role": "assistant", "content": "Else"}, messages[2]]
    assert message_ends(tokenizer, changed, prompt) == ends[:1]


def test_a_prompt_goes_on_with_the_very_tokens_that_came() -> None:
    _, tokenizer = mlx_rewind.load(lazy=True)
    messages = [{"role": "user", "content": "Hi"}]
    prompt = prompt_after(tokenizer, messages, [])
    letters = [tokenizer.encode(c)[0] for c in "there"]  # no tokenizer cuts a word like that
    assert letters != tokenizer.encode("there")
    messages += [{"role": "assistant", "content": "there"}, {"role": "user", "content": "More"}]
    after = prompt_after(tokenizer, messages, [*prompt, *letters])
    assert after[: len(prompt) + 5] == [*prompt, *letters]
    plain = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert tokenizer.decode(after) == tokenizer.decode(plain)
    messages[1]["content"] = "else"
    assert prompt_after(tokenizer, messages, [*prompt, *letters])[: len(prompt)] == prompt


def test_a_saved_prompt_cache_of_mlx_lm(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The command line of mlx-lm and ours go on from it with the same text."""
    model, tokenizer = mlx_rewind.load()
    messages = [{"role": "user", "content": "List every colour in: red book, blue door."}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    cache = make_prompt_cache(model)
    model(mx.array([prompt]), cache=cache)
    file = tmp_path / "cache.safetensors"
    metadata = {"model": str(SHIPPED), "tokenizer_config": "{}"}
    save_prompt_cache(str(file), cache, metadata)
    options = ["--prompt-cache-file", str(file), "-p", " And in: green tree.", "-m", "24"]
    assert cli.main(["generate", *options, "--json", "--draft", "ngram"]) == 0
    ours = json.loads(capsys.readouterr().out)
    rest = tokenizer.encode(
        " And in: green tree.<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )
    plain = generate_step(mx.array(rest), model, max_tokens=24, prompt_cache=cache)
    expected = [token for token, _ in plain]
    assert ours["tokens"] == expected[: len(ours["tokens"])]
    assert ours["prompt_tokens"] == len(rest)
    for wrong, reason in (
        (["--model", "other"], "was made with"),
        (["--max-kv-size", "99"], "--max-kv-size cannot be used"),
        (["--prompt-cache-file", str(tmp_path / "none")], "no prompt cache at"),
        (["--prompt-cache-file", __file__], "is not a prompt cache of mlx_lm"),
    ):
        assert cli.main(["generate", *options, *wrong]) == 2
        assert reason in capsys.readouterr().err
