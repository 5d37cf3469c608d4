"""What goes wrong for one client, or in the engine, and what the others see of it."""

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import mlx.core as mx
import mlx.nn as nn
import openai
import pytest

import servers
from mlx_rewind.server.desk import Served
from mlx_rewind.server.worker import Worker

PROMPTS = ["import os", "In the beginning", "def f(x):\n    return", "1, 2, 3, 4, 5, 6, 7"]


class Flaky(nn.Module):
    """The shipped model; fails at its next forward of `length` tokens, once, if told to."""

    def __init__(self) -> None:
        super().__init__()
        inner = servers.shipped()[0]
        self.update_modules({"inner": inner}) if False else None
        self.inner = inner
        self.fails: type[BaseException] | None = None
        self.slow = 0.0

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        if self.slow:
            time.sleep(self.slow)
        if self.fails is not None and inputs.shape[1] < 8:
            fails, self.fails = self.fails, None
            raise fails("planned: /secret/path")
        return self.inner(inputs, cache=cache)

    def make_cache(self) -> list[Any]:
        return self.inner.make_cache()


@pytest.fixture(scope="module")
def model() -> Flaky:
    return Flaky()


@pytest.fixture(scope="module")
def server(model: Flaky) -> Iterator[servers.Running]:
    """N-grams draft, in batches of four; three choices may wait."""
    served = Served(
        model,
        servers.shipped()[1],
        servers.mlx_rewind.NGram(1, 3),
        engine={"max_rows": 4, "prefill_step_size": 64},
    )
    options = {"max_rows": 4, "queue_limit": 3, "max_total_tokens": 4000}
    with servers.running(served, **options) as running:
        yield running


def complete(server: servers.Running, prompt: str, n: int = 16, **fields: Any) -> httpx.Response:
    return server.post("/v1/completions", {"prompt": prompt, "max_tokens": n, **fields})


def check(server: servers.Running, prompt: str = PROMPTS[0]) -> None:
    """One request is answered as ever, with drafts."""
    answer = complete(server, prompt, 24)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == servers.alone(prompt, 24)
    assert answer.json()["usage"]["draft_n"] > 0


def abandon(server: servers.Running, count: int) -> None:
    """Reads some chunks of a long stream, then drops the connection."""
    body = {"prompt": PROMPTS[3], "max_tokens": 900, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
        for i, _ in enumerate(answer.iter_lines()):
            if i >= 2 * count:
                return


def test_clients_that_go_away_change_nothing(server: servers.Running) -> None:
    """CASES 24 (a)."""
    before = server.metric("mlx_rewind_requests_cancelled_total")
    for i in range(20):
        abandon(server, 5)
        if i % 5 == 0:
            check(server)
    server.wait_idle()
    assert server.metric("mlx_rewind_requests_cancelled_total") == before + 20
    assert server.metric("mlx_rewind_choices_open") == 0
    check(server)


def test_a_row_is_free_within_one_round(server: servers.Running, model: Flaky) -> None:
    model.slow = 0.02
    abandon(server, 2)
    began = time.monotonic()
    server.wait(lambda: server.worker.figures()["open"] == 0, 5)
    assert time.monotonic() - began < 1
    model.slow = 0.0
    check(server)


def test_a_client_that_does_not_stream_may_go_away_too(server: servers.Running) -> None:
    body = {"prompt": PROMPTS[3], "max_tokens": 900}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.3)
    server.wait_idle()
    check(server)


def test_bursts(server: servers.Running) -> None:
    """CASES 24 (b) and 36: the same prompt at once, then different ones."""
    solo = complete(server, PROMPTS[2], 24).json()["usage"]
    for prompts in ([PROMPTS[2]] * 2, [PROMPTS[2]] * 3, [PROMPTS[2]] * 4, PROMPTS):
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda p: complete(server, p, 24).json(), prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer["choices"][0]["text"] == servers.alone(prompt, 24)
            if prompt == PROMPTS[2]:
                assert answer["usage"]["draft_n_accepted"] == solo["draft_n_accepted"]
    check(server)


def test_an_engine_that_fails_starts_again(server: servers.Running, model: Flaky) -> None:
    """CASES 24 (c): those at work get a 500, and the weights stay."""
    restarts = server.metric("mlx_rewind_engine_restarts_total")
    seen: list[str] = []
    model.slow = 0.005
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(complete, server, prompt, 400) for prompt in PROMPTS[:3]]
        server.wait(lambda: server.worker.figures()["open"] == 3)
        time.sleep(0.3)
        model.fails = RuntimeError
        while not all(one.done() for one in waiting):
            seen.append(server.get("/health").json()["status"])
        answers = [one.result() for one in waiting]
    model.slow = 0.0
    assert [answer.status_code for answer in answers] == [500] * 3
    for answer in answers:
        assert "secret" not in answer.text
        assert "planned" not in answer.text
    server.wait(lambda: server.get("/health").status_code == 200)
    assert server.metric("mlx_rewind_engine_restarts_total") == restarts + 1
    check(server)


