"""Forms of requests that clients use beside the common ones, and a server that is told to end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from mlx_rewind.server.jobs import Limits
from mlx_rewind.server.reply import Markers
from mlx_rewind.server.worker import Worker
from serving import WAIT, Served, free_port, new_worker, served

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server(loaded: tuple[Any, Any]) -> Iterator[Served]:
    with served(new_worker(loaded, limits=Limits(max_rows=4, max_schema=2000))) as one:
        yield one


# --- models ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "default_model"])
def test_a_model_by_its_name(server: Served, name: str) -> None:
    model = server.client.models.retrieve(name)
    assert model.id == "demo"
    assert server.client.models.list().data[0] == model


@pytest.mark.parametrize("name", ["other", "demo/..", "../../etc/passwd", "/etc"])
def test_there_is_no_other_model(server: Served, name: str) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no"):
        server.client.models.retrieve(name)


# --- several prompts in one request ------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
def test_several_prompts(server: Served, n: int) -> None:
    texts = ["def f(x):", "Count to three.", "x"]
    options: Any = {"max_tokens": 12, "n": n, "seed": 5, "temperature": 0.8}
    alone = [server.post("completions", prompt=text, **options).json() for text in texts]
    answer = server.post("completions", prompt=texts, **options).json()
    given = [choice["text"] for choice in answer["choices"]]
    assert given == [choice["text"] for one in alone for choice in one["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == list(range(3 * n))
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][count] == sum(one["usage"][count] for one in alone)


def test_several_prompts_as_token_ids_and_streamed(server: Served, loaded: Any) -> None:
    texts = ["def f(x):", "Count to three."]
    ids = [loaded[1].encode(text) for text in texts]
    whole = server.post("completions", prompt=texts, max_tokens=12).json()
    same = server.post("completions", prompt=ids, max_tokens=12).json()
    wanted = [choice["text"] for choice in whole["choices"]]
    assert [choice["text"] for choice in same["choices"]] == wanted
    streamed = ["", ""]
    for chunk in server.client.completions.create(
        model="demo", prompt=texts, max_tokens=12, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == wanted


@pytest.mark.parametrize("prompt", [[], [[]], [["x"]], ["x", 3], ["x", [3]] * 40])
def test_prompts_that_are_none(server: Served, prompt: Any) -> None:
    refused = server.post("completions", prompt=prompt, max_tokens=2)
    assert refused.status_code == 400
    assert "prompt" in refused.json()["error"]["message"]


# --- messages and schemas ----------------------------------------------------------------------


def test_fields_of_messages(server: Served) -> None:
    user = {"role": "user", "content": "x"}
    refused = server.post(messages=[{**user, "thinking_budget": 3}])
    assert refused.status_code == 400
    assert "'thinking_budget'" in refused.json()["error"]["message"]
    # What a client has from an answer goes back as it came.
    said = server.chat().choices[0].message.model_dump()
    sent: Any = [user, said, {**user, "name": "me", "refusal": None}]
    assert server.post(messages=sent, max_tokens=2).status_code == 200


def test_a_schema_has_its_own_limit(server: Served) -> None:
    names = [f"name_{i}" for i in range(200)]
    wanted = {"name": "x", "schema": {"enum": names}}
    refused = server.post(
        messages=[{"role": "user", "content": "x"}],
        response_format={"type": "json_schema", "json_schema": wanted},
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "response_format"
    assert "2000" in refused.json()["error"]["message"]


def test_a_schema_binds_the_content_of_a_model_that_reasons(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the template begins: nothing but the schema's text can follow."""
    monkeypatch.setattr(Worker, "markers", property(lambda self: Markers(("<t>", "</t>"))))
    monkeypatch.setattr(Worker, "starts_reasoning", lambda self, job, request: True)
    with served(new_worker(loaded)) as one:
        message = one.chat(response_format=FORMAT, max_tokens=60).choices[0].message
        assert set(json.loads(message.content)) == {"a"}
        assert not hasattr(message, "reasoning")
        assert one.chat().choices[0].message.reasoning


# --- the end -----------------------------------------------------------------------------------


def test_a_server_says_that_it_drains() -> None:
    """SIGTERM: what is under work is finished, and until then new requests are told why not."""
    port = free_port()
    command = [sys.executable, "-m", "mlx_rewind.cli", "serve", "--port", str(port)]
    process = subprocess.Popen([*command, "--draft", "none"], stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT) as client:
            until = time.monotonic() + WAIT
            while time.monotonic() < until:
                try:
                    client.get("/health")
                    break
                except httpx.ConnectError:
                    time.sleep(0.1)
            body = {"prompt": "x", "max_tokens": 600, "min_tokens": 600, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                os.kill(process.pid, signal.SIGTERM)
                while (health := client.get("/health")).status_code == 200:
                    time.sleep(0.01)
                assert (health.status_code, health.json()) == (503, {"status": "draining"})
                late = client.post("/v1/completions", json={"prompt": "x"})
                assert (late.status_code, late.json()["error"]["type"]) == (503, "server_error")
                data = [line for line in lines if line]
        assert data[-1] == "data: [DONE]"
        assert sum('"text"' in line for line in data) > 300
        process.wait(WAIT)
    finally:
        process.kill()
