"""Exact speculative decoding with cache rollback for every model that mlx-lm runs."""

from .audit import audit
from .batch import WindowProcessor
from .cache.attach import attach, detach
from .cache.describe import CacheRecord, inspect
from .cache.retrace import record_rollback
from .cache.round import Round
from .cache.store import PromptCacheStore
from .cache.trim import speculative_prompt_cache, start_speculation, stop_speculation
from .draft.auto import Auto
from .draft.model import DraftModel
from .draft.mtp import MTP
from .draft.ngram import NGram, Prediction
from .engine import Engine
from .errors import DraftMismatchError, UnsupportedCacheError, UnsupportedModelError
from .generate import generate, generate_step, stream_generate
from .grammar import Grammar
from .load import load, load_draft, load_mtp
from .many import BatchResult, batch_generate
from .request import Handle, Output, Request
from .response import GenerationResponse
from .sampling import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "MTP",
    "Auto",
    "BatchResult",
    "CacheRecord",
    "DraftMismatchError",
    "DraftModel",
    "Engine",
    "GenerationResponse",
    "Grammar",
    "Handle",
    "NGram",
    "Output",
    "Prediction",
    "PromptCacheStore",
    "Request",
    "Round",
    "SamplingParams",
    "UnsupportedCacheError",
    "UnsupportedModelError",
    "WindowProcessor",
    "attach",
    "audit",
    "batch_generate",
    "detach",
    "generate",
    "generate_step",
    "inspect",
    "load",
    "load_draft",
    "load_mtp",
    "record_rollback",
    "speculative_prompt_cache",
    "start_speculation",
    "stop_speculation",
    "stream_generate",
]
