"""The audit: exact where nothing is wrong, near-ties where only rounding is, and a fault with its
place where a rollback is broken on purpose."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from rich.console import Console

import mlx_rewind
import test_sabotage
import zoo
from mlx_rewind import DraftMismatchError, UnsupportedModelError, cli
from mlx_rewind.audit import Check, Report, audit, sampled
from mlx_rewind.audit.chances import chi_square_tail, goodness_of_fit, pooled
from mlx_rewind.audit.judge import Judge, Place
from mlx_rewind.audit.rounding import Bounds, Noise, gap
from mlx_rewind.audit.runs import Plain, Planned, Walk, accept_lengths, spread
from mlx_rewind.audit.state import Part, clone, distances, parts
from mlx_rewind.bench.blas import find_openblas
from mlx_rewind.cache import members, retrace, undo
from mlx_rewind.cli.audit import print_report
from mlx_rewind.ties import gaps, ulp

PROMPT = zoo.PROMPTS[1]


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the law has its own number."""
    monkeypatch.setattr(sampled, "DRAWS", 5)


def audited(model: nn.Module, *prompts: list[int], **options: Any) -> Report:
    return audit(model, prompts or [PROMPT], **{"max_tokens": 24, **options})


def of(report: Report, name: str) -> Check:
    return next(check for check in report.checks if check.name == name)


# --- nothing is wrong ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_hybrids_and_chunks_are_equal_to_the_bit(name: str) -> None:
    report = audited(zoo.build(name), *zoo.PROMPTS[:2])
    assert (report.verdict, report.differences, report.is_bitwise) == ("exact", [], True)
    assert report.line.endswith("every token equal, every number equal to the bit")
    assert {check.name for check in report.checks if not check.tokens} == {"tails"}
    assert {check.name for check in report.checks if check.states} == {
        *("windows", "tails", "accept lengths", "reuse")
    }


@pytest.mark.parametrize("name", ["gpt_oss", "recurrent_gemma"])
def test_sliding_windows_are_exact_to_rounding(name: str) -> None:
    report = audited(zoo.build(name), zoo.PROMPTS[2])
    assert (report.verdict, report.differences, report.exactness) == ("exact", [], "token")
    assert not report.is_bitwise
    assert "every token equal, numbers equal to" in report.line
    assert 0 < max(check.logprobs for check in report.checks) < 1e-5
    assert of(report, "tails").result == "rounding"  # windows of other lengths, not other tails


def test_every_accept_length_is_forced() -> None:
    report = audited(zoo.build("llama"), max_tokens=40, num_draft_tokens=3)
    (note,) = of(report, "accept lengths").notes
    counts = [int(word) for word in note.rsplit(":", 1)[1].split()]
    assert len(counts) == 4
    assert min(counts) >= 3
    assert of(report, "tails").states == 2 * 4


@pytest.fixture(scope="module")
def shipped() -> tuple[Any, Any]:
    return mlx_rewind.load()


@pytest.mark.parametrize("kind", ["mtp", "model", "ngram"])
def test_the_shipped_model_with_every_drafter(shipped: tuple[Any, Any], kind: str) -> None:
    model, tokenizer = shipped
    drafter: Any = {
        "mtp": lambda: mlx_rewind.load_mtp(None, model),
        "model": lambda: mlx_rewind.load_draft(None, tokenizer),
        "ngram": mlx_rewind.NGram,
    }[kind]()
    prompt = tokenizer.encode("    for i in range(10):\n        for i in")
    report = audited(model, prompt, drafter=drafter, max_tokens=12)
    assert (report.verdict, report.is_bitwise, report.draft_kind) == ("exact", True, kind)
    (note,) = of(report, "drafter").notes
    rounds, drafts = (int(word) for word in note.split() if word.isdigit())
    assert rounds <= 12 - drafts
    assert drafts > 0


# --- a broken rollback -----------------------------------------------------------------------


def faults(report: Report) -> set[tuple[str | None, str | None]]:
    assert report.verdict == "fault"
    assert report.line.startswith("FAULT")
    return {(d.layer, d.slot) for d in report.differences if d.kind == "fault" and d.layer}


