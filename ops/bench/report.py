"""What a run's outcomes say: throughput, latencies, errors, goodput. Pure: outcomes in, numbers and a table out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.ops.bench.stream import Outcome


class Objectives(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds a request must keep to count as good, in ms; the one on ITL is for the p99 of the request's own gaps."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def kept(self, outcome: Outcome) -> bool:
        """Whether a successful request kept them all; a bound on what it does not have (one token's TPOT) is kept."""
        itl_s = percentile(sorted(outcome.gaps_s), 99) if outcome.gaps_s else None
        pairs = (
            (self.ttft_ms, outcome.ttft_s if outcome.deltas else None),
            (self.itl_ms, itl_s),
            (self.tpot_ms, outcome.tpot_s),
            (self.e2e_ms, outcome.e2e_s),
        )
        return all(bound is None or taken is None or taken * 1e3 <= bound for bound, taken in pairs)

    def any(self) -> bool:
        """Whether there is any bound."""
        return any(getattr(self, name) is not None for name in self.__struct_fields__)


class Spread(msgspec.Struct, frozen=True):
    """How a quantity is distributed, in ms."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float


class Goodput(msgspec.Struct, frozen=True):
    """Requests that succeeded within the objectives: a rate and a share of all that were sent."""

    requests_per_s: float
    share: float
    objectives: Objectives


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Latencies, tokens and rates are of successful requests; ``errors`` counts the others by kind.

    ``doubts`` counts successful requests whose usage contradicts their stream, by the contradiction.
    """

    url: str
    model: str
    concurrency: int
    seconds: float
    requests: int
    succeeded: int
    errors: dict[str, int]
    timeouts: int
    error_examples: dict[str, str]
    doubts: dict[str, int]
    finish_reasons: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    tokens_per_delta: float
    ttft_ms: Spread | None
    itl_ms: Spread | None
    tpot_ms: Spread | None
    e2e_ms: Spread | None
    goodput: Goodput | None
    client_cpu_share: float


def percentile(ascending: Sequence[float], percent: float) -> float:
    """The ``percent``-th percentile of sorted values, interpolated linearly between neighbours."""
    at = (len(ascending) - 1) * percent / 100
    below = int(at)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (ascending[above] - ascending[below]) * (at - below)


def spread(seconds: Iterable[float]) -> Spread | None:
    """The distribution of some times, None where there are none."""
    ascending = sorted(seconds)
    if not ascending:
        return None
    mean = sum(ascending) / len(ascending)
    values = (mean, *(percentile(ascending, percent) for percent in (50, 95, 99)), ascending[-1])
    return Spread(*(round(value * 1e3, 3) for value in values))


def report(
    outcomes: Sequence[Outcome],
    seconds: float,
    url: str,
    model: str,
    concurrency: int,
    objectives: Objectives,
    client_cpu_share: float,
) -> Report:
    """Sum a run up. ``seconds`` is its wall time, ``client_cpu_share`` the part of a core this program took."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    errors = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    examples: dict[str, str] = {}
    for outcome in outcomes:
        if outcome.error is not None and outcome.detail:
            examples.setdefault(outcome.error, outcome.detail)
    tokens, deltas = sum(outcome.tokens for outcome in good), sum(outcome.deltas for outcome in good)
    goodput = None
    if objectives.any():
        kept = sum(objectives.kept(outcome) for outcome in good)
        goodput = Goodput(round(kept / seconds, 3), kept / len(outcomes) if outcomes else 0.0, objectives)
    return Report(
        url=url,
        model=model,
        concurrency=concurrency,
        seconds=round(seconds, 3),
        requests=len(outcomes),
        succeeded=len(good),
        errors=dict(errors.most_common()),
        timeouts=errors["timeout"],
        error_examples=examples,
        doubts=dict(Counter(outcome.doubt for outcome in good if outcome.doubt is not None)),
        finish_reasons=dict(Counter(outcome.finish_reason or "" for outcome in good)),
        prompt_tokens=sum(outcome.usage.prompt_tokens for outcome in good if outcome.usage is not None),
        output_tokens=tokens,
        output_tokens_per_s=round(tokens / seconds, 3),
        requests_per_s=round(len(good) / seconds, 3),
        tokens_per_delta=round(tokens / deltas, 3) if deltas else 0.0,
        ttft_ms=spread(outcome.ttft_s for outcome in good if outcome.deltas),
        itl_ms=spread(gap for outcome in good for gap in outcome.gaps_s),
        tpot_ms=spread(outcome.tpot_s for outcome in good if outcome.tpot_s is not None),
        e2e_ms=spread(outcome.e2e_s for outcome in good),
        goodput=goodput,
        client_cpu_share=round(client_cpu_share, 4),
    )


def table(found: Report) -> RenderableType:
    """The report for people."""
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(style="dim")
    facts.add_column()
    facts.add_row("server", f"{found.url}  {found.model}")
    facts.add_row("requests", f"{found.succeeded} of {found.requests} succeeded, {found.concurrency} at a time")
    facts.add_row("duration", f"{found.seconds:.2f} s, this client took {100 * found.client_cpu_share:.1f} % of a core")
    facts.add_row("throughput", f"{found.output_tokens_per_s:.1f} tokens/s, {found.requests_per_s:.2f} requests/s")
    facts.add_row("tokens", f"{found.prompt_tokens} in, {found.output_tokens} out, {found.tokens_per_delta} a delta")
    if found.goodput is not None:
        facts.add_row(
            "goodput",
            f"{found.goodput.requests_per_s:.2f} requests/s, {100 * found.goodput.share:.1f} % within bounds",
        )
    for kind, count in found.errors.items():
        facts.add_row(Text("error", "red"), Text(f"{count} × {kind}  {found.error_examples.get(kind, '')}", "red"))
    for doubt, count in found.doubts.items():
        facts.add_row(Text("doubt", "yellow"), Text(f"{count} × {doubt}", "yellow"))
    times = Table(box=None, pad_edge=False, header_style="bold")
    times.add_column("ms")
    for name in Spread.__struct_fields__:
        times.add_column(name, justify="right")
    for name, values in (
        ("TTFT", found.ttft_ms),
        ("ITL", found.itl_ms),
        ("TPOT", found.tpot_ms),
        ("end to end", found.e2e_ms),
    ):
        if values is not None:
            times.add_row(name, *(f"{value:,.2f}" for value in msgspec.structs.astuple(values)))
    return Group(facts, Text(), times)
