"""A store in a folder: it survives restarts, and nothing that does not belong is ever used."""

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

import mlx_rewind
import zoo
from mlx_rewind import DraftModel, PromptCacheStore, generate_step
from mlx_rewind.load import SHIPPED, SHIPPED_DRAFT

PROMPT = zoo.PROMPTS[2][:30]
FAMILIES = ["gpt_oss", "kimi_linear", "lfm2", "llama", "mamba2", "qwen3_5"]


def filled(model: nn.Module, **options: Any) -> PromptCacheStore:
    """A store after a speculative run, of a reply of ten tokens."""
    store = PromptCacheStore(model, interval=8)
    expected = zoo.reference(model, PROMPT, 10).tokens
    drafter = zoo.Scripted(expected, [2, 0, 3, None, 1], prompt_length=len(PROMPT))
    list(generate_step(PROMPT, model, drafter=drafter, max_tokens=10, store=store, **options))
    return store


@pytest.mark.parametrize("name", FAMILIES)
def test_a_store_survives_a_restart(name: str, tmp_path: Path) -> None:
    model = zoo.build(name)
    store = filled(model)
    assert store.save(tmp_path) == len(list(tmp_path.iterdir()))
    assert store.save(tmp_path) == 0  # all there already
    other = PromptCacheStore(zoo.build(name, fresh=True))
    report = other.load(tmp_path)
    assert report.refused == {}
    assert report.entries == other.stats.entries == store.stats.entries
    assert other.stats.bytes == store.stats.bytes
    turn = [*PROMPT, *zoo.reference(model, PROMPT, 10).tokens, 5, 6, 7]
    expected = zoo.reference(model, turn, 10)
    steps = list(generate_step(turn, other.model, max_tokens=10, store=other))
    assert [token for token, _, _ in steps] == expected.tokens
    assert other.stats.tokens_reused == 39
    for entry in store.entries:
        ours, _ = store.fetch([*entry.tokens, 0])
        theirs, _ = other.fetch([*entry.tokens, 0])
        zoo.assert_state_equal(ours, theirs)


def test_four_slots_and_half_precision(tmp_path: Path) -> None:
    model = zoo.build("qwen3_5", dtype=mx.bfloat16)
    store = PromptCacheStore(model)
    cache = make_prompt_cache(model)
    model(mx.array([PROMPT]), cache=cache)
    store.insert(PROMPT, cache)
    entry = ArraysCache(4)
    for i in (0, 1, 3):
        entry[i] = mx.random.normal((1, 3, 5)).astype([mx.bfloat16, mx.float32][i % 2])
    store.give("hand-made", PROMPT, [entry])
    store.save(tmp_path)
    other = PromptCacheStore(model)
    assert other.load(tmp_path).refused == {}
    fresh = ArraysCache(4)
    assert other.take("hand-made", PROMPT, [fresh])
    zoo.assert_state_equal([fresh], [entry])
    zoo.assert_state_equal(other.fetch([*PROMPT, 1])[0], cache)


def test_saving_follows_the_store(tmp_path: Path) -> None:
    model = zoo.build("lfm2")
    store = PromptCacheStore(model)
    (tmp_path / "mine.safetensors").write_bytes(b"not of the store")
    for length in (30, 20, 10):  # each splits what is there
        cache = make_prompt_cache(model)
        model(mx.array([PROMPT[:length]]), cache=cache)
        store.insert(PROMPT[:length], cache)
        store.save(tmp_path)
        assert len(list(tmp_path.iterdir())) == 1 + store.stats.entries
    store.clear()
    store.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.safetensors"]


def _edit(path: Path, change: Callable[[dict[str, Any], dict[str, mx.array]], None]) -> None:
    arrays, metadata = mx.load(str(path), return_metadata=True)  # type: ignore[misc]
    manifest = json.loads(metadata["manifest"])
    change(manifest, arrays)
    mx.save_safetensors(str(path), arrays, {"manifest": json.dumps(manifest)})


