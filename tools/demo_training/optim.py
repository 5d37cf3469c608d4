"""Muon for matrices, AdamW for everything else, and the learning-rate schedule."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Quintic Newton-Schulz coefficients: Jordan et al., Muon, kellerjordan.github.io/posts/muon
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """Singular values of each matrix in  [N, rows, columns]  pushed towards 1."""
    a, b, c = NEWTON_SCHULZ
    tall = update.shape[-2] > update.shape[-1]
    x = update.transpose(-1, -2) if tall else update
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-1, -2) if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, Nesterov form, orthogonalised; matrices of one shape are handled together."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for shape, params in by_shape.items():
                updates = torch.stack([self._nesterov(p, group["momentum"]) for p in params])
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for p, update in zip(params, orthogonalise(updates), strict=True):
                    p.add_(update, alpha=-group["lr"] * scale)

    def _nesterov(self, p: nn.Parameter, momentum: float) -> Tensor:
        buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
        buffer.lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(buffer, momentum)


class Optimisers:
    """The pair of optimisers with one schedule: warm-up, flat, linear decay to zero."""

    WARM_UP = 30
    DECAY_SHARE = 0.6

    def __init__(self, modules: Iterable[nn.Module], matrix_lr: float, other_lr: float) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for module in modules:
            for name, p in module.named_parameters():
                is_matrix = p.ndim == 2 and "embed_tokens" not in name and min(p.shape) >= 16
                (matrices if is_matrix else others).append(p)
        self.params = matrices + others
        self.pair = [
            Muon(matrices, lr=matrix_lr),
            torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.peaks = (matrix_lr, other_lr)

    def step(self, progress: float, step: int) -> None:
        """Apply the gradients; `progress` in [0, 1] places the step in the schedule."""
        factor = min(1.0, (step + 1) / self.WARM_UP, (1 - progress) / self.DECAY_SHARE)
        nn.utils.clip_grad_norm_(self.params, 1.0)
        for optimiser, peak in zip(self.pair, self.peaks, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = peak * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimiser.state_dict() for optimiser in self.pair]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for optimiser, state in zip(self.pair, states, strict=True):
            optimiser.load_state_dict(state)
