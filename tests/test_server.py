"""The server with OpenAI's own client: every answer is that of mlx-lm's plain decoding."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import mlx_rewind
import servers
from mlx_rewind import SamplingParams

HELLO = [{"role": "user", "content": "Count from 1 to 5."}]


@pytest.fixture(scope="module")
def server() -> Iterator[servers.Running]:
    with servers.running(servers.demo(), draft_models=("demo-draft",), max_rows=4) as running:
        yield running


def chat(server: servers.Running, **options: Any) -> Any:
    given = {"model": "demo", "messages": HELLO, **options}
    return server.client.chat.completions.create(**given)


def test_a_chat_completion(server: servers.Running) -> None:
    answer = chat(server, max_tokens=20)
    prompt = servers.chat_prompt(HELLO[0]["content"])
    assert answer.choices[0].message.content == servers.alone(prompt, 20)
    assert answer.object == "chat.completion"
    usage = answer.usage
    assert usage.prompt_tokens == len(prompt)
    assert usage.completion_tokens <= 20
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.draft_kind == "mtp"
    assert usage.draft_n_accepted > 0
    assert usage.exactness == "bitwise"
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens == usage.draft_n_accepted
    assert details.rejected_prediction_tokens == usage.draft_n - usage.draft_n_accepted


def test_a_stream_says_the_same(server: servers.Running) -> None:
    whole = chat(server, max_tokens=20)
    stream = list(chat(server, max_tokens=20, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in stream if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert not any(reasons[:-1])
    assert stream[-1].choices == []
    assert stream[-1].usage == whole.usage
    assert len({chunk.id for chunk in stream}) == 1


def test_without_include_usage_no_chunk_has_it(server: servers.Running) -> None:
    stream = list(chat(server, max_tokens=4, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in stream)


def test_text_completions_of_several_prompts(server: servers.Running) -> None:
    prompts = ["import os", "In the beginning", "def f(x):"]
    answer = server.client.completions.create(model="demo", prompt=prompts, max_tokens=12)
    assert [c.text for c in answer.choices] == [servers.alone(p, 12) for p in prompts]
    assert [c.index for c in answer.choices] == [0, 1, 2]
    ids = servers.shipped()[1].encode("import os")
    answer = server.client.completions.create(model="demo", prompt=ids, max_tokens=12)
    assert answer.choices[0].text == servers.alone("import os", 12)
    stream = server.client.completions.create(
        model="demo", prompt=prompts, max_tokens=12, stream=True
    )
    texts = ["", "", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [servers.alone(p, 12) for p in prompts]


def test_speculation_is_chosen_by_request_and_changes_nothing(server: servers.Running) -> None:
    expected = servers.alone(servers.chat_prompt(HELLO[0]["content"]), 20)

    def ask(**fields: Any) -> Any:
        answer = chat(server, max_tokens=20, extra_body=fields)
        assert answer.choices[0].message.content == expected
        return answer.usage

    assert ask(speculation="auto").draft_kind == "mtp"
    off = ask(speculation="off")
    assert (off.draft_kind, off.draft_n, off.draft_rounds) == ("none", 0, 0)
    assert ask(speculation={"drafter": "ngram"}).draft_kind == "ngram"
    assert ask(draft_model="demo-draft").draft_kind == "mtp"
    one, four = ask(num_draft_tokens=1), ask(speculation={"num_draft_tokens": 4})
    assert one.draft_n / one.draft_rounds <= 1 < four.draft_n / four.draft_rounds
    assert ask(num_draft_tokens=0).draft_n == 0


def test_a_prediction_is_a_drafter(server: servers.Running) -> None:
    expected = servers.alone(servers.chat_prompt(HELLO[0]["content"]), 20)
    plain = chat(server, max_tokens=20).usage
    predicted = chat(server, max_tokens=20, prediction={"type": "content", "content": expected})
    assert predicted.choices[0].message.content == expected
    assert predicted.usage.draft_kind == "prediction"
    details = predicted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > plain.draft_n_accepted
    wrong = chat(server, max_tokens=20, prediction={"type": "content", "content": "x y z " * 9})
    assert wrong.choices[0].message.content == expected
    assert wrong.usage.completion_tokens_details.rejected_prediction_tokens > 0


def test_seeds_are_reported_and_repeat(server: servers.Running) -> None:
    first = chat(server, max_tokens=16, temperature=1.0, n=2)
    texts = [choice.message.content for choice in first.choices]
    seeds = [choice.seed for choice in first.choices]
    assert len(set(seeds)) == 2
    for seed, text in zip(seeds, texts, strict=True):
        again = chat(server, max_tokens=16, temperature=1.0, seed=seed)
        assert again.choices[0].message.content == text
        off = chat(
            server, max_tokens=16, temperature=1.0, seed=seed, extra_body={"speculation": "off"}
        )
        assert off.choices[0].message.content == text
    n = chat(server, max_tokens=8, temperature=1.0, n=2, seed=7)
    assert [choice.seed for choice in n.choices] == [7, 8]
    assert n.usage.prompt_tokens == len(servers.chat_prompt(HELLO[0]["content"]))


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"logit_bias": {"100": 50.0}},
        {"temperature": 0.8, "top_p": 0.9, "seed": 3},
        {"repetition_penalty": 1.3, "repetition_context_size": 8, "top_k": 5, "min_p": 0.1},
    ],
)
def test_sampling_is_that_of_the_library(server: servers.Running, fields: Any) -> None:
    model, tokenizer = servers.shipped()
    prompt = "In the beginning"
    params = SamplingParams(**fields)
    expected = mlx_rewind.generate(model, tokenizer, prompt, max_tokens=16, sampling=params)
    body = {"prompt": prompt, "max_tokens": 16, **fields}
    answer = server.post("/v1/completions", body).json()["choices"][0]["text"]
    assert answer == expected
    assert answer != servers.alone(prompt, 16)


def test_stop_strings_end_the_text(server: servers.Running) -> None:
    whole = servers.alone("In the beginning", 16)
    stop = whole[8:11]
    answer = server.client.completions.create(
        model="demo", prompt="In the beginning", max_tokens=16, stop=["§", stop]
    )
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 16


def test_logprobs_are_the_targets_at_every_position(server: servers.Running) -> None:
    """CASES 28: no token of a draft is reported with probability 1."""
    answer = chat(server, max_tokens=20, logprobs=True, top_logprobs=3)
    assert answer.usage.draft_n_accepted > 0
    told = answer.choices[0].logprobs.content
    prompt = servers.chat_prompt(HELLO[0]["content"])
    tokens = [entry.id for entry in told]
    expected = servers.logprobs_of(prompt, tokens)
    assert [entry.logprob for entry in told] == expected
    assert sum(entry.logprob < -0.1 for entry in told) > 5
    for entry in told:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].id == entry.id  # greedy
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
    text = b"".join(bytes(entry.bytes) for entry in told).decode()
    assert text == answer.choices[0].message.content
    plain = chat(
        server, max_tokens=20, logprobs=True, top_logprobs=3, extra_body={"speculation": "off"}
    )
    assert plain.choices[0].logprobs == answer.choices[0].logprobs
    stream = chat(server, max_tokens=20, logprobs=True, top_logprobs=3, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in stream]
    assert [entry for part in parts if part for entry in part.content] == told


def test_logprobs_of_text_completions(server: servers.Running) -> None:
    answer = server.client.completions.create(
        model="demo", prompt="import os", max_tokens=8, logprobs=2
    )
    told = answer.choices[0].logprobs
    assert "".join(told.tokens) == answer.choices[0].text
    assert told.text_offset == [len("".join(told.tokens[:i])) for i in range(len(told.tokens))]
    assert all(len(top) == 2 for top in told.top_logprobs)
    assert [top[t] for top, t in zip(told.top_logprobs, told.tokens, strict=True)] == (
        told.token_logprobs
    )


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("speculation", ["auto", "off"])
@pytest.mark.parametrize("together", [1, 3])
def test_a_response_format_binds_alone_and_together(
    server: servers.Running, speculation: str, together: int
) -> None:
    """CASES 34: no grammar is dropped on any path."""
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    answer = chat(
        server,
        max_tokens=40,
        n=together,
        response_format=schema,
        extra_body={"speculation": speculation},
    )
    for choice in answer.choices:
        person = json.loads(choice.message.content)
        assert person["name"] in ("ann", "bob")
        assert person["age"] <= 99
        assert choice.finish_reason == "stop"


def test_any_json_object(server: servers.Running) -> None:
    answer = chat(server, max_tokens=12, response_format={"type": "json_object"})
    assert answer.choices[0].message.content.startswith("{")


@pytest.mark.parametrize(
    "given",
    [
        {"type": "grammar"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}},
        {"type": "json_schema", "json_schema": {"schema": {"not": {"type": "string"}}}},
        "json_object",
    ],
)
def test_a_response_format_that_cannot_bind_is_refused(server: servers.Running, given: Any) -> None:
    answer = server.post("/v1/chat/completions", {"messages": HELLO, "response_format": given})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("response_format")


def test_models(server: servers.Running) -> None:
    (model,) = server.client.models.list().data
    assert model.id == "demo"
    assert model.draft_kind == "mtp"
    assert server.client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("/etc/passwd")
    with pytest.raises(openai.NotFoundError):
        chat(server, model="../../demo")
    assert chat(server, model="default_model", max_tokens=2).model == "default_model"


def test_draft_details_of_a_stream(server: servers.Running) -> None:
    body = {"messages": HELLO, "max_tokens": 20, "stream": True, "draft_details": True}
    answer = server.post("/v1/chat/completions", body)
    drafts = [
        chunk["choices"][0]["draft"]
        for chunk in servers.chunks(answer)
        if "draft" in chunk["choices"][0]
    ]
    text = "".join(text for draft in drafts for text, _ in draft["pieces"])
    assert text == servers.alone(servers.chat_prompt(HELLO[0]["content"]), 20)
    accepted = sum(is_draft for draft in drafts for _, is_draft in draft["pieces"])
    assert accepted == drafts[-1]["draft_n_accepted"] > 0
    assert sum(drafts[-1]["accepted_per_position"]) == accepted
    assert drafts[-1]["plain_seconds"] > 0


def test_metrics_count_what_the_usage_says(server: servers.Running) -> None:
    names = ("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total")
    names += ("spec_decode_num_accepted_tokens_total", "mlx_rewind_completion_tokens_total")
    names += ("spec_decode_num_accepted_tokens_per_pos_total",)
    before = [server.metric(name) for name in names]
    usage = chat(server, max_tokens=20).usage
    after = [server.metric(name) for name in names]
    told = [usage.draft_rounds, usage.draft_n, usage.draft_n_accepted]
    told += [usage.completion_tokens, usage.draft_n_accepted]
    assert [b - a for a, b in zip(before, after, strict=True)] == told


def test_health(server: servers.Running) -> None:
    answer = server.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
