"""Nothing that a round records outlives it, and nothing of a request outlives the request."""

import gc
import weakref
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_rewind
import zoo
from mlx_rewind import DraftModel, NGram, generate_step
from mlx_rewind.bench.memory import compare
from mlx_rewind.cache import retrace
from mlx_rewind.memory import bytes_for

PROMPT = zoo.PROMPTS[1]


class Wrong:
    """Mostly wrong: every round rejects something."""

    def propose(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
        return [(tokens[-1] * 7 + i) % zoo.VOCAB for i in range(num_draft_tokens)]


def active_memory() -> int:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
def test_memory_is_that_of_plain_decoding_and_one_rounds_records(name: str) -> None:
    model = zoo.build(name)
    found = compare(model, PROMPT, 2000, 4)
    assert found.tokens == (500, 2000)
    caches = [bytes_for(model, None, len(PROMPT) + tokens, 0) for tokens in found.tokens]
    # The few small arrays of the step in flight come and go: less than a byte per token.
    assert 0 < found.plain[1] - found.plain[0] <= caches[1] - caches[0] + 1024
    assert 0 < found.records < 200_000
    assert found.flat, found


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "gpt_oss", "falcon_h1"])
def test_fifty_requests_leave_nothing(name: str) -> None:
    model = zoo.build(name)
    drafters = (Wrong(), NGram(), DraftModel(model))
    caches: list[weakref.ref[Any]] = []

    def serve(number: int) -> None:
        cache = make_prompt_cache(model)
        caches.extend(weakref.ref(entry) for entry in cache)
        steps = generate_step(
            PROMPT, model, drafter=drafters[number % 3], max_tokens=20, prompt_cache=cache
        )
        for count, _ in enumerate(steps):
            if number % 3 == 0 and count == 7:
                steps.close()

    for number in range(6):
        serve(number)
    before = active_memory()
    for number in range(50):
        serve(number)
    assert active_memory() <= before
    assert not any(cache() for cache in caches)
    assert not retrace._tapes


def test_speculating_caches_need_no_stop_to_be_freed() -> None:
    model = zoo.build("qwen3_5")
    before = active_memory()
    cache = make_prompt_cache(model)
    mlx_rewind.start_speculation(model, cache)
    for token in range(80):
        mx.eval(model(mx.array([[token]]), cache=cache))
    assert active_memory() > before
    entries = [weakref.ref(entry) for entry in cache]
    del cache
    assert active_memory() <= before
    assert not any(entry() for entry in entries)
