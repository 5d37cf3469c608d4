"""Conversion: the trunk is mlx-lm's, the heads survive, a folder appears whole or not at all."""

import contextlib
import filecmp
import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.convert import convert as stock_convert
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import save_config, save_model

import head_checkpoints
import mlx_rewind
import zoo
from head_checkpoints import Tensors
from mlx_rewind import MTP, DraftMismatchError, UnsupportedModelError
from mlx_rewind import convert as module
from mlx_rewind.convert import ConvertOptions, ConvertReport, convert
from mlx_rewind.draft.checkpoint import RECORD
from mlx_rewind.draft.families import FAMILIES
from mlx_rewind.load import SHIPPED, classes_without_heads
from mlx_rewind.target import Target

#: Float32, because the CPU multiplies quantised weights in bfloat16 slowly.
TRUNK = {"quantize": True, "q_group_size": 32, "dtype": "float32"}
IDS = [(5 * i * i + 11 * i + 3) % 97 for i in range(16)]


def make(source: Path, folder: Path, **options: Any) -> ConvertReport:
    return convert(source, folder, ConvertOptions(**options))


def load_trunk(folder: Path) -> Any:
    return mlx_lm.utils.load_model(folder, get_model_classes=classes_without_heads)[0]


def logits_of(mtp: MTP, text: list[int] = IDS) -> list[mx.array]:
    """What each head says of `text`, teacher-forced, from the states of its target."""
    target = Target(mtp.target)
    target.watch(mtp.input)
    states = target(mx.array([text]), make_prompt_cache(mtp.target)).hidden
    found = []
    for k, head in enumerate(mtp.heads):
        rows = len(text) - 1 - k
        after = mtp.embed(mx.array([text[k + 1 :]]))
        state, normed = head(after, states[:, :rows], head.make_cache())
        found.append(mtp.logits(k, normed)[0])
        if head.family.chained:
            states = state
    return found


def assert_same_logits(a: MTP, b: MTP, text: list[int] = IDS) -> None:
    for x, y in zip(logits_of(a, text), logits_of(b, text), strict=True):
        assert mx.array_equal(x, y)
        assert x.max() > x.min()


def tensors_of(folder: Path, pattern: str) -> Tensors:
    found: Tensors = {}
    for file in sorted(folder.glob(pattern)):
        found |= mx.load(str(file))
    assert found
    return found


def assert_same_tensors(a: Tensors, b: Tensors) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert mx.array_equal(a[name], b[name]), name


def parameters_of(mtp: MTP) -> Tensors:
    return dict(tree_flatten([head.parameters() for head in mtp.heads]))


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def tokenizer_into(folder: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / file, folder)


def in_float32(folder: Path) -> Path:
    """Lets config.json name the dtype that a trunk has; mlx-lm leaves the old one there."""
    config = config_of(folder)
    config["text_config"]["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "new" / "out"


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model, trunk in 4 bits and head in 8."""
    folder = tmp_path_factory.mktemp("shared") / "four-bits"
    make(SHIPPED, folder, **TRUNK, mtp_q_bits=8, mtp_q_group_size=32)
    return in_float32(folder)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model as mlx-lm converts it to 4 bits: without its head."""
    folder = tmp_path_factory.mktemp("shared") / "bare"
    with contextlib.redirect_stdout(io.StringIO()):
        stock_convert(str(SHIPPED), str(folder), quantize=True, dtype="float32")
    return in_float32(folder)


# --- the trunk -------------------------------------------------------------------------------


def assert_trunk_is_that_of_mlx_lm(source: Path, out: Path, **options: Any) -> ConvertReport:
    """Every file is the same but config.json, which lacks the source's note on its heads."""
    stock = out.with_name("stock")
    with contextlib.redirect_stdout(io.StringIO()):
        stock_convert(str(source), str(stock), **options)
    report = make(source, out, **options)
    expected = {path.name for path in stock.iterdir()}
    assert {path.name for path in out.iterdir()} - {"mtp"} == expected
    for name in expected - {"config.json"}:
        assert filecmp.cmp(out / name, stock / name, shallow=False), name
    config = config_of(stock)
    config.pop(RECORD, None)
    assert config_of(out) == config
    assert_mlx_lm_computes_the_same(out, stock)
    return report


def assert_mlx_lm_computes_the_same(a: Path, b: Path) -> None:
    logits = [mlx_lm.load(str(folder))[0](mx.array([IDS[:4]])) for folder in (a, b)]
    assert mx.array_equal(*logits)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quantize": True},
        {"quantize": True, "q_bits": 8, "q_group_size": 32, "dtype": "float32"},
        {"quantize": True, "q_mode": "mxfp8", "dtype": "float32"},
        {"quantize": True, "quant_predicate": "mixed_3_6", "dtype": "float32"},
        {"quantize": True, "quant_predicate": lambda path, _: "mlp" in path},
        {"dtype": "float16"},
    ],
)
def test_the_trunk_is_what_mlx_lm_writes(out: Path, options: dict[str, Any]) -> None:
    report = assert_trunk_is_that_of_mlx_lm(SHIPPED, out, **options)
    assert report.folder == out
    assert report.bits_per_weight == pytest.approx(
        mlx_lm.utils.compute_bits_per_weight(mlx_lm.load(str(out))[0])
    )
    assert report.notes == ()


