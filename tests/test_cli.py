"""The command line: every option does something, and what is wrong is said in one line."""

import io
import json
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import load as load_tokenizer

import zoo
from mlx_rewind import cli
from mlx_rewind.load import SHIPPED

KEYS = {
    *("text", "tokens", "finish_reason", "prompt_tokens", "generation_tokens"),
    *("prompt_tps", "generation_tps", "draft_kind", "draft_rounds", "draft_n"),
    *("draft_n_accepted", "exactness"),
}
QUESTION = ("-p", "List every colour in: red book, blue door, red hat.")


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert (self.code, self.err) == (0, "")
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process."""

    def run(*argv: object) -> Result:
        capsys.readouterr()
        try:
            code = cli.main([str(argument) for argument in argv])
        except SystemExit as stop:  # what argparse does
            code = stop.code if isinstance(stop.code, int) else 1
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture
def generate(run: Run, llama: Path) -> Callable[..., Any]:
    """Generates 12 tokens from the tiny llama; returns the JSON."""
    start = ("generate", "--json", "--model", llama, "-p", "one two three", "-m", 12)
    return lambda *argv: run(*start, *argv).json


@pytest.fixture(autouse=True)
def _random_state() -> Iterator[None]:
    """A sampler that raises while it is compiled leaves mlx's random state unusable."""
    yield
    mx.random.seed(0)


def save(folder: Path, name: str = "llama", **config: Any) -> Path:
    """A random model with the shipped tokenizer, which never ends a text."""
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(SHIPPED / file, folder)
    size = {"vocab_size": 2048, "head_dim": 64}
    weights = dict(tree_flatten(zoo.build(name, **size).parameters()))
    head = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
    weights[head] *= mx.arange(2048)[:, None] > 2  # ids 0 and 2 end a text
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    settings = {**zoo.CONFIGS[name], **size, **config}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that leaves its caches to mlx-lm, so that `--max-kv-size` decides."""
    return save(tmp_path_factory.mktemp("models") / "plain", "llama4_text")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose tokenizer has two words in each other's place."""
    folder = save(tmp_path_factory.mktemp("models") / "stranger")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    names = {i: word for word, i in vocabulary.items()}
    vocabulary[names[400]], vocabulary[names[401]] = 401, 400
    path.write_text(json.dumps(content))
    return folder


@pytest.fixture
def prediction(tmp_path: Path) -> Path:
    path = tmp_path / "expected.txt"
    path.write_text("red, blue, red")
    return path


# --- drafters --------------------------------------------------------------------------------


def steps_of(result: Any) -> int:
    """Forwards of the target: each gives one token of its own and the accepted drafts."""
    return int(result["generation_tokens"] - result["draft_n_accepted"])


def assert_counts_add_up(result: Any, k: int) -> None:
    assert result.keys() >= KEYS
    assert result["generation_tokens"] == len(result["tokens"])
    assert 0 <= result["draft_n_accepted"] <= result["draft_n"] <= k * result["draft_rounds"]
    assert result["draft_rounds"] <= steps_of(result)
    assert result["mean_acceptance_length"] * steps_of(result) == pytest.approx(
        result["generation_tokens"]
    )
    assert len(result["acceptance_per_position"]) <= k
    assert result["finish_reason"] in ("stop", "length")
    assert result["exactness"] in ("bitwise", "token", "near-tie")
    assert min(result["prompt_tps"], result["generation_tps"]) > 0


@pytest.mark.parametrize("options", [(), ("--kv-bits", 8, "--quantized-kv-start", 30)])
def test_every_drafter_gives_the_same_text(
    run: Run, prediction: Path, options: tuple[object, ...]
) -> None:
    drafts = {
        "none": (),
        "ngram": (),
        "model": (),
        "mtp": (),
        "prediction": ("--prediction-file", prediction),
    }
    results = {
        kind: run("generate", *QUESTION, "-m", 16, "--json", "--draft", kind, *more, *options).json
        for kind, more in drafts.items()
    }
    for kind, result in results.items():
        assert_counts_add_up(result, 4)
        assert result["draft_kind"] == kind
        for key in ("text", "tokens", "finish_reason", "prompt_tokens", "exactness"):
            assert result[key] == results["none"][key]
    assert results["none"]["draft_n"] == results["none"]["draft_rounds"] == 0


