"""Latency and goodput against the offered rate, one line a server. The one place that imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from baton.ops.bench.compare.measured import Comparison
from baton.ops.bench.compare.ratios import GAP_P99, GOOD, RATE, TOKEN_P50, TTFT_P50, TTFT_P99, Metric, middle

#: a panel each: title, the solid line, the dashed line
PANELS: Sequence[tuple[str, Metric, Metric | None]] = (
    ("TTFT, ms (dashed: p99)", TTFT_P50, TTFT_P99),
    ("ITL p50, ms (dashed: gap p99)", TOKEN_P50, GAP_P99),
    ("within bounds, %", GOOD, None),
)


class NoPlot(Exception):
    """There is nothing to draw with, or nothing to draw; the message says which."""


def check() -> None:
    """``NoPlot`` where matplotlib is missing: better known before an hour of measuring."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise NoPlot("the plot needs matplotlib: pip install 'baton-llm[bench]', or leave --plot away") from None


def points(found: Comparison, server: str, metric: Metric) -> list[tuple[float, float]]:
    """(offered requests/s, figure), medians over rounds, ascending."""
    pairs = []
    for workload in found.workloads():
        mine = found.of(server, workload)
        rate, value = middle(map(RATE.value, mine)), middle(map(metric.value, mine))
        if rate is not None and value is not None:
            pairs.append((rate.median, value.median))
    return sorted(pairs)


def plot(found: Comparison, path: Path) -> None:
    """Draw to a file whose ending names the format (png, svg, pdf)."""
    check()
    if not any(RATE.value(one) for one in found.measured):
        raise NoPlot("no workload with a load or a rate was measured, so there is no latency against load to draw")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(PANELS), 4.2), layout="constrained")
    for axes, (title, solid, dashed) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for server in found.names():
            xs, ys = zip(*points(found, server, solid), strict=True) if points(found, server, solid) else ((), ())
            (line,) = axes.plot(xs, ys, marker="o", label=server)
            if dashed is not None and (more := points(found, server, dashed)):
                axes.plot(*zip(*more, strict=True), marker=".", linestyle="--", color=line.get_color())
        axes.set_title(title)
        axes.set_xlabel("offered, requests/s")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    try:
        figure.savefig(path)
    except ValueError as error:
        raise NoPlot(f"{path}: {error}") from None
