"""Exact speculative decoding on the shipped model; this is `make demo`.

Decodes held-out prompts plainly and with every drafter, and compares each run token by token with
`mlx_lm.generate_step`. The exit code is 1 if any token differs.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from rich.console import Console
from rich.table import Table

import mlx_rewind
from mlx_rewind.load import held_out_prompts
from mlx_rewind.target import row_invariant

MAX_TOKENS = 32
KINDS = ("code", "docs", "prose", "task")
console = Console(highlight=False)


@dataclass(frozen=True)
class Run:
    """One decoding of a prompt; `last` has the statistics of mlx_rewind, None for mlx_lm itself."""

    tokens: list[int]
    seconds: float
    last: mlx_rewind.GenerationResponse | None = None

    @property
    def speed(self) -> float:
        return len(self.tokens) / self.seconds


class Stopwatch:
    """Runs from the end of prefill: the prompt costs the same whatever the drafter."""

    def progress(self, processed: int, total: int) -> None:
        if processed < total:
            self.start = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self.start


def decode_with_mlx_lm(
    model: nn.Module, tokenizer: Any, prompt: list[int], max_tokens: int = MAX_TOKENS
) -> Run:
    watch, tokens = Stopwatch(), []
    steps = generate_step(
        mx.array(prompt), model, max_tokens=max_tokens, prompt_progress_callback=watch.progress
    )
    for token, _ in steps:
        tokens.append(token)
        if token in tokenizer.eos_token_ids:
            break
    return Run(tokens, watch.seconds())


def decode(
    model: nn.Module,
    tokenizer: Any,
    prompt: list[int],
    drafter: Any = None,
    max_tokens: int = MAX_TOKENS,
) -> Run:
    watch = Stopwatch()
    responses = list(
        mlx_rewind.stream_generate(
            model,
            tokenizer,
            prompt,
            drafter=drafter,
            max_tokens=max_tokens,
            prompt_progress_callback=watch.progress,
        )
    )
    return Run([response.token for response in responses], watch.seconds(), responses[-1])


def almost(tokenizer: Any, tokens: list[int]) -> mlx_rewind.Prediction:
    """A prediction of `tokens` with a few words changed, like a file before an edit."""
    words = tokenizer.decode(tokens).split(" ")
    words[3::6] = ["changed"] * len(words[3::6])
    return mlx_rewind.Prediction(tokenizer.encode(" ".join(words), add_special_tokens=False))


def verdict(expected: list[int], got: list[int]) -> str:
    """`identical`, or the index of the first difference and the two tokens there."""
    if got == expected:
        return "identical"
    pairs = zip(expected, got, strict=False)
    i = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(got)))
    ours, theirs = ((*tokens, "end")[i] for tokens in (got, expected))
    return f"differs at {i}: {ours}, not {theirs}"


def warm_up(model: nn.Module, tokenizer: Any, *drafters: Any) -> None:
    """Compiles the kernels of every window size, so that no figure below includes it."""
    prompt = tokenizer.encode("Warm up.")
    for drafter in (None, *drafters):
        decode(model, tokenizer, prompt, drafter, max_tokens=12)
    decode_with_mlx_lm(model, tokenizer, prompt, max_tokens=12)


def compare(
    model: nn.Module,
    tokenizer: Any,
    prompt: list[int],
    draft: mlx_rewind.DraftModel,
    head: mlx_rewind.MTP,
) -> dict[str, Run]:
    """The prompt decoded by mlx_lm, plainly, and with each drafter there is."""
    runs = {"(mlx_lm)": decode_with_mlx_lm(model, tokenizer, prompt)}
    runs["none"] = decode(model, tokenizer, prompt)
    drafters: dict[str, Callable[[], Any]] = {
        "ngram": mlx_rewind.NGram,
        "model": lambda: draft,
        "mtp": lambda: head,
        "prediction": lambda: almost(tokenizer, runs["none"].tokens),
    }
    for name, drafter in drafters.items():
        runs[name] = decode(model, tokenizer, prompt, drafter())
    return runs


def table(title: str, runs: dict[str, Run]) -> Table:
    result = Table(title=title, title_justify="left")
    left = ("drafter", "% by depth", "output")
    columns = ("drafter", "tok/s", "ratio", "accepted", "% by depth", "/step", "output")
    for column in columns:
        result.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    expected, plain = runs["(mlx_lm)"], runs["none"]
    for name, run in runs.items():
        ratio = f"{run.speed / plain.speed:.2f}"
        accepted = depths = length = ""
        if run.last is not None and run.last.draft_kind != "none":
            accepted = f"{run.last.draft_n_accepted}/{run.last.draft_n}"
            depths = " ".join(f"{share:.0%}"[:-1] for share in run.last.acceptance_per_position)
            length = f"{run.last.mean_acceptance_length:.2f}"
        word = "reference" if run is expected else verdict(expected.tokens, run.tokens)
        result.add_row(name, f"{run.speed:.0f}", ratio, accepted, depths, length, word)
    return result


def show(model: nn.Module, tokenizer: Any, entry: dict[str, Any], drafter: Any) -> None:
    """Streams the text of a prompt, the accepted draft tokens in bold."""
    console.print(f"── prompt, the end of it: {entry['source']}", style="dim")
    console.print(f"…{entry['prompt'][-160:]}", style="cyan", markup=False)
    console.print("── the model goes on (bold: drafted, and accepted)", style="dim")
    prompt = tokenizer.encode(entry["prompt"], add_special_tokens=False)
    for response in mlx_rewind.stream_generate(
        model, tokenizer, prompt, drafter=drafter, max_tokens=MAX_TOKENS
    ):
        style = "bold" if response.from_draft else ""
        console.print(response.text, style=style, markup=False, end="", soft_wrap=True)
    console.print("\n")


def one_of_each_kind(tokenizer: Any) -> list[dict[str, Any]]:
    prompts = held_out_prompts(tokenizer)
    return [next(entry for entry in prompts if entry["kind"] == kind) for kind in KINDS]


def main() -> int:
    model, tokenizer = mlx_rewind.load()
    draft = mlx_rewind.load_draft(None, tokenizer)
    head = mlx_rewind.load_mtp(None, model)
    if not row_invariant():
        console.print("This machine sums a window in another order than single steps, so a near-")
        console.print("tie in bfloat16 may go either way. The models run in float32 here.\n")
        for each in (model, draft.model, *head.heads):
            each.set_dtype(mx.float32)
    prompts = one_of_each_kind(tokenizer)
    warm_up(model, tokenizer, draft, head)
    show(model, tokenizer, prompts[0], head)
    same = True
    for entry in prompts:
        prompt = tokenizer.encode(entry["prompt"], add_special_tokens=False)
        runs = compare(model, tokenizer, prompt, draft, head)
        console.print(table(f"{entry['kind']}: {entry['source']}", runs))
        same &= all(run.tokens == runs["(mlx_lm)"].tokens for run in runs.values())
    if mx.default_device() == mx.Device(mx.cpu):
        console.print("On a CPU a window of K tokens can cost up to K single steps, which limits")
        console.print("the ratios. 'Limits' in README.md says more.\n")
    console.print("Every run is identical to mlx_lm." if same else "A run differs from mlx_lm.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