@pytest.mark.parametrize("more", [(), ("--draft", "auto")])
def test_the_default_chooses_by_itself(run: Run, more: tuple[str, ...]) -> None:
    line = ("generate", "--ignore-chat-template", "-p", "import os", "-m", 40, "--json")
    chosen, plain = run(*line, *more).json, run(*line, "--draft", "none").json
    assert (chosen["draft_kind"], plain["draft_kind"]) == ("auto", "none")
    assert chosen["tokens"] == plain["tokens"]
    assert chosen["draft_reason"]
    assert "draft_reason" in plain
    assert not plain["draft_reason"]


def test_auto_goes_with_what_is_named(run: Run, llama: Path, prediction: Path) -> None:
    line = ("generate", "--model", llama, "-p", "one two three", "-m", 12, "--json")
    plain = run(*line, "--draft", "none").json
    for more in (("--draft-model", llama), ("--prediction-file", prediction)):
        chosen = run(*line, "--draft", "auto", *more).json
        assert chosen["draft_kind"] == "auto"
        assert chosen["tokens"] == plain["tokens"]


def test_auto_says_which_head_it_cannot_use(run: Run, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SHIPPED, tmp_path / "unrecorded"))
    config = json.loads((folder / "config.json").read_text())
    del config["mlx_rewind_mtp"]
    (folder / "config.json").write_text(json.dumps(config))
    result = run("generate", "--model", folder, *QUESTION, "-m", 4)
    assert result.code == 0
    assert "note: the MTP head is not used" in result.err


def test_a_drafters_own_option_chooses_it(
    generate: Callable[..., Any], llama: Path, prediction: Path
) -> None:
    assert generate("--draft-model", llama)["draft_kind"] == "model"
    assert generate("--prediction-file", prediction)["draft_kind"] == "prediction"


@pytest.mark.parametrize(("k", "rounds"), [(0, 0), (1, 6), (2, 4), (3, 3), (5, 2)])
def test_num_draft_tokens_is_the_length_of_a_round(
    generate: Callable[..., Any], llama: Path, k: int, rounds: int
) -> None:
    """A model drafts for itself: all is accepted, 12 tokens come in blocks of k + 1."""
    result = generate("--draft-model", llama, "--num-draft-tokens", k)
    assert_counts_add_up(result, k)
    assert result["draft_rounds"] == rounds
    assert result["draft_n"] == result["draft_n_accepted"] == k * rounds
    assert result["acceptance_per_position"] == [1.0] * k


def test_another_draft_model_is_another_drafter(
    generate: Callable[..., Any], llama: Path, tmp_path: Path
) -> None:
    shutil.copytree(llama, tmp_path / "other")
    weights = mx.load(str(llama / "model.safetensors"))
    weights["lm_head.weight"] = -weights["lm_head.weight"]
    mx.save_safetensors(str(tmp_path / "other" / "model.safetensors"), weights)
    right, wrong = (generate("--draft-model", path) for path in (llama, tmp_path / "other"))
    assert right["tokens"] == wrong["tokens"]
    assert right["draft_n_accepted"] > wrong["draft_n_accepted"] == 0