@pytest.mark.parametrize("options", [{"dequantize": True}, {}, {"quantize": True, "q_bits": 8}])
def test_a_quantised_trunk_is_what_mlx_lm_writes(
    bare: Path, out: Path, options: dict[str, Any]
) -> None:
    report = assert_trunk_is_that_of_mlx_lm(bare, out, **options)
    assert report.head is None


def test_other_files_are_copied_as_mlx_lm_does(tmp_path: Path, out: Path) -> None:
    source = Path(shutil.copytree(SHIPPED, tmp_path / "source"))
    (source / "extra.py").write_text("x = 1\n")
    (source / "notes.txt").write_text("not a part of it\n")
    make(source, out)
    assert (out / "extra.py").exists()
    assert (out / "generation_config.json").exists()
    assert not (out / "notes.txt").exists()


# --- the heads, quantised or not ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("trunk", "head"),
    [
        ({**TRUNK, "q_bits": 4}, {"bits": 8, "group_size": 32, "mode": "affine"}),
        ({**TRUNK, "q_bits": 8}, {"bits": 4, "group_size": 64, "mode": "affine"}),
        ({**TRUNK, "q_bits": 4}, {"bits": 3, "group_size": 32, "mode": "affine"}),
        ({**TRUNK, "q_bits": 4}, {"bits": 2, "group_size": 32, "mode": "affine"}),
        ({**TRUNK, "q_bits": 4}, {"bits": 8, "group_size": 32, "mode": "mxfp8"}),
        ({**TRUNK, "q_mode": "mxfp4"}, {"bits": 4, "group_size": 32, "mode": "mxfp4"}),
        ({}, {"bits": 4, "group_size": 16, "mode": "nvfp4"}),
    ],
)
def test_a_quantised_head_is_that_quantised_in_memory(
    out: Path, trunk: dict[str, Any], head: dict[str, Any]
) -> None:
    asked = {f"mtp_q_{name}": value for name, value in head.items()}
    report = make(SHIPPED, out, **trunk, **asked)
    target = load_trunk(out)
    written, expected = MTP.load(out, target), MTP.load(SHIPPED, target)
    if "dtype" in trunk:
        expected.heads[0].set_dtype(mx.float32)
    before = MTP.load(SHIPPED, target)
    nn.quantize(
        expected.heads[0],
        **head,
        class_predicate=lambda path, m: hasattr(m, "to_quantized") and path != "projection",
    )
    assert_same_logits(written, expected)
    assert_same_tensors(parameters_of(written), parameters_of(expected))
    assert report.head is not None
    assert (report.head.layout, report.head.norms) == ("side file", "converted")
    assert report.head.files == ("mtp/weights.safetensors",)
    assert report.head.unused == report.head.copies == ()
    assert list(report.head.quantization.values()) == [head] * 7
    noted = config_of(out / "mtp")
    assert noted["model_type"] == "qwen3_5_mtp"
    assert noted[RECORD] == {"norms": "converted", "quantization": report.head.quantization}
    # Each tensor of the file has one place.
    assert len(tensors_of(out, "mtp/*.safetensors")) == len(parameters_of(written))
    text = mlx_rewind.load()[1].encode(module._TEXT, add_special_tokens=False)
    agree = mx.argmax(logits_of(written, text)[0], -1) == mx.argmax(logits_of(before, text)[0], -1)
    assert report.agreement == pytest.approx(agree.astype(mx.float32).mean().item())


