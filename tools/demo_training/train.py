"""The trunk, trained together with the prediction head; checkpoints that training resumes from."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_training import data
from demo_training.config import TARGET
from demo_training.head import MTPHead
from demo_training.model import Trunk
from demo_training.optim import Optimisers

ROWS, LENGTH = 5, 512
HEAD_ROWS = 2  # the head is trained on a part of each batch: it is distilled later anyway
HEAD_WEIGHT = 0.3
CHECKPOINT_EVERY = 100


@dataclass(frozen=True)
class Checkpoint:
    """Modules by name, their optimisers and the steps done, in one file."""

    path: Path
    modules: dict[str, nn.Module]
    optimisers: Optimisers

    def save(self, step: int) -> None:
        state = {name: module.state_dict() for name, module in self.modules.items()}
        state |= {"optimisers": self.optimisers.state_dict(), "step": step}
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.path)

    def resume(self) -> int:
        """Load what is there; returns the number of steps done."""
        if not self.path.exists():
            return 0
        state = torch.load(self.path, weights_only=True)
        for name, module in self.modules.items():
            module.load_state_dict(state[name])
        self.optimisers.load_state_dict(state["optimisers"])
        print(f"resuming {self.path.name} at step {state['step']}", flush=True)
        return state["step"]


@dataclass
class Progress:
    """Prints smoothed losses, speed and time left every few steps."""

    label: str
    total: int
    first: int
    every: int = 10

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.smooth: dict[str, float] = {}

    def report(self, step: int, **losses: float) -> None:
        for name, value in losses.items():
            self.smooth[name] = 0.95 * self.smooth.get(name, value) + 0.05 * value
        done = step + 1 - self.first
        if done % self.every and step + 1 != self.total:
            return
        pace = (time.monotonic() - self.began) / done
        shown = " ".join(f"{name} {value:.3f}" for name, value in self.smooth.items())
        left = pace * (self.total - step - 1) / 60
        print(
            f"{self.label} {step + 1}/{self.total} {shown} {pace:.2f} s/step, {left:.0f} min left",
            flush=True,
        )


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_trunk(work: Path, steps: int) -> None:
    """Cross entropy of the trunk plus a share of the head's; writes `trunk.pt`."""
    trunk, head = Trunk(TARGET), MTPHead(TARGET)
    optimisers = Optimisers([trunk, head], matrix_lr=0.02, other_lr=3e-3)
    checkpoint = Checkpoint(work / "trunk.pt", {"trunk": trunk, "head": head}, optimisers)
    first = checkpoint.resume()
    stream = data.batches(data.load(work, "train"), ROWS, LENGTH + 1, seed=100 + first)
    progress = Progress("trunk", steps, first)
    for step, tokens in zip(range(first, steps), stream, strict=False):
        hidden = trunk(tokens[:, :-1])
        loss = cross_entropy(trunk.logits(hidden), tokens[:, 1:])
        few = tokens[:HEAD_ROWS]
        guess = head(trunk.embed_tokens(few[:, 1:-1]), hidden[:HEAD_ROWS, :-1])
        head_loss = cross_entropy(trunk.logits(guess), few[:, 2:])
        (loss + HEAD_WEIGHT * head_loss).backward()
        optimisers.step(step / steps, step)
        progress.report(step, loss=loss.item(), head=head_loss.item())
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps:
            checkpoint.save(step + 1)
    report_held_out(work, trunk)


def load_target(work: Path) -> tuple[Trunk, MTPHead]:
    """The newest trunk and head: the distilled head where it exists."""
    trunk, head = Trunk(TARGET), MTPHead(TARGET)
    state = torch.load(work / "trunk.pt", weights_only=True)
    trunk.load_state_dict(state["trunk"])
    distilled = work / "head.pt"
    head_state = torch.load(distilled, weights_only=True) if distilled.exists() else state
    head.load_state_dict(head_state["head"])
    return trunk.eval(), head.eval()


def held_out_windows(work: Path, kind: str, number: int, length: int) -> Iterator[Tensor]:
    """Evenly spaced windows  [1, length]  of the held-out stream."""
    stream = data.load(work, "held_out")[kind]
    last = len(stream.tokens) - length
    for i in range(number):
        start = last * i // number
        if kind == "task":
            start = stream.starts[stream.starts.searchsorted(start)]
        yield torch.from_numpy(stream.tokens[start : start + length].astype("int64"))[None]


@torch.no_grad()
def report_held_out(work: Path, trunk: Trunk) -> dict[str, float]:
    """Nats per token on held-out windows of 512, by kind."""
    losses = {}
    for kind in data.KINDS:
        batch = torch.cat(list(held_out_windows(work, kind, number=24, length=LENGTH + 1)))
        logits = trunk.logits(trunk(batch[:, :-1]))
        losses[kind] = cross_entropy(logits, batch[:, 1:]).item()
    print("held out:", " ".join(f"{kind} {loss:.2f}" for kind, loss in losses.items()), flush=True)
    return losses