def test_another_prediction_file_is_another_drafter(
    generate: Callable[..., Any], prediction: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").write_text("")
    some, none = (
        generate("--prediction-file", path) for path in (prediction, tmp_path / "empty.txt")
    )
    assert some["tokens"] == none["tokens"]
    assert some["draft_n"] > none["draft_n"] == 0


# --- every option ----------------------------------------------------------------------------

SAMPLING = ("--temp", 1.5, "--seed", 1)
LONG = ("--max-tokens", 40)
XTC = ("--xtc-threshold", 0.001)
QUANTISED = ("--kv-bits", 4, "--quantized-kv-start", 0)

# Two command lines, and the field of the JSON in which they differ.
DIFFERENCES: dict[str, tuple[tuple[object, ...], tuple[object, ...], str]] = {
    "--prompt": ((), ("--prompt", "one two three four five six"), "prompt_tokens"),
    "--system-prompt": ((), ("--system-prompt", "Be brief."), "prompt_tokens"),
    "--ignore-chat-template": ((), ("--ignore-chat-template",), "prompt_tokens"),
    "--max-tokens": ((), ("--max-tokens", 5), "generation_tokens"),
    "--temp": (("--seed", 1), SAMPLING, "tokens"),
    "--seed": (SAMPLING, (*SAMPLING, "--seed", 2), "tokens"),
    "--top-p": (SAMPLING, (*SAMPLING, "--top-p", 0.3), "tokens"),
    "--top-k": (SAMPLING, (*SAMPLING, "--top-k", 2), "tokens"),
    "--min-p": (SAMPLING, (*SAMPLING, "--min-p", 0.9), "tokens"),
    "--xtc-probability": (SAMPLING, (*SAMPLING, "--xtc-probability", 1, *XTC), "tokens"),
    "--xtc-threshold": (
        (*SAMPLING, "--xtc-probability", 1, "--xtc-threshold", 0.5),
        (*SAMPLING, "--xtc-probability", 1, *XTC),
        "tokens",
    ),
    "--repetition-penalty": (LONG, (*LONG, "--repetition-penalty", 5), "tokens"),
    "--repetition-context-size": (
        (*LONG, "--repetition-penalty", 5, "--repetition-context-size", 1),
        (*LONG, "--repetition-penalty", 5),
        "tokens",
    ),
    "--presence-penalty": (LONG, (*LONG, "--presence-penalty", 9), "tokens"),
    "--presence-context-size": (
        (*LONG, "--presence-penalty", 9, "--presence-context-size", 1),
        (*LONG, "--presence-penalty", 9),
        "tokens",
    ),
    "--frequency-penalty": (LONG, (*LONG, "--frequency-penalty", 9), "tokens"),
    "--frequency-context-size": (
        (*LONG, "--frequency-penalty", 9, "--frequency-context-size", 1),
        (*LONG, "--frequency-penalty", 9),
        "tokens",
    ),
    "--logit-bias": ((), ("--logit-bias", '{"3": 100}'), "tokens"),
    "--min-tokens": (
        ("--extra-eos-token", 3, "--logit-bias", '{"3": 100}'),
        ("--extra-eos-token", 3, "--logit-bias", '{"3": 100}', "--min-tokens", 4),
        "generation_tokens",
    ),
    "--logprobs": (("--logprobs", 0), ("--logprobs", 2), "logprobs"),
    "--raw-logprobs": (
        ("--logprobs", 0, "--logit-bias", '{"3": 100}'),
        ("--logprobs", 0, "--logit-bias", '{"3": 100}', "--raw-logprobs"),
        "logprobs",
    ),
    "--acceptance": (
        (*SAMPLING, "--draft", "ngram"),
        (*SAMPLING, "--draft", "ngram", "--acceptance", "block"),
        "exactness",
    ),
    "--regex": ((), ("--regex", "[0-9]{4}"), "text"),
    "--kv-bits": ((*QUANTISED, "--kv-bits", 2), (*QUANTISED, "--kv-bits", 8), "tokens"),
    "--kv-group-size": (QUANTISED, (*QUANTISED, "--kv-group-size", 32), "tokens"),
    "--quantized-kv-start": (QUANTISED, ("--kv-bits", 4), "tokens"),
    "--draft": ((), ("--draft", "ngram"), "draft_kind"),
}


@pytest.mark.parametrize("option", DIFFERENCES)
def test_an_option_makes_a_difference(generate: Callable[..., Any], option: str) -> None:
    one, other, field = DIFFERENCES[option]
    assert generate(*one)[field] != generate(*other)[field]


def test_grammars_bind_the_text(run: Run, tmp_path: Path) -> None:
    line = ("generate", "--ignore-chat-template", "-p", "import os", "-m", 40, "--json")
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}
    (tmp_path / "schema.json").write_text(json.dumps({**schema, "additionalProperties": False}))
    (tmp_path / "digits.lark").write_text("start: /[0-9]{3}/")
    for drafting in ((), ("--draft", "mtp"), ("--draft", "ngram", "--temp", 1, "--seed", 2)):
        for option in (tmp_path / "schema.json", (tmp_path / "schema.json").read_text()):
            result = run(*line, *drafting, "--json-schema", option).json
            assert json.loads(result["text"])["a"] in ("x", "yy")
            assert result["finish_reason"] == "stop"
        text = run(*line, *drafting, "--lark", tmp_path / "digits.lark").json["text"]
        assert re.fullmatch("[0-9]{3}", text)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    batch = ("generate", "--prompts-file", tmp_path / "prompts.jsonl", "--draft", "mtp")
    results = lines_of(run(*batch, "--regex", "(yes|no)!", "--logprobs", 1))
    assert all(re.fullmatch("(yes|no)!", result["text"]) for result in results)
    assert [len(result["logprobs"]) for result in results] == [len(r["tokens"]) for r in results]