def test_agreement_tells_a_coarse_head_from_a_fine_one(out: Path) -> None:
    fine = make(SHIPPED, out, mtp_q_bits=8).agreement
    coarse = make(SHIPPED, out.with_name("coarse"), mtp_q_bits=2).agreement
    assert fine is not None
    assert coarse is not None
    assert coarse < fine <= 1.0


@pytest.mark.parametrize("options", [{}, {"quantize": True}])
def test_a_head_in_full_precision_keeps_its_bits(out: Path, options: dict[str, Any]) -> None:
    report = make(SHIPPED, out, **options)
    target = load_trunk(out)
    assert_same_logits(MTP.load(out, target), MTP.load(SHIPPED, target))
    original = tensors_of(SHIPPED, "model.safetensors")
    expected = {name: x for name, x in original.items() if name.startswith("mtp.")}
    assert_same_tensors(tensors_of(out, "mtp/*.safetensors"), expected)
    assert report.agreement == 1.0


def test_the_dtype_asked_for_is_that_of_the_head(out: Path) -> None:
    make(SHIPPED, out, **TRUNK)
    stored = tensors_of(out, "mtp/*.safetensors")
    assert {x.dtype for x in stored.values()} == {mx.float32}


def test_what_mlx_lm_does_not_cast_in_the_trunk_stays_in_the_head(
    tmp_path: Path, out: Path
) -> None:
    source = head_checkpoints.write("glm4_moe", tmp_path / "source").folder
    make(source, out, dtype="bfloat16")
    stored = tensors_of(out, "mtp/*.safetensors")
    kept = {name.rpartition(".")[2] for name, x in stored.items() if x.dtype == mx.float32}
    assert kept == {"e_score_correction_bias"}


def test_a_projection_that_is_stored_transposed_is_turned(tmp_path: Path, out: Path) -> None:
    def turn(tensors: Tensors) -> Tensors:
        return {k: mx.contiguous(x.T) if "linear_proj" in k else x for k, x in tensors.items()}

    source = head_checkpoints.write("ernie4_5_moe", tmp_path / "source", edit=turn).folder
    make(source, out)
    target = load_trunk(out)
    ours, theirs = (parameters_of(MTP.load(folder, target)) for folder in (out, source))
    assert_same_tensors(ours, theirs)


def test_a_quantised_head_is_kept_as_it_is(four_bits: Path, out: Path) -> None:
    report = make(four_bits, out)
    assert_same_tensors(*(tensors_of(each, "mtp/*.safetensors") for each in (four_bits, out)))
    assert report.head is not None
    assert {each["bits"] for each in report.head.quantization.values()} == {8}
    again = make(four_bits, out.with_name("cast"), dtype="float32")
    assert again.head is not None
    assert again.head.quantization == report.head.quantization


def test_dequantize_is_for_the_head_too(four_bits: Path, out: Path) -> None:
    report = make(four_bits, out, dequantize=True)
    assert report.head is not None
    assert report.head.quantization == {}
    written, quantised = (MTP.load(each, load_trunk(each)) for each in (out, four_bits))
    found, old = parameters_of(written), parameters_of(quantised)
    name = "0.body.layers.0.mlp.up_proj"
    expected = mx.dequantize(
        *(old[f"{name}.{part}"] for part in ("weight", "scales", "biases")), group_size=32, bits=8
    )
    assert mx.array_equal(found[f"{name}.weight"], expected)
    again = make(four_bits, out.with_name("other"), dequantize=True, mtp_q_bits=4)
    assert again.head is not None
    assert {each["bits"] for each in again.head.quantization.values()} == {4}


