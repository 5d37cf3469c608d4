"""A server over real sockets, its clients, and what mlx-lm itself would have answered."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import mlx.core as mx
import openai
import uvicorn
from mlx_lm.generate import generate_step as stock_step

from mlx_rewind.load import load_mtp
from mlx_rewind.server.app import Settings, make_app
from mlx_rewind.server.worker import Worker

WAIT = 60.0


class Served:
    """A server on a free port, and a client."""

    def __init__(self, worker: Worker, url: str) -> None:
        self.worker, self.url = worker, url
        self.http = httpx.Client(base_url=url, timeout=WAIT)
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def chat(self, text: str = "Count to three.", **options: Any) -> Any:
        messages: Any = [{"role": "user", "content": text}]
        given = {"max_tokens": 16, **options}
        return self.client.chat.completions.create(model="demo", messages=messages, **given)

    def post(self, path: str = "chat/completions", **body: Any) -> httpx.Response:
        return self.http.post(f"/v1/{path}", json=body)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def served(worker: Worker, settings: Settings | None = None) -> Iterator[Served]:
    port = free_port()
    app = make_app(worker, settings or Settings("demo", draft_kind="mtp"))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    until = time.monotonic() + WAIT
    while not server.started and time.monotonic() < until:
        time.sleep(0.02)
    try:
        yield Served(worker, f"http://127.0.0.1:{port}")
    finally:
        server.should_exit = True
        thread.join(WAIT)


def new_worker(loaded: tuple[Any, Any], **options: Any) -> Worker:
    model, tokenizer = loaded
    return Worker(model, tokenizer, drafter=load_mtp(None, model), **options)


def reference(loaded: tuple[Any, Any], text: str, n: int = 16) -> str:
    """mlx-lm's own greedy answer, ended by an end token or the budget."""
    model, tokenizer = loaded
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True
    )
    tokens: list[int] = []
    for token, _ in stock_step(mx.array(prompt), model, max_tokens=n):
        if token in tokenizer.eos_token_ids:
            break
        tokens.append(token)
    return str(tokenizer.decode(tokens))