def test_what_is_wrong_with_sampling_is_told(run: Run, tmp_path: Path) -> None:
    wrong = {
        ("--regex", "[0-9"): "not a usable regex grammar",
        ("--lark", tmp_path / "none"): "no file at",
        ("--json-schema", "{"): "is not JSON",
        ("--regex", "a", "--json-schema", "{}"): "not allowed with",
        ("--logit-bias", "[]"): "expected a JSON object",
        ("--logit-bias", '{"90000": 1}'): "logit_bias",
        ("--logprobs", 2): "--logprobs needs --json",
        ("--acceptance", "best"): "invalid choice",
    }
    for options, message in wrong.items():
        result = run("generate", "-p", "x", "-m", 2, *options)
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert message in result.err


def test_max_kv_size_is_the_longest_window(generate: Callable[..., Any], plain: Path) -> None:
    whole, window = generate("--model", plain), generate("--model", plain, "--max-kv-size", 8)
    assert whole["tokens"] != window["tokens"]
    assert whole["exactness"] != "token"
    assert window["exactness"] != "bitwise"  # of rings


@pytest.mark.parametrize("narrow", [("--top-k", 1), ("--top-p", 1e-6), ("--min-p", 1.0)])
def test_sampling_from_one_token_is_greedy(
    generate: Callable[..., Any], narrow: tuple[object, ...]
) -> None:
    assert generate(*SAMPLING, *narrow)["tokens"] == generate()["tokens"]


@pytest.mark.parametrize("draft", ["none", "ngram", "model"])
def test_a_seed_gives_one_text_with_and_without_drafter(
    generate: Callable[..., Any], llama: Path, draft: str
) -> None:
    more = ("--draft-model", llama) if draft == "model" else ()
    sampled = generate("--temp", 0.7, "--seed", 7, "--draft", draft, *more)
    assert sampled["tokens"] == generate("--temp", 0.7, "--seed", 7)["tokens"]
    assert sampled["tokens"] != generate()["tokens"]


def test_stop_ends_the_text_before_a_string(generate: Callable[..., Any]) -> None:
    text = generate()["text"]
    late, early = text[12:15], text[5:8]
    assert generate("--stop", late)["text"] == text[: text.index(late)]
    stopped = generate("--stop", late, "--stop", early)
    assert stopped["text"] == text[: text.index(early)]
    assert stopped["finish_reason"] == "stop"
    assert stopped["generation_tokens"] < 12