def test_layers_that_no_group_divides_are_named(tmp_path: Path, out: Path) -> None:
    source = head_checkpoints.write("qwen3_5", tmp_path / "source").folder  # 64 wide, its MLP 96
    report = make(source, out, mtp_q_bits=8, mtp_q_group_size=64)
    assert report.head is not None
    assert len(report.head.quantization) == 6
    assert report.notes == ("not quantised, no group divides them: body.layers.0.mlp.down_proj",)


# --- experts ---------------------------------------------------------------------------------


def fuse(tensors: Tensors) -> Tensors:
    """The experts of a head as one tensor of each kind, [E, 2I, H] and [E, H, I]."""
    found = {name: x for name, x in tensors.items() if ".experts." not in name}
    mlp = "mtp.layers.0.mlp.experts."
    kinds = {
        kind: mx.stack([tensors[f"{mlp}{e}.{kind}_proj.weight"] for e in range(4)])
        for kind in ("gate", "up", "down")
    }
    found[f"{mlp}gate_up_proj"] = mx.concatenate([kinds["gate"], kinds["up"]], axis=1)
    found[f"{mlp}down_proj"] = kinds["down"]
    return found


@pytest.mark.parametrize("fused", [False, True])
def test_experts_are_found_however_they_are_stored(tmp_path: Path, out: Path, fused: bool) -> None:
    edit = fuse if fused else lambda tensors: tensors
    written = head_checkpoints.write("qwen3_5_moe", tmp_path / "source", edit=edit)
    assert any(name.endswith(".gate_up_proj") for name in written.tensors) is fused
    report = make(written.folder, out, mtp_q_bits=4, mtp_q_group_size=32)
    target = load_trunk(out)
    expected = MTP.load(written.folder, target)

    def parameters(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        if path == "projection" or not hasattr(layer, "to_quantized"):
            return False
        gate = path.endswith(("mlp.gate", "shared_expert_gate"))
        return {"group_size": 64, "bits": 8} if gate else {"group_size": 32, "bits": 4}

    nn.quantize(expected.heads[0], class_predicate=parameters)
    assert_same_logits(MTP.load(out, target), expected)
    assert report.head is not None
    assert report.head.quantization["0.body.layers.0.mlp.gate"]["bits"] == 8
    assert report.head.quantization["0.body.layers.0.mlp.switch_mlp.up_proj"]["bits"] == 4
    stored = tensors_of(out, "mtp/*.safetensors")
    assert "mtp.layers.0.mlp.switch_mlp.down_proj.weight" in stored


def test_what_the_trunk_spares_is_spared_in_the_head(tmp_path: Path, out: Path) -> None:
    source = head_checkpoints.write("bailing_moe_v3", tmp_path / "source").folder
    report = make(source, out, mtp_q_bits=8, mtp_q_group_size=32)
    assert report.head is not None
    assert not any("attention.q_a_proj" in path for path in report.head.quantization)
    assert any("shared_experts.up_proj" in path for path in report.head.quantization)


def test_experts_that_this_machine_cannot_compute_are_written(tmp_path: Path, out: Path) -> None:
    source = head_checkpoints.write("qwen3_5_moe", tmp_path / "source").folder
    report = make(source, out, dtype="bfloat16")
    assert report.agreement is None
    assert "not tried out" in report.notes[0]
    a = tensors_of(out, "mtp/*.safetensors")
    b = parameters_of(MTP.load(source, load_trunk(source)))
    assert mx.array_equal(a["mtp.fc.weight"], b["0.projection.weight"].astype(mx.bfloat16))


# --- every family ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_heads_of_every_family_survive(name: str, tmp_path: Path, out: Path) -> None:
    """Kept, and by themselves, and attached to a trunk that had lost them, quantised."""
    source = head_checkpoints.write(name, tmp_path / "source").folder
    kept = make(source, out)
    target = mlx_lm.utils.load_model(out)[0]
    original = MTP.load(source, target)
    assert kept.agreement == 1.0
    assert_same_tensors(parameters_of(MTP.load(out, target)), parameters_of(original))
    alone, trunk, attached = (out.with_name(each) for each in ("alone", "trunk", "attached"))
    make(source, alone, mtp_only=True)
    assert sorted(path.name for path in alone.iterdir()) == ["config.json", "model.safetensors"]
    assert_same_tensors(parameters_of(MTP.load(alone, target)), parameters_of(original))
    make(source, trunk, mtp="drop")
    text = config_of(trunk)
    for fields in (text, text.get("text_config", {})):
        for field in [each for each in fields if each.startswith(("mtp_", "num_nextn"))]:
            if name != "step3p5":  # whose tokenizer cannot be loaded without
                del fields[field]
    (trunk / "config.json").write_text(json.dumps(text))
    report = make(trunk, attached, mtp_from=alone, mtp_q_bits=8, mtp_q_group_size=32)
    assert report.head is not None
    assert report.head.quantization
    assert report.agreement is not None
    assert report.agreement > 0.8
    assert report.head.announced == (kept.head and kept.head.announced)
    target = mlx_lm.utils.load_model(attached)[0]
    assert MTP.load(attached, target).heads[0].projection.weight.dtype == mx.float32


# --- raw and converted sources -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_raw_and_converted_sources_give_the_same(name: str, tmp_path: Path) -> None:
    """CASES 10, with `convert`: trunk and head, raw or converted, in all ways."""

    def plus_one(tensors: Tensors) -> Tensors:
        norms = (k for k, x in tensors.items() if "norm" in k and x.ndim == 1)
        return {**tensors, **{k: tensors[k] + 1.0 for k in norms}}

    write = head_checkpoints.write
    sources: dict[str, tuple[Path, dict[str, Any]]] = {
        "raw": (write(name, tmp_path / "raw").folder, {}),
        "trunk": (write(name, tmp_path / "t", is_raw=False).folder, {"mtp_norms": "raw"}),
        "both": (
            write(name, tmp_path / "both", is_raw=False, edit=plus_one).folder,
            {"mtp_norms": "converted"},
        ),
        "head": (
            write(name, tmp_path / "head", layout="mtp.safetensors", edit=plus_one).folder,
            {"mtp_norms": "converted"},
        ),
    }
    found = {}
    for kind, (source, options) in sources.items():
        make(source, tmp_path / f"{kind}-out", **options)
        found[kind] = tmp_path / f"{kind}-out"
    twice = tmp_path / "twice"
    make(found["raw"], twice)  # and what was converted says so itself
    for folder in (*found.values(), twice):
        for pattern in ("model*.safetensors", "mtp/*.safetensors"):
            assert_same_tensors(tensors_of(folder, pattern), tensors_of(found["raw"], pattern))


def test_norms_that_cannot_be_told_are_refused(tmp_path: Path, out: Path) -> None:
    source = head_checkpoints.write("qwen3_5", tmp_path / "source", is_raw=False).folder
    with pytest.raises(ValueError, match="--mtp-norms"):
        make(source, out)
    assert not out.parent.exists()
    make(source, out, mtp="drop")


# --- heads that are taken from elsewhere, or nowhere -----------------------------------------


def test_split_and_attach_gives_the_same_proposals(bare: Path, out: Path) -> None:
    alone = out.with_name("alone")
    report = make(SHIPPED, alone, mtp_only=True)
    assert report.bits_per_weight is None
    assert report.agreement is None
    assert report.head is not None
    assert report.head.layout == "separate"
    config = config_of(alone)
    assert config["model_type"] == "qwen3_5_mtp"
    assert (config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]) == (
        192,
        2048,
        8,
    )
    make(bare, out, mtp_from=alone)
    target = mlx_lm.load(str(out))[0]
    attached = MTP.load(out, target)
    assert_same_logits(attached, MTP.load(SHIPPED, target))
    assert_same_logits(attached, MTP.load(alone, target))
    # The trunk goes through as it is.
    assert_same_tensors(*(tensors_of(each, "model.safetensors") for each in (bare, out)))


