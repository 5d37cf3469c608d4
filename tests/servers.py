"""A server in a thread of the test, and what its answers are judged by."""

import functools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import mlx.core as mx
import openai
from mlx_lm.generate import stream_generate

import mlx_rewind
from mlx_rewind.server.desk import Served
from mlx_rewind.server.run import Server, listen
from mlx_rewind.server.settings import Settings
from mlx_rewind.server.worker import Worker

#: Seconds that anything in a test may take.
LIMIT = 30.0


@dataclass
class Running:
    """A server that answers at `url`."""

    url: str
    worker: Worker
    server: Server

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=LIMIT
        )

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        options.setdefault("timeout", LIMIT)
        return httpx.post(f"{self.url}{path}", json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=LIMIT, **options)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = self.get("/metrics").text.splitlines()
        found = [line for line in lines if line.split("{")[0].split(" ")[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def wait(self, is_so: Any, seconds: float = LIMIT) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < end, "it did not come true in time"
            time.sleep(0.01)

    def wait_idle(self) -> None:
        self.wait(lambda: self.worker.is_idle)


@contextmanager
def running(served: Served, **options: Any) -> Iterator[Running]:
    """Serves on a free port until the block ends."""
    settings = Settings(**{"models": ("demo",), "max_tokens": 24, **options})
    worker = Worker(lambda: served, settings)
    worker.start()
    with listen("127.0.0.1", 0) as bound:
        server = Server(worker, settings, drain_seconds=LIMIT)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield Running(f"http://127.0.0.1:{bound.getsockname()[1]}", worker, server)
        finally:
            server.should_exit = True
            thread.join(LIMIT)
            assert not thread.is_alive(), "the server does not stop"


@functools.cache
def shipped() -> tuple[Any, Any]:
    return mlx_rewind.load()


@functools.cache
def head() -> Any:
    return mlx_rewind.load_mtp(None, shipped()[0])


def demo(**options: Any) -> Served:
    """The shipped model with its own head, four rows at once."""
    model, tokenizer = shipped()
    engine = {"max_rows": 4, "prefill_step_size": 64, **options.pop("engine", {})}
    return Served(model, tokenizer, **{"drafter": head(), **options}, engine=engine)


def alone(prompt: str | Sequence[int], max_tokens: int = 24, **options: Any) -> str:
    """The text that mlx-lm's own plain decoding gives."""
    return _alone(prompt if isinstance(prompt, str) else tuple(prompt), max_tokens, **options)


@functools.cache
def _alone(prompt: Any, max_tokens: int, **options: Any) -> str:
    model, tokenizer = shipped()
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    steps = stream_generate(model, tokenizer, ids, max_tokens=max_tokens, **options)
    return "".join(step.text for step in steps)


def chat_prompt(text: str) -> list[int]:
    message = [{"role": "user", "content": text}]
    return list(shipped()[1].apply_chat_template(message, add_generation_prompt=True))


def chunks(response: httpx.Response) -> Iterator[Any]:
    """The objects of a stream; the last one must be [DONE]."""
    last = None
    for line in response.iter_lines():
        if line.startswith("data: "):
            last = line[6:]
            if last != "[DONE]":
                yield json.loads(last)
    assert last == "[DONE]"


def logprobs_of(prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """The logprobs of `tokens` in one forward of the model, without speculation."""
    model, _ = shipped()
    logits = model(mx.array([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1]
    told = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return [told[i, token].item() for i, token in enumerate(tokens)]
