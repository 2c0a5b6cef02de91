"""What /metrics says, in Prometheus's text format: of requests, as they come; of the engine, when asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ktopt.engine.engine import Engine
from ktopt.engine.events import Finished

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class Metrics:
    """A registry of its own for each server."""

    def __init__(self, engine: Engine, model: str) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"ktopt_{name}", what, labels, registry=registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"ktopt_{name}", what, labels, buckets=buckets, registry=registry)

        info = Gauge("ktopt_info", "The model and the engine that serve", ["model", "backend"], registry=registry)
        info.labels(model, engine.backend).set(1)
        self.responses = counter("http_requests", "Answered requests", "path", "status")
        self.seconds = histogram("request_seconds", "From request to the end of its answer", SECONDS, "path")
        self.left = counter("answers_left", "Answers that nobody waited for until their end", "why")
        self.finished = counter("choices", "Choices by how they ended", "reason")
        self.queued = histogram("queue_seconds", "Waiting for its turn", SECONDS)
        self.first = histogram("time_to_first_token_seconds", "From request to first token", SECONDS)
        self.between = histogram("time_per_output_token_seconds", "Between tokens, each choice's mean", BETWEEN)
        self.prompt = histogram("request_prompt_tokens", "Tokens of a prompt", TOKENS)
        self.answer = histogram("request_completion_tokens", "Tokens of a choice", TOKENS)
        self.streams = Gauge("ktopt_open_answers", "Requests that are being answered or wait for it", registry=registry)
        ProcessCollector(registry=registry)
        registry.register(_OfEngine(engine))  # type: ignore[arg-type]

    def ended(self, event: Finished) -> None:
        """Count a choice that has ended."""
        self.finished.labels(event.reason).inc()
        self.queued.observe(event.timings.queued_s)
        if event.usage.completion_tokens:
            self.first.observe(event.timings.first_token_s)
            self.answer.observe(event.usage.completion_tokens)
        if event.usage.completion_tokens > 1:
            self.between.observe(event.timings.decode_s / (event.usage.completion_tokens - 1))
        if event.index == 0:
            self.prompt.observe(event.usage.prompt_tokens)


@dataclass(frozen=True)
class _OfEngine:
    """Asks the engine for its status whenever metrics are read."""

    engine: Engine

    def collect(self) -> Iterator[Metric]:
        status = self.engine.status()
        gauges: dict[str, tuple[str, Any]] = {
            "ktopt_running_requests": ("Requests that the engine runs", status.running),
            "ktopt_waiting_requests": ("Requests that wait for their turn", status.waiting),
            "ktopt_prompt_tokens_per_second": ("Prompts read, over the last seconds", status.prompt_tokens_per_s),
            "ktopt_completion_tokens_per_second": ("Tokens written, over the last seconds", status.tokens_per_s),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        if status.pages is not None:
            pages = GaugeMetricFamily("ktopt_cache_pages", "Pages of the cache", labels=["state"])
            for state in ("used", "cached", "free"):
                pages.add_metric([state], getattr(status.pages, state))
            yield pages
        memory = GaugeMetricFamily("ktopt_memory_bytes", "Memory of the engine by tier", labels=["tier"])
        for tier, count in status.memory_bytes.items():
            memory.add_metric([tier], count)
        yield memory
        totals = status.totals
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "steps", "requests", "cancelled", "failed"):
            yield CounterMetricFamily(f"ktopt_{name}", _TOTALS[name], value=getattr(totals, name))
        refused = CounterMetricFamily("ktopt_refused", "Requests that the engine refused", labels=["code"])
        for code, count in totals.refused.items():
            refused.add_metric([code], count)
        yield refused


_TOTALS = {
    "prompt_tokens": "Tokens of prompts",
    "cached_tokens": "Of those, the ones that a cache had",
    "completion_tokens": "Tokens written",
    "steps": "Passes through the model",
    "requests": "Requests that the engine took",
    "cancelled": "Requests that were cancelled",
    "failed": "Requests that failed",
}
