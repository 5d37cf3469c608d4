"""The store of prompt caches: what starts from it is what starts cold, on every kind of cache."""

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

import mlx_rewind
import zoo
from mlx_rewind import (
    DraftModel,
    Engine,
    PromptCacheStore,
    Request,
    Round,
    UnsupportedCacheError,
    UnsupportedModelError,
    generate_step,
)
from mlx_rewind.bench.measure import active_memory
from mlx_rewind.target import Target

PROMPT = zoo.PROMPTS[2][:30]
PLAN = [2, 0, 3, None, 1]

#: How far a boundary is from a cold prefill of its key: by the kernels of mlx-lm alone.
BOUNDARY = {"qwen3_5": 0.0, "lfm2": 0.0, "llama": 0.0, "kimi_linear": 1e-5, "mamba2": 1e-5}
BOUNDARY["gpt_oss"] = 1e-5
FAMILIES = pytest.mark.parametrize("name", BOUNDARY)


def cold(model: nn.Module, tokens: Sequence[int]) -> list[Any]:
    """A fresh cache, fed `tokens` in one forward."""
    cache = make_prompt_cache(model)
    model(mx.array([list(tokens)]), cache=cache)
    return cache


def run(
    model: nn.Module, store: PromptCacheStore, prompt: list[int], n: int, **options: Any
) -> int:
    """Generates with a drafter that is wrong in most rounds; compares with plain decoding.

    Returns the tokens that were reused.
    """
    expected = zoo.reference(model, prompt, n).tokens
    drafter = zoo.Scripted(expected, PLAN, prompt_length=len(prompt))
    before = store.stats.tokens_reused
    steps = generate_step(prompt, model, drafter=drafter, max_tokens=n, store=store, **options)
    assert [token for token, _, _ in steps] == expected
    return store.stats.tokens_reused - before


