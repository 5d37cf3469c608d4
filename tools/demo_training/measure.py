"""Figures for the model card, measured in torch on the held-out prompts.

A chain of drafts is alive only while every draft was right, so each drafter can be run once over
the target's greedy text: drafts along the true tokens are the drafts of every possible round.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo_training import data, distil, sample, tokenizer, train
from demo_training.head import MTPHead
from demo_training.model import Trunk

NEW_TOKENS = 48
DEPTHS = 4


def acceptance(work: Path, prompts: Path) -> dict[str, list[str]]:
    """Per drafter and kind: 'accepted/drafted, tokens per verify' for 1..DEPTHS drafts."""
    trunk, head = train.load_target(work)
    draft = distil.load_draft(work)
    encoder = tokenizer.load(work)
    greedy = [(kind, *continuation(trunk, encoder, text)) for kind, text in texts(prompts)]
    table = {}
    for name, matcher in (
        ("head", lambda tokens: head_matches(trunk, head, tokens)),
        ("draft", lambda tokens: draft_matches(draft, tokens)),
    ):
        matched = [(kind, matcher(tokens), first) for kind, tokens, first in greedy]
        for group in ("all", *data.KINDS):
            chosen = [(m, first) for kind, m, first in matched if group in ("all", kind)]
            table[f"{name} {group}"] = [rounds(chosen, d) for d in range(1, DEPTHS + 1)]
    return table


def texts(prompts: Path) -> Iterator[tuple[str, str]]:
    for line in prompts.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "task":
            yield "task", tokenizer.chat(record["messages"][0]["content"])
        else:
            yield record["kind"], record["prompt"]


def continuation(trunk: Trunk, encoder: Tokenizer, text: str) -> tuple[Tensor, int]:
    """Greedy text  [1, T]  up to an end marker, and the index of its first new token."""
    prompt = torch.tensor([encoder.encode(text).ids])
    first = prompt.shape[1]
    length = first + NEW_TOKENS + DEPTHS
    tokens = sample.continue_prompts(trunk, prompt, length, torch.zeros(1, 1))
    ends = torch.tensor(tokenizer.end_ids(encoder))
    stops = torch.isin(tokens[0, first:], ends).nonzero()
    return (tokens[:, : first + stops[0].item() + 1] if len(stops) else tokens), first


@torch.no_grad()
def head_matches(trunk: Trunk, head: MTPHead, tokens: Tensor) -> list[list[bool]]:
    """matches[n][d]: with tokens[:n] known, is draft d the token n + d?"""
    hidden = trunk(tokens[:, :-1])
    outputs = head.unroll(trunk.embed_tokens(tokens[:, 1:]), hidden, DEPTHS)
    guesses = [trunk.logits(out)[0].argmax(-1).tolist() for out in outputs]
    truth = tokens[0].tolist()
    # The chain of position n - 2 sees the pair (h of n - 2, token n - 1).
    return [
        [guesses[d][n - 2] == truth[n + d] for d in range(DEPTHS) if n + d < len(truth)]
        for n in range(2, len(truth))
    ]


@torch.no_grad()
def draft_matches(draft: Trunk, tokens: Tensor) -> list[list[bool]]:
    guesses = draft.logits(draft(tokens))[0].argmax(-1).tolist()
    truth = tokens[0].tolist()
    return [
        [guesses[n + d - 1] == truth[n + d] for d in range(DEPTHS) if n + d < len(truth)]
        for n in range(2, len(truth))
    ]


def rounds(matched: list[tuple[list[list[bool]], int]], depth: int) -> str:
    """Replay the rounds of speculative decoding with `depth` drafts each."""
    accepted = drafted = verifies = tokens = 0
    for matches, first in matched:
        n = first + 1  # the prefill has already given the first new token
        while n - 2 < len(matches):
            drafts = matches[n - 2][:depth]
            right = drafts.index(False) if False in drafts else len(drafts)
            accepted, drafted, verifies = accepted + right, drafted + len(drafts), verifies + 1
            tokens += right + 1
            n += right + 1
    return f"{accepted / drafted:.2f} {tokens / verifies:.2f}"


def report(work: Path, prompts: Path) -> None:
    trunk, _ = train.load_target(work)
    train.report_held_out(work, trunk)
    for name, row in acceptance(work, prompts).items():
        print(f"{name:12}", "  ".join(row), flush=True)