def _no_state(manifest: dict[str, Any], arrays: dict[str, mx.array]) -> None:
    for name in [name for name in arrays if name.startswith("state.")]:
        del arrays[name]


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "truncated"),
    "cut in the header": (lambda path: path.write_bytes(path.read_bytes()[:99]), "truncated"),
    "empty": (lambda path: path.write_bytes(b""), "truncated"),
    "another byte": (
        lambda path: path.write_bytes(path.read_bytes()[:-5] + b"\1" + path.read_bytes()[-4:]),
        "checksum",
    ),
    "not one": (lambda path: path.write_bytes(b"\4\0\0\0\0\0\0\0nope"), "not an entry"),
    "another format": (
        lambda path: _edit(path, lambda manifest, _: manifest.update(format=0)),
        "another format: got 0, expected 1",
    ),
    "another mlx-lm": (
        lambda path: _edit(path, lambda manifest, _: manifest.update(mlx_lm="0.1")),
        "another mlx_lm",
    ),
    "half-empty": (lambda path: _edit(path, _no_state), "does not hold what its manifest says"),
    "other tokens": (
        lambda path: _edit(path, lambda _, a: a.update(tokens=a["tokens"] + 1)),
        "checksum",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_with_a_reason(damage: str, tmp_path: Path) -> None:
    model = zoo.build("qwen3_5")
    store = PromptCacheStore(model)
    cache = make_prompt_cache(model)
    model(mx.array([PROMPT]), cache=cache)
    store.insert(PROMPT, cache)
    store.save(tmp_path)
    (path,) = tmp_path.iterdir()
    work, reason = DAMAGES[damage]
    work(path)
    other = PromptCacheStore(model)
    report = other.load(tmp_path)
    assert report.entries == other.stats.entries == other.stats.bytes == 0
    assert list(report.refused) == [path.name]
    assert reason in report.refused[path.name]
    assert other.fetch([*PROMPT, 1])[1] == 0


def test_a_half_empty_entry_with_a_right_checksum_is_refused(tmp_path: Path) -> None:
    from mlx_rewind.cache.disk import _digest

    model = zoo.build("qwen3_5")
    store = PromptCacheStore(model)
    cache = make_prompt_cache(model)
    model(mx.array([PROMPT]), cache=cache)
    store.insert(PROMPT, cache)
    store.save(tmp_path)
    (path,) = tmp_path.iterdir()

    def without_pages(manifest: dict[str, Any], arrays: dict[str, mx.array]) -> None:
        for name in [name for name in arrays if name.startswith("page.")]:
            del arrays[name], manifest["arrays"][name]
        manifest["checksum"] = _digest(arrays, manifest)

    _edit(path, without_pages)
    report = PromptCacheStore(model).load(tmp_path)
    assert "half-empty: cache 3" in report.refused[path.name]


def test_a_missing_beginning(tmp_path: Path) -> None:
    model = zoo.build("qwen3_5")
    store = filled(model)
    store.save(tmp_path)
    paths = {
        json.loads(mx.load(str(p), return_metadata=True)[1]["manifest"])["start"]: p  # type: ignore[misc]
        for p in tmp_path.iterdir()
    }
    assert sorted(paths) == [0, 8, 16, 24, 29]
    paths[16].unlink()
    other = PromptCacheStore(model)
    report = other.load(tmp_path)
    assert report.entries == 2
    assert all("beginning is missing" in reason for reason in report.refused.values())
    assert len(report.refused) == 2
    assert other.fetch(PROMPT)[1] == 16


def test_entries_of_others_are_refused(tmp_path: Path) -> None:
    """Other weights, layers, precision, family, or bits of the caches."""
    model = zoo.build("llama")
    filled(model).save(tmp_path)
    others = {
        "weights": zoo.build("llama", seed=123),
        "layers": zoo.build("llama", num_hidden_layers=3),
        "precision": zoo.build("llama", dtype=mx.bfloat16),
        "family": zoo.build("qwen3_5"),
    }
    for other in others.values():
        report = PromptCacheStore(other).load(tmp_path)
        assert report.entries == 0
        assert all("another model" in reason for reason in report.refused.values())
        assert report.refused
    one_bit = zoo.build("llama", fresh=True)
    weight = one_bit.layers[1].mlp.up_proj.weight
    one_bit.layers[1].mlp.up_proj.weight = weight.at[0, 0].add(1e-3)
    assert PromptCacheStore(one_bit).load(tmp_path).entries == 0
    store = PromptCacheStore(model)
    assert store.load(tmp_path).entries
    steps = generate_step(
        PROMPT, model, max_tokens=1, kv_bits=8, kv_group_size=32, quantized_kv_start=0, store=store
    )
    list(steps)
    assert store.stats.tokens_reused == 29  # from before they are quantised
    quantized = tmp_path / "quantized"
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0, "prefill_step_size": 16}
    filled(model, **options).save(quantized)
    four = PromptCacheStore(model)
    assert four.load(quantized).entries
    list(generate_step(PROMPT, model, max_tokens=1, store=four, **{**options, "kv_bits": 4}))
    assert four.stats.tokens_reused <= 16  # what 8 bits gave is of no use


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    model, tokenizer = mlx_rewind.load()
    _, draft_tokenizer = mlx_rewind.load(SHIPPED_DRAFT)
    store = PromptCacheStore(model, tokenizer)
    prompt = tokenizer.encode("In the beginning")
    draft = mlx_rewind.load_draft(None, tokenizer)
    list(generate_step(prompt, model, drafter=draft, max_tokens=8, store=store))
    store.save(tmp_path)
    same = PromptCacheStore(mlx_rewind.load(SHIPPED)[0], draft_tokenizer)
    assert same.load(tmp_path).refused == {}
    draft_tokenizer.add_tokens(["<|other|>"])
    other = PromptCacheStore(model, draft_tokenizer)
    report = other.load(tmp_path)
    assert report.entries == 0
    assert all("another tokenizer" in reason for reason in report.refused.values())