def test_a_stream_tells_that_the_engine_failed(server: servers.Running, model: Flaky) -> None:
    stream = server.client.completions.create(
        model="demo", prompt=PROMPTS[0], max_tokens=300, stream=True
    )
    next(stream)
    model.fails = RuntimeError
    with pytest.raises(openai.APIError, match="engine failed"):
        list(stream)
    server.wait(lambda: server.get("/health").status_code == 200)
    check(server)


def test_health_is_red_until_a_step_works_again(server: servers.Running, model: Flaky) -> None:
    status: list[int] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            status.append(server.get("/health").status_code)

    watcher = threading.Thread(target=look)
    watcher.start()
    model.fails = RuntimeError
    assert complete(server, PROMPTS[0], 100).status_code == 500
    server.wait(lambda: server.get("/health").status_code == 200)
    done.set()
    watcher.join()
    assert 503 in status
    check(server)


def test_too_many_wait(server: servers.Running, model: Flaky) -> None:
    model.slow = 0.01
    with ThreadPoolExecutor(7) as pool:
        waiting = [pool.submit(complete, server, PROMPTS[0], 60) for _ in range(7)]
        server.wait(lambda: server.worker.figures()["open"] == 7)
        refused = complete(server, PROMPTS[1])
        answers = [one.result() for one in waiting]
    model.slow = 0.0
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert {a.json()["choices"][0]["text"] for a in answers} == {servers.alone(PROMPTS[0], 60)}
    check(server)


def test_token_limits_of_the_whole_server(server: servers.Running, model: Flaky) -> None:
    never = complete(server, PROMPTS[0], 4001)
    assert (never.status_code, never.json()["error"]["code"]) == (400, "context_length_exceeded")
    model.slow = 0.01
    with ThreadPoolExecutor(1) as pool:
        body = {"prompt": PROMPTS[3], "max_tokens": 3000, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as one:
            next(one.iter_lines())
            later = pool.submit(complete, server, PROMPTS[0], 1500).result()
    model.slow = 0.0
    assert (later.status_code, later.json()["error"]["code"]) == (429, "tokens_exceeded")
    server.wait_idle()
    check(server)


class Broken(servers.mlx_rewind.NGram):
    """A drafter that raises in its rows."""

    def start(self, target: Any) -> Any:
        return Broken()

    def propose(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
        raise OSError("planned: /secret/path")


def test_a_request_that_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with servers.running(servers.demo(drafter=Broken())) as server:
        with ThreadPoolExecutor(2) as pool:
            bad = pool.submit(complete, server, PROMPTS[0], 24)
            good = pool.submit(complete, server, PROMPTS[1], 24, speculation="off")
        assert bad.result().status_code == 500
        assert "secret" not in bad.result().text
        assert good.result().json()["choices"][0]["text"] == servers.alone(PROMPTS[1], 24)
        assert server.metric("mlx_rewind_engine_restarts_total") == 0
        assert server.get("/health").status_code == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_engine_is_not_healthy(model: Flaky) -> None:
    with servers.running(Served(model, servers.shipped()[1])) as server:
        model.fails = SystemExit
        assert complete(server, PROMPTS[0]).status_code == 500
        server.wait(lambda: server.get("/health").json() == {"status": "dead"})
        assert server.get("/health").status_code == 503
        assert complete(server, PROMPTS[0]).status_code == 503


def test_draining_finishes_what_was_taken(model: Flaky) -> None:
    model.slow = 0.02
    with servers.running(Served(model, servers.shipped()[1])) as server:
        with ThreadPoolExecutor(1) as pool:
            one = pool.submit(complete, server, PROMPTS[0], 40)
            server.wait(lambda: server.worker.figures()["open"] == 1)
            server.server.drain()
            health = server.get("/health")
            assert (health.status_code, health.json()) == (503, {"status": "draining"})
            assert complete(server, PROMPTS[1]).status_code == 503
        model.slow = 0.0
        assert one.result().json()["choices"][0]["text"] == servers.alone(PROMPTS[0], 40)
        server.wait(lambda: server.worker.status == "dead")


def test_a_model_that_cannot_be_loaded() -> None:
    def fail() -> Served:
        raise FileNotFoundError("no such model")

    worker = Worker(fail, servers.Settings(models=("x",)))
    with pytest.raises(FileNotFoundError, match="no such model"):
        worker.start()
    assert worker.status == "dead"


def test_memory_returns(server: servers.Running) -> None:
    def used() -> int:
        server.wait_idle()
        time.sleep(0.05)
        gc.collect()
        mx.clear_cache()
        return mx.get_active_memory()

    check(server)
    before = used()
    for i in range(12):
        if i % 3 == 0:
            abandon(server, 3)
        else:
            complete(server, PROMPTS[i % 4], 20)
    assert used() <= before + 100_000