def test_extra_eos_token_ends_the_text_after_a_token(
    generate: Callable[..., Any], llama: Path
) -> None:
    tokens = generate()["tokens"]
    names = load_tokenizer(llama).convert_ids_to_tokens(tokens)
    for token in (tokens[4], names[4]):
        stopped = generate("--extra-eos-token", token)
        assert stopped["tokens"] == tokens[: tokens.index(tokens[4]) + 1]
        assert stopped["finish_reason"] == "stop"
    earlier = generate("--extra-eos-token", names[4], names[2])
    assert earlier["tokens"] == tokens[: tokens.index(tokens[2]) + 1]


def test_extra_eos_token_goes_with_a_draft_model(run: Run) -> None:
    line = ("generate", *QUESTION, "-m", 8, "--json", "--extra-eos-token", "qu")
    assert run(*line, "--draft", "model").json["tokens"] == run(*line).json["tokens"]


def test_a_prompt_is_read_from_standard_input(
    generate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one two three"))
    piped = generate("--prompt", "-")
    for key in ("tokens", "prompt_tokens"):
        assert piped[key] == generate()[key]


def test_prefill_step_size_is_the_length_of_a_chunk(
    generate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    stock = cli.generate.stream_generate

    def spy(*args: Any, **options: Any) -> Any:
        options["prompt_progress_callback"] = lambda processed, total: seen.append(processed)
        return stock(*args, **options)

    monkeypatch.setattr(cli.generate, "stream_generate", spy)
    size = generate("--prefill-step-size", 4)["prompt_tokens"]
    assert seen == [*range(0, size - 1, 4), size - 1, size]
    seen.clear()
    generate()
    assert seen == [0, size - 1, size]


def test_an_adapter_changes_the_model(
    generate: Callable[..., Any], llama: Path, tmp_path: Path
) -> None:
    head = mx.load(str(llama / "model.safetensors"))["lm_head.weight"]
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), {"lm_head.weight": -head})
    (tmp_path / "adapter_config.json").write_text('{"fine_tune_type": "full"}')
    assert generate("--adapter-path", tmp_path)["tokens"] != generate()["tokens"]


@pytest.mark.parametrize("command", ["generate", "inspect"])
def test_code_of_a_model_is_run_only_when_trusted(run: Run, tmp_path: Path, command: str) -> None:
    folder = save(tmp_path / "custom", model_file="custom.py")
    (folder / "custom.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n")
    line = [command, "--model", folder, "--json", *(("-m", 2) if command == "generate" else ())]
    refused = run(*line)
    assert refused.code == 2
    assert "trust" in refused.err
    assert run(*line, "--trust-remote-code").json


def test_text_and_closing_line(run: Run, generate: Callable[..., Any], llama: Path) -> None:
    line = ("generate", "--model", llama, "-p", "one two three", "-m", 12)
    line = (*line, "--draft-model", llama, "--num-draft-tokens", 3)
    quiet, verbose = run(*line, "--verbose", "false"), run(*line)
    assert quiet == (0, generate()["text"] + "\n", "")
    assert (verbose.code, verbose.err) == (0, "")
    assert verbose.out.startswith(quiet.out)
    closing = verbose.out[len(quiet.out) :]
    for part in ("prompt tokens", "12 tokens", "model: 3 rounds", "9/9", "4.00", "length"):
        assert part in closing
    assert "no drafter" in run(*line[:-4], "--draft", "none").out


