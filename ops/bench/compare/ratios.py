"""Medians over rounds, and ratios within them. A ratio compares two servers in the same round, nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import median

import msgspec

from baton.ops.bench.compare.measured import Comparison, Measured
from baton.ops.bench.compare.requests import CAPACITY, FIXED, PREFIX, PREFIX_FIRST
from baton.ops.bench.report import Spread

Value = Callable[[Measured], float | None]


class Range(msgspec.Struct, frozen=True):
    """Some values' median and their extremes."""

    median: float
    least: float
    most: float
    count: int


class Metric(msgspec.Struct, frozen=True):
    """One figure of a ``Measured``. ``more_is_better`` turns the ratio round; ``only`` are the kinds it is for."""

    name: str
    value: Value
    more_is_better: bool = False
    only: tuple[str, ...] = ()
    decimals: int = 1


def kind(one: Measured) -> str:
    """What a workload is, as far as figures go: its name, or "open" where requests come at a rate."""
    known = (*FIXED, PREFIX, PREFIX_FIRST, CAPACITY)
    return "open" if one.rate is not None else one.workload if one.workload in known else "many"


def middle(values: Iterable[float | None]) -> Range | None:
    """Their range; None where there are none."""
    known = [value for value in values if value is not None]
    return Range(median(known), min(known), max(known), len(known)) if known else None


def _of(spread_of: Callable[[Measured], Spread | None], which: str) -> Value:
    def value(one: Measured) -> float | None:
        found = spread_of(one)
        return None if found is None else float(getattr(found, which))

    return value


def _tokens_per_s(one: Measured) -> float | None:
    return one.report.output_tokens_per_s if one.report.output_tokens else None


def _goodput(one: Measured) -> float | None:
    # Of the rate offered, not of the time until the last answer: that one is as long as the longest request.
    good = one.report.goodput
    return None if good is None or one.rate is None else good.share * one.rate


def _good_share(one: Measured) -> float | None:
    return 100 * one.report.goodput.share if one.report.goodput is not None else None


TTFT_P50 = Metric("TTFT p50, ms", _of(lambda one: one.report.ttft_ms, "p50"))
TTFT_P99 = Metric("TTFT p99, ms", _of(lambda one: one.report.ttft_ms, "p99"), only=("many", CAPACITY, "open"))
TOKEN_P50 = Metric("ITL p50, ms", _of(lambda one: one.token_ms, "p50"))
TOKEN_P99 = Metric("ITL p99, ms", _of(lambda one: one.token_ms, "p99"))
GAP_P99 = Metric("gap p99, ms", _of(lambda one: one.report.itl_ms, "p99"), only=("many", CAPACITY, "open"))
TPOT = Metric("TPOT, ms", _of(lambda one: one.report.tpot_ms, "p50"), only=("single", "many"))
RATE = Metric("offered, requests/s", lambda one: one.rate, True, ("open",), 3)
TOKENS = Metric("tokens/s", _tokens_per_s, True, ("single", "many", CAPACITY))
CAPACITY_RATE = Metric("capacity, requests/s", lambda one: one.capacity, True, (CAPACITY,), 3)
GOODPUT = Metric("goodput, requests/s", _goodput, True, ("open",), 3)
GOOD = Metric("within bounds, %", _good_share, True, ("open",))
TIMEOUTS = Metric("timed out, %", lambda one: 100 * one.timeout_share or None)
FAILED = Metric("failed, %", lambda one: 100 * (1 - one.report.succeeded / one.report.requests) or None)
OUTSIDE = Metric("CPU outside the model, µs/token", lambda one: one.outside_us_per_token, False, ("many", "open"), 0)

#: the columns of a workload's table
COLUMNS = (
    *(RATE, CAPACITY_RATE, GOODPUT, GOOD, TTFT_P50, TTFT_P99, TOKEN_P50, TOKEN_P99, GAP_P99),
    *(TPOT, TOKENS, OUTSIDE, TIMEOUTS, FAILED),
)
#: what is compared, by kind
COMPARED = {
    "single": (TTFT_P50, TPOT),
    "many": (TOKENS, TTFT_P50, TOKEN_P99),
    "prompt": (TTFT_P50,),
    PREFIX_FIRST: (TTFT_P50,),
    PREFIX: (TTFT_P50,),
    CAPACITY: (CAPACITY_RATE,),
    "open": (GOODPUT, TTFT_P50, TTFT_P99, TOKEN_P99, GAP_P99),
}


def better(found: Comparison, metric: Metric, workload: str, baseline: str, other: str) -> Range | None:
    """How many times better the baseline did than the other, round by round: above 1 is the baseline's favour."""
    theirs = {one.round: metric.value(one) for one in found.of(other, workload)}
    ratios = []
    for one in found.of(baseline, workload):
        ours, other_value = metric.value(one), theirs.get(one.round)
        if ours is not None and other_value is not None and (ours or other_value):
            above, below = (ours, other_value) if metric.more_is_better else (other_value, ours)
            ratios.append(above / below if below else math.inf)
    return middle(ratios)
