"""z-lab's `dflash`: it replaces the class's GatedDeltaNet forward while it generates."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from dflash.model_mlx import _GDNStateCapture
from harness import Rewind, main


class ZLab(Rewind):
    name = "dflash (z-lab)"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.capture: Any = None

    def verify(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        self.capture = _GDNStateCapture()
        return self.model(tokens, cache=cache)

    def keep(self, cache: list[Any], accepted: int, drafted: int) -> None:
        if accepted < drafted:
            self.capture.rollback(cache, accepted, drafted - accepted)
        self.capture.close()  # the patched class would slow mlx-rewind in the same process


if __name__ == "__main__":
    main("dflash", ZLab)