@pytest.mark.parametrize("rolled_back", test_sabotage.STALE)
def test_half_a_rollback_is_a_fault_of_its_slot(
    rolled_back: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = test_sabotage.STALE[rolled_back]
    broken = test_sabotage.without(retrace.RetraceUndo.rewind, stale)
    monkeypatch.setattr(retrace.RetraceUndo, "rewind", broken)
    report = audited(zoo.build("qwen3_5"))
    first = "0" if stale(0, 2) else "1"
    assert faults(report) == {("0", f"ArraysCache slot {first}")}
    assert f"FAULT in layer 0, ArraysCache slot {first}:" in report.line


def test_one_layer_that_is_not_rolled_back_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("qwen3_5")
    labels = [record.layer for record in mlx_rewind.inspect(model) if record.mechanism == "retrace"]
    order, original = itertools.count(), retrace.RetraceUndo.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        vars(self)["nth"] = next(order) % len(labels)

    stock = retrace.RetraceUndo.rewind
    stuck = test_sabotage.without(stock, lambda i, n: i == 1)
    monkeypatch.setattr(retrace.RetraceUndo, "__init__", init)
    monkeypatch.setattr(
        retrace.RetraceUndo,
        "rewind",
        lambda self, kept: (stuck if vars(self)["nth"] == 1 else stock)(self, kept),
    )
    assert faults(audited(model)) == {(str(labels[1]), "ArraysCache slot 1")}


def test_a_step_too_early_is_a_fault_although_tails_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = retrace.RetraceUndo.rewind
    early = lambda self, kept: stock(self, max(0, kept - 1))  # noqa: E731
    monkeypatch.setattr(retrace.RetraceUndo, "rewind", early)
    report = audited(zoo.build("lfm2"))
    assert ("0", "ArraysCache slot 0") in faults(report)
    assert "never fed the rejected tail" in of(report, "tails").differences[0].detail


@pytest.mark.parametrize(
    ("name", "kind", "layer"),
    [("llama", undo.TrimUndo, "0"), ("falcon_h1", undo.TrimUndo, "0[1]")],
)
def test_keys_that_stay_are_a_fault(
    name: str, kind: Any, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "rewind", lambda self, kept: None)
    assert {where for where, _ in faults(audited(zoo.build(name)))} == {layer}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_a_ring_that_is_not_rolled_back_is_no_rounding(
    dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(undo.RingUndo, "rewind", lambda self, kept: None)
    report = audited(zoo.build("gemma3_text", dtype=dtype))
    assert ("0", "RotatingKVCache keys") in faults(report)


def test_a_row_that_is_not_rolled_back_is_a_fault_of_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = members.RowsUndo.rewind_rows

    def stuck(self: Any, kept: Any) -> None:
        stock(self, [*kept[:-1], max(kept)])

    monkeypatch.setattr(members.RowsUndo, "rewind_rows", stuck)
    report = audited(zoo.build("llama"))
    assert {check.name for check in report.checks if check.result == "fault"} == {"neighbours"}
    assert {d.layer for d in report.differences} == {None}
    assert report.line.startswith("FAULT:")


# --- rounding --------------------------------------------------------------------------------


class Halves(nn.Module):
    """A head that adds up windows in two halves, single steps in one go."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def __call__(self, x: mx.array) -> mx.array:
        weight = self.linear.weight
        half = weight.shape[1] // 2
        if x.shape[1] == 1:
            return x @ weight.T
        return x[..., :half] @ weight[:, :half].T + x[..., half:] @ weight[:, half:].T


def test_windows_that_round_otherwise_are_near_ties() -> None:
    model: Any = zoo.build("llama", dtype=mx.bfloat16, fresh=True)
    model.lm_head = Halves(model.lm_head)
    report = audited(model, *zoo.PROMPTS[1:], max_tokens=48)
    assert (report.verdict, report.exactness) == ("near-ties", "bitwise")
    assert "no fault" in report.line
    drawn = [d for d in report.differences if d.check == "seeds"]
    assert all(d.kind == "near-tie" and (d.gap or 0) <= (d.bound or 0) for d in drawn)
    assert any(d.gap for d in drawn)  # keyed draws, whose noise is known
    greedy = [d for d in report.differences if d.check != "seeds"]
    assert greedy
    for difference in greedy:
        assert difference.kind == "near-tie"
        assert difference.gap is not None
        assert difference.bound is not None
        assert difference.gap <= difference.bound <= 4
        plain = Plain.record(model, zoo.PROMPTS[1 + difference.prompt], 48)
        logits = plain.logits[difference.position]
        assert mx.argmax(logits).item() == difference.plain != difference.speculative
        assert mx.sort(logits)[-2:].min() <= logits[difference.speculative]
        assert gap(logits, difference.plain, difference.speculative) == difference.gap


def test_a_fault_among_rounding_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = test_sabotage.without(retrace.RetraceUndo.rewind, lambda i, n: i == 0)
    monkeypatch.setattr(retrace.RetraceUndo, "rewind", broken)
    model: Any = zoo.build("qwen3_5", dtype=mx.bfloat16, fresh=True)
    model.language_model.lm_head = Halves(model.language_model.lm_head)
    assert ("0", "ArraysCache slot 0") in faults(audited(model))


def test_windows_far_from_single_steps_are_a_fault() -> None:
    model: Any = zoo.build("llama", fresh=True)

    class Shifted(Halves):
        def __call__(self, x: mx.array) -> mx.array:
            return self.linear(x) * (1 if x.shape[1] == 1 else 1.01)

    model.lm_head = Shifted(model.lm_head)
    (first, *_) = of(audited(model), "windows").differences
    assert first.kind == "fault"
    assert "away from single steps" in first.detail


@pytest.mark.skipif(sys.platform != "linux", reason="MLX has its own BLAS here")
def test_openblas_gives_near_ties_and_no_fault() -> None:
    library = find_openblas()
    if library is None:
        pytest.skip("OpenBLAS is missing (Debian: apt-get install libopenblas0-pthread)")
    settings = {"LD_PRELOAD": library, "OPENBLAS_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "near-ties under OpenBLAS" in run.stdout


def main() -> None:
    """Every token has a twin whose logit is its own but for a bit or two."""
    mx.set_default_device(mx.cpu)
    sampled.DRAWS = 5
    model: Any = zoo.build("llama", fresh=True)
    weight = model.lm_head.weight
    model.lm_head.weight = mx.concatenate([weight[:48], weight[:49] * (1 + 2e-7)])
    report = audit(model, zoo.PROMPTS[1:], max_tokens=32)
    assert report.exactness == "near-tie"
    assert report.verdict == "near-ties", report
    assert all(abs(d.plain - d.speculative) == 48 for d in report.differences)  # type: ignore[operator]
    print("near-ties under OpenBLAS")


# --- the near-tie rule of single comparisons -------------------------------------------------


def plain_of(*logits: float, dtype: mx.Dtype = mx.bfloat16) -> Plain:
    row = mx.array(logits).astype(dtype)
    logprobs = row - mx.logsumexp(row)
    return Plain([1], [int(mx.argmax(row).item())], [row], [logprobs])


@pytest.mark.parametrize(
    ("logits", "token", "nudge", "kind"),
    [
        ((8.0, 8.0, 1.0), 1, 0.0625, "near-tie"),  # an exact tie
        ((8.0625, 8.0, 1.0), 1, 0.0625, "near-tie"),  # one unit in the last place
        ((8.125, 8.0, 1.0), 1, 0.0625, "near-tie"),  # two
        ((8.1875, 8.0, 1.0), 1, 0.0625, "fault"),  # three
        ((8.0, 8.0, 1.0), 2, 0.0625, "fault"),  # not one of the two
        ((8.0, 8.0, 1.0), 1, 0.0, "fault"),  # the same numbers, another token
        ((8.0, 8.0, 1.0), 1, 4.0, "fault"),  # other numbers
        ((8.0, 7.0, 1.0), 0, 0.0625, None),
        ((8.0, 7.0, 1.0), 0, 4.0, "fault"),  # the token survived, the numbers did not
    ],
)
def test_the_near_tie_rule(
    logits: tuple[float, ...], token: int, nudge: float, kind: str | None
) -> None:
    plain, check = plain_of(*logits), Check("x", "")
    judge = Judge(Bounds(Noise(), floor=64 * 2**-7 / 64, cap=0.25))
    logprobs = plain.logprobs[0] - mx.array([0, nudge, 0], mx.bfloat16)
    found = judge.token(Place(check, 0), plain, 0, token, logprobs)
    assert (found and found.kind) == kind
    assert check.differences == ([found] if found else [])
    if kind == "near-tie":
        assert found is not None
        assert (found.plain, found.speculative, found.bound) == (0, token, 2.0)
        assert found.gap == (logits[0] - logits[token]) / 0.0625


def test_units_in_the_last_place() -> None:
    for value, dtype, unit in (
        (1.0, mx.float32, 2**-23),
        (-1.9, mx.bfloat16, 2**-7),
        (8.0, mx.bfloat16, 2**-4),
        (7.99, mx.float16, 2**-8),
    ):
        assert ulp(mx.array(value), dtype).item() == unit
    assert ulp(mx.array(0.0), mx.float32).item() > 0
    assert gaps(mx.array([[1.0, 8.0, 7.5], [2.0, 2.0, 0.0]], mx.bfloat16)).tolist() == [8, 0]
    assert gap(mx.array([1.0, 1.0 + 2**-22]), 0, 1) == 2


# --- parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_the_state_is_what_the_oracle_reads(name: str) -> None:
    model = zoo.build(name)
    for cut in (3, 30):  # rings and chunks have 8
        _, cache = zoo.windowed(model, [(5 * i + 3) % 97 for i in range(cut)], 2, 4)
        ours, theirs = parts(cache), zoo.state(cache)
        assert len(ours) == len(theirs)
        for mine, (label, array) in zip(ours.values(), theirs, strict=True):
            assert zoo.difference(mine, array, 0) is None, label


def test_distances_tell_shapes_numbers_and_nan() -> None:
    part = [Part("0", f"slot {i}") for i in range(6)]
    ones = mx.ones((2, 2))
    ours = [ones, ones * 1.5, mx.ones((2, 3)), mx.array(3), ones * mx.nan, ones]
    theirs = [ones, ones, ones, mx.array(4), ones, ones.astype(mx.bfloat16)]
    found = distances(dict(zip(part, ours, strict=True)), dict(zip(part, theirs, strict=True)))
    assert [found[p] for p in part] == [0, 0.5, math.inf, math.inf, math.inf, math.inf]
    assert distances({part[0]: ones}, {}) == {part[0]: math.inf}
    same = mx.array([mx.nan, mx.inf, -mx.inf, 1.0])
    assert distances({part[0]: same}, {part[0]: same + 0}) == {part[0]: 0}


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss", "llama4", "falcon_h1"])
def test_a_clone_is_independent(name: str) -> None:
    model = zoo.build(name)
    cache = zoo.feed(model, zoo.PROMPTS[2][:20])
    copy, before = clone(cache), clone(cache)
    mx.eval(model(mx.array([[3, 4, 5]]), cache=copy), model(mx.array([[7]]), cache=copy))
    assert set(distances(parts(cache), parts(before)).values()) == {0}
    assert math.inf in distances(parts(cache), parts(copy)).values()


def test_plain_decoding_is_mlx_lms() -> None:
    model = zoo.build("qwen3_5")
    expected, plain = zoo.reference(model, PROMPT, 12), Plain.record(model, PROMPT, 12)
    assert plain.tokens == expected.tokens
    assert all(map(mx.array_equal, plain.logprobs, expected.logprobs))
    assert [int(mx.argmax(row).item()) for row in plain.logits] == plain.tokens
    walk = Walk(model, plain)
    for position in (1, 5, 11):
        fed = zoo.prefill(model, PROMPT)
        for token in plain.tokens[:position]:
            model(mx.array([[token]]), cache=fed)
        zoo.assert_state_equal(walk.to(position), fed)
    walk.close()


def test_plans() -> None:
    assert accept_lengths(4) == [0, 4, 1, 3, 2]
    assert accept_lengths(1) == [0, 1]
    assert list(spread(3, 9)) == [1, 5, 9]
    assert list(spread(3, 1)) == [1, 1, 1]
    drafter = Planned([5, 6, 7, 8], [1, 3], 2, 9)
    assert drafter.propose([1, 1], 3) == [5, 7, 8]
    assert drafter.propose([1, 1, 5], 3) == [6, 7, 8]
    assert drafter.propose([1, 1, 5, 6, 7], 3) == [8]
    assert Planned([8], [0], 2, 9).propose([1, 1], 3) == [0]


# --- the law of draws ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statistic", "freedom", "tail"),
    [(3.841, 1, 0.05), (5.991, 2, 0.05), (7.815, 3, 0.05), (18.307, 10, 0.05), (23.93, 1, 1e-6)],
)
def test_chi_square(statistic: float, freedom: int, tail: float) -> None:
    assert chi_square_tail(statistic, freedom) == pytest.approx(tail, rel=2e-3)
    assert chi_square_tail(0, freedom) == 1


def test_goodness_of_fit() -> None:
    law = [0.5, 0.3, 0.1, 0.06, 0.04]
    assert pooled([50, 30, 10, 6, 4]) == [[0], [1], [2], [3, 4]]
    assert pooled([1, 2]) == [[1, 0]]
    assert goodness_of_fit([50, 30, 10, 6, 4], law) == (1.0, 4)
    assert goodness_of_fit([10, 10, 20, 30, 30], law)[0] < 1e-12
    assert goodness_of_fit([44, 35, 12, 5, 4], law)[0] > 0.1
    assert goodness_of_fit([100], [1.0]) == (1.0, 1)


@pytest.mark.parametrize("wrong", [False, True])
def test_draws_of_another_law_are_a_fault(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is kept although the target drew another token."""
    monkeypatch.setattr(sampled, "DRAWS", 150)
    model = zoo.build("llama")
    plain, check = Plain.record(model, PROMPT, 2), Check("distribution", "")
    if wrong:
        stock, turn = sampled.generate_step, itertools.count()

        def biased(*args: Any, **kwargs: Any) -> Any:
            steps = list(stock(*args, **kwargs))
            (likeliest,) = kwargs["drafter"].text
            kept = next(turn) % 2 == 0
            return [(likeliest, *steps[0][1:]), *steps[1:]] if kept else steps

        monkeypatch.setattr(sampled, "generate_step", biased)
    judge = Judge(Bounds(Noise(), 0, 0))
    runs = sampled.Sampled(model, judge, 97, num_draft_tokens=4, seed=0)
    runs.distribution(Place(check, 0), plain)
    assert {d.kind for d in check.differences} == ({"fault"} if wrong else set())
    assert (0 in [d.position for d in check.differences]) == wrong
    assert len(check.notes) == 6


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"num_draft_tokens": 0}, {"max_tokens": 5}])
def test_too_little_to_audit(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="an audit needs"):
        audited(zoo.build("llama"), **options)
    with pytest.raises(ValueError, match="an audit needs a prompt"):
        audit(zoo.build("llama"), [])