def assert_entries_are_cold(model: nn.Module, store: PromptCacheStore, tolerance: float) -> None:
    assert store.entries
    for entry in store.entries:
        cache, length = store.fetch([*entry.tokens, 0])
        assert length == len(entry.tokens)
        zoo.assert_state_equal(cache, cold(model, entry.tokens), tolerance)


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every forward of a target."""
    windows: list[int] = []
    stock = Target.__call__

    def call(self: Target, window: mx.array, cache: list[Any]) -> Any:
        windows.append(window.shape[1])
        return stock(self, window, cache)

    monkeypatch.setattr(Target, "__call__", call)
    return windows


# -- conversations --------------------------------------------------------------------------------


@FAMILIES
def test_turns_start_from_what_was_read_and_emitted(name: str) -> None:
    model = zoo.build(name)
    store = PromptCacheStore(model, interval=8)
    assert run(model, store, PROMPT, 10, boundaries=[5, 20]) == 0
    answer = zoo.reference(model, PROMPT, 10).tokens
    turn = [*PROMPT, *answer, 5, 6, 7, 8, 9]
    assert run(model, store, turn, 10) == 39  # the last token of the answer was never fed
    assert run(model, store, PROMPT, 10) == 29  # asked again
    assert run(model, store, PROMPT[:20], 10) == (19 if name == "llama" else 16)
    edited = [*PROMPT[:22], 1, 2, 3]
    assert run(model, store, edited, 10) == (22 if name == "llama" else 20)
    assert store.stats.hits == 4
    assert store.stats.requests == 5
    assert_entries_are_cold(model, store, BOUNDARY[name])


@FAMILIES
def test_entries_of_interleaved_requests_are_those_of_a_cold_prefill(name: str) -> None:
    """Twenty requests over shared beginnings, together in an engine, with many rejections."""
    model, rng = zoo.build(name), random.Random(3)
    store = PromptCacheStore(model, interval=8)
    engine = Engine(model, max_rows=3, prefill_step_size=16, store=store)
    handles = []
    for i in range(20):
        prompt = PROMPT[: rng.choice([9, 17, 30])] + [rng.randrange(97) for _ in range(i % 4)]
        if handles and handles[-1].done and i % 3 == 0:
            prompt = [*handles[-1].request.prompt, *handles[-1].tokens, 7, i]
        n = rng.randrange(2, 9)
        right = zoo.reference(model, prompt, n).tokens
        drafter = zoo.Scripted(right, rng.sample(PLAN, 5), prompt_length=len(prompt))
        handles.append(engine.submit(Request(prompt, max_tokens=n, drafter=drafter)))
        for _ in range(rng.randrange(4)):
            engine.step()
    for _ in engine:
        pass
    for handle in handles:
        prompt = list(handle.request.prompt)
        assert handle.error is None
        assert handle.tokens == zoo.reference(model, prompt, len(handle.tokens)).tokens
    stats = store.stats
    assert stats.requests == 20
    assert stats.hits > 10
    assert sum(handle.cached_tokens for handle in handles) == stats.tokens_reused > 150
    assert_entries_are_cold(model, store, BOUNDARY[name])


def test_prompts_of_a_batch_start_from_the_store() -> None:
    model, tokenizer = mlx_rewind.load()
    store = PromptCacheStore(model, tokenizer, interval=8)
    prompts = ["import os", "import os\nimport sys\n\n\ndef main(arguments):", "In the beginning"]
    cold = mlx_rewind.batch_generate(model, tokenizer, prompts, max_tokens=12)
    for _ in range(2):
        found = mlx_rewind.batch_generate(model, tokenizer, prompts, max_tokens=12, store=store)
        assert found.tokens == cold.tokens
    assert store.stats.requests == 6
    assert store.stats.hits >= 3


def test_a_second_turn_feeds_only_what_is_new(fed: list[int]) -> None:
    model = zoo.build("qwen3_5")
    store = PromptCacheStore(model)
    prompt = [(5 * i * i + 11 * i + 3) % zoo.VOCAB for i in range(2000)]
    answer = [t for t, _, _ in generate_step(prompt, model, max_tokens=20, store=store)]
    fed.clear()
    turn = [*prompt, *answer, 1, 2, 3, 4, 5]
    second = [t for t, _, _ in generate_step(turn, model, max_tokens=1, store=store)]
    assert fed == [5, 1]  # the last token of the answer, four new ones; then the last new one
    assert second == [t for t, _, _ in generate_step(turn, model, max_tokens=1)]


def test_a_stop_inside_an_accepted_block_leaves_what_was_emitted() -> None:
    """And nothing of the rest of the block, in the target's caches or the draft model's."""
    model = zoo.build("qwen3_5")
    draft = DraftModel(zoo.build("qwen3_5", fresh=True))  # always right
    store = PromptCacheStore(model)
    steps = generate_step(PROMPT, model, drafter=draft, max_tokens=20, store=store)
    emitted = [next(steps)[0] for _ in range(2)]
    steps.close()
    assert emitted == zoo.reference(model, PROMPT, 20).tokens[:2]
    assert max(len(entry.tokens) for entry in store.entries) == 31
    assert_entries_are_cold(model, store, 0.0)
    turn, before = [*PROMPT, *emitted, 1, 2, 3, 4, 5], store.stats.tokens_reused
    again = list(generate_step(turn, model, drafter=draft, max_tokens=10, store=store))
    assert store.stats.tokens_reused - before == 31
    expected = zoo.reference(model, turn, 10)
    assert [token for token, _, _ in again] == expected.tokens
    for (_, logprobs, _), plain in zip(again, expected.logprobs, strict=True):
        assert mx.array_equal(logprobs, plain)
    assert sum(from_draft for *_, from_draft in again) >= 7  # the draft caches were right, too


def test_nothing_is_left_after_a_failure() -> None:
    model = zoo.build("qwen3_5")

    class Fails:
        def propose(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
            if len(tokens) > 33:
                raise OSError("no more")
            return []

    store = PromptCacheStore(model)
    with pytest.raises(OSError, match="no more"):
        list(generate_step(PROMPT, model, drafter=Fails(), store=store))
    assert {len(entry.tokens) for entry in store.entries} <= {29, 33}
    assert_entries_are_cold(model, store, 0.0)


# -- snapshots ------------------------------------------------------------------------------------

KINDS = """deepseek_v32 falcon_h1 gemma3_text kimi_linear lfm2 llama4 longcat_flash mamba2 qwen3_5
recurrent_gemma rwkv7""".split()


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_cache_comes_back_as_it_was(name: str) -> None:
    """And what one request does to it does not show in the store, nor in another request's."""
    model, tokens = zoo.build(name), zoo.PROMPTS[2]
    store = PromptCacheStore(model)
    live = cold(model, tokens[:20])
    assert store.insert(tokens[:20], live)
    for part in (tokens[20:21], tokens[21:30], tokens[30:31]):
        model(mx.array([part]), cache=live)
    (first, a), (second, b) = store.fetch(tokens), store.fetch(tokens)
    assert a == b == 20
    model(mx.array([tokens[:5]]), cache=second)
    plain = cold(model, tokens[:20])
    zoo.assert_state_equal(first, plain)
    for part in (tokens[20:21], tokens[21:30], tokens[30:31]):
        assert mx.array_equal(
            model(mx.array([part]), cache=first), model(mx.array([part]), cache=plain)
        )
    zoo.assert_state_equal(first, live)
    third, _ = store.fetch(tokens)
    zoo.assert_state_equal(third, cold(model, tokens[:20]))


