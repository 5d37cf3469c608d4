"""What the operator allows and sets by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Names, limits and defaults of one server.

    models               names that requests may use; the first one is shown
    draft_models         names that `draft_model` may have
    defaults             sampling parameters of requests that do not set them
    max_tokens           tokens of an answer whose request sets none, and the most of any
    max_prompt_tokens    of one prompt
    max_total_tokens     prompt and `max_tokens` of all requests in the server; None: no limit
    max_choices          prompts times `n` of one request
    queue_limit          choices that may wait beyond `max_rows`
    api_keys             one of these is needed; none: no key is
    origins              web origins whose pages may call (CORS)
    hosts                names that the Host header may have; none: any
    body_seconds         time to receive the body of a request
    note                 why drafting is not what it might be, for `/v1/models`
    """

    models: tuple[str, ...]
    draft_models: tuple[str, ...] = ()
    num_draft_tokens: int = 4
    max_draft_tokens: int = 16
    defaults: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int = 512
    max_tokens_limit: int = 32_768
    max_prompt_tokens: int = 131_072
    max_total_tokens: int | None = None
    max_choices: int = 16
    max_rows: int = 8
    queue_limit: int = 64
    max_body_bytes: int = 4 << 20
    max_schema_bytes: int = 64 << 10
    api_keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    body_seconds: float = 30.0
    note: str = ""
