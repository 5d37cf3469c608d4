"""The server over real sockets, with the real `openai` client."""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step as stock_step

import mlx_rewind
from mlx_rewind import Auto, NGram
from mlx_rewind.draft.auto import Costs
from mlx_rewind.engine import Engine
from mlx_rewind.load import load_mtp
from mlx_rewind.server.app import Settings
from mlx_rewind.server.jobs import Limits
from mlx_rewind.server.reply import Markers, Splitter, tool_calls
from mlx_rewind.server.worker import Worker
from serving import WAIT, Served, new_worker, reference, served


@pytest.fixture(scope="module")
def server(loaded: tuple[Any, Any]) -> Iterator[Served]:
    limits = Limits(max_rows=4, max_queue=40, max_tokens=200, max_prompt=2000, max_body=60_000)
    with served(new_worker(loaded, limits=limits)) as one:
        yield one


QUESTIONS = ["Count to three.", "Name a colour.", "def f(x):", "x", "Say why, in a long sentence."]


# --- answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", QUESTIONS)
def test_an_answer_is_that_of_plain_decoding(
    server: Served, loaded: tuple[Any, Any], text: str
) -> None:
    answer = server.chat(text)
    (choice,) = answer.choices
    assert choice.message.content == reference(loaded, text)
    assert choice.finish_reason in ("length", "stop")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens == usage.draft_n_accepted > 0
    assert details.rejected_prediction_tokens == usage.draft_n - usage.draft_n_accepted
    assert (usage.draft_kind, usage.exactness) == ("mtp", "bitwise")
    assert usage.draft_rounds > 0


def test_a_stream_is_the_answer_in_pieces(server: Served) -> None:
    whole = server.chat()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = server.chat(**options)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 8
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert any(chunk.choices[0].from_draft for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].x_usage["draft_n"] == last.usage.draft_n


def test_text_completions(server: Served, loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    expected = mlx_rewind.generate(model, tokenizer, "import os", max_tokens=12)
    for prompt in ("import os", tokenizer.encode("import os")):
        answer = server.client.completions.create(model="demo", prompt=prompt, max_tokens=12)
        assert answer.choices[0].text == expected
    stream = server.client.completions.create(
        model="demo", prompt="import os", max_tokens=12, stream=True, logprobs=1
    )
    pieces = [chunk.choices[0] for chunk in stream]
    assert "".join(piece.text for piece in pieces) == expected
    assert len(pieces[0].logprobs.tokens) == 1


def test_the_same_question_many_times_at_once(server: Served, loaded: tuple[Any, Any]) -> None:
    """CASES 36: alone, two, three, four at once; then four different ones."""
    alone = server.chat().usage
    for count in (2, 3, 4):
        with ThreadPoolExecutor(count) as pool:
            answers = list(pool.map(lambda _: server.chat(), range(count)))
        for answer in answers:
            assert answer.choices[0].message.content == reference(loaded, QUESTIONS[0])
            assert answer.usage.draft_n_accepted == alone.draft_n_accepted
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(server.chat, QUESTIONS[:4]))
    for text, answer in zip(QUESTIONS, answers, strict=False):
        assert answer.choices[0].message.content == reference(loaded, text)


def test_a_seed_gives_one_text(server: Served) -> None:
    options = {"temperature": 0.9, "seed": 5, "top_p": 0.95}
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: server.chat(**options), range(3)))
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert {answer.usage.seed for answer in answers} == {5}
    off = server.chat(**options, extra_body={"speculation": "off"})
    assert off.choices[0].message.content == answers[0].choices[0].message.content
    assert (off.usage.draft_kind, off.usage.draft_n) == ("none", 0)
    assert server.chat(temperature=0.9).usage.seed is not None


