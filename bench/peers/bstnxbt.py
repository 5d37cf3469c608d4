"""bstnxbt's `dflash-mlx`: a cache class of its own, a patched layer class, and a replayed tape."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from dflash_mlx.engine.target_ops import resolve_target_ops
from harness import main


class Bstnxbt:
    name = "dflash-mlx (bstnxbt)"

    def __init__(self, model: nn.Module) -> None:
        self.model, self.ops = model, resolve_target_ops(model)

    def make_cache(self) -> list[Any]:
        return self.ops.make_cache(self.model, enable_speculative_linear_cache=True)

    def step(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        return self.model(tokens, cache=cache)

    def verify(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        self.before = next(entry.offset for entry in cache if hasattr(entry, "offset"))
        self.ops.arm_rollback(cache, prefix_len=self.before)
        logits, _ = self.ops.verify_block(
            target_model=self.model, verify_ids=tokens, target_cache=cache, capture_layer_ids=set()
        )
        return logits

    def keep(self, cache: list[Any], accepted: int, drafted: int) -> None:
        self.ops.restore_after_acceptance(
            cache,
            target_len=self.before + accepted + 1,
            acceptance_length=accepted,
            drafted_tokens=drafted,
        )


if __name__ == "__main__":
    main("dflash-mlx", Bstnxbt)
