"""The comparison as Markdown: for each workload what every server did, then ratios, then what a server costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.ops.bench.compare.measured import Comparison
from baton.ops.bench.compare.ratios import COLUMNS, COMPARED, OUTSIDE, Range, better, kind, middle

NOTES = (
    "Medians over the rounds, in brackets the least and the most of them. ITL is the time a token took: a gap between"
    " two deltas counts once for each token of the second, divided by their number; *gap* is the undivided one, and"
    " goodput is the offered rate times the share of requests that succeeded and whose TTFT and 99th percentile of gaps"
    " kept to the bounds."
)


def shown(value: Range | None, decimals: int, unit: str = "") -> str:
    """A range as a cell."""
    if value is None:
        return "–"
    text = f"{value.median:,.{decimals}f}{unit}"
    if value.count > 1:
        text += f" ({value.least:,.{decimals}f}–{value.most:,.{decimals}f})"
    return text


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table, without the columns that say nothing in any row."""
    kept = [at for at in range(len(head)) if at == 0 or any(row[at] not in ("–", "") for row in rows)]
    for line in (head, ["---" if at == 0 else "---:" for at in range(len(head))], *rows):
        yield "| " + " | ".join(line[at] for at in kept) + " |"


def markdown(found: Comparison, baseline: str) -> str:
    """The whole page; ``baseline`` is what the others are compared with."""
    bounds = found.objectives
    lines = [", ".join(f"{name}: {value}" for name, value in found.machine.items()), ""]
    lines += [f"{found.rounds} round(s) of: " + "; ".join(f"{one.name} {one.version}".strip() for one in found.servers)]
    lines += [f"Bounds: TTFT {bounds.ttft_ms:g} ms, gaps {bounds.itl_ms:g} ms. Time-out: {found.timeout_s:g} s.", ""]
    client = max(one.report.client_cpu_share for one in found.measured)
    others = middle(100 * one.usage.others_share for one in found.measured)
    shares = (
        f"The measuring client took at most {100 * client:.1f} % of a core, others {shown(others, 0)} % of all cores."
    )
    lines += [f"{NOTES} {shares}", ""]
    for workload in found.workloads():
        lines += [f"**{workload}**", "", *workload_grid(found, workload), ""]
    if len(found.names()) > 1 and baseline in found.names():
        lines += [f"**How many times better {baseline} does** (in the same round; less than 1 is worse)", ""]
        lines += [*ratio_grid(found, baseline), ""]
    lines += ["**What a server costs**", "", *cost_grid(found), ""]
    lines += doubts(found)
    return "\n".join(lines).rstrip() + "\n"


def workload_grid(found: Comparison, workload: str) -> Iterator[str]:
    """One row a server."""
    what = next(kind(one) for one in found.measured if one.workload == workload)
    metrics = [metric for metric in COLUMNS if not metric.only or what in metric.only]
    rows = [
        [name, *(shown(middle(map(metric.value, found.of(name, workload))), metric.decimals) for metric in metrics)]
        for name in found.names()
        if found.of(name, workload)
    ]
    yield from grid(["server", *(metric.name for metric in metrics)], rows)


def ratio_grid(found: Comparison, baseline: str) -> Iterator[str]:
    """One row a workload and figure, one column a server."""
    others = [name for name in found.names() if name != baseline]
    rows = []
    for workload in found.workloads():
        for metric in COMPARED[next(kind(one) for one in found.measured if one.workload == workload)]:
            cells = [shown(better(found, metric, workload, baseline, name), 2) for name in others]
            rows.append([f"{workload}: {metric.name.partition(',')[0]}", *cells])
    yield from grid(["", *others], rows)


def cost_grid(found: Comparison) -> Iterator[str]:
    """Start-up, memory, and processor time outside the process that computes the model, over all workloads."""
    rows = []
    for name in found.names():
        mine = [one for one in found.measured if one.server == name]
        rounds = sorted({one.round for one in mine})
        memory = [max(one.usage.memory_bytes_max for one in mine if one.round == number) / 2**20 for number in rounds]
        outside = []
        for number in rounds:
            tokens = sum(one.report.output_tokens for one in mine if one.round == number)
            spent = sum(one.usage.outside_cpu_s for one in mine if one.round == number)
            outside.append(spent / tokens * 1e6 if tokens else None)
        starts = middle(one.start_s for one in found.starts if one.server == name)
        rows.append([name, shown(starts, 1), shown(middle(memory), 0), shown(middle(outside), OUTSIDE.decimals)])
    yield from grid(["server", "start to ready, s", "peak memory, MiB", OUTSIDE.name], rows)


def doubts(found: Comparison) -> list[str]:
    """What went wrong, and where a server's own count contradicts the stream: such figures are not to be trusted."""
    lines = []
    for one in found.measured:
        where = f"- {one.server}, round {one.round}, {one.workload}"
        for doubt, count in one.report.doubts.items():
            lines.append(f"{where}: {count} × {doubt}")
        for error, count in one.report.errors.items():
            lines.append(f"{where}: {count} × {error} {one.report.error_examples.get(error, '')}".rstrip())
    return ["**Errors and doubts**", "", *lines, ""] if lines else []