def test_a_head_comes_from_the_original_checkpoint(bare: Path, out: Path) -> None:
    report = make(bare, out, mtp_from=SHIPPED, mtp_q_mode="mxfp8")
    assert report.head is not None
    assert report.head.quantization["0.body.layers.0.mlp.up_proj"]["mode"] == "mxfp8"
    assert_same_tensors(*(tensors_of(each, "model.safetensors") for each in (bare, out)))


def test_a_quantised_head_is_split(out: Path) -> None:
    report = make(SHIPPED, out, mtp_only=True, mtp_q_bits=3, mtp_q_group_size=32)
    model, _ = mlx_rewind.load()
    expected = MTP.load(SHIPPED, model)
    nn.quantize(
        expected.heads[0],
        32,
        3,
        class_predicate=lambda path, m: hasattr(m, "to_quantized") and path != "projection",
    )
    assert_same_logits(MTP.load(out, model), expected)
    assert report.head is not None
    assert {each["bits"] for each in report.head.quantization.values()} == {3}


def test_several_heads_share_what_is_stored_once(tmp_path: Path, out: Path) -> None:
    source = head_checkpoints.write("qwen3_5", tmp_path / "source", heads=2).folder
    report = make(source, out, mtp_q_bits=8, mtp_q_group_size=32)
    assert report.head is not None
    assert report.head.heads == 2
    target = load_trunk(out)
    assert [head.projection.weight.shape for head in MTP.load(out, target).heads] == [(64, 128)] * 2
    assert "mtp.layers.1.mlp.up_proj.scales" in tensors_of(out, "mtp/*.safetensors")


