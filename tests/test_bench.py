"""The benchmark's arithmetic, on a clock that only the model and the drafter move."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import zoo
from mlx_rewind import DraftModel, Round
from mlx_rewind.bench import blas, memory, plot, report
from mlx_rewind.bench.measure import Stretch, dealt, decode, in_turn, ratio, seconds_per_token
from mlx_rewind.bench.models import SIZES, VOCAB, Scripted, Size, hybrid, random_prompts
from mlx_rewind.bench.record import Verify, cut
from mlx_rewind.bench.run import Result, Settings, Subject, measure
from mlx_rewind.bench.trials import Case, Prompt, Trial
from mlx_rewind.cli import main
from mlx_rewind.cli.bench import _some_of_each_kind

TOKENS = 24

PROMPTS = [Prompt(prompt, kind) for prompt, kind in zip(zoo.PROMPTS, ("a", "b", "b"), strict=True)]


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def slow(model: nn.Module, clock: Clock) -> nn.Module:
    """A step of the model takes a second, every further token of a window a tenth of one."""

    class Slow(type(model)):  # type: ignore[misc]
        def __call__(self, tokens: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            clock.now += 1 + 0.1 * (tokens.shape[1] - 1)
            return super().__call__(tokens, *args, **kwargs)

    model.__class__ = Slow
    return model


class SlowScript(Scripted):
    """Guesses take a twentieth of a second each."""

    def __init__(self, case: Case, clock: Clock, acceptance: float = 0.7) -> None:
        super().__init__(case.prompt.tokens, case.text, acceptance)
        self.clock = clock

    def propose(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
        drafts = super().propose(tokens, num_draft_tokens)
        self.clock.now += 0.05 * len(drafts)
        return drafts


def bench(clock: Clock, settings: Settings, **drafters: Any) -> Result:
    model = slow(zoo.build("qwen3_5", fresh=True), clock)
    return measure(Subject(model, PROMPTS, drafters), settings, clock, lambda stage: None)


def quick(*lengths: int, **options: Any) -> Settings:
    return Settings(lengths, max_tokens=TOKENS, repeats=1, memory_tokens=0, **options)


def test_every_figure_follows_from_the_costs_of_a_step_a_position_and_a_guess() -> None:
    clock = Clock()
    result = bench(clock, quick(2, 4), scripted=lambda case: SlowScript(case, clock))
    assert result.stock == [pytest.approx(1)]
    assert result.plain == [pytest.approx(1)]
    assert result.plain_over_mlx_lm == pytest.approx(1)
    costs = {size: 1 + 0.1 * (size - 1) for size in range(1, 17)}
    assert result.verify == pytest.approx(costs)
    assert result.commit == {1: 0, 2: 0, 3: 0, 4: 0, 5: 0}
    assert [run.num_draft_tokens for run in result.runs] == [2, 4]
    for run in result.runs:
        assert run.m == pytest.approx(0.1)
        assert run.c == pytest.approx(0.05)
        assert run.tau == run.stats.emitted / run.stats.steps
        drafted = run.stats.drafted / run.stats.steps  # fewer than K at the end of a text
        assert run.ideal == pytest.approx(run.tau / (1 + drafted * 0.15))
        assert run.speed == pytest.approx(run.tau / (1 + drafted * 0.15))
        assert run.achieved_over_ideal == pytest.approx(run.speed / run.ideal)
        assert run.achieved_over_ideal == pytest.approx(1)
        assert run.identical
        assert run.kinds.keys() == {"a", "b"}
        assert sum(stats.emitted for stats, _ in run.kinds.values()) == run.stats.emitted


def test_what_commits_cost_is_missing_from_the_ideal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    commit = Round.commit

    def dear(self: Round, kept: Any) -> None:
        fed = self.seal()
        commit(self, kept)
        if fed > 1:
            clock.now += 0.03 if kept in (fed, [fed]) else 0.25

    with monkeypatch.context() as patch:
        patch.setattr(Round, "commit", dear)
        result = bench(clock, quick(4), scripted=lambda case: SlowScript(case, clock))
    assert result.full_commit == pytest.approx(0.03)
    assert result.reject_commit == pytest.approx(0.25)
    (run,) = result.runs
    free = bench(clock, quick(4), scripted=lambda case: SlowScript(case, clock)).runs[0]
    lost = run.stats.emitted * (1 / run.speed - 1 / free.speed)
    rejected = run.stats.steps - run.stats.accepted_per_position[3]
    assert lost == pytest.approx(0.25 * rejected, abs=1.0)
    assert run.achieved_over_ideal < free.achieved_over_ideal - 0.05


def test_a_drafter_that_says_nothing_is_left_out() -> None:
    result = bench(Clock(), quick(2), silent=lambda case: None)
    assert result.runs == []
    assert result.best is None
    assert "decode plainly" in report.verdict(result)["text"]


def test_the_verdict_names_the_fastest_or_none() -> None:
    clock = Clock()
    result = bench(
        clock,
        quick(1, 3),
        good=lambda case: SlowScript(case, clock, 1.0),
        wrong=lambda case: SlowScript(case, clock, 0.0),
    )
    told = report.verdict(result)
    assert (told["draft"], told["num_draft_tokens"]) == ("good", 3)
    result.runs = [run for run in result.runs if run.draft == "wrong"]
    told = report.verdict(result)
    assert (told["draft"], told["num_draft_tokens"]) == ("none", 0)
    assert "does not pay" in told["text"]
    assert all(run.tau == 1 and run.stats.accepted == 0 for run in result.runs)


def test_a_text_that_differs_is_told() -> None:
    drafters = {"scripted": lambda case: Scripted(case.prompt.tokens, case.text, 1)}
    trial = Trial(zoo.build("qwen3_5"), "scripted", drafters["scripted"], 2)
    trial.watch(0, Case(PROMPTS[0], zoo.reference("qwen3_5", PROMPTS[0].tokens, 8).tokens), Clock())
    assert trial.identical
    trial.watch(1, Case(PROMPTS[0], [1, 2, 3]), Clock())
    assert not trial.identical


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_against_mlx_lm_it_runs_or_is_refused(name: str) -> None:
    clock = Clock()
    model = slow(zoo.build(name, fresh=True), clock)
    draft = DraftModel(model)
    drafters = {"model": lambda case: draft, "other": lambda case: Scripted([], [], 1)}
    subject = Subject(model, PROMPTS[1:2], drafters)
    result = measure(subject, quick(2, against_stock=True), clock, lambda stage: None)
    ours = [run for run in result.runs if run.draft == "model"]
    assert ours[0].identical
    assert ours[0].tau > 2.5
    theirs, other = result.against
    assert other.refusal == "mlx_lm knows no drafter of this kind"
    if name == "llama":
        assert theirs.identical
    else:
        assert "trimmable" in str(theirs.refusal)


def test_the_first_round_is_not_timed() -> None:
    clock = Clock()

    def steps() -> Iterator[tuple[Any, ...]]:
        for drafted, seconds in ((True, 7), (False, 5), (True, 1), (False, 2), (False, 3)):
            clock.now += seconds
            yield 0, None, drafted

    assert decode(steps(), 9, clock) == Stretch(3, 6)
    assert decode(steps(), 4, clock) == Stretch(2, 3)
    assert decode(((0, None) for _ in range(4)), 4, clock) == Stretch(3, 0)
    assert decode(((0, None, True) for _ in range(4)), 4, clock) == Stretch(0, 0)


def test_what_is_compared_is_measured_close_by() -> None:
    windows, texts = {n: n for n in range(6)}, {"a": 0, "b": 0}
    assert list(dealt(windows, texts)) == [0, 1, "a", 2, 3, 4, "b", 5]
    assert dealt(windows, texts) == {**windows, **texts}


def test_medians_are_of_ratios_within_a_turn() -> None:
    calls: list[str] = []
    tasks = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    assert in_turn(tasks, 2) == {"a": [3, 5], "b": [4, 6]}
    assert calls == ["a", "b"] * 3
    turns = [[Stretch(2, 4.0), Stretch(2, 40.0)], [Stretch(2, 2.0), Stretch(2, 20.0)]]
    assert seconds_per_token(turns) == [1.5, 15]
    assert ratio([1.0, 20.0, 3.0], [1.0, 10.0, 1.0]) == 2


def test_emitted_tokens_are_cut_into_rounds() -> None:
    drafted = [True, True, False, False, True, False, True, True]
    guesses = {0: 2, 4: 3, 6: 2}
    assert list(cut(drafted, guesses)) == [
        Verify(2, 2, 3),
        Verify(0, 0, 1),
        Verify(3, 1, 2),
        Verify(2, 2, 2),
    ]


# --- synthetic ---------------------------------------------------------------------------------


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_a_scripted_drafter_is_right_with_its_probability(acceptance: float) -> None:
    text = [i % VOCAB for i in range(4000)]
    drafter = Scripted([5, 6], text, acceptance)
    right = []
    for at in range(0, 4000, 4):
        drafts = drafter.propose([5, 6, *text[:at]], 4)
        right += [draft == token for draft, token in zip(drafts, text[at:], strict=False)]
        assert drafts == drafter.propose([5, 6, *text[:at]], 4)
        assert all(0 <= draft < VOCAB for draft in drafts)
    assert len(right) == 4000
    assert sum(right) / 4000 == pytest.approx(acceptance, abs=0.03)


def test_synthetic_models_have_the_dtype_asked_for() -> None:
    model = hybrid(Size(64, 4), mx.bfloat16)
    assert model(mx.array(random_prompts(1, 5))).shape == (1, 5, VOCAB)
    assert model.layers[0].mlp.up_proj.weight.dtype == mx.bfloat16
    assert [layer.is_linear for layer in model.layers] == [True, True, True, False]


# --- memory ------------------------------------------------------------------------------------


def test_memory_that_grows_is_told() -> None:
    plain, records = (100_000, 200_000), 50_000
    assert memory.Memory((1, 2), plain, (150_000, 250_000), records).flat
    assert not memory.Memory((1, 2), plain, (110_000, 260_000), records).flat


# --- the BLAS ----------------------------------------------------------------------------------


def test_openblas_is_found_and_comes_first(tmp_path: Path) -> None:
    assert blas.find_openblas([str(tmp_path)]) is None
    library = tmp_path / "x86_64-linux-gnu" / "libopenblas.so.0"
    library.parent.mkdir()
    library.touch()
    assert blas.find_openblas(["/nowhere", str(tmp_path)]) == str(library)
    environment = blas.preloaded({"HOME": "h", "LD_PRELOAD": "other.so"}, str(library))
    assert environment["LD_PRELOAD"] == f"{library} other.so"
    assert environment["OPENBLAS_NUM_THREADS"] == "1"
    assert environment["MALLOC_MMAP_THRESHOLD_"] == "1073741824"
    assert environment["HOME"] == "h"
    assert blas.preloaded({"OPENBLAS_NUM_THREADS": "2"}, None)["OPENBLAS_NUM_THREADS"] == "2"
    assert "LD_PRELOAD" not in blas.preloaded({}, None)


@pytest.mark.skipif(sys.platform != "linux", reason="no restart here")
def test_the_command_runs_under_openblas_by_itself() -> None:
    if blas.find_openblas() is None:
        pytest.skip("OpenBLAS is missing (Debian: apt-get install libopenblas0-pthread)")
    options = ["--max-tokens", "8", "--repeats", "1", "--memory-tokens", "0", "--json"]
    command = ["bench", "--synthetic", "5M", "--num-draft-tokens", "2", *options]
    run = subprocess.run(
        [sys.executable, "-m", "mlx_rewind.cli", *command],
        env={name: x for name, x in os.environ.items() if name != "OPENBLAS_NUM_THREADS"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert (told["blas"], told["blas_threads"]) == ("openblas", 1)
    assert told["exactness"] == "near-tie"


class Restarted(Exception):  # noqa: N818
    pass


def catch_restart(monkeypatch: pytest.MonkeyPatch, platform: str) -> list[Any]:
    caught: list[Any] = []

    def execve(path: str, command: list[str], environment: dict[str, str]) -> None:
        caught.append((command, environment))
        raise Restarted

    monkeypatch.setattr(blas.os, "execve", execve)
    monkeypatch.setattr(blas.sys, "platform", platform)
    return caught


def test_it_restarts_once_with_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    caught = catch_restart(monkeypatch, "linux")
    with pytest.raises(Restarted):
        main(["bench", "--synthetic", "5M", "--json"])
    ((command, environment),) = caught
    given = ["bench", "--synthetic", "5M", "--json"]
    assert command[1:] == ["-m", "mlx_rewind.cli", *given, "--no-preload"]
    assert "MALLOC_TRIM_THRESHOLD_" in environment


def test_it_does_not_restart_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not catch_restart(monkeypatch, "darwin")
    blas.restart(["x"])


def test_a_missing_openblas_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    catch_restart(monkeypatch, "linux")
    monkeypatch.setattr(blas, "find_openblas", lambda: None)
    with pytest.raises(Restarted):
        blas.restart([])
    assert "libopenblas0-pthread" in capsys.readouterr().err


# --- the command -------------------------------------------------------------------------------

TINY = ["--no-preload", "--max-tokens", "8", "--repeats", "1", "--num-draft-tokens", "2"]
KEYS = {
    "achieved_over_ideal",
    "plain_over_mlx_lm",
    "reject_commit_over_plain_step",
    "m",
    "c",
    "tau",
    "blas",
    "verdict",
    "runs",
    "auto",
    "memory",
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "5M", Size(64, 4))


@pytest.mark.usefixtures("tiny")
def test_the_synthetic_mode_prints_one_json_value(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--acceptance", "0.8", "--memory-tokens", "8", "--against", "mlx_lm", "--json"]
    assert main(["bench", "--synthetic", "5M", *TINY, *arguments]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told.keys() >= KEYS
    assert told["blas"] in {"wheel", "openblas", "accelerate", "metal"}
    assert told["draft"] == "scripted"
    assert told["tau"] == told["runs"][0]["tau"]
    assert told["auto"]["identical"]
    assert told["auto"]["num_draft_tokens"] == 2
    assert told["auto"]["speed"] > 0
    assert len(told["verify_over_plain_step"]) == 16
    assert told["memory"]["tokens"] == [2, 8]
    assert told["against"][0]["refusal"]


@pytest.mark.usefixtures("tiny")
def test_the_synthetic_mode_prints_tables_and_a_verdict(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "speed.png"
    arguments = ["--memory-tokens", "8", "--plot", str(picture), "--dtype", "bfloat16"]
    assert main(["bench", "--synthetic", "5M", *TINY, *arguments]) == 0
    output = capsys.readouterr().out
    names = ("Drafters", "auto", "rejecting commit", "Bytes held", "scripted")
    for told in ("blas", "bfloat16", *names):
        assert told in output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_shipped_model_is_measured_with_every_drafter(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "import os, sys, os, sys, os,"}\n', "utf-8")
    arguments = ["--prompts-file", str(file), "--memory-tokens", "0", "--json"]
    assert main(["bench", *TINY, *arguments]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["prompts"] == 1
    assert {run["draft"] for run in told["runs"]} == {"ngram", "model", "mtp"}
    assert all(run["identical"] for run in told["runs"])
    assert told["memory"] is None


@pytest.mark.usefixtures("tiny")
def test_without_drafters_nothing_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--draft", "none", "--memory-tokens", "0", "--json"]
    assert main(["bench", "--synthetic", "5M", *TINY, *arguments]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["auto"] is None
    assert told["runs"] == []


def test_prompts_of_every_kind_are_taken() -> None:
    entries = [{"kind": kind, "prompt": str(i)} for i in range(3) for kind in ("code", "docs")]
    assert [entry["prompt"] for entry in _some_of_each_kind(entries, 2)] == ["0", "1", "0", "1"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--acceptance", "0.5"], "--acceptance needs --synthetic"),
        (["--dtype", "float16"], "--dtype needs --synthetic"),
        (["--synthetic", "5M", "--model", "x"], "--model cannot be used with --synthetic"),
        (["--synthetic", "5M", "--draft", "mtp"], "--draft cannot be used with --synthetic"),
        (["--draft", "ngram", "--draft-model", "x"], "cannot be used with --draft ngram"),
        (["--model", "x", "--draft", "model"], "needs --draft-model"),
        (["--plot", "/nowhere/x.png"], "there is no folder /nowhere"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_what_does_not_go_together_is_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--no-preload", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_a_plot_that_could_not_be_drawn_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> ModuleType:
        raise ModuleNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(plot.importlib, "import_module", missing)
        assert main(["bench", "--no-preload", "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install 'mlx-rewind[plot]'" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    assert main(["bench", "--no-preload", "--plot", str(tmp_path / "x.abc")]) == 2
    assert "must end in one of" in capsys.readouterr().err
