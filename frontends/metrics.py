"""Prometheus metrics of a frontend: fed from accounts when requests close, and from gauges when they are scraped.

The numbers of a request come from its ``Account`` alone, so that metrics, log and trace say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.engine.effects import Account
from baton.frontends.status import Gauges

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)


class _Gauges(Collector):
    """Reads the engine's gauges at the time of the scrape."""

    def __init__(self, read: Callable[[], Gauges]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        yield GaugeMetricFamily("baton_requests_running", "Requests in the batch.", now.requests_running)
        yield GaugeMetricFamily("baton_requests_waiting", "Requests not in the batch yet.", now.requests_waiting)
        yield GaugeMetricFamily("baton_kv_blocks_total", "KV cache blocks.", now.kv_blocks_total)
        yield GaugeMetricFamily("baton_kv_blocks_free", "KV cache blocks in no use.", now.kv_blocks_free)
        yield GaugeMetricFamily("baton_kv_blocks_cached", "KV cache blocks kept for reuse.", now.kv_blocks_cached)


class Metrics:
    """One registry; nothing global."""

    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Gauges(gauges))
        registry = self.registry
        self.requests = Counter("baton_requests", "Requests closed, by reason.", ("reason",), registry=registry)
        self.refused = Counter(
            "baton_requests_refused",
            "Requests refused at a door before they were opened.",
            ("door", "status"),
            registry=registry,
        )
        self.ignored = Counter(
            "baton_ignored_parameters", "Request parameters that nobody knows.", ("door",), registry=registry
        )
        self.prompt_tokens = Counter("baton_prompt_tokens", "Prompt tokens.", registry=registry)
        self.completion_tokens = Counter("baton_completion_tokens", "Output tokens.", registry=registry)
        self.lives = Counter("baton_request_restarts", "Times a request was submitted again.", registry=registry)
        self.output = Histogram(
            "baton_request_completion_tokens", "Output tokens a request.", registry=registry, buckets=_TOKENS
        )
        self.first = Histogram(
            "baton_time_to_first_token_seconds", "From receipt to first token.", registry=registry, buckets=_SECONDS
        )
        self.whole = Histogram(
            "baton_request_seconds", "From receipt to the end of the answer.", registry=registry, buckets=_SECONDS
        )
        self.token = Histogram(
            "baton_inter_token_seconds",
            "Mean time between a request's tokens.",
            registry=registry,
            buckets=_TOKEN_SECONDS,
        )

    def observe(self, account: Account) -> None:
        """Count a closed request."""
        self.requests.labels(account.reason).inc()
        self.prompt_tokens.inc(account.prompt_tokens)
        self.completion_tokens.inc(account.completion_tokens)
        self.lives.inc(account.lives - 1)
        self.output.observe(account.completion_tokens)
        self.whole.observe((account.closed_ns - account.received_ns) / 1e9)
        if account.first_token_ns:
            self.first.observe((account.first_token_ns - account.received_ns) / 1e9)
            if account.completion_tokens > 1:
                rest_s = (account.closed_ns - account.first_token_ns) / 1e9
                self.token.observe(rest_s / (account.completion_tokens - 1))

    def page(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)