def test_draft_caches_are_saved_too(tmp_path: Path) -> None:
    model, draft = zoo.build("llama"), DraftModel(zoo.build("lfm2"))
    store = PromptCacheStore(model)
    list(generate_step(PROMPT, model, drafter=draft, max_tokens=8, store=store))
    store.save(tmp_path)
    other = PromptCacheStore(model)
    assert other.load(tmp_path).entries == store.stats.entries
    cache = make_prompt_cache(draft.model)
    assert other.resume(PROMPT, cache, model=draft.model) == 29


def test_readers_see_whole_entries_while_another_saves(tmp_path: Path) -> None:
    model = zoo.build("lfm2")
    caches = {}
    for length in range(3, 31, 3):
        caches[length] = make_prompt_cache(model)
        model(mx.array([PROMPT[:length]]), cache=caches[length])
        mx.eval([entry.state for entry in caches[length]])
    done = threading.Event()
    problems: list[str] = []

    def write() -> None:
        for turn in range(12):
            store = PromptCacheStore(model)
            for length in list(caches)[turn % 3 :: 2]:
                store.insert(PROMPT[:length], caches[length])
            store.save(tmp_path)
        done.set()

    tmp_path.mkdir(exist_ok=True)
    writer = threading.Thread(target=write)
    writer.start()
    loads = 0
    while not done.is_set():
        store = PromptCacheStore(model)
        reasons = store.load(tmp_path).refused.values()
        problems += [reason for reason in reasons if not re.search("missing|went away", reason)]
        for entry in store.entries:
            cache, length = store.fetch([*entry.tokens, 0])
            zoo.assert_state_equal(cache, caches[length])
            loads += 1
    writer.join()
    assert problems == []
    assert loads > 10
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no store at"):
        PromptCacheStore(zoo.build("lfm2")).load(tmp_path / "nowhere")
