"""What Prometheus sees. The names of the drafting counters are vLLM's."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from .records import Counts

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The metrics of one server; may be used from any thread."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, seconds = self._counter, self._seconds
        self.requests = counter("mlx_rewind_requests", "Requests by outcome", "route", "status")
        self.cancelled = counter("mlx_rewind_requests_cancelled", "Requests that were given up")
        self.restarts = counter("mlx_rewind_engine_restarts", "Engines that had to be replaced")
        self.prompt = counter("mlx_rewind_prompt_tokens", "Prompt tokens taken")
        self.cached = counter("mlx_rewind_prompt_tokens_cached", "Of these, not read again")
        self.tokens = counter("mlx_rewind_completion_tokens", "Tokens generated")
        self.steps = counter("mlx_rewind_target_steps", "Forwards of the target, row by row")
        self.first = seconds("mlx_rewind_time_to_first_token_seconds", "From request to token")
        self.whole = seconds("mlx_rewind_request_seconds", "From request to the end")
        self.rounds = counter("spec_decode_num_drafts", "Verifies of a draft", "kind")
        self.drafted = counter("spec_decode_num_draft_tokens", "Draft tokens proposed", "kind")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Of these, accepted", "kind")
        self.per_position = counter(
            "spec_decode_num_accepted_tokens_per_pos", "The same by place in the draft", "position"
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=_SECONDS, registry=self.registry)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A gauge that is read when somebody looks."""
        Gauge(name, text, registry=self.registry).set_function(value)

    def add(self, counts: Counts) -> None:
        """Takes what one choice came to, finished or not."""
        self.tokens.inc(counts.completion_tokens)
        self.steps.inc(counts.steps)
        kind = counts.draft_kind
        self.rounds.labels(kind).inc(counts.draft_rounds)
        self.drafted.labels(kind).inc(counts.draft_n)
        self.accepted.labels(kind).inc(counts.draft_n_accepted)
        for position, count in enumerate(counts.accepted_per_position):
            self.per_position.labels(str(position)).inc(count)

    def text(self) -> bytes:
        return generate_latest(self.registry)
