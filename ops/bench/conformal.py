"""What the bound on answer lengths keeps: ``python -m baton.ops.bench.conformal TRACE``. Prints a Markdown table.

A trace of arrivals is replayed in time order through the scheduler's own predictor. A request's length becomes known
when it would have finished, at a stated rate, never before: there is no look-ahead.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable
from datetime import datetime
from heapq import heappop, heappush
from io import StringIO
from pathlib import Path

import click
import msgspec

from baton.engine.limits import Limits
from baton.engine.predictor import LengthPredictor

KEY = ("", "trace", "any")


class Arrival(msgspec.Struct, frozen=True):
    """One request of a trace: seconds since its first, and tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


class Kept(msgspec.Struct, frozen=True):
    """How a replay went. Coverage is the share of requests no longer than their bound; ratios are of means."""

    requests: int
    predicted: int
    coverage: float
    coverage_last_third: float
    reserved_over_used: float
    past_bound_tokens: float


def read_trace(path: Path) -> list[Arrival]:
    """Arrivals in time order, from gzipped or plain CSV.

    Columns are those of the Azure LLM inference trace (TIMESTAMP, ContextTokens, GeneratedTokens), or ``gap_ms`` since
    the request before, ``context_tokens``, ``generated_tokens``. Raises ValueError for other columns.
    """
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
    reader = csv.DictReader(StringIO(text))
    found: list[Arrival] = []
    if "TIMESTAMP" in (reader.fieldnames or ()):
        for row in reader:
            at = datetime.strptime(row["TIMESTAMP"][:26], "%Y-%m-%d %H:%M:%S.%f")
            found.append(Arrival(at.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"])))
        found.sort(key=lambda one: one.at_s)
        first_s = found[0].at_s if found else 0.0
        return [msgspec.structs.replace(one, at_s=one.at_s - first_s) for one in found]
    if "gap_ms" not in (reader.fieldnames or ()):
        raise ValueError(f"{path}: no column TIMESTAMP and none gap_ms: {reader.fieldnames}")
    at_ms = 0
    for row in reader:
        at_ms += int(row["gap_ms"])
        found.append(Arrival(at_ms / 1e3, int(row["context_tokens"]), int(row["generated_tokens"])))
    return found


def replay(arrivals: Iterable[Arrival], alpha: float, max_tokens: int, token_s: float) -> Kept:
    """Ask for a bound at each arrival; tell each length ``token_s`` seconds a token after it."""
    predictor = LengthPredictor(Limits(), alpha)
    running: list[tuple[float, int, Arrival]] = []
    bounds: list[tuple[int, int]] = []
    requests = 0
    for arrival in arrivals:
        while running and running[0][0] <= arrival.at_s:
            done = heappop(running)[2]
            predictor.observe(KEY, done.prompt_tokens, min(max_tokens, done.output_tokens))
        bound = predictor.bound(KEY, arrival.prompt_tokens, max_tokens)
        if bound is not None:
            bounds.append((bound, min(max_tokens, arrival.output_tokens)))
        heappush(running, (arrival.at_s + token_s * arrival.output_tokens, requests, arrival))
        requests += 1
    assert bounds, "the trace is too short for a bound"
    third = bounds[len(bounds) * 2 // 3 :]
    return Kept(
        requests,
        len(bounds),
        coverage(bounds),
        coverage(third),
        sum(bound for bound, _ in bounds) / sum(used for _, used in bounds),
        sum(max(0, used - bound) for bound, used in bounds) / len(bounds),
    )


def coverage(bounds: list[tuple[int, int]]) -> float:
    """The share of (bound, used) that keep the bound."""
    return sum(used <= bound for bound, used in bounds) / len(bounds)


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--max-tokens", type=click.IntRange(1), default=1000, show_default=True, help="What requests ask for.")
@click.option("--token-ms", type=click.FloatRange(0), default=30.0, show_default=True, help="Time a token takes.")
def main(trace: Path, max_tokens: int, token_ms: float) -> None:
    """Print how often the bound on answer lengths held on TRACE, and what reserving it costs."""
    try:
        arrivals = read_trace(trace)
    except (ValueError, KeyError, OSError) as error:
        raise click.ClickException(f"{trace} is no trace: {error}") from None
    used = sum(min(max_tokens, one.output_tokens) for one in arrivals) / len(arrivals)
    click.echo("| alpha | requests | coverage | coverage, last third | reserved / used | tokens past the bound |")
    click.echo("| --- | --- | --- | --- | --- | --- |")
    for alpha in (0.05, 0.1, 0.2, 0.5):
        kept = replay(arrivals, alpha, max_tokens, token_ms / 1e3)
        click.echo(
            f"| {alpha:g} | {kept.predicted} | {kept.coverage:.3f} | {kept.coverage_last_third:.3f} "
            f"| {kept.reserved_over_used:.2f} | {kept.past_bound_tokens:.1f} |"
        )
    click.echo(f"| `max_tokens` | {len(arrivals)} | 1.000 | 1.000 | {max_tokens / used:.2f} | 0.0 |")


if __name__ == "__main__":
    main()
