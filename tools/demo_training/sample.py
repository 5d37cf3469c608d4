"""Text sampled from the target: what the head and the draft model are distilled on."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from demo_training import data, train
from demo_training.model import Trunk

LENGTH = 258
ROWS = 64
PROMPT_LENGTH = {"code": 48, "docs": 48, "prose": 48, "task": 150}
TEMPERATURES = (0.0, 0.3, 0.6, 0.9)


def build(work: Path, number: int) -> None:
    """Write `samples.npy`  [number, LENGTH]  uint16; prompts come from the training split."""
    trunk, _ = train.load_target(work)
    streams = data.load(work, "train")
    rng = np.random.default_rng(5)
    torch.manual_seed(5)
    kinds = rng.permutation([k for k in data.KINDS for _ in range(round(20 * data.SHARES[k]))])
    temperatures = torch.tensor(TEMPERATURES).repeat(ROWS // len(TEMPERATURES))[:, None]
    groups = []
    for group in range(-(-number // ROWS)):
        kind = kinds[group % len(kinds)]
        prompts = torch.cat([prompt(streams[kind], kind, rng) for _ in range(ROWS)])
        sampled = continue_prompts(trunk, prompts, LENGTH, temperatures)
        groups.append(sampled.numpy().astype(np.uint16))
        print(f"sample: {(group + 1) * ROWS}/{number} sequences ({kind})", flush=True)
    np.save(work / "samples.npy", rng.permutation(np.concatenate(groups)))


def prompt(stream: data.Stream, kind: str, rng: np.random.Generator) -> Tensor:
    """[1, length]: a window of text, or what precedes the answer of a task."""
    length = PROMPT_LENGTH[kind]
    if kind == "task":
        end = rng.choice(stream.answers[np.searchsorted(stream.answers, length) :])
    else:
        end = rng.integers(length, len(stream.tokens))
    return torch.from_numpy(stream.tokens[end - length : end].astype(np.int64))[None]


@torch.no_grad()
def continue_prompts(trunk: Trunk, prompts: Tensor, length: int, temperatures: Tensor) -> Tensor:
    """prompts  [B, P]  continued to  [B, length]; temperatures  [B, 1], 0 is greedy.

    argmax(logits + T * Gumbel noise) draws from softmax(logits / T).
    """
    states = trunk.new_state()
    tokens, fed = prompts, prompts
    while tokens.shape[1] < length:
        logits = trunk.logits(trunk(fed, states)[:, -1])
        noise = -torch.empty_like(logits).exponential_().log()
        fed = (logits + temperatures * noise).argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, fed], dim=1)
    return tokens
