"""Iteration-level batching against static batching: ``python -m baton.ops.bench.static --trace FILE`` (the hour
of conversations that the tests bring is ``tests/data/azure-conversation-2023.csv.gz``).

A static batch begins together and ends together: a row that has finished is computed on until the longest is done. That
exists here alone, as a baseline. Both compute with the production runner and the real model, the other one by the
production scheduler; output lengths come from a trace. Prompts are one token long, so that all time is decoding, and
the scheduler's is counted while its batch is full, as a static batch always is.

What the lengths predict is the mean over the batches of the longest in each, over the mean of all.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from statistics import mean
from time import perf_counter

import click
import msgspec

from baton.engine.batch import Sampling, StepRow
from baton.engine.limits import Limits
from baton.engine.worker import WorkerCore
from baton.ipc.frames import KVLayout, Params
from baton.ops.bench.arrivals import read_trace
from baton.ops.bench.lockstep import Lockstep
from baton.ops.terminal import out
from baton.workers.model.pull import resolve
from baton.workers.runner import Runner

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, end_ids=())
FIRST_IDS = range(1000, 20000)


class StaticReport(msgspec.Struct, frozen=True, kw_only=True):
    """Throughputs in tokens a second; ``predicted`` and ``measured`` are iteration-level over static."""

    batch: int
    requests: int
    mean_tokens: float
    mean_longest_tokens: float
    static_tokens_per_s: float
    iteration_tokens_per_s: float
    predicted: float
    measured: float


def read_lengths(path: Path, most: int) -> list[int]:
    """The output lengths of a trace, capped at ``most``; ``click.ClickException`` where there are none."""
    try:
        lengths = [min(arrival.output_tokens, most) for arrival in read_trace(path) if arrival.output_tokens > 0]
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if not lengths:
        raise click.ClickException(f"{path}: no request of it has output tokens")
    return lengths


def run_static(runner: Runner, lengths: list[int], batch: int, first_ids: list[int]) -> tuple[int, float]:
    """Batch after batch, each to its longest: (tokens that were asked for, seconds)."""
    block_tokens = runner.layout.block_size
    per_row = runner.layout.blocks // batch
    tokens, seconds = 0, 0.0
    for at in range(0, len(lengths), batch):
        part = lengths[at : at + batch]
        last = first_ids[at : at + batch]
        tables = [list(range(row * per_row, (row + 1) * per_row)) for row in range(len(part))]
        began = perf_counter()
        for position in range(max(part)):
            blocks = position // block_tokens + 1
            rows = [
                StepRow(row, [last[row]], position, tables[row][:blocks], True, position, GREEDY)
                for row in range(len(part))
            ]
            last = [sampled.token for sampled in runner.step(rows)]
        seconds += perf_counter() - began
        tokens += sum(part)
    return tokens, seconds


def run_iteration(runner: Runner, lengths: list[int], batch: int, first_ids: list[int]) -> tuple[int, float]:
    """All at once for the scheduler, ``batch`` at a time: (tokens made, seconds) while its batch was full."""
    own = runner.layout
    layout = KVLayout(
        own.block_size, own.blocks, own.bytes_per_block, own.layers, own.kv_heads, own.head_dim, own.dtype
    )
    limits = Limits(running_requests_max=batch)
    engine = Lockstep(len(lengths), layout, runner.config.vocab, runner.config.context_length, limits)
    worker = WorkerCore(0, (1,), own.block_size)
    for slot, length in enumerate(lengths):
        engine.submit(slot, [first_ids[slot]], Params(max_tokens=length, ignore_eos=True, temperature=0.0))
    tokens, began, seconds = 0, perf_counter(), 0.0
    while engine.plans:
        plan = engine.plans[0]
        rows = worker.apply(plan)
        assert rows is not None, "a plan for another worker"
        sampled = runner.step(rows)
        engine.answer(worker.commit(plan, rows, sampled))
        if len(rows) == batch:
            tokens += len(sampled)
            seconds = perf_counter() - began
    return tokens, seconds


@click.command()
@click.option("--trace", type=click.Path(exists=True, path_type=Path), required=True, help="Where lengths come from.")
@click.option("--model", default="smollm2-135m", show_default=True, help="Model to run.")
@click.option("--batch", type=click.IntRange(2), default=8, show_default=True, help="Rows of a batch.")
@click.option("--requests", type=click.IntRange(8), default=64, show_default=True, help="Requests in all.")
@click.option("--tokens-max", type=click.IntRange(2), default=256, show_default=True, help="Lengths are capped here.")
@click.option("--seed", type=int, default=0, show_default=True, help="Which lengths are drawn.")
@click.option("--json", "json_path", metavar="PATH", help="Write the report as JSON.")
def main(trace: Path, model: str, batch: int, requests: int, tokens_max: int, seed: int, json_path: str | None) -> None:
    """Measure what joining and leaving a batch at every step gains over a batch that ends together."""
    chance = random.Random(seed)
    lengths = chance.choices(read_lengths(trace, tokens_max), k=requests - requests % batch)
    first_ids = chance.choices(FIRST_IDS, k=len(lengths))
    blocks = batch * -(-(tokens_max + 1) // 16)
    runner = Runner(resolve(model), blocks=2 * blocks)
    runner.warm_up()
    run_static(runner, [8] * batch, batch, first_ids)
    static, static_s = run_static(runner, lengths, batch, first_ids)
    iteration, iteration_s = run_iteration(runner, lengths, batch, first_ids)
    longest = mean(max(lengths[at : at + batch]) for at in range(0, len(lengths), batch))
    report = StaticReport(
        batch=batch,
        requests=len(lengths),
        mean_tokens=round(mean(lengths), 1),
        mean_longest_tokens=round(longest, 1),
        static_tokens_per_s=round(static / static_s, 1),
        iteration_tokens_per_s=round(iteration / iteration_s, 1),
        predicted=round(longest / mean(lengths), 3),
        measured=round(iteration / iteration_s / (static / static_s), 3),
    )
    out().print(f"{report.requests} requests of {report.mean_tokens} tokens on average, batches of {batch}")
    out().print(
        f"static {report.static_tokens_per_s} tokens/s, iteration-level {report.iteration_tokens_per_s} tokens/s"
    )
    out().print(f"ratio {report.measured:.2f}, predicted by the lengths {report.predicted:.2f}")
    if json_path is not None:
        Path(json_path).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    sys.exit(0 if abs(report.measured / report.predicted - 1) <= 0.15 else 1)


if __name__ == "__main__":
    main()
