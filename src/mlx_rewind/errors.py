"""The refusals of mlx-rewind. Each is a ValueError: the request cannot be done exactly as asked.

ValueError
├── UnsupportedCacheError     a cache that no undo covers, or that does not fit the model
├── UnsupportedModelError     a layer whose recurrence cannot be recorded
└── DraftMismatchError        a drafter that does not fit the target
"""


class UnsupportedCacheError(ValueError):
    """A prompt cache holds an object whose state cannot be undone exactly."""


class UnsupportedModelError(ValueError):
    """A model has a layer whose recurrent state cannot be recorded and retraced."""


class DraftMismatchError(ValueError):
    """A drafter does not fit the target: other tokenizer, or tokens the target does not have."""