def test_what_cannot_speculate_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="windows"):
        audited(zoo.build("phi3small"))
    with pytest.raises(DraftMismatchError):
        audited(zoo.build("llama"), drafter=3)


# --- the command -----------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    capsys.readouterr()
    try:
        code = cli.main([str(argument) for argument in argv])
    except SystemExit as stop:  # what argparse does
        code = stop.code if isinstance(stop.code, int) else 1
    return code, *capsys.readouterr()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "import os"}\n')
    return path


def test_the_command(capsys: pytest.CaptureFixture[str], prompts: Path) -> None:
    line = ("audit", "--prompts", prompts, "--max-tokens", 6, "--draft", "ngram")
    code, out, err = run(capsys, *line, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert (report["verdict"], report["differences"]) == ("exact", [])
    assert (report["draft_kind"], report["prompts"], report["seed"]) == ("ngram", 1, 0)
    assert (report["exactness"], report["device"]) == ("bitwise", "cpu")
    assert all(check["result"] == "equal" for check in report["checks"])
    code, out, err = run(capsys, *line)
    assert (code, err) == (0, "")
    assert out.count("\n") < 40
    assert out.splitlines()[-1] == f"verdict: {report['line']}"
    for word in ("drafter ngram", "windows", "accept lengths", "to the bit", "neighbours"):
        assert word in out


def test_the_command_reports_a_fault(
    capsys: pytest.CaptureFixture[str], prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = test_sabotage.without(retrace.RetraceUndo.rewind, lambda i, n: True)
    monkeypatch.setattr(retrace.RetraceUndo, "rewind", broken)
    line = ("audit", "--prompts", prompts, "--max-tokens", 6)
    code, out, err = run(capsys, *line, "--json")
    assert (code, err) == (1, "")
    report = json.loads(out)
    assert report["verdict"] == "fault"
    first = report["differences"][0]
    assert (first["kind"], first["layer"], first["slot"]) == ("fault", "0", "ArraysCache slot 0")
    token = next(d for d in report["differences"] if d["plain"] is not None)
    assert isinstance(token["plain_text"], str)
    assert token["gap"] > 2
    assert report["line"].startswith("FAULT in layer 0, ArraysCache slot 0:")


def test_the_page_of_a_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(undo.TrimUndo, "rewind", lambda self, kept: None)
    report = audited(zoo.build("llama"), num_draft_tokens=2, max_tokens=12)

    class Names:
        decode = staticmethod(lambda ids: f"[b]{ids[0]}")

    print_report(Console(width=200, highlight=False), "tiny", report, Names())
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == f"verdict: {report.line}"
    assert "FAULT" in out
    token = next(d for d in report.differences if d.plain is not None)
    assert f"{token.plain} '[b]{token.plain}'" in out  # not taken for markup
    assert "layer 0, KVCache keys" in out
    assert out.count("\n") < 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompts", "/none"), "no prompts file at /none"),
        (("--max-tokens", "4"), "an audit needs"),
        (("--num-draft-tokens", "0"), "num_draft_tokens of 1 or more"),
        (("--max-tokens", "2"), "max_tokens must be 3 or more"),
        (("--draft", "prediction"), "needs --prediction-file"),
        (("--model", "/no/such/model"), "/no/such/model"),
    ],
)
def test_bad_input(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    code, out, err = run(capsys, "audit", *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


if __name__ == "__main__":
    main()
