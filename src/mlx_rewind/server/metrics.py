"""Prometheus metrics, read off the worker's counters when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .jobs import Memory, Totals


class Source(Protocol):
    totals: Totals
    restarts: int

    @property
    def load(self) -> tuple[int, int]: ...
    @property
    def choices(self) -> dict[str, int]: ...
    @property
    def memory(self) -> Memory: ...


class WorkerMetrics(Collector):
    """The metrics of one worker, in a registry of their own."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        totals, (running, waiting) = self._source.totals, self._source.load
        memory = self._source.memory
        plain = {
            "spec_decode_num_drafts": ("Verifies with a draft", totals.rounds),
            "spec_decode_num_draft_tokens": ("Draft tokens proposed", totals.drafted),
            "spec_decode_num_accepted_tokens": ("Draft tokens emitted", totals.accepted),
            "generation_tokens": ("Tokens emitted", totals.tokens),
            "prompt_tokens": ("Prompt tokens of finished requests", totals.prompt_tokens),
            "cached_prompt_tokens": ("Of these, found in the store", totals.cached_tokens),
            "engine_restarts": ("Engines that failed", self._source.restarts),
            "prompt_cache_hits": ("Prompts that the store knew a beginning of", memory.hits),
            "prompt_cache_evictions": ("Entries that the store let go", memory.evictions),
        }
        for name, (text, value) in plain.items():
            yield CounterMetricFamily(name, text, value=value)
        by_position = CounterMetricFamily(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens emitted, by position in the window",
            labels=["position"],
        )
        for position, count in enumerate(totals.accepted_per_position):
            by_position.add_metric([str(position)], count)
        yield by_position
        requests = CounterMetricFamily("requests", "Requests by their end", labels=["outcome"])
        for outcome, count in totals.requests.items():
            requests.add_metric([outcome], count)
        yield requests
        choices = GaugeMetricFamily(
            "auto_requests", "Requests in the engine, by what auto does", labels=["choice"]
        )
        for choice, count in self._source.choices.items():
            choices.add_metric([choice], count)
        yield choices
        gauges = {
            "requests_running": ("Requests in the engine", running),
            "requests_waiting": ("Requests on their way to it", waiting),
            "active_memory_bytes": ("Bytes of arrays in use", memory.active),
            "prompt_cache_bytes": ("Of these, the store's", memory.store),
            "prompt_cache_entries": ("Entries of the store", memory.entries),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