def test_a_ring_after_single_steps_comes_back_in_time_order() -> None:
    model, tokens = zoo.build("gpt_oss"), zoo.PROMPTS[2]
    store = PromptCacheStore(model)
    live = zoo.feed(model, tokens[:21])
    store.insert(tokens[:21], live)
    cache, _ = store.fetch(tokens)
    zoo.assert_state_equal(cache, live)
    rings = [entry for entry in cache if type(entry) is RotatingKVCache]
    assert all(ring._idx == ring.max_size == ring.keys.shape[2] for ring in rings)
    store.insert(tokens[:30], cold(model, tokens[:30]))  # which holds more than any query sees
    cache, _ = store.fetch(tokens)
    rings = [entry for entry in cache if type(entry) is RotatingKVCache]
    assert all(ring.max_size == ring.keys.shape[2] for ring in rings)


def test_caches_that_are_not_one_state_are_refused_with_both_numbers() -> None:
    model = zoo.build("qwen3_5")
    store = PromptCacheStore(model)
    mixed = cold(model, PROMPT[:20])
    for i, entry in enumerate(cold(model, PROMPT[:18])):
        if type(entry) is ArraysCache:
            mixed[i] = entry
    with pytest.raises(UnsupportedCacheError, match=r"18 .*20|20 .*18"):
        store.insert(PROMPT[:20], mixed)
    with pytest.raises(UnsupportedCacheError, match="holds 20 tokens, the key has 19"):
        store.insert(PROMPT[:19], cold(model, PROMPT[:20]))
    half = cold(model, PROMPT[:20])
    half[3] = KVCache()
    with pytest.raises(UnsupportedCacheError, match=r"20 .*0|0 .*20"):
        store.insert(PROMPT[:20], half)
    with pytest.raises(UnsupportedCacheError, match="not one of this model's"):
        store.insert(PROMPT[:20], cold(zoo.build("lfm2"), PROMPT[:20]))
    cache = cold(model, PROMPT[:20])
    with Round(model, cache), pytest.raises(UnsupportedCacheError, match="open Round"):
        store.insert(PROMPT[:20], cache)
    assert not store.entries


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss", "llama"])
def test_the_size_that_is_told_is_that_of_the_memory(name: str) -> None:
    """Buffers, chunks and what was split off are not kept alive by a part of them."""
    model = zoo.build(name)
    tokens = [(5 * i * i + 11 * i + 3) % zoo.VOCAB for i in range(700)]
    cold(model, tokens[:3])
    store = PromptCacheStore(model)
    store.insert(PROMPT, cold(model, PROMPT))  # what is made once
    store.clear()
    before = active_memory()
    for length in (700, 300, 301, 650):
        store.insert(tokens[:length], cold(model, tokens[:length]))
    store.insert([*tokens[:400], 1, 2], cold(model, [*tokens[:400], 1, 2]))
    held = active_memory() - before
    assert store.stats.entries == 5
    assert held / 1.5 < store.stats.bytes < held * 1.5
    assert (
        store.stats.bytes
        < 1.5 * sum(x.nbytes for _, x in zoo.state(cold(model, tokens))) + 5 * 60_000
    )  # shared beginnings are there once


# -- limits ---------------------------------------------------------------------------------------


def filled(model: nn.Module, *keys: list[int], **limits: int) -> PromptCacheStore:
    store = PromptCacheStore(model, **limits)
    for key in keys:
        store.insert(key, cold(model, key))
    return store


