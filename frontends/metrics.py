"""Prometheus metrics of the whole server: every frontend counts on the board, and whichever is scraped adds them up.

A frontend writes its own words only, all of them whole numbers that grow; they survive it, so that no sum ever falls.
The numbers of a request come from its ``Account`` alone, so that metrics, log and trace say the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise, product

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.engine.effects import Account
from baton.frontends.status import Gauges

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_CANCEL_SECONDS = (0.0005, 0.001, 0.0025, *_TOKEN_SECONDS[2:], 5, 10)
_TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)

_REASONS = (
    *("stop", "length", "cancelled", "disconnected", "timeout", "deadline_exceeded", "queue_timeout"),
    *("slow_consumer", "error", "refused", "other"),
)
_DOORS = ("http", "websocket", "zmq")
_STATUSES = (400, 401, 403, 404, 405, 408, 409, 411, 413, 414, 415, 422, 426, 429, 431, 499, 500, 503, 504)


class _Counter:
    """One word for each combination of labels."""

    def __init__(self, name: str, help_: str, labels: dict[str, tuple[str, ...]]) -> None:
        self.name, self.help, self.labels = name, help_, labels
        self.keys = list(product(*labels.values()))
        self.words = len(self.keys)
        self.at = 0

    def add(self, mine: memoryview, key: tuple[str, ...], count: int) -> None:
        """Count; a label that the table lacks counts as the last one of its kind, which is "other"."""
        known = [
            value if value in values else values[-1] for value, values in zip(key, self.labels.values(), strict=True)
        ]
        mine[self.at + self.keys.index(tuple(known))] += count

    def metric(self, sums: list[int]) -> Metric:
        """The sums of all frontends; combinations that never came up are left out."""
        family = CounterMetricFamily(self.name, self.help, labels=list(self.labels))
        for key, count in zip(self.keys, sums[self.at :], strict=False):
            if count or not self.labels:
                family.add_metric(list(key), count)
        return family


class _Histogram:
    """A word for each bucket and one for the sum, which is kept in whole parts of ``unit``."""

    def __init__(self, name: str, help_: str, bounds: tuple[float, ...], unit: float = 1) -> None:
        self.name, self.help, self.bounds, self.unit = name, help_, bounds, unit
        self.words = len(bounds) + 2
        self.at = 0

    def observe(self, mine: memoryview, parts: int) -> None:
        """One value, in parts of ``unit``."""
        mine[self.at + bisect_left(self.bounds, parts * self.unit)] += 1
        mine[self.at + self.words - 1] += parts

    def metric(self, sums: list[int]) -> Metric:
        """The sums of all frontends."""
        counts, total = sums[self.at : self.at + self.words - 1], sums[self.at + self.words - 1]
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        family = HistogramMetricFamily(self.name, self.help)
        family.add_metric([], list(zip(names, accumulate(counts), strict=True)), total * self.unit)
        return family


_NS = 1e-9
REQUESTS = _Counter("baton_requests", "Requests closed, by reason.", {"reason": _REASONS})
REFUSED = _Counter(
    "baton_requests_refused",
    "Requests refused at a door before they were opened.",
    {"door": _DOORS, "status": (*map(str, _STATUSES), "other")},
)
IGNORED = _Counter("baton_ignored_parameters", "Request parameters that nobody knows.", {"door": _DOORS})
PROMPT_TOKENS = _Counter("baton_prompt_tokens", "Prompt tokens.", {})
CACHED_TOKENS = _Counter("baton_prompt_cached_tokens", "Prompt tokens that came from the prefix cache.", {})
COMPLETION_TOKENS = _Counter("baton_completion_tokens", "Output tokens.", {})
RESTARTS = _Counter("baton_request_restarts", "Times a request was submitted again.", {})
OUTPUT = _Histogram("baton_request_completion_tokens", "Output tokens a request.", _TOKENS)
FIRST = _Histogram("baton_time_to_first_token_seconds", "From receipt to first token.", _SECONDS, _NS)
WHOLE = _Histogram("baton_request_seconds", "From receipt to the end of the answer.", _SECONDS, _NS)
TOKEN = _Histogram("baton_inter_token_seconds", "Mean time between a request's tokens.", _TOKEN_SECONDS, _NS)
RELEASE = _Histogram(
    "baton_cancel_release_seconds", "From a cancel until all that the request held is free.", _CANCEL_SECONDS, _NS
)
INVALID = _Counter("baton_invalid_logits", "Requests ended because the model's numbers were not finite.", {})
#: the order is the layout of the words
METRICS: tuple[_Counter | _Histogram, ...] = (
    *(REQUESTS, REFUSED, IGNORED, PROMPT_TOKENS, CACHED_TOKENS, COMPLETION_TOKENS, RESTARTS, INVALID),
    *(OUTPUT, FIRST, WHOLE, TOKEN, RELEASE),
)
for _before, _after in pairwise(METRICS):
    _after.at = _before.at + _before.words
WORDS = METRICS[-1].at + METRICS[-1].words


class _All(Collector):
    """Reads the engine's gauges and every frontend's words at the time of the scrape."""

    def __init__(self, gauges: Callable[[], Gauges], totals: Sequence[memoryview]) -> None:
        self._gauges = gauges
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        now = self._gauges()
        yield GaugeMetricFamily("baton_requests_running", "Requests in the batch.", now.requests_running)
        yield GaugeMetricFamily("baton_requests_waiting", "Requests not in the batch yet.", now.requests_waiting)
        yield GaugeMetricFamily("baton_kv_blocks_total", "KV cache blocks.", now.kv_blocks_total)
        yield GaugeMetricFamily("baton_kv_blocks_free", "KV cache blocks in no use.", now.kv_blocks_free)
        yield GaugeMetricFamily("baton_kv_blocks_cached", "KV cache blocks kept for reuse.", now.kv_blocks_cached)
        yield GaugeMetricFamily("baton_kv_tokens_total", "Tokens that the KV cache holds.", now.kv_tokens_total)
        gave_way = CounterMetricFamily("baton_preemptions", "Times a request gave way to others.", labels=["way"])
        gave_way.add_metric(["recompute"], now.preemptions_recompute)
        gave_way.add_metric(["swap"], now.preemptions_swap)
        yield gave_way
        for name, help_, count in (
            ("queries_tokens", "Prompt tokens that were looked up in the prefix cache.", now.prefix_queries_tokens),
            ("hits_tokens", "Tokens that the prefix cache had.", now.prefix_hits_tokens),
            ("evictions", "Blocks that the prefix cache gave up for their room.", now.prefix_evictions_blocks),
        ):
            yield CounterMetricFamily(f"baton_prefix_cache_{name}", help_, count)
        ledger = GaugeMetricFamily("baton_ledger_blocks", "KV blocks, by the line of the ledger.", labels=["line"])
        for line, blocks in now.ledger.items():
            ledger.add_metric([line], blocks)
        yield ledger
        restarts = CounterMetricFamily(
            "baton_process_restarts", "Times a process was replaced.", labels=["role", "index"]
        )
        for (role, index), count in now.restarts.items():
            restarts.add_metric([role, str(index)], count)
        yield restarts
        sums = [sum(words) for words in zip(*(totals[:WORDS] for totals in self._totals), strict=True)]
        for metric in METRICS:
            yield metric.metric(sums)


class Metrics:
    """One registry; nothing global. ``totals`` are the words of every frontend, ``index`` says which are ours."""

    def __init__(self, gauges: Callable[[], Gauges], totals: Sequence[memoryview], index: int) -> None:
        assert len(totals[index]) >= WORDS
        self.registry = CollectorRegistry()
        self.registry.register(_All(gauges, totals))
        self._mine = totals[index]

    def refused(self, door: str, status: int) -> None:
        """A request was refused before it was opened."""
        REFUSED.add(self._mine, (door, str(status)), 1)

    def ignored(self, door: str, parameters: int) -> None:
        """Parameters came that nobody knows."""
        IGNORED.add(self._mine, (door,), parameters)

    def observe(self, account: Account) -> None:
        """Count a closed request."""
        mine = self._mine
        REQUESTS.add(mine, (account.reason,), 1)
        PROMPT_TOKENS.add(mine, (), account.prompt_tokens)
        CACHED_TOKENS.add(mine, (), account.cached_tokens)
        COMPLETION_TOKENS.add(mine, (), account.completion_tokens)
        RESTARTS.add(mine, (), account.lives - 1)
        INVALID.add(mine, (), account.code == "invalid_logits")
        OUTPUT.observe(mine, account.completion_tokens)
        WHOLE.observe(mine, account.closed_ns - account.received_ns)
        if account.first_token_ns:
            FIRST.observe(mine, account.first_token_ns - account.received_ns)
            if account.completion_tokens > 1:
                rest_ns = account.closed_ns - account.first_token_ns
                TOKEN.observe(mine, rest_ns // (account.completion_tokens - 1))
        if account.release_ns is not None:
            RELEASE.observe(mine, account.release_ns)

    def page(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)
