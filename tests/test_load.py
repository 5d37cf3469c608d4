"""Loading: folders, hub names and shipped models; one clear message where there is none."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants as hub
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_flatten

import mlx_rewind
from mlx_rewind import DraftMismatchError, DraftModel
from mlx_rewind.load import SHIPPED, SHIPPED_DRAFT, held_out_prompts


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    ours, theirs = dict(tree_flatten(a.parameters())), dict(tree_flatten(b.parameters()))
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[path], theirs[path]) for path in ours)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that holds a model, to be damaged."""
    return Path(shutil.copytree(SHIPPED_DRAFT, tmp_path / "a-model"))


# --- what loads ------------------------------------------------------------------------------


def test_without_a_path_the_shipped_model_loads() -> None:
    model, tokenizer = mlx_rewind.load()
    stock, stock_tokenizer = mlx_lm.load(str(SHIPPED))
    assert_same_weights(model, stock)
    assert tokenizer.get_vocab() == stock_tokenizer.get_vocab()
    assert tokenizer.eos_token_ids == stock_tokenizer.eos_token_ids


@pytest.mark.parametrize("as_type", [str, Path])
def test_a_folder_loads(folder: Path, as_type: Callable[[Path], str | Path]) -> None:
    model, tokenizer = mlx_rewind.load(as_type(folder))
    stock, stock_tokenizer = mlx_lm.load(str(SHIPPED_DRAFT))
    assert_same_weights(model, stock)
    assert tokenizer.get_vocab() == stock_tokenizer.get_vocab()


def test_a_relative_folder_loads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    model, _ = mlx_rewind.load(folder.name)
    assert len(model.layers) == 4


def test_options_reach_mlx_lm() -> None:
    _, tokenizer = mlx_rewind.load(tokenizer_config={"eos_token": "<|endoftext|>"})
    assert tokenizer.eos_token == "<|endoftext|>"
    pair = mlx_rewind.load(return_config=True)
    assert len(pair) == 2


def test_the_shipped_draft_model_fits_the_shipped_model() -> None:
    _, tokenizer = mlx_rewind.load()
    drafter = mlx_rewind.load_draft(None, tokenizer)
    assert isinstance(drafter, DraftModel)
    assert drafter.tokenizer.get_vocab() == tokenizer.get_vocab()


def test_a_draft_with_another_tokenizer_is_refused(folder: Path) -> None:
    _, tokenizer = mlx_rewind.load()
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = (next(w for w, i in vocabulary.items() if i == n) for n in (300, 301))
    vocabulary[first], vocabulary[second] = 301, 300
    path.write_text(json.dumps(content))
    with pytest.raises(DraftMismatchError, match="id 300 is"):
        mlx_rewind.load_draft(folder, tokenizer)


# --- hub names -------------------------------------------------------------------------------


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache without a network, which holds the draft model as someone/a-model."""
    cache = tmp_path / "hub"
    repository, revision = cache / "models--someone--a-model", "0" * 40
    shutil.copytree(SHIPPED_DRAFT, repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return cache


@pytest.mark.usefixtures("offline_hub")
def test_a_hub_name_loads() -> None:
    model, tokenizer = mlx_rewind.load("someone/a-model")
    assert_same_weights(model, mlx_lm.load(str(SHIPPED_DRAFT))[0])
    assert mlx_rewind.load_draft("someone/a-model", tokenizer).tokenizer is not None


@pytest.mark.usefixtures("offline_hub")
@pytest.mark.parametrize("name", ["someone/another-model", "another-model"])
def test_a_hub_name_that_leads_nowhere_is_named(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=name):
        mlx_rewind.load(name)


# --- what does not load ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/no/such/model", "./no-such-model", "no/such/model"])
def test_a_path_that_leads_nowhere_is_named(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"no model at {name}"):
        mlx_rewind.load(name)


def test_a_home_folder_may_be_written_with_a_tilde(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell leaves the tilde of `--model=~/a-model` alone."""
    monkeypatch.setenv("HOME", str(folder.parent))
    model, _ = mlx_rewind.load("~/a-model")
    assert len(model.layers) == 4
    with pytest.raises(FileNotFoundError, match=r"no model at .*/another-model"):
        mlx_rewind.load("~/another-model")


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def garbage_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_text("garbage")


def half_the_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])


def config(text: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "config.json").write_text(text)

    return damage


def another_shape(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    settings["text_config"]["hidden_size"] = 64
    (folder / "config.json").write_text(json.dumps(settings))


# What is done to a model's folder, the error, and what its message must name.
Errors = type[Exception] | tuple[type[Exception], ...]
DAMAGE: dict[str, tuple[Callable[[Path], None], Errors, str]] = {
    "empty": (empty, FileNotFoundError, "a-model"),
    "no weights": (without_weights, FileNotFoundError, "a-model"),
    "no tokenizer": (without_tokenizer, (FileNotFoundError, ValueError), "a-model"),
    "garbage weights": (garbage_weights, ValueError, "a-model"),
    "half the weights": (half_the_weights, ValueError, "a-model"),
    "no json": (config("{nope"), ValueError, "a-model"),
    "empty config": (config(""), ValueError, "a-model"),
    "a list": (config("[]"), ValueError, "a-model"),
    "no model type": (config("{}"), ValueError, "a-model.*model_type"),
    "unknown model type": (config('{"model_type": "frobnicate"}'), ValueError, "frobnicate"),
    "incomplete config": (config('{"model_type": "llama"}'), ValueError, "a-model.*hidden_size"),
    "another shape": (another_shape, ValueError, r"\(2048, 64\)"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_folder_without_a_usable_model_is_refused(folder: Path, name: str) -> None:
    damage, error, named = DAMAGE[name]
    damage(folder)
    with pytest.raises(error, match=named) as caught:
        mlx_rewind.load(folder)
    assert "\n" not in str(caught.value)


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(OSError, match="a-model"):
        mlx_rewind.load(folder / "config.json")


# --- held-out prompts ------------------------------------------------------------------------


def test_held_out_prompts_are_ready_to_be_generated_from() -> None:
    _, tokenizer = mlx_rewind.load()
    prompts = held_out_prompts(tokenizer)
    assert {entry["kind"] for entry in prompts} == {"code", "docs", "prose", "task"}
    assert all(isinstance(entry["prompt"], str) and entry["prompt"] for entry in prompts)
    assert len({entry["prompt"] for entry in prompts}) == len(prompts)
    for entry in prompts:
        if entry["kind"] == "task":
            text = entry["messages"][0]["content"]
            assert entry["prompt"] == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
