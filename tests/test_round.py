"""Rounds over real models: whatever was fed, what remains is as if the rest had never been."""

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache, make_prompt_cache

import mlx_rewind
import zoo
from mlx_rewind import Round, UnsupportedCacheError, UnsupportedModelError

FAMILIES = zoo.FAMILIES
KEPT = [3, 50, 8, 91, 11, 26, 77, 14, 33, 60]
TAILS = ([20, 40, 60, 80, 1, 2, 4, 6, 9, 12], [95, 30, 22, 5, 0, 7, 13, 90, 66, 19])


def prompt_of(length: int) -> list[int]:
    return [(5 * i * i + 11 * i + 3) % zoo.VOCAB for i in range(length)]


def fed(model: nn.Module, tokens: list[int], cache: list[Any], sizes: list[int]) -> None:
    """Feeds `tokens` in forwards of the given sizes."""
    assert sum(sizes) == len(tokens)
    for size in sizes:
        model(mx.array([tokens[:size]]), cache=cache)
        tokens = tokens[size:]


def next_logits(model: nn.Module, cache: list[Any]) -> mx.array:
    return model(mx.array([[42]]), cache=copy.deepcopy(cache))[0, -1]


def relative(a: mx.array, b: mx.array) -> float:
    return (mx.abs(a - b).max() / mx.abs(b).max()).item()


def check_every_count(name: str, prompt: int, sizes: list[int], hint: bool = False) -> None:
    """Commits every possible count after a round of forwards of `sizes`, with two tails each."""
    model, total = zoo.build(name), sum(sizes)
    start = zoo.feed(model, prompt_of(prompt))
    expected = copy.deepcopy(start)
    for kept in range(total + 1):
        results = []
        for tail in TAILS:
            cache = copy.deepcopy(start)
            with Round(model, cache, single_steps=total if hint else None) as round_:
                fed(model, KEPT[:kept] + tail[: total - kept], cache, sizes)
                round_.commit(kept)
            results.append(cache)
        zoo.assert_state_equal(results[0], results[1])
        zoo.assert_state_equal(results[0], expected, zoo.round_tolerance(name))
        if kept == 0:
            zoo.assert_state_equal(results[0], start)
        difference = relative(next_logits(model, results[0]), next_logits(model, expected))
        assert difference <= zoo.round_tolerance(name)
        if kept < total:
            fed(model, KEPT[kept : kept + 1], expected, [1])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("prompt", [1, 7, 40])
def test_one_window(name: str, prompt: int) -> None:
    check_every_count(name, prompt, [5])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("prompt", [1, 7, 20])
@pytest.mark.parametrize("hint", [False, True])
def test_single_token_forwards(name: str, prompt: int, hint: bool) -> None:
    check_every_count(name, prompt, [1] * 4, hint)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("prompt", [0, 1, 20])
def test_one_token_that_is_kept_or_not(name: str, prompt: int) -> None:
    model = zoo.build(name)
    start = zoo.feed(model, prompt_of(prompt)) if prompt else make_prompt_cache(model)
    expected, cache = copy.deepcopy(start), copy.deepcopy(start)
    fed(model, KEPT[:1], expected, [1])
    for route in ([1], [0], [0, 1], [1, 0], [1, 0, 1]):
        with Round(model, cache, whole=True) as round_:
            fed(model, KEPT[:1], cache, [1])
            for kept in route:
                round_.rewind(kept)
                zoo.assert_state_equal(cache, expected if kept else start)
            with pytest.raises(ValueError, match="kept must be within"):
                round_.commit(2)
        zoo.assert_state_equal(cache, start)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3_text", "llama4", "qwen3_5", "lfm2"])
