"""Requests that are hostile or odd, and an engine that dies: all get an answer that says why."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from mlx_rewind.engine import Engine
from mlx_rewind.server.app import Settings
from mlx_rewind.server.jobs import Limits
from mlx_rewind.server.worker import Worker
from serving import Served, served

USER = {"role": "user", "content": "x"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
FORMAT = {"type": "json_object"}
PREDICTION = {"type": "content", "content": "x"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.fixture(scope="module")
def server(loaded: tuple[Any, Any]) -> Iterator[Served]:
    settings = Settings("demo", hosts=("127.0.0.1", "::1"))
    with served(Worker(*loaded, limits=Limits(max_rows=2)), settings) as one:
        yield one


# 2048 is the first id that the model does not have. The ones far beyond would end the process.
@pytest.mark.parametrize("token", [2048, 2049])
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_the_model_does_not_have(server: Served, token: int, stream: bool) -> None:
    answer = server.post("completions", prompt=[5, token], max_tokens=2, stream=stream)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert server.post("completions", prompt=[5, 2047], max_tokens=2).status_code == 200


def test_a_bias_of_such_tokens_is_refused_before_a_stream_begins(server: Served) -> None:
    answer = server.post(messages=[USER], stream=True, logit_bias={"99999": 1})
    assert answer.status_code == 400
    assert "logit_bias" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("tools", {"tools": TOOLS}),
        ("prediction", {"prediction": PREDICTION, "speculation": "off"}),
        ("prediction", {"prediction": PREDICTION, "speculation": {"draft": "ngram"}}),
        ("num_draft_tokens", {"num_draft_tokens": 17}),
        ("num_draft_tokens", {"speculation": {"num_draft_tokens": 5000}}),
    ],
)
def test_nothing_is_ignored_in_silence(server: Served, name: str, fields: dict[str, Any]) -> None:
    answer = server.post(messages=[USER], max_tokens=2, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


@pytest.fixture
def template(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the chat template of the shared tokenizer for one test."""
    tokenizer = loaded[1]._tokenizer
    return lambda text: monkeypatch.setattr(tokenizer, "chat_template", text)


def test_messages_that_the_template_refuses(server: Served, template: Any) -> None:
    template("{{ raise_exception('roles must alternate') }}")
    answer = server.post(messages=[USER, USER], max_tokens=2)
    assert answer.status_code == 400
    assert "roles must alternate" in answer.json()["error"]["message"]


def test_arguments_of_earlier_calls_are_objects_for_the_template(
    server: Served, template: Any, loaded: tuple[Any, Any]
) -> None:
    template(
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% for name, value in c.function.arguments.items() %}{{ name }}{{ value + 1 }}{% endfor %}"
        "{% endfor %}{{ m.content }}{% endfor %}"
    )
    history = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    answer = server.post(messages=history, max_tokens=2)
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == len(loaded[1].encode("xa2"))
    function = {**CALL["function"], "arguments": "{"}  # type: ignore[dict-item]
    broken = {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}
    answer = server.post(messages=[USER, broken], max_tokens=2)
    assert answer.status_code == 400
    assert "tool_calls" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_bodies_that_a_foreign_page_may_send(server: Served, kind: str | None) -> None:
    """Browsers ask before they send JSON to another origin, and do not for these."""
    headers = {} if kind is None else {"content-type": kind}
    body = b'{"prompt": "x", "max_tokens": 2}'
    answer = server.http.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 415


@pytest.mark.parametrize(
    ("host", "status"),
    [("evil.example", 403), ("127.0.0.1.evil.example", 403), ("127.0.0.1:9", 200), ("[::1]", 200)],
)
def test_names_that_lead_to_the_server_from_elsewhere(
    server: Served, host: str, status: int
) -> None:
    assert server.http.get("/v1/models", headers={"host": host}).status_code == status


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_died(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES 24: the one at work and the one on its way get an error, and health is red."""
    dying, go = threading.Event(), threading.Event()

    def die(engine: Engine) -> Any:
        dying.set()
        go.wait(10)
        raise SystemExit

    with served(Worker(*loaded)) as one, ThreadPoolExecutor(2) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "step", die)
            fields = {"prompt": "x", "max_tokens": 4}

            def ask() -> httpx.Response:
                return httpx.post(f"{one.url}/v1/completions", json=fields, timeout=10)

            first = pool.submit(ask)
            assert dying.wait(10)
            second = pool.submit(ask)
            until = time.monotonic() + 10
            while one.worker.load[1] == 0 and time.monotonic() < until:
                time.sleep(0.01)
            go.set()
            assert [first.result().status_code, second.result().status_code] == [500, 500]
        assert one.http.get("/health").status_code == 503
        assert one.post(messages=[USER], max_tokens=2).status_code == 503
