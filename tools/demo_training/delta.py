"""The gated delta rule in its chunkwise (WY) form.

Per head, with decay exp(g_t) and write strength beta_t (Yang et al., Gated Delta Networks,
arXiv:2412.06464, section 3.3):

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T        o_t = S_t^T q_t

Inside a chunk the writes solve a unit lower triangular system, so a chunk costs a few small
matrix products, and only the state travels from chunk to chunk.
"""

import torch
from torch import Tensor
from torch.nn import functional

from demo_training.config import CHUNK


def gated_delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of the recurrence.

    q, k  [B, H, 1, Dk];  v  [B, H, 1, Dv];  g, beta  [B, H, 1];  state  [B, H, Dk, Dv].
    Returns the output  [B, H, 1, Dv]  and the new state.
    """
    state = state * g.exp()[..., None]
    write = beta[..., None] * (v - k @ state)
    state = state + k.transpose(-1, -2) @ write
    return q @ state, state


def gated_delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Any number of tokens T; shapes as in `gated_delta_step` with T in place of 1."""
    length = q.shape[2]
    padding = -length % CHUNK
    # A padded token is an identity step: decay 1, write strength 0.
    q, k, v = (functional.pad(x, (0, 0, 0, padding)) for x in (q, k, v))
    g, beta = (functional.pad(x, (0, padding)) for x in (g, beta))
    q, k, v, g, beta = (x.unflatten(2, (-1, CHUNK)) for x in (q, k, v, g, beta))

    # decay[i, j] = product of the decays of j+1..i, for j <= i
    total = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()

    # (I + L) [U W] = diag(beta) [V  decayed K];  writes of a chunk = U - W S
    system = (beta[..., None] * (k @ k.transpose(-1, -2)) * decay).tril(-1)
    into = total.exp()[..., None]
    sides = beta[..., None] * torch.cat([v, k * into], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    free, bound = solved.split([v.shape[-1], k.shape[-1]], dim=-1)

    queries = q * into
    scores = (q @ k.transpose(-1, -2)) * decay
    keys_out = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    chunk_decay = total[..., -1].exp()[..., None, None]

    outputs = []
    for c in range(q.shape[2]):
        writes = free[:, :, c] - bound[:, :, c] @ state
        outputs.append(queries[:, :, c] @ state + scores[:, :, c] @ writes)
        state = chunk_decay[:, :, c] * state + keys_out[:, :, c] @ writes
    return torch.cat(outputs, dim=2)[:, :, :length], state


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule for T tokens: recurrent for one, chunkwise for more."""
    rule = gated_delta_step if q.shape[2] == 1 else gated_delta_chunks
    return rule(q, k, v, g, beta, state)
