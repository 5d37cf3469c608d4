"""`mlx-vlm`: models of its own, whose caches keep what a rollback needs."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from harness import main
from mlx.utils import tree_flatten
from mlx_vlm.models.qwen3_5.config import TextConfig
from mlx_vlm.models.qwen3_5.language import LanguageModel
from mlx_vlm.speculative.cache_state import commit_speculative_round


class Vlm:
    name = "mlx-vlm"

    def __init__(self, model: nn.Module) -> None:
        theirs = vars(model.language_model.args)
        names = {field.name for field in fields(TextConfig)} - {"rope_parameters"}
        config = TextConfig(**{name: x for name, x in theirs.items() if name in names})
        # What it asks of the configuration of a model with vision, for prompts without pictures.
        vision = SimpleNamespace(spatial_merge_size=2)
        ids = {f"{kind}_token_id": -1 for kind in ("image", "video", "vision_start")}
        self.model = LanguageModel(config, SimpleNamespace(vision_config=vision, **ids))
        weights = tree_flatten(model.language_model.parameters())
        self.model.load_weights(weights, strict=True)
        self.model.eval()

    def make_cache(self) -> list[Any]:
        return self.model.make_cache()

    def step(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        return self.model(tokens, cache=cache).logits

    def verify(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        *_, self.state, logits = self.model.speculative_verify_logits(tokens, cache, _as_they_are)
        return logits

    def keep(self, cache: list[Any], accepted: int, drafted: int) -> None:
        commit_speculative_round(self.model, cache, self.state, accepted, drafted + 1)


def _as_they_are(logits: mx.array) -> mx.array:
    """In the place of the sampler."""
    return logits


if __name__ == "__main__":
    main("mlx-vlm", Vlm)
