"""Metrics of several frontends: each counts for itself, whoever is scraped shows the sum, and no sum ever falls."""

from __future__ import annotations

import msgspec

from baton.engine.effects import Account
from baton.frontends.metrics import Metrics
from baton.frontends.status import Gauges
from tests.frontends.conftest import words


def account(reason: str, release_ns: int | None = None) -> Account:
    """A request of 3 prompt and 5 output tokens: first token after 20 ms, the others 10 ms apart."""
    ms = 1_000_000
    return Account(b"", b"", "m", "", reason, 3, 5, 0, 20 * ms, 60 * ms, 1, 200, release_ns)


def test_whichever_frontend_is_scraped_the_sums_are_the_same_and_an_heir_counts_on() -> None:
    totals = [words(), words()]
    one, two = Metrics(Gauges, totals, 0), Metrics(Gauges, totals, 1)
    one.observe(account("stop"))
    two.observe(account("stop"))
    two.observe(account("cancelled", 700_000))
    two.refused("zmq", 429)
    assert one.page() == two.page()
    heir = Metrics(Gauges, totals, 1)
    heir.observe(account("stop"))
    lines = one.page().decode().splitlines()
    for line in (
        'baton_requests_total{reason="stop"} 3.0',
        'baton_requests_total{reason="cancelled"} 1.0',
        'baton_requests_refused_total{door="zmq",status="429"} 1.0',
        "baton_completion_tokens_total 20.0",
        'baton_time_to_first_token_seconds_bucket{le="0.01"} 0.0',
        'baton_time_to_first_token_seconds_bucket{le="0.025"} 4.0',
        'baton_inter_token_seconds_bucket{le="0.01"} 4.0',
        'baton_cancel_release_seconds_bucket{le="0.0005"} 0.0',
        'baton_cancel_release_seconds_bucket{le="0.001"} 1.0',
        "baton_cancel_release_seconds_count 1.0",
        "baton_request_completion_tokens_sum 20.0",
    ):
        assert line in lines, line


def test_a_label_outside_the_tables_is_counted_as_another() -> None:
    metrics = Metrics(Gauges, [words()], 0)
    metrics.refused("http", 418)
    assert b'baton_requests_refused_total{door="http",status="other"} 1.0' in metrics.page()


def test_what_the_engine_counts_is_shown_as_counters() -> None:
    now = Gauges(4, 3, 50, 20, 10, 1, 2, 800, 600, 70, 8, restarts={("worker", 0): 2, ("tokenizer", 1): 0})
    lines = Metrics(lambda: now, [words()], 0).page().decode().splitlines()
    for line in (
        "# TYPE baton_prefix_cache_queries_tokens_total counter",
        "baton_prefix_cache_queries_tokens_total 600.0",
        'baton_process_restarts_total{index="0",role="worker"} 2.0',
        'baton_process_restarts_total{index="1",role="tokenizer"} 0.0',
        "baton_prefix_cache_hits_tokens_total 70.0",
        "baton_prefix_cache_evictions_total 8.0",
        "baton_kv_blocks_cached 10.0",
    ):
        assert line in lines, line


def test_requests_whose_numbers_were_not_finite_are_counted() -> None:
    metrics = Metrics(Gauges, [words()], 0)
    metrics.observe(account("stop"))
    metrics.observe(msgspec.structs.replace(account("error"), code="interrupted"))
    assert b"baton_invalid_logits_total 0.0" in metrics.page()
    metrics.observe(msgspec.structs.replace(account("error"), code="invalid_logits"))
    assert b"baton_invalid_logits_total 1.0" in metrics.page()