def test_what_was_not_used_for_longest_goes_first() -> None:
    model = zoo.build("qwen3_5")
    a, b, c, d = ([i, *PROMPT[:10]] for i in range(4))
    store = filled(model, a, b, c, max_entries=3)
    store.fetch([*a, 1])
    store.insert(d, cold(model, d))
    assert [entry.tokens[0] for entry in store.entries] == [2, 0, 3]
    assert store.stats.evictions == 1
    size = store.stats.bytes // 3
    store = filled(model, a, b, c, max_bytes=2 * size)
    assert [entry.tokens[0] for entry in store.entries] == [1, 2]
    assert store.stats.bytes <= 2 * size


def test_what_is_pinned_stays_and_what_cannot_fit_is_refused() -> None:
    model = zoo.build("qwen3_5")
    a, b, c = ([i, *PROMPT[:10]] for i in range(3))
    store = filled(model, a, b, max_entries=2)
    store.pin(a)
    store.insert(c, cold(model, c))
    assert {entry.tokens[0] for entry in store.entries} == {0, 2}
    store.pin(c)
    assert not store.insert(b, cold(model, b))
    assert store.stats.refused == 1
    store.unpin(a)
    assert store.insert(b, cold(model, b))
    assert {entry.tokens[0] for entry in store.entries} == {1, 2}
    with pytest.raises(KeyError, match="not pinned"):
        store.unpin(b)
    with pytest.raises(KeyError, match="no boundary"):
        store.pin(a)
    store.clear()
    assert store.stats.bytes == store.stats.entries == 0


def test_bytes_are_those_of_the_nodes_whatever_happened() -> None:
    model, rng = zoo.build("lfm2"), random.Random(1)
    store = PromptCacheStore(model, max_bytes=30_000)
    for _ in range(60):
        key = PROMPT[: rng.randrange(1, 20)] + [rng.randrange(5) for _ in range(rng.randrange(8))]
        store.insert(key, cold(model, key))
        counted = store.stats.bytes
        store._recount()
        assert counted == store.stats.bytes <= 30_000
    assert store.stats.evictions > 10
    assert_entries_are_cold(model, store, 0.0)


# -- what depends on where chunks end -------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 24, 45])
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_quantised_caches_are_reused_where_a_cold_run_would_have_them(
    name: str, start: int
) -> None:
    model = zoo.build(name) if name == "llama" else zoo.build(name, head_dim=32)
    store = PromptCacheStore(model, interval=8)
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    for prompt in (zoo.PROMPTS[2], PROMPT):  # not quantised at all
        run(model, store, prompt, 4)
    already, reused = store.stats.tokens_reused, []
    prompts = [PROMPT, [*zoo.PROMPTS[2], 3, 4], PROMPT, PROMPT[:25]]
    for prompt in prompts:
        plain = stock_generate_step(
            mx.array(prompt), model, max_tokens=12, prefill_step_size=16, **options
        )
        ours = generate_step(
            prompt, model, max_tokens=12, prefill_step_size=16, store=store, **options
        )
        for (token, logprobs), (t, ours_logprobs, _) in zip(plain, ours, strict=True):
            assert t == token
            assert mx.array_equal(logprobs, ours_logprobs)
        reused.append(store.stats.tokens_reused - already)
    assert 0 < reused[0] < reused[1] < reused[2]
    answer = [t for t, _, _ in generate_step(PROMPT, model, max_tokens=12, store=store)]
    assert answer == zoo.reference(model, PROMPT, 12).tokens


def test_rings_that_keep_their_first_tokens() -> None:
    model = zoo.build("mimo")
    store = PromptCacheStore(model, interval=4)
    for prompt in (PROMPT[:12], PROMPT, [*PROMPT, 1, 2], PROMPT[:14]):
        options = {"max_tokens": 12, "max_kv_size": 16, "prefill_step_size": 8}
        plain = stock_generate_step(mx.array(prompt), model, **options)
        ours = generate_step(prompt, model, store=store, **options)
        assert [t for t, _, _ in ours] == [t for t, _ in plain]
    assert store.stats.hits == 3