def test_a_terminal_shows_progress_and_the_same_text(
    run: Run, generate: Callable[..., Any], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = generate()["text"]
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich, a terminal
    line = ("generate", "--model", llama, "-p", "one two three", "-m", 12, "--verbose", "false")
    result = run(*line)
    assert (result.code, result.out) == (0, text + "\n")
    assert "prompt" in result.err


# --- what is wrong ---------------------------------------------------------------------------

# A command line after `generate -m 4`, and a part of the message. {names} are folders and files.
WRONG: dict[str, tuple[str, str]] = {
    "no such folder": ("--model /no/such/model", "/no/such/model"),
    "empty folder": ("--model {empty}", "{empty}"),
    "broken config": ("--model {broken}", "{broken}"),
    "no such draft": ("--draft-model ./no-such-model", "./no-such-model"),
    "draft of another tokenizer": ("--draft-model {stranger}", "id 400"),
    "draft of another target": ("--model {stranger} --draft-model {llama}", "id 400"),
    "no default draft": ("--model {llama} --draft model", "--draft-model"),
    "draft model and ngram": ("--draft ngram --draft-model {llama}", "--draft-model"),
    "draft model and none": ("--draft none --draft-model {llama}", "--draft none"),
    "draft model and prediction": ("--draft prediction --draft-model {llama}", "--draft"),
    "two drafters": ("--draft-model {llama} --prediction-file {text}", "exclude"),
    "prediction and ngram": ("--draft ngram --prediction-file {text}", "--prediction-file"),
    "no prediction": ("--draft prediction", "--prediction-file"),
    "no such prediction": ("--prediction-file /no/such/file", "/no/such/file"),
    "a folder as prediction": ("--prediction-file {empty}", "{empty}"),
    "unknown drafter": ("--draft best", "best"),
    "negative draft": ("--draft ngram --num-draft-tokens -1", "num_draft_tokens"),
    "no tokens": ("--max-tokens 0", "max_tokens"),
    "not a number": ("--max-tokens many", "many"),
    "empty stop": ("--stop=", "stop"),
    "empty chunk": ("--prefill-step-size 0", "prefill_step_size"),
    "bad min-p": ("--temp 1 --min-p 2", "min_p"),
    "bad top-k": ("--temp 1 --top-k 5000", "top_k"),
    "bad temperature": ("--temp -1", "temp"),
    "bad seed": ("--seed -1", "seed"),
    "bad bits": ("--kv-bits 7 --quantized-kv-start 0", "7"),
    "bad bits, later": ("--kv-bits 7 --quantized-kv-start 22", "7"),
    "bad group": ("--kv-bits 8 --kv-group-size 48 --quantized-kv-start 0", "48"),
    "bits for a window": ("--model {plain} --max-kv-size 8 --kv-bits 8", "RotatingKVCache"),
    "no adapter": ("--adapter-path /no/such/adapter", "/no/such/adapter"),
    "no such token": ("--extra-eos-token nosuchtoken", "nosuchtoken"),
    "empty prompt": ("--ignore-chat-template --prompt=", "empty"),
    "unknown option": ("--speculate", "--speculate"),
    "neither true nor false": ("--verbose maybe", "maybe"),
}


@pytest.fixture
def names(
    llama: Path, plain: Path, stranger: Path, prediction: Path, tmp_path: Path
) -> dict[str, Path]:
    empty, broken = tmp_path / "empty", tmp_path / "broken"
    empty.mkdir()
    broken.mkdir()
    (broken / "config.json").write_text("{nope")
    folders = {"llama": llama, "plain": plain, "stranger": stranger}
    return {**folders, "empty": empty, "broken": broken, "text": prediction}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_in_one_line(run: Run, names: dict[str, Path], case: str) -> None:
    options, message = WRONG[case]
    result = run("generate", "-m", 4, *(part.format(**names) for part in options.split()))
    assert result.code == 2
    assert result.out == ""
    assert result.err.count("\n") == 1
    assert result.err.endswith("\n")
    assert message.format(**names) in result.err


@pytest.mark.parametrize("line", [(), ("speculate",), ("inspect", "--model", "/no/such/model")])
def test_wrong_commands(run: Run, line: tuple[str, ...]) -> None:
    result = run(*line)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)


# --- inspect ---------------------------------------------------------------------------------