def test_a_dropped_head_is_not_written(out: Path) -> None:
    report = make(SHIPPED, out, mtp="drop")
    assert (report.head, report.agreement) == (None, None)
    assert not (out / "mtp").exists()
    assert RECORD not in config_of(out)
    with pytest.raises(FileNotFoundError, match="no MTP head"):
        MTP.load(out, load_trunk(out))


def test_an_announced_head_that_is_missing_is_noted(bare: Path, out: Path) -> None:
    report = make(bare, out)
    assert report.head is None
    assert len(report.notes) == 1
    assert "announces 1" in report.notes[0]


def test_tensors_of_no_part_are_noted(tmp_path: Path, out: Path) -> None:
    extra = {"mtp.layers.0.strange.weight": mx.ones((3,))}
    source = head_checkpoints.write("qwen3_5", tmp_path / "s", edit=lambda t: {**t, **extra}).folder
    report = make(source, out)
    assert "mtp.layers.0.strange.weight" in report.notes[0] or "layers.0.strange" in report.notes[0]


def write_plain(name: str, folder: Path) -> Path:
    save_model(folder, zoo.build(name, fresh=True))
    save_config(dict(zoo.CONFIGS[name]), folder / "config.json")
    tokenizer_into(folder)
    return folder


def test_a_model_without_heads_is_converted(tmp_path: Path, out: Path) -> None:
    source = write_plain("llama", tmp_path / "llama")
    report = assert_trunk_is_that_of_mlx_lm(source, out, quantize=True, q_group_size=32)
    assert (report.head, report.notes) == (None, ())
    with pytest.raises(UnsupportedModelError, match="no MTP head is known"):
        make(source, out.with_name("other"), mtp_from=SHIPPED)


def test_heads_that_cannot_be_used_are_noted(tmp_path: Path, out: Path) -> None:
    report = make(write_plain("longcat_flash_ngram", tmp_path / "ngram"), out)
    assert report.head is None
    assert "left out" in report.notes[0]