def test_positions_beyond_those_of_a_dynamic_rope() -> None:
    scaling = {"type": "dynamic", "factor": 2.0}
    model = zoo.build("internlm2", max_position_embeddings=24, rope_scaling=scaling)
    store = PromptCacheStore(model)
    prompt = zoo.PROMPTS[2]
    for part in (prompt[:20], prompt[:30], prompt, prompt[:22]):
        plain = stock_generate_step(mx.array(part), model, max_tokens=8, prefill_step_size=16)
        ours = generate_step(part, model, max_tokens=8, prefill_step_size=16, store=store)
        for (token, logprobs), (t, ours_logprobs, _) in zip(plain, ours, strict=True):
            assert t == token
            assert mx.array_equal(logprobs, ours_logprobs)
    assert store.stats.hits == 3


def test_a_model_whose_windows_are_wrong_is_refused() -> None:
    model = zoo.build("plamo3")
    with pytest.raises(UnsupportedModelError, match="Generate without a store"):
        generate_step(PROMPT, model, store=PromptCacheStore(model))


def test_a_store_is_for_one_model_and_for_fresh_caches() -> None:
    model = zoo.build("qwen3_5")
    store = PromptCacheStore(model)
    with pytest.raises(ValueError, match="another model object"):
        generate_step(PROMPT, zoo.build("llama"), store=store)
    with pytest.raises(ValueError, match="either store or prompt_cache"):
        generate_step(PROMPT, model, store=store, prompt_cache=make_prompt_cache(model))
    with pytest.raises(ValueError, match="boundaries must be 1 or more"):
        generate_step(PROMPT, model, store=store, boundaries=[0])
    with pytest.raises(ValueError, match="max_bytes"):
        PromptCacheStore(model, max_bytes=-1)
    with pytest.raises(ValueError, match="at least one token"):
        store.insert([], make_prompt_cache(model))


# -- drafters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lfm2", "gpt_oss", "qwen3_5"])
def test_a_draft_model_reads_no_prompt_twice(name: str, fed: list[int]) -> None:
    model, draft = zoo.build("llama"), DraftModel(zoo.build(name))
    store = PromptCacheStore(model)
    fed_by_draft: list[int] = []
    stock = draft.forward

    def forward(window: mx.array, cache: list[Any]) -> Any:
        fed_by_draft.append(window.shape[1])
        return stock(window, cache)

    draft.forward = forward  # type: ignore[assignment]
    answer = zoo.reference(model, PROMPT, 10).tokens
    longest = []
    for prompt in (PROMPT, [*PROMPT, *answer, 1, 2, 3], PROMPT):
        steps = generate_step(prompt, model, drafter=draft, max_tokens=10, store=store)
        assert [t for t, _, _ in steps] == zoo.reference(model, prompt, 10).tokens
        longest.append(max(fed_by_draft))
        fed_by_draft.clear()
    assert longest[0] == 29
    assert longest[1] <= 8
    assert longest[2] == 1


def test_chunks_end_where_those_of_a_cold_prefill_do(fed: list[int]) -> None:
    model = zoo.build("qwen3_5")
    store = PromptCacheStore(model)
    prompt = zoo.PROMPTS[2]
    options: dict[str, Any] = {"max_tokens": 1, "prefill_step_size": 8, "store": store}
    list(generate_step(prompt[:12], model, **options))
    fed.clear()
    list(generate_step(prompt, model, **options))
    assert list(accumulate(fed, initial=12)) == [12, 16, 24, 32, 39, 40]


def test_a_head_goes_on_where_it_was() -> None:
    """Over three turns it drafts what it drafts when it reads everything again."""
    model, tokenizer = mlx_rewind.load()
    head = mlx_rewind.load_mtp(None, model)
    prompt = tokenizer.encode("def mean(values):\n    ")
    counts = []
    for store in (None, PromptCacheStore(model)):
        tokens, count = list(prompt), []
        for _ in range(3):
            for response in mlx_rewind.stream_generate(
                model, tokenizer, tokens, drafter=head, max_tokens=16, store=store
            ):
                tokens.append(response.token)
            count += [response.draft_n, response.draft_n_accepted, tuple(tokens)]
        counts.append(count)
        assert response.cached_tokens == (0 if store is None else len(tokens) - 17)
    assert store is not None
    of_head = [node for key, space in store._spaces.items() if ":" in key.model
               for node in space.tree if node.boundary]  # fmt: skip
    assert len(of_head) == len(store.entries)
    assert counts[0] == counts[1]
