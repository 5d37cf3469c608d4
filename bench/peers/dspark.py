"""`mlx-dspark`: patches mlx-lm's module while it feeds a window, and feeds its recurrence again."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from harness import main
from mlx_dspark.target import Target


class DSpark:
    name = "mlx-dspark"

    def __init__(self, model: nn.Module) -> None:
        self.target = Target(model, None)

    def make_cache(self) -> list[Any]:
        return self.target.make_cache()

    def step(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        return self.target.plain(tokens, cache)

    def verify(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits, _ = self.target.verify(tokens, cache, None)
        return logits

    def keep(self, cache: list[Any], accepted: int, drafted: int) -> None:
        self.target.rollback(cache, drafted - accepted, [])


if __name__ == "__main__":
    main("mlx-dspark", DSpark)
