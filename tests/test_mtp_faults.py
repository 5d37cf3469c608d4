"""Checkpoints that are damaged, contradictory or not what they say: one clear word, no guess."""

import json
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

import mlx_rewind
from head_checkpoints import write
from mlx_rewind import MTP, DraftMismatchError
from mlx_rewind.load import classes_without_heads


def trunk(folder: Path) -> Any:
    return load_model(folder, get_model_classes=classes_without_heads)[0]


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b""])
def test_a_side_file_that_cannot_be_read(tmp_path: Path, content: bytes) -> None:
    folder = write("qwen3_5", tmp_path / "c").folder
    (folder / "mtp.safetensors").write_bytes(content)
    model = trunk(folder)
    with pytest.raises(ValueError, match=r"mtp\.safetensors cannot be read"):
        MTP.load(folder, model)


def test_a_model_loads_beside_a_side_file_that_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import shutil

    from mlx_rewind.load import SHIPPED

    folder = Path(shutil.copytree(SHIPPED, tmp_path / "c"))
    (folder / "stray.safetensors").write_bytes(b"no")
    with caplog.at_level(logging.WARNING, "mlx_rewind"):
        model, _ = mlx_rewind.load(folder)
    assert [*mlx_rewind.generate_step([1, 2, 3], model, max_tokens=2)]
    (record,) = caplog.records
    assert "stray.safetensors cannot be read" in record.message


@pytest.mark.parametrize("wrong", [{"norms": "Raw"}, {"input": "Normed"}])
def test_what_an_option_may_not_be(tmp_path: Path, wrong: dict[str, Any]) -> None:
    folder = write("qwen3_5", tmp_path / "c").folder
    with pytest.raises(ValueError, match=r"Raw|Normed"):
        MTP.load(folder, trunk(folder), **wrong)


def test_a_record_of_another_convention_is_refused(tmp_path: Path) -> None:
    folder = write("qwen3_5", tmp_path / "c").folder
    config = json.loads((folder / "config.json").read_text())
    config["mlx_rewind_mtp"] = {"norms": "delta"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="delta"):
        MTP.load(folder, trunk(folder))


def test_only_files_of_the_trunk_tell_how_it_is_stored(tmp_path: Path) -> None:
    folder = write("qwen3_5", tmp_path / "c", is_raw=False).folder
    model = trunk(folder)
    for name, tensor in (("conv1d.weight", mx.zeros((8, 3, 80))), ("x.moe.y", mx.zeros((2,)))):
        mx.save_safetensors(str(folder / "stray.safetensors"), {name: tensor})
        with pytest.raises(ValueError, match="cannot tell how"):
            MTP.load(folder, model)


@pytest.mark.parametrize(
    ("config", "message"),
    [("[1]", "holds no JSON object"), ("{bro", "is not JSON")],
)
def test_a_config_that_is_none(tmp_path: Path, config: str, message: str) -> None:
    folder = write("qwen3_5", tmp_path / "c").folder
    model = trunk(folder)
    (folder / "config.json").write_text(config)
    with pytest.raises(ValueError, match=message):
        MTP.load(folder, model)


@pytest.mark.parametrize("extra", ["x", {"mtp_file": 5}, {"mtp_file": "../../etc/passwd"}, None])
def test_notes_of_other_tools_that_make_no_sense(tmp_path: Path, extra: Any) -> None:
    folder = write("qwen3_5", tmp_path / "c").folder
    model = trunk(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"mlx_lm_extra_tensors": extra, "mlx_rewind_mtp": None}
    (folder / "config.json").write_text(json.dumps(config))
    assert MTP.load(folder, model).heads


def test_blocks_that_a_head_cannot_have(tmp_path: Path) -> None:
    folder = write("nemotron_h", tmp_path / "c").folder
    model = trunk(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("mtp_hybrid_override_pattern", None)
    for kinds in (["attention", "linear_attention"], None):
        config["mtp_layers_block_type"] = kinds
        (folder / "config.json").write_text(json.dumps(config))
        if kinds is None:
            assert MTP.load(folder, model).heads
            continue
        with pytest.raises(ValueError, match="linear_attention"):
            MTP.load(folder, model)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5_moe", "glm4_moe", "bailing_hybrid"])
def test_tensors_of_experts_that_nobody_stacks_are_listed(tmp_path: Path, name: str) -> None:
    names: list[str] = []

    def with_biases(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
        found = [k for k in tensors if ".experts.0." in k and k.endswith("proj.weight")]
        more = {k.replace("weight", "bias"): mx.zeros((3,)) for k in found}
        names[:] = more
        return {**tensors, **more}

    checkpoint = write(name, tmp_path / "c", edit=with_biases)
    assert names
    report = MTP.load(checkpoint.folder, trunk(checkpoint.folder)).report
    assert report is not None
    assert set(names) <= set(report.unused)


def test_a_head_by_itself_of_another_model(tmp_path: Path) -> None:
    from mlx_rewind.convert import ConvertOptions, convert
    from mlx_rewind.load import SHIPPED

    convert(SHIPPED, tmp_path / "head", ConvertOptions(mtp_only=True))
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    config["vocab_size"] += 1
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    model, _ = mlx_rewind.load()
    with pytest.raises(DraftMismatchError, match="vocab_size 2049"):
        MTP.load(tmp_path / "head", model)
