"""A window that is taken back in part: from what was kept of it, or by the layers' own forward."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_rewind import Round
from mlx_rewind.cache import recurrence
from mlx_rewind.cache.pick import Picks

WINDOW = [11, 52, 7, 33, 90]


@contextmanager
def most_states(limit: int) -> Iterator[None]:
    before, recurrence.MOST_STATES = recurrence.MOST_STATES, limit
    try:
        yield
    finally:
        recurrence.MOST_STATES = before


@contextmanager
def computed_again() -> Iterator[None]:
    """What a round takes back is computed by the layer's own forward: neither kept nor picked."""
    with most_states(0), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Picks, "after", lambda self, kept: None)
        yield


def calls_of(round_: Round) -> list[Any]:
    """The recorded layer calls of a round."""
    tapes = [vars(undo).get("tape") for undo in round_._undos.values()]
    return [call for tape in tapes if tape is not None for call in tape.calls]


def taken_back(model: nn.Module, start: list[Any], kept: Any, window: list[list[int]]) -> list[Any]:
    cache = copy.deepcopy(start)
    with Round(model, cache) as round_:
        model(mx.array(window), cache=cache)
        round_.commit(kept)
    return cache
