"""Token streams per kind and split, and the batches drawn from them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo_training import corpus, tasks, tokenizer

KINDS = ("code", "docs", "prose", "task")
SHARES = {"code": 0.25, "docs": 0.18, "prose": 0.22, "task": 0.35}
NUMBER_OF_TASKS = {"train": 24_000, "held_out": 400}


@dataclass(frozen=True)
class Stream:
    """Documents end to end, an end-of-text token after each.

    tokens  [N] uint16;  starts: where documents begin;  answers: where tasks' answers begin.
    """

    tokens: np.ndarray
    starts: np.ndarray
    answers: np.ndarray


def build(work: Path) -> None:
    """Encode documents and generated tasks into `streams/KIND.SPLIT.npz`."""
    folder = work / "streams"
    folder.mkdir(exist_ok=True)
    encoder = tokenizer.load(work)
    documents = corpus.load(work)
    for split, held_out in (("train", False), ("held_out", True)):
        chosen = [d for d in documents if d.held_out == held_out]
        for kind in KINDS[:-1]:
            texts = [d.text for d in chosen if d.kind == kind]
            save(folder / f"{kind}.{split}.npz", encode(encoder, [(text, "") for text in texts]))
        passages = tasks.collect_passages(chosen)
        seed = 4 if held_out else 3
        made = list(tasks.generate(passages, NUMBER_OF_TASKS[split], seed))
        pairs = [(tokenizer.chat(q), f"{a}{tokenizer.END}\n") for _, q, a in made]
        save(folder / f"task.{split}.npz", encode(encoder, pairs))
        if held_out:
            lines = (json.dumps({"task": n, "question": q, "answer": a}) for n, q, a in made)
            (work / "held_out_tasks.jsonl").write_text("\n".join(lines) + "\n")


def encode(encoder: Tokenizer, pairs: list[tuple[str, str]]) -> Stream:
    """Pairs of (text or question, answer or nothing)."""
    end = tokenizer.marker_id(encoder, tokenizer.END_OF_TEXT)
    questions = encoder.encode_batch_fast([q for q, _ in pairs])
    answers = encoder.encode_batch_fast([a for _, a in pairs])
    tokens: list[int] = []
    starts, answer_starts = [], []
    for question, answer in zip(questions, answers, strict=True):
        starts.append(len(tokens))
        tokens += question.ids
        answer_starts.append(len(tokens))
        tokens += [*answer.ids, end]
    return Stream(np.array(tokens, np.uint16), np.array(starts), np.array(answer_starts))


def save(path: Path, stream: Stream) -> None:
    np.savez(path, tokens=stream.tokens, starts=stream.starts, answers=stream.answers)
    print(f"data: {path.stem:16} {len(stream.tokens):9,} tokens, {len(stream.starts):6,} documents")


def load(work: Path, split: str) -> dict[str, Stream]:
    streams = {}
    for kind in KINDS:
        with np.load(work / "streams" / f"{kind}.{split}.npz") as file:
            streams[kind] = Stream(file["tokens"], file["starts"], file["answers"])
    return streams


def window(stream: Stream, kind: str, length: int, rng: np.random.Generator) -> np.ndarray:
    """`length` tokens from a random place; tasks from a task's start, so questions are whole."""
    last = len(stream.tokens) - length
    if kind == "task":
        start = rng.choice(stream.starts[: np.searchsorted(stream.starts, last)])
    else:
        start = rng.integers(last)
    return stream.tokens[start : start + length]


def batches(streams: dict[str, Stream], rows: int, length: int, seed: int) -> Iterator[Tensor]:
    """Endless batches  [rows, length]  int64, kinds mixed by SHARES within each batch."""
    rng = np.random.default_rng(seed)
    shares = np.array([SHARES[kind] for kind in KINDS])
    while True:
        # Low-discrepancy choice of kinds: one offset for the batch, evenly spaced rows.
        points = (np.arange(rows) + rng.random()) / rows
        kinds = [KINDS[i] for i in np.searchsorted(shares.cumsum()[:-1], points)]
        rng.shuffle(kinds)
        picked = [window(streams[kind], kind, length, rng) for kind in kinds]
        yield torch.from_numpy(np.stack(picked).astype(np.int64))
