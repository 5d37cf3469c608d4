"""The models in the package: small, loadable by mlx-lm as they are, and decoded exactly."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten

import mlx_rewind
from mlx_rewind import NGram
from mlx_rewind.load import SHIPPED, SHIPPED_DRAFT, held_out_prompts

KINDS = ("code", "docs", "prose", "task")
FOLDERS = pytest.mark.parametrize("folder", [SHIPPED, SHIPPED_DRAFT], ids=lambda path: path.name)


def tensors(folder: Path) -> dict[str, mx.array]:
    files = sorted(folder.glob("*.safetensors"))
    return dict(chain.from_iterable(mx.load(str(file)).items() for file in files))


@pytest.fixture(scope="module")
def shipped() -> tuple[Any, Any]:
    return mlx_rewind.load()


def test_the_weights_are_small() -> None:
    files = list(SHIPPED.parent.rglob("*.safetensors"))
    assert files
    assert sum(file.stat().st_size for file in files) < 12_000_000


@FOLDERS
def test_the_folder_is_complete(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen3_5"
    assert config["text_config"]["vocab_size"] == 2048
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).is_file()


@FOLDERS
def test_mlx_lm_loads_and_runs_it(folder: Path) -> None:
    model, tokenizer = mlx_lm.load(str(folder))
    tokens = tokenizer.encode("for i in range(10):")
    logits = model(mx.array([tokens]))
    assert logits.shape == (1, len(tokens), 2048)
    assert mx.isfinite(logits).all()
    assert tokenizer.decode(tokens) == "for i in range(10):"
    assert len(tokenizer.get_vocab()) <= 2048
    assert tokenizer.eos_token_ids == {0, 2}
    assert tokenizer.has_chat_template


def test_both_have_one_tokenizer() -> None:
    contents = [json.loads((f / "tokenizer.json").read_text()) for f in (SHIPPED, SHIPPED_DRAFT)]
    assert contents[0] == contents[1]


def test_the_target_carries_a_head_that_mlx_lm_leaves_out(shipped: tuple[Any, Any]) -> None:
    head = {name for name in tensors(SHIPPED) if name.startswith("mtp.")}
    assert {"mtp.fc.weight", "mtp.norm.weight"} <= head
    config = json.loads((SHIPPED / "config.json").read_text())
    assert config["text_config"]["mtp_num_hidden_layers"] == 1
    assert not [name for name, _ in tree_flatten(shipped[0].parameters()) if "mtp" in name]
    assert not [name for name in tensors(SHIPPED_DRAFT) if "mtp" in name]


def test_it_is_a_hybrid(shipped: tuple[Any, Any]) -> None:
    mechanisms = [record.mechanism for record in mlx_rewind.inspect(shipped[0])]
    assert mechanisms == ["retrace", "retrace", "retrace", "trim"] * 2


def prompts(tokenizer: Any) -> list[dict[str, Any]]:
    """Six held-out prompts: one of each kind, and two more."""
    entries = held_out_prompts(tokenizer)
    first = [next(entry for entry in entries if entry["kind"] == kind) for kind in KINDS]
    last = [[entry for entry in entries if entry["kind"] == kind][-1] for kind in ("code", "task")]
    return first + last


def test_every_kind_of_prompt_is_held_out(shipped: tuple[Any, Any]) -> None:
    entries = held_out_prompts(shipped[1])
    for kind in KINDS:
        assert sum(entry["kind"] == kind for entry in entries) >= 5
    assert {entry["kind"] for entry in entries} == set(KINDS)


@pytest.mark.parametrize("index", range(6))
def test_a_held_out_prompt_gives_one_text_with_any_drafter(
    shipped: tuple[Any, Any], index: int
) -> None:
    model, tokenizer = shipped
    prompt = prompts(tokenizer)[index]["prompt"]

    def tokens(drafter: Any, k: int = 4) -> list[int]:
        responses = mlx_rewind.stream_generate(
            model, tokenizer, prompt, drafter=drafter, num_draft_tokens=k, max_tokens=32
        )
        return [response.token for response in responses]

    plain = tokens(None)
    assert 1 <= len(plain) <= 32
    assert tokens(NGram()) == plain
    assert tokens(mlx_rewind.load_draft(None, tokenizer), 2) == plain
    if index == 0:
        stock = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=32)
        assert [response.token for response in stock] == plain