def test_inspect_lists_every_cache(run: Run, llama: Path) -> None:
    records = run("inspect", "--json").json
    assert [record["layer"] for record in records] == list(range(9))
    assert {(r["cache"], r["mechanism"], r["slots"], r["growth"]) for r in records} == {
        ("ArraysCache", "retrace", 2, "fixed"),
        ("KVCache", "trim", 2, "per token"),
    }
    assert all(record["bytes"] > 0 for record in records)
    (head,) = [record for record in records if "mtp" in record]
    assert head["layer"] == 8
    assert head["mtp"]["layout"] == "embedded"
    assert head["mtp"]["heads"] == head["mtp"]["announced"] == 1
    assert [r["cache"] for r in run("inspect", "--json", "--model", llama).json] == ["KVCache"] * 2


def test_inspect_prints_a_table(run: Run, llama: Path) -> None:
    result = run("inspect")
    assert (result.code, result.err) == (0, "")
    for word in ("shipped", "layer", "cache", "mechanism", "ArraysCache", "retrace", "per token"):
        assert word in result.out
    for word in ("MTP head", "embedded: model.safetensors", "normed state", "converted", "none"):
        assert word in result.out
    dense = run("inspect", "--model", llama)
    assert "KVCache" in dense.out
    assert "no MTP head is known for model type llama" in dense.out


# --- MTP heads -------------------------------------------------------------------------------


@pytest.fixture
def stripped(tmp_path: Path) -> Path:
    """The shipped model as mlx-lm's conversion leaves it: announced in the config, no head."""
    folder = Path(shutil.copytree(SHIPPED, tmp_path / "stripped"))
    weights = mx.load(str(folder / "model.safetensors"))
    trunk = {name: x for name, x in weights.items() if not name.startswith("mtp.")}
    mx.save_safetensors(str(folder / "model.safetensors"), trunk, metadata={"format": "mlx"})
    return folder


def test_the_head_drafts(run: Run, tmp_path: Path) -> None:
    line = ("generate", *QUESTION, "-m", 12, "--json")
    plain, drafted = run(*line).json, run(*line, "--draft", "mtp", "--num-draft-tokens", 2).json
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["draft_kind"] == "mtp"
    assert 0 < drafted["draft_n_accepted"] <= drafted["draft_n"]
    assert len(drafted["acceptance_per_position"]) == 2
    assert (
        run("convert", "--model", SHIPPED, "--mlx-path", tmp_path / "head", "--mtp-only").code == 0
    )
    alone = run(*line, "--draft-model", tmp_path / "head", "--num-draft-tokens", 2).json
    assert (alone["draft_kind"], alone["draft_n"]) == ("mtp", drafted["draft_n"])


def test_a_head_that_is_announced_and_missing(run: Run, stripped: Path, caplog: Any) -> None:
    line = ("generate", "--model", stripped, *QUESTION, "-m", 4)
    assert run(*line, "--json").json["draft_kind"] == "auto"
    (note,) = [record.message for record in caplog.records]
    assert "announces 1, but the tensors are missing" in note
    refused = run(*line, "--draft", "mtp")
    assert (refused.code, refused.out) == (2, "")
    assert "the tensors are missing" in refused.err
    assert "the tensors are missing" in run("inspect", "--model", stripped).out


def test_norms_of_a_head_are_decided_by_the_option(run: Run, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SHIPPED, tmp_path / "unrecorded"))
    config = json.loads((folder / "config.json").read_text())
    del config["mlx_rewind_mtp"]
    (folder / "config.json").write_text(json.dumps(config))
    line = ("generate", "--model", folder, *QUESTION, "-m", 12, "--draft", "mtp", "--json")
    assert "--mtp-norms raw|converted" in run(*line).err
    drafted = {how: run(*line, "--mtp-norms", how).json for how in ("raw", "converted")}
    assert drafted["raw"]["tokens"] == drafted["converted"]["tokens"]
    assert drafted["raw"]["draft_n_accepted"] < drafted["converted"]["draft_n_accepted"]