@pytest.mark.parametrize("sizes", [[10], [1] * 10, [3, 1, 1, 4], [1, 4, 1]], ids=str)
def test_wide_and_mixed_rounds(name: str, sizes: list[int]) -> None:
    check_every_count(name, 7, sizes)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_round_on_an_empty_cache(name: str) -> None:
    model = zoo.build(name)
    cache = make_prompt_cache(model)
    with Round(model, cache) as round_:
        fed(model, KEPT[:4], cache, [4])
        round_.commit(0)
    assert all(entry.empty() for entry in cache)
    with Round(model, cache) as round_:
        fed(model, KEPT[:4], cache, [4])
        round_.commit(2)
    zoo.assert_state_equal(cache, zoo.feed(model, KEPT[:2]), zoo.round_tolerance(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_rounds_follow_each_other(name: str) -> None:
    model = zoo.build(name)
    text = prompt_of(60)
    cache, committed = make_prompt_cache(model), 0
    for kept in (4, 0, 1, 2, 3, 4, 0, 0, 1, 4, 2):
        with Round(model, cache) as round_:
            fed(model, text[committed : committed + kept] + TAILS[0][: 4 - kept], cache, [4])
            round_.commit(kept)
        committed += kept
    zoo.assert_state_equal(cache, zoo.feed(model, text[:committed]), zoo.round_tolerance(name))


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=5, deadline=None)
@given(route=st.lists(st.integers(0, 4), max_size=5), kept=st.integers(0, 4))
def test_rewinding_may_go_anywhere(name: str, route: list[int], kept: int) -> None:
    model = zoo.build(name)
    start = zoo.feed(model, prompt_of(9))
    caches = [copy.deepcopy(start), copy.deepcopy(start)]
    for cache, stops in zip(caches, ([], route), strict=True):
        with Round(model, cache) as round_:
            fed(model, KEPT[:4], cache, [4])
            for stop in stops:
                round_.rewind(stop)
            round_.commit(kept)
    zoo.assert_state_equal(*caches)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("abandon", ["leave", "raise", "interrupt"])
def test_leaving_takes_everything_back(name: str, abandon: str) -> None:
    model = zoo.build(name)
    cache = zoo.feed(model, prompt_of(11))
    before = copy.deepcopy(cache)

    def leave() -> None:
        with Round(model, cache):
            fed(model, KEPT[:3], cache, [3])
            if abandon == "raise":
                raise LookupError
            if abandon == "interrupt":
                raise KeyboardInterrupt

    if abandon == "leave":
        leave()
    else:
        with pytest.raises((LookupError, KeyboardInterrupt)):
            leave()
    zoo.assert_state_equal(cache, before)


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "gpt_oss", "llama4"])
def test_a_forward_that_fails_half_way_is_taken_back(name: str) -> None:
    model = zoo.build(name, fresh=True)
    cache = zoo.feed(model, prompt_of(11))
    before = copy.deepcopy(cache)
    last = model.layers[-1]

    class Broken(type(last)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise LookupError("the last layer fails")

    kind, last.__class__ = type(last), Broken
    with pytest.raises(LookupError), Round(model, cache):
        fed(model, KEPT[:3], cache, [3])
    last.__class__ = kind
    zoo.assert_state_equal(cache, before)


# --- counts and life -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
@pytest.mark.parametrize("kept", [-1, 5, 2.0, "2", None, [1, 2], [7], [-1]], ids=repr)
def test_a_bad_count_changes_nothing(name: str, kept: Any) -> None:
    model = zoo.build(name)
    cache = zoo.feed(model, prompt_of(9))
    with Round(model, cache) as round_:
        fed(model, KEPT[:4], cache, [4])
        after = copy.deepcopy(cache)
        with pytest.raises(ValueError, match=r"kept|row"):
            round_.commit(kept)
        zoo.assert_state_equal(cache, after)
        round_.commit([2])
    expected = zoo.feed(model, prompt_of(9) + KEPT[:2])
    zoo.assert_state_equal(cache, expected, zoo.round_tolerance(name))


def test_a_closed_round_refuses() -> None:
    model = zoo.build("qwen3_5")
    cache = make_prompt_cache(model)
    with Round(model, cache) as round_:
        fed(model, KEPT[:2], cache, [2])
        round_.commit(1)
        with pytest.raises(RuntimeError, match="closed"):
            round_.commit(1)
    with pytest.raises(RuntimeError, match="closed"):
        round_.seal()


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss", "llama4"])
def test_a_cache_records_for_one_round_at_a_time(name: str) -> None:
    model = zoo.build(name)
    cache = zoo.feed(model, prompt_of(9))
    before = copy.deepcopy(cache)
    with Round(model, cache) as round_:
        with pytest.raises(RuntimeError, match="already inside"):
            Round(model, cache).open()
        fed(model, KEPT[:2], cache, [2])
        round_.commit(2)
    with Round(model, cache) as round_:
        fed(model, KEPT[2:3], cache, [1])
        round_.commit(0)
    expected = zoo.feed(model, prompt_of(9) + KEPT[:2])
    zoo.assert_state_equal(cache, expected, zoo.round_tolerance(name))
    assert before[0].__dict__.keys() == cache[0].__dict__.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sealed_round_waits_under_a_second_one(name: str) -> None:
    """As a decoder does that launches the next step before it has emitted the last."""
    model = zoo.build(name)
    start = zoo.feed(model, prompt_of(11))
    for first_kept in (0, 1):
        cache = copy.deepcopy(start)
        first = Round(model, cache, single_steps=1).open()
        fed(model, KEPT[:1], cache, [1])
        first.seal()
        second = Round(model, cache, single_steps=1).open()
        fed(model, KEPT[1:2], cache, [1])
        second.rewind(0)
        zoo.assert_state_equal(cache, zoo.feed(model, prompt_of(11) + KEPT[:1]))
        second.rewind(1)
        zoo.assert_state_equal(cache, zoo.feed(model, prompt_of(11) + KEPT[:2]))
        second.abort()
        first.commit(first_kept)
        zoo.assert_state_equal(cache, zoo.feed(model, prompt_of(11) + KEPT[:first_kept]))


# --- refusals --------------------------------------------------------------------------------


def test_an_unknown_cache_class_is_refused_by_name() -> None:
    class Homemade(KVCache):
        pass

    model = zoo.build("llama")
    for stranger in (Homemade(), BatchKVCache([0])):
        cache = make_prompt_cache(model)
        cache[1] = stranger
        with pytest.raises(UnsupportedCacheError, match=f"cache 1 is a {type(stranger).__name__}"):
            Round(model, cache)


def test_a_layer_that_hides_its_slots_is_refused_by_name() -> None:
    class Outside(nn.Module):
        """Writes its slots from the model itself, where no layer call can be recorded."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 7)

        def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
            h = self.embed(tokens)
            cache[0][0] = h[:, -1:]
            return h

        def make_cache(self) -> list[Any]:
            return [ArraysCache(1)]

    class Sneaky(Outside):
        def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
            h = self.embed(tokens)
            cache[0].cache = [h[:, -1:]]
            return h

    for kind, reason in ((Outside, "outside any layer"), (Sneaky, "cannot be observed")):
        model = kind()
        with pytest.raises(UnsupportedModelError, match=rf"cache 0 \(ArraysCache\).*{reason}"):
            Round(model, model.make_cache())


def test_a_batched_recurrent_cache_is_refused() -> None:
    model = zoo.build("qwen3_5")
    cache = make_prompt_cache(model)
    cache[0].lengths = mx.array([3])
    with pytest.raises(UnsupportedCacheError, match="batch"):
        Round(model, cache).open()
    cache[0].lengths = None
    with Round(model, cache) as round_:
        fed(model, KEPT[:1], cache, [1])
        round_.commit(1)


def test_a_cache_of_another_model_is_refused() -> None:
    cache = make_prompt_cache(zoo.build("lfm2"))
    with pytest.raises(UnsupportedCacheError, match="not one of this model's"):
        Round(zoo.build("qwen3_5"), cache)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cache_with_other_parts_is_refused(name: str) -> None:
    model = zoo.build(name)
    for cache in (make_prompt_cache(model)[:-1], [*make_prompt_cache(model), KVCache()], []):
        with pytest.raises(UnsupportedCacheError, match="not one of this model's"):
            mlx_rewind.generate_step([1], model, prompt_cache=cache)


def test_a_cache_with_other_heads_is_refused() -> None:
    history = zoo.feed(zoo.build("llama", head_dim=64), [1, 2, 3])
    with pytest.raises(UnsupportedCacheError, match=r"heads .* \(2, 64, 64\)"):
        mlx_rewind.generate_step([1], zoo.build("llama"), prompt_cache=history)


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss", "llama"])
def test_what_is_fed_behind_a_sealed_round_is_noticed(name: str) -> None:
    model = zoo.build(name)
    cache = zoo.feed(model, prompt_of(9))
    for kept in (2, 4):
        with pytest.raises(RuntimeError, match="sealed"), Round(model, cache) as round_:
            fed(model, KEPT[:4], cache, [4])
            round_.rewind(2)
            fed(model, KEPT[:2], cache, [2])
            round_.commit(kept)
        cache = zoo.feed(model, prompt_of(9))


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss", "llama4"])
def test_a_rewind_that_fails_may_be_tried_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build(name)
    cache = zoo.feed(model, prompt_of(9))
    with Round(model, cache) as round_:
        fed(model, KEPT[:4], cache, [4])
        round_.seal()
        undo = list(round_._undos.values())[-1]

        def broken(kept: int) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(undo, "rewind", broken)
        with pytest.raises(KeyboardInterrupt):
            round_.rewind(3)
        zoo.assert_state_equal(cache, zoo.feed(model, prompt_of(9)))
        round_.commit(2)
    expected = zoo.feed(model, prompt_of(9) + KEPT[:2])
    zoo.assert_state_equal(cache, expected, zoo.round_tolerance(name))


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "kimi_linear", "falcon_h1", "gpt_oss"])
def test_halves_of_different_lengths_are_refused_with_both_numbers(name: str) -> None:
    model = zoo.build(name)
    mlx_rewind.attach(model)
    long, short = (zoo.feed(model, prompt_of(length)) for length in (20, 18))
    if name == "falcon_h1":
        long[0].caches = (short[0].caches[0], long[0].caches[1])
    else:
        long[0] = short[0]
    with pytest.raises(UnsupportedCacheError, match="18") as refusal:
        mlx_rewind.generate_step([1], model, prompt_cache=long)
    assert "20" in str(refusal.value)


# --- attaching -------------------------------------------------------------------------------


RECURRENT = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "mamba2", "lfm2", "falcon_h1", "kimi_linear"]


@pytest.mark.parametrize("name", RECURRENT)
def test_attaching_touches_instances_only(name: str) -> None:
    model, other = zoo.build(name, fresh=True), zoo.build(name, fresh=True)
    kinds = [type(module) for module in model.modules()]
    calls = [kind.__call__ for kind in kinds]
    names = [path for path, _ in nn.utils.tree_flatten(model.parameters())]
    first = mlx_rewind.attach(model)
    assert mlx_rewind.attach(model) is first
    swapped = [type(module) for module in model.modules()]
    assert swapped != kinds
    assert all(issubclass(new, old) for new, old in zip(swapped, kinds, strict=True))
    assert [kind.__call__ for kind in kinds] == calls
    assert [type(module) for module in other.modules()] == kinds
    assert [path for path, _ in nn.utils.tree_flatten(model.parameters())] == names
    mlx_rewind.detach(model)
    assert [type(module) for module in model.modules()] == kinds


def test_a_wrapper_and_its_inner_model_share_their_layers() -> None:
    inner = zoo.build("qwen3_5", fresh=True)
    text = inner.language_model
    mlx_rewind.attach(inner)
    mlx_rewind.attach(text)
    mlx_rewind.detach(inner)
    start = zoo.feed(text, prompt_of(5))
    with Round(text, start) as round_:
        fed(text, KEPT[:4], start, [4])
        round_.commit(2)
    zoo.assert_state_equal(start, zoo.feed(text, prompt_of(5) + KEPT[:2]))
    mlx_rewind.detach(text)


def test_a_copy_of_an_attached_model_records_on_its_own() -> None:
    model = zoo.build("qwen3_5", fresh=True)
    mlx_rewind.attach(model)
    twin = copy.deepcopy(model)
    mlx_rewind.detach(model)
    cache = zoo.feed(twin, prompt_of(5))
    with Round(twin, cache) as round_:
        fed(twin, KEPT[:4], cache, [4])
        round_.commit(2)
    zoo.assert_state_equal(cache, zoo.feed(model, prompt_of(5) + KEPT[:2]))


def test_nothing_outlives_a_round() -> None:
    from mlx_rewind.cache import retrace

    model = zoo.build("qwen3_5")
    cache = zoo.feed(model, prompt_of(5))
    with Round(model, cache) as round_:
        fed(model, KEPT[:4], cache, [4])
        assert len(retrace._tapes) == 3
        round_.commit(2)
    assert not retrace._tapes
    assert not round_._undos
