"""Stopping anywhere, on purpose or by failure, leaves caches that hold exactly the text so far."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.generate import stream_generate as stock_stream_generate
from mlx_lm.models.cache import make_prompt_cache

import mlx_rewind
import zoo
from mlx_rewind import DraftModel, generate_step
from mlx_rewind.cache import retrace

FAMILIES = zoo.FAMILIES
PROMPT = zoo.PROMPTS[1]
MIXED: list[int | None] = [2, 0, None, 4, 1]


class PlannedError(Exception):
    pass


def scripted(name: str, plan: list[int | None]) -> zoo.Scripted:
    return zoo.Scripted(zoo.reference(name, PROMPT, 40).tokens, plan, prompt_length=len(PROMPT))


def holds(model: Any, cache: list[Any], tokens: list[int], name: str) -> None:
    zoo.assert_state_equal(cache, zoo.feed(model, tokens), zoo.tolerance(name))


# --- closing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("plan", ["plain", "mixed", "all", "draft model"])
def test_close_after_any_token_and_go_on_with_mlx_lm(name: str, plan: str) -> None:
    model, expected = zoo.build(name), zoo.reference(name, PROMPT, 24).tokens
    drafter: Any = {
        "plain": None,
        "mixed": scripted(name, MIXED),
        "all": scripted(name, [4]),
        "draft model": DraftModel(model),
    }[plan]
    for taken in (1, 2, 3, 4, 5, 7, 10, 12):
        if isinstance(drafter, zoo.Scripted):
            drafter.calls.clear()
        cache = make_prompt_cache(model)
        steps = generate_step(PROMPT, model, drafter=drafter, max_tokens=30, prompt_cache=cache)
        tokens = [next(steps)[0] for _ in range(taken)]
        steps.close()
        assert tokens == expected[:taken]
        rest = stock_generate_step(
            mx.array(tokens[-1:]), model, max_tokens=24 - taken, prompt_cache=cache
        )
        assert tokens + [token for token, _ in rest] == expected


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss", "lfm2"])
def test_a_cache_goes_from_thread_to_thread(name: str) -> None:
    """Load here, decode in one thread, stop there, go on in a second one."""
    model, expected = zoo.build(name), zoo.reference(name, PROMPT, 24).tokens
    cache, tokens = make_prompt_cache(model), []

    def decode(prompt: list[int], count: int) -> None:
        drafter = zoo.Scripted(expected[len(tokens) :], [2, 0, 3], prompt_length=len(prompt))
        steps = generate_step(prompt, model, drafter=drafter, max_tokens=24, prompt_cache=cache)
        tokens.extend([next(steps)[0] for _ in range(count)])
        steps.close()

    for count in (6, 5, 8):
        prompt = tokens[-1:] or PROMPT
        worker = threading.Thread(target=decode, args=(prompt, count))
        worker.start()
        worker.join()
    assert tokens == expected[:19]


def test_a_generator_that_never_ran_changes_nothing() -> None:
    model = zoo.build("qwen3_5")
    cache = make_prompt_cache(model)
    generate_step(PROMPT, model, prompt_cache=cache).close()
    assert all(entry.empty() for entry in cache)


# --- failures --------------------------------------------------------------------------------


def failing(calls: int, inner: Any, error: type[BaseException] = PlannedError) -> Any:
    """`inner`, which raises at its call number `calls`."""
    count = iter(range(calls))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(count, None) is None:
            raise error("planned")
        return inner(*args, **kwargs)

    return call


class FailingDrafter:
    def __init__(self, name: str, calls: int, error: type[BaseException]) -> None:
        self.propose = failing(calls, scripted(name, MIXED).propose, error)


def argmax(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss", "falcon_h1", "llama4"])
@pytest.mark.parametrize("calls", [0, 1, 3, 6])
@pytest.mark.parametrize("error", [PlannedError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["drafter", "sampler", "processor", "plain sampler"])
def test_an_exception_leaves_the_text_so_far(
    name: str, calls: int, error: type[BaseException], where: str
) -> None:
    model = zoo.build(name)
    cache = make_prompt_cache(model)
    options: dict[str, Any] = {"drafter": scripted(name, MIXED)}
    if where == "drafter":
        options["drafter"] = FailingDrafter(name, calls, error)
    elif where == "processor":
        options["logits_processors"] = [failing(calls, lambda tokens, logits: logits, error)]
    else:
        options["sampler"] = failing(calls, argmax, error)
    if where == "plain sampler":
        del options["drafter"]
    tokens = []
    with pytest.raises(error):
        for token, *_ in generate_step(PROMPT, model, max_tokens=30, prompt_cache=cache, **options):
            tokens.append(token)
    assert tokens == zoo.reference(name, PROMPT, 40).tokens[: len(tokens)]
    holds(model, cache, (PROMPT + tokens)[:-1], name)


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss", "falcon_h1", "llama4"])
@pytest.mark.parametrize("plan", ["plain", "mixed"])
@pytest.mark.parametrize("forwards", [0, 1, 2, 3, 6])
def test_a_model_that_fails_leaves_the_text_so_far(name: str, plan: str, forwards: int) -> None:
    model = zoo.build(name, fresh=True)
    cache, tokens = zoo.feed(model, [8, 9]), []
    drafter = None
    if plan == "mixed":
        expected = zoo.reference(model, [8, 9, *PROMPT], 40).tokens
        drafter = zoo.Scripted(expected, MIXED, prompt_length=len(PROMPT))
    mlx_rewind.inspect(model)  # probes the model, so that only forwards of `cache` follow
    last = model.layers[-1]
    kind = type(last)
    call = failing(forwards, kind.__call__)

    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = any(value is cache[-1] for value in (*args, *kwargs.values()))
        return (call if ours else kind.__call__)(self, *args, **kwargs)

    broken = type("Broken", (kind,), {"__call__": guarded})
    last.__class__ = broken
    with pytest.raises(PlannedError):
        for token, *_ in generate_step(
            PROMPT, model, drafter=drafter, max_tokens=30, prompt_cache=cache
        ):
            tokens.append(token)
    last.__class__ = kind
    text = [8, 9] if forwards == 0 else ([8, 9, *PROMPT, *tokens])[:-1]
    holds(model, cache, text, name)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_a_failing_callback_leaves_what_the_cache_held(name: str, calls: int) -> None:
    model = zoo.build(name)
    cache = zoo.feed(model, zoo.PROMPTS[2])
    with pytest.raises(PlannedError):
        next(
            generate_step(
                list(range(20)),
                model,
                prompt_cache=cache,
                prefill_step_size=4,
                prompt_progress_callback=failing(calls, lambda done, total: None),
            )
        )
    holds(model, cache, zoo.PROMPTS[2], name)


def test_a_failing_first_read_leaves_the_prompt() -> None:
    model = zoo.build("qwen3_5")
    cache = make_prompt_cache(model)
    callback = failing(2, lambda done, total: None)
    with pytest.raises(PlannedError):
        next(generate_step(PROMPT, model, prompt_cache=cache, prompt_progress_callback=callback))
    holds(model, cache, PROMPT[:-1], "qwen3_5")


# --- end of text, stop strings, usage: on the shipped model ----------------------------------


@pytest.fixture(scope="module")
def shipped() -> tuple[Any, Any]:
    return mlx_rewind.load()


TEXT = "def add(a, b):\n    return a + b\n\n\ndef sub("


@pytest.fixture(scope="module")
def continuation(shipped: tuple[Any, Any]) -> list[int]:
    model, tokenizer = shipped
    prompt = mx.array(tokenizer.encode(TEXT))
    return [token for token, _ in stock_generate_step(prompt, model, max_tokens=24)]


@pytest.fixture
def eos(shipped: tuple[Any, Any]) -> Iterator[Any]:
    _, tokenizer = shipped
    before = set(tokenizer.eos_token_ids)
    yield lambda *ids: setattr(tokenizer, "eos_token_ids", before | set(ids))
    tokenizer.eos_token_ids = before


def outcome(responses: list[Any]) -> tuple[Any, ...]:
    last = responses[-1]
    tokens = [response.token for response in responses]
    text = "".join(response.text for response in responses)
    return tokens, text, last.finish_reason, last.generation_tokens, last.prompt_tokens


@pytest.mark.parametrize("position", range(10))
def test_end_of_text_inside_a_block(
    shipped: tuple[Any, Any], continuation: list[int], eos: Any, position: int
) -> None:
    model, tokenizer = shipped
    eos(continuation[position], 2047)
    stock = list(stock_stream_generate(model, tokenizer, TEXT, max_tokens=24))
    for drafter in (None, mlx_rewind.Prediction(continuation), DraftModel(model)):
        cache = make_prompt_cache(model)
        ours = list(
            mlx_rewind.stream_generate(
                model, tokenizer, TEXT, drafter=drafter, max_tokens=24, prompt_cache=cache
            )
        )
        assert outcome(ours) == outcome(stock)
        tokens = [response.token for response in ours]
        holds(model, cache, (tokenizer.encode(TEXT) + tokens)[:-1], "qwen3_5")
        last = ours[-1]
        assert last.draft_n_accepted == sum(response.from_draft for response in ours)


@pytest.mark.parametrize("budget", [*range(1, 13), 24])
def test_usage_counts_what_was_emitted(
    shipped: tuple[Any, Any], continuation: list[int], budget: int
) -> None:
    model, tokenizer = shipped
    stock = list(stock_stream_generate(model, tokenizer, TEXT, max_tokens=budget))
    ours = list(
        mlx_rewind.stream_generate(
            model, tokenizer, TEXT, drafter=mlx_rewind.Prediction(continuation), max_tokens=budget
        )
    )
    assert outcome(ours) == outcome(stock)
    last = ours[-1]
    assert last.draft_n_accepted == sum(response.from_draft for response in ours)
    assert last.draft_n_accepted <= last.draft_n <= last.draft_rounds * 4
    assert last.mean_acceptance_length <= 5


def test_the_next_turn_after_a_stop_inside_a_block(
    shipped: tuple[Any, Any], continuation: list[int], eos: Any
) -> None:
    """Stop at position 1 of an accepted block, add five tokens, decode ten: as from cold."""
    model, tokenizer = shipped
    prompt = tokenizer.encode(TEXT)
    eos(continuation[1])
    cache = make_prompt_cache(model)
    drafter = mlx_rewind.Prediction(continuation)
    responses = list(
        mlx_rewind.stream_generate(model, tokenizer, TEXT, drafter=drafter, prompt_cache=cache)
    )
    emitted = [response.token for response in responses]
    assert emitted == continuation[:2]
    more = [500, 501, 502, 503, 504]
    warm = generate_step(
        emitted[-1:] + more, model, drafter=drafter, max_tokens=10, prompt_cache=cache
    )
    cold = stock_generate_step(mx.array(prompt + emitted + more), model, max_tokens=10)
    assert [token for token, *_ in warm] == [token for token, _ in cold]


def test_a_stop_string_ends_the_text_before_it(
    shipped: tuple[Any, Any], continuation: list[int]
) -> None:
    model, tokenizer = shipped
    whole = tokenizer.decode(continuation)
    stop = whole[9:13]
    for drafter in (None, mlx_rewind.Prediction(continuation)):
        cache = make_prompt_cache(model)
        responses = list(
            mlx_rewind.stream_generate(
                model,
                tokenizer,
                TEXT,
                drafter=drafter,
                max_tokens=24,
                stop=[stop, "never"],
                prompt_cache=cache,
            )
        )
        tokens, text, reason, count, _ = outcome(responses)
        assert text == whole[: whole.index(stop)]
        assert reason == "stop"
        assert count == len(tokens)
        holds(model, cache, (tokenizer.encode(TEXT) + tokens)[:-1], "qwen3_5")


# --- interrupts anywhere --------------------------------------------------------------------


@contextlib.contextmanager
def interrupted_at(call: int) -> Iterator[None]:
    """Raises KeyboardInterrupt once, when the package makes its call number `call`."""
    count = iter(range(call))

    def profile(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        ours = "mlx_rewind" in code.co_filename and code.co_name != "<genexpr>"
        if event == "call" and ours and next(count, None) is None:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss", "falcon_h1", "llama4"])
@pytest.mark.parametrize("drafting", ["plain", "mixed", "draft model"])
def test_an_interrupt_anywhere_leaves_the_text_so_far(name: str, drafting: str) -> None:
    model = zoo.build(name)
    expected = zoo.reference(name, PROMPT, 40).tokens
    for call in range(0, 1400, 37):
        drafters = {"mixed": scripted(name, MIXED), "draft model": DraftModel(model)}
        cache, tokens = make_prompt_cache(model), []
        steps = generate_step(
            PROMPT, model, drafter=drafters.get(drafting), max_tokens=30, prompt_cache=cache
        )
        try:
            with interrupted_at(call):
                for _ in range(12):  # one by one: what was given out is kept
                    tokens.append(next(steps)[0])  # noqa: PERF401
        except KeyboardInterrupt:
            # In prefill the cache goes back to what it held before: nothing.
            held = (PROMPT + tokens)[:-1] if cache[0].state and not cache[-1].empty() else []
            if held:
                holds(model, cache, held, name)
            assert tokens == expected[: len(tokens)]
        steps.close()
        assert not retrace._tapes


def test_a_session_ends_even_if_the_decoder_cannot() -> None:
    model = zoo.build("qwen3_5")
    cache = make_prompt_cache(model)
    steps = generate_step(PROMPT, model, drafter=DraftModel(model), prompt_cache=cache)
    next(steps)
    model(mx.array([[1, 2]]), cache=cache)  # what nobody should do
    with pytest.raises(RuntimeError, match="fed or changed"):
        steps.close()
    assert not retrace._tapes
