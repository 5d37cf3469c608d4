"""The trim protocol: `cache.trim(n)` undoes exactly, for engines that are built around it.

    start_speculation(model, cache)
    model(window, cache=cache)                   # any number of forwards
    for entry in cache: entry.trim(rejected)     # or mlx_lm's trim_prompt_cache
    stop_speculation(cache)

Each cache keeps a log of its last forwards (`log`), with the undos that a `Round` uses.
"""

from __future__ import annotations

import operator
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from .log import Log, RecurrentLog, unwatch
from .probe import walk
from .retrace import LOG, is_recorded
from .round import check
from .slots import is_recurrent


def start_speculation(model: nn.Module, cache: list[Any], window: int = 64) -> None:
    """Makes every cache of a prompt cache of `model` trimmable until `stop_speculation`.

    Between the two, `is_trimmable()` is true and `trim(n)` takes back the last n tokens exactly,
    across any number of forwards, up to `window` of them. Beyond it `trim` raises ValueError and
    changes nothing. A forward of more than `window` tokens (prefill) is not recorded and cannot be
    taken back. The objects stay what they are: they can be saved, copied (the copy is stock again)
    and fed as before.

    Raises `UnsupportedCacheError` or `UnsupportedModelError`, with nothing changed, where a `Round`
    would, and for a prompt cache that speculates already.
    """
    if operator.index(window) < 1:
        raise ValueError(f"window must be at least 1 token, got {window}")
    plan = check(model, cache)
    plan.check_windows()
    if any(is_recorded(entry) for _, entry in plan.leaves):
        raise RuntimeError("this prompt cache is inside an open Round: end it first")
    logs = {
        label: RecurrentLog(entry, window, plan.calls[label])
        if is_recurrent(entry)
        else Log(entry, window)
        for label, entry in plan.leaves
    }
    for label, log in logs.items():
        log.group = list(logs.values())
        log.window_end = plan.window_end
        log.siblings = [logs[sibling] for sibling in plan.siblings.get(label, ())]
        log.watch(log.cache)


def stop_speculation(cache: list[Any]) -> None:
    """Makes the caches stock again and drops what was recorded. Without effect on stock caches."""
    for _, entry in walk(cache):
        if LOG in vars(entry):
            unwatch(entry)


def speculative_prompt_cache(
    model: nn.Module, draft_model: nn.Module, window: int = 64
) -> list[Any]:
    """A prompt cache for mlx-lm's own speculative decoding, exact for every model.

        cache = speculative_prompt_cache(model, draft_model)
        speculative_generate_step(prompt, model, draft_model, prompt_cache=cache)   # mlx_lm's

    It holds fresh caches of the model, then of the draft model, all of them speculating.

    Raises what `start_speculation` raises.
    """
    ours, drafts = make_prompt_cache(model), make_prompt_cache(draft_model)
    start_speculation(model, ours, window)
    start_speculation(draft_model, drafts, window)
    ahead = next((vars(entry)[LOG] for _, entry in walk(drafts) if LOG in vars(entry)), None)
    for log in (vars(entry)[LOG] for _, entry in walk(ours) if LOG in vars(entry)):
        log.ahead = ahead
    return _TwoCaches(ours, drafts, boundary=len(model.layers))


class _TwoCaches(list[Any]):
    """mlx-lm cuts the list at the number of the model's layers, not of its caches."""

    def __init__(self, ours: list[Any], drafts: list[Any], boundary: int) -> None:
        super().__init__([*ours, *drafts])
        self._count, self._boundary = len(ours), boundary

    def __getitem__(self, index: Any) -> Any:
        if index == slice(None, self._boundary):
            index = slice(None, self._count)
        elif index == slice(self._boundary, None):
            index = slice(self._count, None)
        return super().__getitem__(index)
