"""Distillation of the prediction head and of the draft model from the trained trunk."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from demo_training import data, sample, train
from demo_training.config import DRAFT
from demo_training.head import MTPHead
from demo_training.model import Trunk
from demo_training.optim import Optimisers

ROWS = 6
DEPTHS = 3
CHECKPOINT_EVERY = 50


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Mean KL(teacher || student) of logits  [B, T, V]."""
    target, guess = teacher.log_softmax(-1), student.log_softmax(-1)
    return (target.exp() * (target - guess)).sum(-1).mean()


def sampled_batches(work: Path, rows: int, seed: int) -> Iterator[Tensor]:
    """Endless batches  [rows, sample.LENGTH]  of the sampled sequences."""
    sequences = np.load(work / "samples.npy").astype(np.int64)
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(sequences))
        for start in range(0, len(order) - rows + 1, rows):
            yield torch.from_numpy(sequences[order[start : start + rows]])


def train_head(work: Path, steps: int) -> None:
    """The head, unrolled as a drafter feeds it, towards the frozen trunk; writes `head.pt`."""
    trunk, head = train.load_target(work)
    optimisers = Optimisers([head], matrix_lr=0.006, other_lr=1e-3)
    checkpoint = train.Checkpoint(work / "head.pt", {"head": head}, optimisers)
    first = checkpoint.resume()
    progress = train.Progress("head", steps, first)
    stream = sampled_batches(work, ROWS, seed=200 + first)
    for step, tokens in zip(range(first, steps), stream, strict=False):
        losses = head_losses(trunk, head, tokens)
        torch.stack(losses).mean().backward()
        optimisers.step(step / steps, step)
        progress.report(step, **{f"depth{d}": loss.item() for d, loss in enumerate(losses, 1)})
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps:
            checkpoint.save(step + 1)


def head_losses(trunk: Trunk, head: MTPHead, tokens: Tensor) -> list[Tensor]:
    """Divergence per depth; depth d from position t is compared with the trunk at t + d."""
    with torch.no_grad():
        hidden = trunk(tokens[:, :-1])
        teacher = trunk.logits(hidden)
        embedded = trunk.embed_tokens(tokens[:, 1:-1])
        weight = trunk.embed_tokens.weight.detach()
    outputs = head.unroll(embedded, hidden[:, :-1], DEPTHS)
    return [divergence(teacher[:, d:], out @ weight.T) for d, out in enumerate(outputs, 1)]


def train_draft(work: Path, steps: int) -> None:
    """A smaller hybrid towards the target, half on samples, half on texts; writes `draft.pt`."""
    trunk, _ = train.load_target(work)
    draft = Trunk(DRAFT)
    optimisers = Optimisers([draft], matrix_lr=0.02, other_lr=3e-3)
    checkpoint = train.Checkpoint(work / "draft.pt", {"draft": draft}, optimisers)
    first = checkpoint.resume()
    progress = train.Progress("draft", steps, first)
    texts = data.batches(data.load(work, "train"), ROWS // 2, sample.LENGTH, seed=300 + first)
    sampled = sampled_batches(work, ROWS // 2, seed=400 + first)
    for step, pair in zip(range(first, steps), zip(texts, sampled, strict=True), strict=False):
        tokens = torch.cat(pair)
        with torch.no_grad():
            teacher = trunk.logits(trunk(tokens))
        loss = divergence(teacher, draft.logits(draft(tokens)))
        loss.backward()
        optimisers.step(step / steps, step)
        progress.report(step, loss=loss.item())
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps:
            checkpoint.save(step + 1)


def load_draft(work: Path) -> Trunk:
    draft = Trunk(DRAFT)
    draft.load_state_dict(torch.load(work / "draft.pt", weights_only=True)["draft"])
    return draft.eval()
