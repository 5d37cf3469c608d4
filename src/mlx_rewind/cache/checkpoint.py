"""A prompt cache as it is now, to go back to."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import ArraysCache, RotatingKVCache

from .probe import walk


class Checkpoint:
    """A prompt cache as it is now. `restore` puts it back, whatever was fed since.

    Records nothing, so it suits prefill: it holds no prompt-sized tensors of its own.
    """

    def __init__(self, cache: list[Any]) -> None:
        self._cache, self._entries = cache, list(cache)
        self._saved = [(entry, _attributes(entry)) for _, entry in walk(cache)]

    def restore(self) -> None:
        self._cache[:] = self._entries
        for entry, attributes in self._saved:
            vars(entry).clear()
            vars(entry).update(attributes)


def _attributes(entry: Any) -> dict[str, Any]:
    """The attributes of a cache object. A ring overwrites what is valid, so it gets new handles."""
    attributes = dict(vars(entry))
    if isinstance(entry, ArraysCache):
        attributes["cache"] = list(entry.cache)
    if type(entry) is RotatingKVCache and entry.keys is not None:
        attributes.update({side: attributes[side][...] for side in ("keys", "values")})
    return attributes
