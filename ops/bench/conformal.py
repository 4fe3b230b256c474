"""What the bound on answer lengths keeps: ``python -m baton.ops.bench.conformal TRACE``. Prints a Markdown table.

A trace of arrivals is replayed in time order through the scheduler's own predictor. A request's length becomes known
when it would have finished, at a stated rate, never before: there is no look-ahead.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from pathlib import Path

import click
import msgspec

from baton.engine.limits import Limits
from baton.engine.predictor import LengthPredictor
from baton.ops.bench.arrivals import Arrival, read_trace

KEY = ("", "trace", "any")


class Kept(msgspec.Struct, frozen=True):
    """How a replay went. Coverage is the share of requests no longer than their bound; ratios are of means."""

    requests: int
    predicted: int
    coverage: float
    coverage_last_third: float
    reserved_over_used: float
    past_bound_tokens: float


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
