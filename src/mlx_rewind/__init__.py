"""Exact speculative decoding with cache rollback for every model that mlx-lm runs."""

from .cache.describe import CacheRecord, inspect
from .cache.retrace import attach, detach
from .cache.round import Round
from .draft.model import DraftModel
from .draft.ngram import NGram, Prediction
from .errors import DraftMismatchError, UnsupportedCacheError, UnsupportedModelError
from .generate import GenerationResponse, generate, generate_step, stream_generate

__version__ = "0.1.0"

__all__ = [
    "CacheRecord",
    "DraftMismatchError",
    "DraftModel",
    "GenerationResponse",
    "NGram",
    "Prediction",
    "Round",
    "UnsupportedCacheError",
    "UnsupportedModelError",
    "attach",
    "detach",
    "generate",
    "generate_step",
    "inspect",
    "stream_generate",
]