def test_convert_gives_a_lost_head_back(run: Run, stripped: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = ("convert", "--model", stripped, "--mlx-path", out, "--mtp-from", SHIPPED, "-q")
    report = run(*line, "--mtp-q-bits", 8, "--json").json
    assert report["head"]["layout"] == "side file"
    assert report["head"]["quantization"]
    assert report["agreement"] > 0.9
    assert "exist" in run(*line).err
    told = run("convert", "--model", out, "--mlx-path", tmp_path / "again", "--mtp", "drop").out
    assert "wrote" in told
    assert "MTP" not in told
    result = run("generate", "--model", out, *QUESTION, "-m", 4, "--draft", "mtp", "--json").json
    assert result["draft_kind"] == "mtp"


# --- many prompts ----------------------------------------------------------------------------


def lines_of(result: Result) -> list[Any]:
    assert (result.code, result.err) == (0, "")
    return [json.loads(line) for line in result.out.splitlines()]


@pytest.mark.parametrize("draft", ["none", "ngram", "model", "mtp"])
def test_a_file_of_prompts(run: Run, tmp_path: Path, draft: str) -> None:
    """Every line as if it were alone, in the order of the file, whatever ends first."""
    texts = ["Say one.", "List every colour in: red book, blue door.", "Count from 1 to 5.", "x"]
    entries = [
        {"prompt": text, "id": f"n{i}", "max_tokens": 24 - 5 * i} for i, text in enumerate(texts)
    ]
    entries[3]["num_draft_tokens"] = 1
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(json.dumps(entry) for entry in entries))
    results = lines_of(run("generate", "--prompts-file", file, "--draft", draft, "--max-rows", 3))
    assert [result["index"] for result in results] == [0, 1, 2, 3]
    for entry, result in zip(entries, results, strict=True):
        alone = run("generate", "-p", entry["prompt"], "-m", entry["max_tokens"], "--json").json
        assert result["id"] == entry["id"]
        assert result["draft_kind"] == draft
        for key in ("text", "tokens", "finish_reason", "prompt_tokens", "exactness"):
            assert result[key] == alone[key]
    if draft == "mtp":
        assert results[0]["draft_n"] > results[0]["draft_rounds"]
        assert results[3]["draft_n"] == results[3]["draft_rounds"]


def test_prompts_from_stdin(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt": "x", "max_tokens": 2}\n'))
    (result,) = lines_of(run("generate", "--prompts-file", "-", "-m", 9))
    assert (len(result["tokens"]), result["finish_reason"]) == (2, "length")
    assert "id" not in result


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ('{"prompt": "x"}\n{', "line 2: not JSON"),
        ('["x"]', 'line 1: expected an object with a "prompt"'),
        ('{"prompt": 3}', 'line 1: expected an object with a "prompt"'),
        ('{"prompt": "x", "temperature": 1}', "line 1: temperature = 1"),
        ('{"prompt": "x", "max_tokens": "2"}', "line 1: max_tokens = '2'"),
        ('{"prompt": "x", "max_tokens": true}', "line 1: max_tokens = True"),
        ('{"prompt": "x", "num_draft_tokens": -1}', "num_draft_tokens must be 0 or more"),
    ],
)
def test_a_malformed_file_of_prompts(run: Run, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    result = run("generate", "--prompts-file", file)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err


@pytest.mark.parametrize("more", [("-p", "x"), ("--max-kv-size", 8)])
def test_options_that_do_not_go_with_a_file(run: Run, tmp_path: Path, more: Any) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "x"}')
    assert (
        "cannot be used with --prompts-file" in run("generate", "--prompts-file", file, *more).err
    )
    assert "no prompts file" in run("generate", "--prompts-file", tmp_path / "none").err


# --- the installed command -------------------------------------------------------------------


def test_the_installed_command_runs() -> None:
    script = Path(sysconfig.get_path("scripts")) / "mlx-rewind"
    line = [script, "generate", *QUESTION, "-m", "4", "--draft", "ngram", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout)["draft_kind"] == "ngram"