# --- in use ----------------------------------------------------------------------------------


def test_generation_with_a_converted_head_is_plain_generation(four_bits: Path) -> None:
    stock, stock_tokenizer = mlx_lm.load(str(four_bits))
    model, tokenizer = mlx_rewind.load(four_bits)
    for prompt in ("import os", "In the beginning"):
        options: dict[str, Any] = {"prompt": prompt, "max_tokens": 40}
        plain = mlx_lm.generate(stock, stock_tokenizer, **options)
        responses = list(
            mlx_rewind.stream_generate(
                model, tokenizer, drafter=MTP.load(four_bits, model), num_draft_tokens=3, **options
            )
        )
        assert "".join(each.text for each in responses) == plain
        assert responses[-1].draft_n_accepted > 0


def test_progress_is_told_and_nothing_printed(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[int, int, str]] = []
    options = ConvertOptions(**TRUNK, mtp_q_bits=8)
    convert(SHIPPED, out, options, lambda *call: calls.append(call))
    assert [stage for _, _, stage in calls] == ["load", "save", "head", "check", "done"]
    assert [done for done, _, _ in calls] == [0, 1, 2, 3, 4]
    assert {total for _, total, _ in calls} == {4}
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_hub_names(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card names the source, and the folder is whole when it is uploaded."""
    asked: list[tuple[Any, ...]] = []

    def download(name: str, revision: str | None = None) -> Path:
        asked.append((name, revision))
        return SHIPPED

    def upload(folder: str, repository: str) -> None:
        print("uploading")
        asked.append((repository, sorted(path.name for path in Path(folder).iterdir())))

    monkeypatch.setattr(sys.modules["mlx_rewind.load"], "folder_of", download)
    monkeypatch.setattr(module.utils, "upload_to_hub", upload)
    card = mlx_lm.utils.create_model_card
    cards: list[str | None] = []

    def card_of(folder: Path, name: str | None) -> None:
        cards.append(name)
        card(folder, None)

    monkeypatch.setattr(module.utils, "create_model_card", card_of)
    make(Path("me/mine"), out, revision="v1", upload_repo="me/theirs")
    assert cards[-1] == "me/mine"
    assert asked == [("me/mine", "v1"), ("me/theirs", sorted(path.name for path in out.iterdir()))]


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": True, "dequantize": True}, "exclude each other"),
        ({"quantize": True, "quant_predicate": "mixed_3_6", "q_mode": "mxfp4"}, "affine"),
        ({"dtype": "float8"}, "--dtype must be one of float16"),
        ({"mtp": "drop", "mtp_q_bits": 8}, "--mtp drop"),
        ({"mtp": "drop", "mtp_only": True}, "--mtp drop"),
        ({"mtp_only": True, "quantize": True}, "--mtp-q-bits"),
        ({"mtp_only": True, "upload_repo": "me/mine"}, "hf upload"),
        ({"mtp_q_bits": 7}, "bits"),
        ({"mtp_q_mode": "mxfp4", "mtp_q_bits": 8}, "mxfp4"),
        ({"mtp_q_mode": "q4_k_m"}, "q4_k_m"),
        ({"mtp_q_group_size": 48}, "group size 48"),
    ],
)
def test_options_are_refused_before_anything_is_read(
    out: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(out / "no-source", out, **options)
    assert not out.parent.exists()


def test_an_existing_folder_is_refused_before_anything_is_read(out: Path) -> None:
    out.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"exists already: remove it"):
        make(out / "no-source", out)
    assert list(out.parent.iterdir()) == [out]


def test_a_source_that_is_not_there_is_refused(tmp_path: Path, out: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no model at"):
        make(tmp_path / "nothing", out)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="cannot load"):
        make(tmp_path / "empty", out)
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "no-such-model"}')
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="holds no model"):
        make(tmp_path / "empty", out)
    assert not out.parent.exists()


@pytest.mark.parametrize(
    "options", [{"mtp_only": True}, {"mtp_q_bits": 8}, {"mtp_from": "the same"}]
)
def test_a_head_that_is_asked_for_must_be_there(
    bare: Path, out: Path, options: dict[str, Any]
) -> None:
    if "mtp_from" in options:
        options = {"mtp_from": bare}
    with pytest.raises(FileNotFoundError, match="no MTP head"):
        make(bare, out, **options)
    assert not out.parent.exists()


def test_a_head_is_not_quantised_twice(four_bits: Path, bare: Path, out: Path) -> None:
    with pytest.raises(ValueError, match=r"quantised already.*--mtp-from"):
        make(four_bits, out, mtp_q_bits=4)
    with pytest.raises(ValueError, match="quantised already"):
        make(bare, out, mtp_from=four_bits, mtp_q_mode="mxfp8")
    assert not out.parent.exists()


def test_the_head_of_another_model_is_refused(tmp_path: Path, out: Path) -> None:
    other = head_checkpoints.write("qwen3_5", tmp_path / "other").folder
    with pytest.raises(DraftMismatchError, match="belongs to another model"):
        make(SHIPPED, out, mtp_from=other)
    make(other, tmp_path / "alone", mtp_only=True)
    mimo = head_checkpoints.write("mimo", tmp_path / "mimo", layout="none").folder
    with pytest.raises(DraftMismatchError, match="qwen3_5_mtp"):
        make(mimo, out, mtp_from=tmp_path / "alone")
    assert not out.parent.exists()


# --- nothing is left behind ----------------------------------------------------------------------


def saboteurs() -> Iterator[Any]:
    def fails(error: BaseException) -> Callable[..., None]:
        def fail(*_: Any, **__: Any) -> None:
            raise error

        return fail

    yield pytest.param("utils.save", fails(OSError("disk full")), OSError, id="save")
    yield pytest.param("utils.save", fails(KeyboardInterrupt()), KeyboardInterrupt, id="ctrl-c")
    yield pytest.param("_write_heads", fails(OSError("disk full")), OSError, id="heads")
    yield pytest.param("_check", fails(RuntimeError("no")), RuntimeError, id="check")
    yield pytest.param("Path.rename", fails(OSError("no")), OSError, id="rename")


@pytest.mark.parametrize(("where", "fail", "error"), saboteurs())
def test_nothing_is_left_of_a_failure(
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    fail: Callable[..., None],
    error: type[BaseException],
) -> None:
    monkeypatch.setattr(f"mlx_rewind.convert.{where}", fail)
    with pytest.raises(error):
        make(SHIPPED, out, mtp_q_bits=8)
    assert list(out.parent.parent.iterdir()) == []
    monkeypatch.undo()
    make(SHIPPED, out, mtp_q_bits=8)
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_check_sees_a_tensor_that_changed_on_the_way(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, dtype: str | None, alone: bool
) -> None:
    """Also where the heads cannot be computed: experts in bfloat16 on a CPU."""
    write = mx.save_safetensors

    def damaged(file: str, tensors: Tensors, *args: Any, **kwargs: Any) -> None:
        norm = "mtp.layers.0.input_layernorm.weight"
        if norm in tensors:
            tensors = {**tensors, norm: tensors[norm] * 1.01}
        write(file, tensors, *args, **kwargs)

    source = head_checkpoints.write("qwen3_5_moe", tmp_path / "source").folder
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(mx, "save_safetensors", damaged)
    with pytest.raises(RuntimeError, match="do not compute"):
        make(source, out, dtype=dtype, mtp_only=alone)
    assert sorted(tmp_path.iterdir()) == before


def test_the_check_sees_a_trunk_that_mlx_lm_cannot_load(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = mx.save_safetensors

    def truncated(file: str, tensors: Tensors, *args: Any, **kwargs: Any) -> None:
        write(file, dict(list(tensors.items())[1:]), *args, **kwargs)

    monkeypatch.setattr(mx, "save_safetensors", truncated)
    with pytest.raises(ValueError, match="Missing 1 parameters"):
        make(SHIPPED, out)
    assert not out.parent.exists()
