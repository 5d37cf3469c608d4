"""A server under load: every finished answer against its solo run; speed against mlx_lm.server.

    python bench/server.py              16 clients, 20 requests each, some cancelled or malformed
    python bench/server.py --compare    throughput over mlx_lm.server's, plain and with drafts
    python bench/server.py --long       the first token while a prompt of 4,000 tokens is read

The shipped model; the servers run as processes of their own, one after the other.
"""

import argparse
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from typing import Any

import httpx

import mlx_rewind
from mlx_rewind.load import SHIPPED, SHIPPED_DRAFT, held_out_prompts

OURS = [sys.executable, "-m", "mlx_rewind.cli", "serve", "--model-name", "demo"]
STOCK = [sys.executable, "-m", "mlx_lm", "server", "--model", str(SHIPPED)]


@contextmanager
def running(command: list[str]) -> Iterator[httpx.Client]:
    """A server on a free port, until the end of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*command, "--port", str(port)], **quiet)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300)
    try:
        while True:
            try:
                client.get("/v1/models")
                break
            except httpx.ConnectError:
                time.sleep(0.2)
                if process.poll() is not None:
                    raise SystemExit(f"{command} ended at once") from None
        yield client
    finally:
        process.terminate()
        process.wait()


def ask(client: httpx.Client, text: str, **options: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": text, "max_tokens": 32, **options})


def load(args: argparse.Namespace) -> dict[str, Any]:
    """Counts of what came of all requests."""
    model, tokenizer = mlx_rewind.load()
    prompts = [entry["prompt"] for entry in held_out_prompts(tokenizer)][:12]
    solo = {p: mlx_rewind.generate(model, tokenizer, p, max_tokens=32) for p in prompts}
    counts = {"right": 0, "wrong": 0, "cancelled": 0, "refused": 0, "other": 0}

    def client_of(number: int, client: httpx.Client) -> None:
        luck = random.Random(number)
        for _ in range(args.requests):
            prompt, kind = luck.choice(prompts), luck.random()
            if kind < 0.15:
                response = client.post(
                    "/v1/completions",
                    content=b'{"prompt": 3, "x": ',
                    headers={"content-type": "application/json"},
                )
                counts["refused" if response.status_code == 400 else "other"] += 1
            elif kind < 0.3:
                body = {"prompt": prompt, "max_tokens": 200, "stream": True}
                with client.stream("POST", "/v1/completions", json=body) as response:
                    next(response.iter_lines())
                counts["cancelled"] += 1
            else:
                answer = ask(client, prompt).json()
                right = answer["choices"][0]["text"] == solo[prompt]
                counts["right" if right else "wrong"] += 1

    with running(OURS) as client, ThreadPoolExecutor(args.clients) as pool:
        ask(client, prompts[0])
        before = settled(client)
        list(pool.map(lambda number: client_of(number, client), range(args.clients)))
        after = settled(client)
        health = client.get("/health").status_code
    left = {
        "rows_left": after["requests_running"],
        "bytes_left": of_requests(after) - of_requests(before),
    }
    return {**counts, **left, "health": health}


def settled(client: httpx.Client) -> dict[str, float]:
    """The metrics once no request is under work, or after 20 seconds."""
    until = time.monotonic() + 20
    while True:
        lines = client.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        values = {name: float(value) for name, value in pairs}
        if not values["requests_running"] or time.monotonic() > until:
            return values
        time.sleep(0.1)


def of_requests(values: dict[str, float]) -> float:
    """Bytes in use that the store does not count."""
    return values["active_memory_bytes"] - values["prompt_cache_bytes"]


def throughput(command: list[str], args: argparse.Namespace) -> float:
    """Tokens per second of all clients together."""
    _, tokenizer = mlx_rewind.load()
    prompts = [entry["prompt"] for entry in held_out_prompts(tokenizer)]

    def one(number: int) -> int:
        answer = ask(client, prompts[number % len(prompts)], max_tokens=64).json()
        return int(answer["usage"]["completion_tokens"])

    with running(command) as client, ThreadPoolExecutor(args.clients) as pool:
        list(pool.map(one, range(args.clients)))
        began = time.perf_counter()
        tokens = sum(pool.map(one, range(args.clients * 3)))
        return tokens / (time.perf_counter() - began)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    draft = ["--draft-model", str(SHIPPED_DRAFT)]
    ways = {
        "mlx_lm plain": STOCK,
        "ours plain": [*OURS, "--draft", "none"],
        "ours auto": OURS,
        "ours draft model": [*OURS, *draft],
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.repeats):
        for name, command in ways.items():
            speeds[name].append(throughput(command, args))
    base = median(speeds["mlx_lm plain"])
    return {name: median(values) / base for name, values in speeds.items()}


def long_prompt(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first token of a short request: alone, and beside a prompt of 4,000 tokens."""

    def first(client: httpx.Client) -> float:
        began = time.perf_counter()
        body = {"prompt": "import os", "max_tokens": 4, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
        return time.perf_counter() - began

    times: dict[str, list[float]] = {"alone": [], "beside": []}
    with running([*OURS, "--store-bytes", "0"]) as client, ThreadPoolExecutor(1) as pool:
        first(client)
        for number in range(args.repeats):
            times["alone"].append(first(client))
            long: Any = [(number + i) % 500 + 10 for i in range(4000)]
            began = time.perf_counter()
            waiting = pool.submit(ask, client, long, max_tokens=1)
            time.sleep(0.1)
            times["beside"].append(first(client))
            waiting.result()
            times.setdefault("long", []).append(time.perf_counter() - began)
    alone, beside, whole = (median(times[name]) for name in ("alone", "beside", "long"))
    return {"beside_over_alone": beside / alone, "beside_over_long_prompt": beside / whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=20, help="of each client")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--long", action="store_true")
    args = parser.parse_args()
    work = compare if args.compare else long_prompt if args.long else load
    print(json.dumps(work(args), indent=2))


if __name__ == "__main__":
    main()
