"""What a multi-token prediction head computes: a one-layer model of the target's own class.

    x = projection([norm(embedding of the next token); norm(state of the target)])
    logits = output head(norm(layers(x)))

Layers, masks and caches are those of mlx-lm's model file: the body of a head is the inner model of
the target's class, made with the head's layers only, and given x where it would look up embeddings.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..target import Trunk
from .families import Family


class Head(nn.Module):
    """One head, with random weights until they are loaded.

    family    what it computes
    target    the model that it belongs to
    index     which of the checkpoint's heads it is
    config    the checkpoint's config.json, for what mlx-lm's `ModelArgs` leave out
    """

    def __init__(
        self, family: Family, target: nn.Module, index: int, config: dict[str, Any]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        model = _with_the_layers_of_the_head(family, target, index, config)
        trunk = Trunk.of(model)
        body = trunk.inner(model)
        norm = body[trunk.norm]
        vocab, size = body[trunk.embedding].weight.shape
        self.embedding_norm = type(norm)(size, eps=norm.eps)
        self.hidden_norm = type(norm)(size, eps=norm.eps)
        self.projection = nn.Linear(2 * size, size, bias=False)
        if family.own_norm:
            self.norm = norm
        if family.own_output:
            self.output = nn.Linear(size, vocab, bias=False)
        for name in (trunk.embedding, trunk.norm):
            setattr(body, name, _same)
        family.reshape(body)
        self.body = body
        # Kept out of the tree of modules: `body` is a part of it.
        vars(self).update(family=family, trunk=trunk, model=model)
        if not family.own_norm:
            shared = Trunk.of(target)
            vars(self)["norm"] = shared.inner(target)[shared.norm]

    def make_cache(self) -> list[Any]:
        return make_prompt_cache(vars(self)["model"])

    def trial_cache(self) -> list[Any]:
        """Caches after two pairs that are never computed, to be looked at."""
        cache = self.make_cache()
        pairs = mx.zeros((1, 2, self.projection.weight.shape[0]))
        self(pairs, pairs, cache)
        return cache

    def __call__(
        self, embedded: mx.array, hidden: mx.array, cache: list[Any]
    ) -> tuple[mx.array, mx.array]:
        """Reads pairs: `embedded` next tokens and `hidden` states, both [B, S, H]. Mutates `cache`.

        Returns the states for the next depth and the input of the output head, both [B, S, H].
        """
        pair = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        if self.family.hidden_first:
            pair.reverse()
        raw = self.body(self.projection(mx.concatenate(pair, axis=-1)), cache)
        normed = self.norm(raw)
        return (normed if self.family.hands_on == "normed" else raw), normed


def _same(x: mx.array) -> mx.array:
    return x


def _with_the_layers_of_the_head(
    family: Family, target: nn.Module, index: int, config: dict[str, Any]
) -> nn.Module:
    """A model of the target's class that has nothing but the layers of a head."""
    kind: Any = type(target)
    args: Any = target.args
    if isinstance(getattr(args, "text_config", None), dict):
        text = {**args.text_config, **family.layers(args.text_config, index, config)}
        args = dataclasses.replace(args, text_config=text)
    else:
        changes = family.layers(dataclasses.asdict(args), index, config)
        args = copy.copy(args)
        for name, value in changes.items():
            setattr(args, name, value)
    return kind(args)