def test_several_choices(server: Served) -> None:
    answer = server.chat(n=3, temperature=1.0, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    first = server.chat(temperature=1.0, seed=1)
    assert answer.choices[0].message.content == first.choices[0].message.content
    stream = server.chat(n=2, temperature=1.0, seed=1, stream=True)
    texts = ["", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices[:2]]


def test_logprobs_are_the_targets(server: Served, loaded: tuple[Any, Any]) -> None:
    """CASES 28 over HTTP: none is a placeholder; all are those of plain decoding."""
    model, tokenizer = loaded
    answer = server.chat(logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Count to three."}], add_generation_prompt=True
    )
    steps = list(stock_step(mx.array(prompt), model, max_tokens=len(entries)))
    for entry, (token, logprobs) in zip(entries, steps, strict=True):
        assert entry.logprob == pytest.approx(logprobs[token].item(), abs=1e-4)
        assert entry.top_logprobs[0].logprob == pytest.approx(logprobs.max().item(), abs=1e-4)
        assert len(entry.top_logprobs) == 2
    streamed = server.chat(logprobs=True, top_logprobs=2, stream=True)
    told = [e for chunk in streamed if chunk.choices[0].logprobs
            for e in chunk.choices[0].logprobs.content]  # fmt: skip
    assert [e.logprob for e in told] == [e.logprob for e in entries]


def test_a_schema_binds_the_answer(server: Served) -> None:
    """CASES 34 over HTTP: alone, and together with free answers."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    given = [wanted, None, wanted, {"type": "json_object"}]
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(
                lambda one: server.chat(**({"response_format": one} if one else {}), max_tokens=60),
                given,
            )
        )
    texts = [answer.choices[0].message.content for answer in answers]
    assert 0 <= json.loads(texts[0])["a"] <= 99
    assert texts[0] == texts[2]
    assert not texts[1].startswith("{")
    assert texts[3].startswith("{")
    for bad in (
        {"type": "grammar"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
    ):
        refused = server.post(messages=[{"role": "user", "content": "x"}], response_format=bad)
        assert refused.status_code == 400
        assert "response_format" in refused.json()["error"]["message"]


def test_a_prediction_is_the_draft(server: Served) -> None:
    expected = server.chat(max_tokens=40).choices[0].message.content
    answer = server.chat(max_tokens=40, prediction={"type": "content", "content": expected})
    assert answer.choices[0].message.content == expected
    assert answer.usage.draft_kind == "prediction"
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 10


def test_options_that_choose_the_draft(server: Served) -> None:
    """CASES 48: every option makes a difference."""

    def usage(**body: Any) -> Any:
        return server.chat(extra_body=body).usage

    assert usage(num_draft_tokens=1).draft_n < usage(num_draft_tokens=4).draft_n
    assert usage(speculation={"draft": "ngram"}).draft_kind == "ngram"
    assert usage(speculation={"draft": "none"}).draft_kind == "none"
    assert usage(speculation={"num_draft_tokens": 2}).draft_n == usage(num_draft_tokens=2).draft_n
    hot = {"temperature": 1.0, "seed": 2}
    assert (
        server.chat(**hot, extra_body={"speculation": {"acceptance": "block"}}).usage.exactness
        == "law"
    )
    models = server.http.get("/v1/models").json()["data"]
    assert models[0]["speculation"] == {"draft_kind": "mtp", "draft_model": None}


def test_stop_budget_and_penalties(server: Served) -> None:
    text = server.chat(max_tokens=40).choices[0].message.content
    stop = text[5:9]
    stopped = server.chat(max_tokens=40, stop=[stop])
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    short = server.chat(max_completion_tokens=3)
    assert short.usage.completion_tokens == 3
    assert server.chat(max_tokens=40, frequency_penalty=2.0).choices[0].message.content != text
    assert server.chat(logit_bias={"5": 100}).choices[0].message.content != text[:16]


def test_the_second_turn_reads_only_what_is_new(server: Served) -> None:
    first = server.chat("Tell me about stores.", max_tokens=20)
    messages: Any = [
        {"role": "user", "content": "Tell me about stores."},
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And then?"},
    ]
    second = server.client.chat.completions.create(model="demo", messages=messages, max_tokens=8)
    assert second.usage.prompt_tokens_details.cached_tokens > 0


# --- refusals --------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"messages": MESSAGES, "best_of": 2}, 400, "best_of"),
        ({"messages": MESSAGES, "temperature": -1}, 400, "temperature"),
        ({"messages": MESSAGES, "temperature": "hot"}, 400, "temperature"),
        ({"messages": MESSAGES, "max_tokens": 0}, 400, "max_tokens"),
        ({"messages": MESSAGES, "max_tokens": True}, 400, "max_tokens"),
        ({"messages": MESSAGES, "temperature": "1"}, 400, "temperature"),
        ({"messages": MESSAGES, "max_tokens": 100_000}, 400, "max_tokens"),
        ({"messages": MESSAGES, "n": 99}, 400, "n"),
        ({"messages": MESSAGES, "top_logprobs": 2}, 400, "logprobs"),
        ({"messages": MESSAGES, "model": "/etc/passwd"}, 404, "model"),
        ({"messages": MESSAGES, "draft_model": "../secret"}, 400, "draft_model"),
        ({"messages": MESSAGES, "speculation": "maybe"}, 400, "speculation"),
        ({"messages": MESSAGES, "speculation": {"acceptance": "block"}}, 200, ""),
        ({"messages": MESSAGES, "top_k": 10_000_000, "temperature": 1}, 400, "top_k"),
        (
            {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "x"}},
            400,
            "chat_template",
        ),
        ({"messages": MESSAGES, "user": "me", "metadata": {}}, 200, ""),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "wizard"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content"),
        ({"messages": [{"role": "user", "content": "word " * 4000}]}, 400, "prompt"),
        ({}, 400, "messages"),
    ],
)
def test_what_is_refused_is_named(
    server: Served, body: dict[str, Any], status: int, word: str
) -> None:
    response = server.post(**{"max_tokens": 2, **body})
    assert response.status_code == status
    if status != 200:
        error = response.json()["error"]
        assert word in error["message"]
        assert "Traceback" not in response.text
        assert "/work" not in response.text


JSON = {"content-type": "application/json"}


def test_bodies_that_are_not_json_or_too_large(server: Served) -> None:
    for content, status in ((b"{", 400), (b"[]", 400), (b"\xff", 400), (b"x" * 70_000, 413)):
        response = server.http.post("/v1/chat/completions", content=content, headers=JSON)
        assert response.status_code == status
        assert response.json()["error"]["message"]

    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    assert (
        server.http.post("/v1/chat/completions", content=endless(), headers=JSON).status_code == 413
    )


def test_keys_and_origins(loaded: tuple[Any, Any]) -> None:
    settings = Settings("demo", api_key="secret", cors=["https://ours.example"])
    with served(new_worker(loaded), settings) as one:
        body = {"messages": MESSAGES, "max_tokens": 2}
        assert one.post(**body).status_code == 401
        for key, status in (("wrong", 401), ("secret", 200)):
            header = {"Authorization": f"Bearer {key}"}
            response = one.http.post("/v1/chat/completions", json=body, headers=header)
            assert response.status_code == status
        assert one.http.get("/metrics").status_code == 401
        assert one.http.get("/health").status_code == 200
        ours = one.http.get("/health", headers={"Origin": "https://ours.example"})
        assert ours.headers["access-control-allow-origin"] == "https://ours.example"
        theirs = one.http.get("/health", headers={"Origin": "https://theirs.example"})
        assert "access-control-allow-origin" not in theirs.headers


def test_no_origin_is_allowed_by_default(server: Served) -> None:
    response = server.http.get("/health", headers={"Origin": "https://any.example"})
    assert "access-control-allow-origin" not in response.headers


# --- faults ----------------------------------------------------------------------------------


def idle(one: Served) -> bool:
    until = time.monotonic() + 10
    while one.worker.load != (0, 0) and time.monotonic() < until:
        time.sleep(0.02)
    return one.worker.load == (0, 0)


def test_clients_that_go_away_free_their_rows(server: Served, loaded: tuple[Any, Any]) -> None:
    """CASES 24 (a): twenty dropped streams, then one answer as before, speculating."""
    body = {"messages": MESSAGES, "max_tokens": 200, "stream": True, "stop": ["\u0000"]}
    for _ in range(20):
        with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            for _ in range(5):
                next(lines)
    assert idle(server)
    answer = server.chat()
    assert answer.choices[0].message.content == reference(loaded, QUESTIONS[0])
    assert answer.usage.draft_n_accepted > 0
    assert server.worker.totals.requests["cancelled"] > 5


def test_a_client_that_does_not_wait_for_a_whole_answer(server: Served) -> None:
    before = server.worker.totals.requests.get("cancelled", 0)
    body = {"messages": MESSAGES, "max_tokens": 200, "n": 8, "temperature": 1.0}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=0.3)
    assert idle(server)
    assert server.worker.totals.requests["cancelled"] > before


def test_an_engine_that_fails_starts_again(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES 24 (c): the request gets a 500, the next one an answer, and nothing is switched off."""
    with served(new_worker(loaded)) as one:
        expected = one.chat().choices[0].message.content
        step = Engine.step
        with monkeypatch.context() as patch:

            def failing(engine: Engine) -> Any:
                patch.setattr(Engine, "step", step)
                raise RuntimeError("the device is gone: /secret/path")

            patch.setattr(Engine, "step", failing)
            response = one.post(messages=MESSAGES, max_tokens=4)
        assert response.status_code == 500
        assert "secret" not in response.text
        assert one.worker.restarts == 1
        answer = one.chat()
        assert answer.choices[0].message.content == expected
        assert answer.usage.draft_n > 0
        assert one.http.get("/health").status_code == 200


def test_a_dead_engine_is_told(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with served(new_worker(loaded)) as one:
        assert one.http.get("/health").json() == {"status": "ok"}
        monkeypatch.setattr(one.worker._thread, "is_alive", lambda: False)
        assert one.http.get("/health").status_code == 503
        assert one.post(messages=MESSAGES, max_tokens=2).status_code == 503


def test_a_full_queue_is_429(loaded: tuple[Any, Any]) -> None:
    worker = new_worker(loaded, limits=Limits(max_rows=1, max_queue=1))
    with served(worker) as one, ThreadPoolExecutor(6) as pool:
        answers = list(
            pool.map(
                lambda _: one.post(messages=MESSAGES, max_tokens=60, temperature=1.0).status_code,
                range(6),
            )
        )
        assert set(answers) == {200, 429}
        assert one.post(messages=MESSAGES, max_tokens=2).status_code == 200


def test_all_requests_together_have_a_limit(loaded: tuple[Any, Any]) -> None:
    worker = new_worker(loaded, limits=Limits(max_total_tokens=150))
    with served(worker) as one, ThreadPoolExecutor(4) as pool:
        assert one.post(messages=MESSAGES, max_tokens=149).status_code == 429
        body = {"messages": MESSAGES, "max_tokens": 100, "temperature": 1.0}
        answers = list(pool.map(lambda _: one.post(**body).status_code, range(4)))
        assert set(answers) == {200, 429}
        assert one.post(**body).status_code == 200  # what is over does not count
        assert not worker._requests


def test_closing_finishes_what_is_under_work(loaded: tuple[Any, Any]) -> None:
    with ThreadPoolExecutor(1) as pool:
        with served(new_worker(loaded)) as one:
            waiting = pool.submit(one.chat, max_tokens=80)
            until = time.monotonic() + 10
            while not one.worker.load[0] and time.monotonic() < until:
                time.sleep(0.01)
        assert waiting.result(WAIT).usage.completion_tokens > 0


def test_the_store_survives_a_restart(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    folder = str(tmp_path / "store")
    with served(new_worker(loaded, store_folder=folder)) as one:
        first = one.chat("A question to keep.")
        assert first.usage.prompt_tokens_details.cached_tokens == 0
    with served(new_worker(loaded, store_folder=folder)) as one:
        again = one.chat("A question to keep.")
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    assert again.choices[0].message.content == first.choices[0].message.content


def test_metrics_count_what_came(server: Served) -> None:
    def values() -> dict[str, float]:
        lines = server.http.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    before, usage, after = values(), server.chat().usage, values()
    for name, count in {
        "spec_decode_num_drafts_total": usage.draft_rounds,
        "spec_decode_num_draft_tokens_total": usage.draft_n,
        "spec_decode_num_accepted_tokens_total": usage.draft_n_accepted,
        "generation_tokens_total": usage.completion_tokens,
    }.items():
        assert after[name] - before.get(name, 0) == count
    assert after["active_memory_bytes"] > after["prompt_cache_bytes"] > 0
    assert after["prompt_cache_entries"] > 0
    server.chat()
    assert values()["prompt_cache_hits_total"] > before["prompt_cache_hits_total"]
    positions = [value for name, value in after.items() if "per_pos" in name]
    assert sum(positions) == after["spec_decode_num_accepted_tokens_total"]


def test_the_page_is_there_and_loads_nothing_from_elsewhere(server: Served) -> None:
    page = server.http.get("/").text
    for name in ("page.js", "page.css"):
        assert name in page
        assert server.http.get(f"/{name}").status_code == 200
    assert not re.search(r"https?://", page)
    assert server.http.get("/../pyproject.toml").status_code == 404


def test_auto_is_told(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    drafter = Auto(NGram(), load_mtp(None, model), costs=Costs(fixed=0.1))
    with served(Worker(model, tokenizer, drafter=drafter)) as one:
        usage = one.chat(max_tokens=30).usage
        assert usage.draft_kind == "auto"
        assert usage.draft_reason


def test_metrics_tell_what_auto_does(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    always = Auto(load_mtp(None, model), costs=Costs(fixed=0.0))
    never = Auto(load_mtp(None, model), costs=Costs(fixed=9.0))
    for drafter, choice in ((always, "drafting by mtp"), (never, "stopped")):
        with served(Worker(model, tokenizer, drafter=drafter)) as one:
            stream = one.chat(stream=True, max_tokens=400, extra_body={"min_tokens": 400})
            wanted = f'auto_requests{{choice="{choice}"}} 1.0'
            assert any(wanted in one.http.get("/metrics").text for _ in stream)
            for _ in stream:
                pass
            assert "auto_requests{" not in one.http.get("/metrics").text


# --- reasoning and tools ---------------------------------------------------------------------

MARKERS = Markers(
    ("<think>", "</think>"), ("<tool_call>", "</tool_call>"), lambda t, _: json.loads(t)
)
REPLY = 'I<think>hm, <b>?</think>Yes.<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> ok'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_a_reply_is_cut_into_its_parts(size: int) -> None:
    splitter = Splitter(MARKERS, starts_reasoning=False, has_tools=True)
    parts: dict[str, str] = {}
    ends = 0
    pieces = [REPLY[i : i + size] for i in range(0, len(REPLY), size)]
    for kind, text in [p for piece in pieces for p in splitter.feed(piece)] + [*splitter.flush()]:
        parts[kind] = parts.get(kind, "") + text
        ends += kind == "tool" and not text
    assert parts["content"] == "IYes. ok"
    assert parts["reasoning"] == "hm, <b>?"
    assert ends == 1
    (call,) = tool_calls(parts["tool"], MARKERS, None)
    assert call["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert tool_calls("{", MARKERS, None) == []


def test_markers_are_text_where_nothing_is_asked() -> None:
    splitter = Splitter(Markers(), starts_reasoning=False, has_tools=False)
    assert "".join(text for _, text in [*splitter.feed(REPLY), *splitter.flush()]) == REPLY


def test_tools_and_reasoning_over_http(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is made to say a reply with both, since the shipped one does not."""
    _, tokenizer = loaded
    ids = tokenizer.encode(REPLY, add_special_tokens=False)
    worker = new_worker(loaded)
    monkeypatch.setattr(Worker, "markers", property(lambda self: MARKERS))
    prepare = Worker._request

    def scripted(self: Worker, job: Any) -> Any:
        import dataclasses

        request = prepare(self, job)
        start = len(request.prompt)

        def say(tokens: mx.array, logits: mx.array) -> mx.array:
            at = tokens.size - start
            wanted = ids[at] if at < len(ids) else tokenizer.eos_token_id
            return mx.where(mx.arange(logits.shape[-1]) == wanted, 0.0, -mx.inf)[None]

        return dataclasses.replace(request, logits_processors=(say,))

    monkeypatch.setattr(Worker, "_request", scripted)
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with served(worker) as one:
        choice = one.chat(tools=tools, max_tokens=100).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "IYes. ok"
        assert choice.message.reasoning == "hm, <b>?"
        assert choice.message.tool_calls[0].function.name == "f"
        streamed = list(one.chat(tools=tools, max_tokens=100, stream=True))
        calls = [c.choices[0].delta.tool_calls for c in streamed if c.choices[0].delta.tool_calls]
        assert json.loads(calls[0][0].function.arguments) == {"x": 1}
        assert streamed[-1].choices[0].finish_reason == "tool_calls"
