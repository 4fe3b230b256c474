"""How long a step of the model takes, without a server around it, beside what the machine could do at most.

``python -m baton.ops.bench.steps``: decoding steps of some sizes and whole prompts, for each way of holding weights.
The limit is the larger of two times: that of reading all weights and the context's keys and values once, and that of
all multiplications and additions; both with the machine's peaks as measured in the same run.
"""

from __future__ import annotations

import os
import statistics
from time import perf_counter

import click
import msgspec
from rich.console import Console
from rich.table import Table

from baton.engine.batch import Sampling, StepRow
from baton.ops.fetch import ensure
from baton.workers.cache import MemoryBudgetError
from baton.workers.model.config import ModelConfig
from baton.workers.model.gguf import ModelFileError
from baton.workers.model.loaded import Kernels, KernelsUnavailable
from baton.workers.model.probe import Peaks, peaks
from baton.workers.runner import Runner

BLOCK_TOKENS = 16
WARM_UPS = 2
FIRST_ID = 1000  # of those that steps are made of
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, end_ids=())


class Timed(msgspec.Struct, frozen=True):
    """One size of step: medians in milliseconds, by phase too; ``share`` is of the limit, 1 at best."""

    weights: str
    rows: int
    tokens: int
    context: int
    step_ms: float
    least_ms: float
    limit_ms: float
    bound: str
    share: float
    phases_ms: dict[str, float]


class StepsReport(msgspec.Struct, frozen=True):
    """``kernels`` say what computed, by how weights were held."""

    threads: int
    peaks: Peaks
    kernels: dict[str, str]
    timed: list[Timed]


def limit_ms(
    config: ModelConfig, weights: str, weights_bytes: int, step: list[StepRow], most: Peaks, threads: int
) -> tuple[float, str]:
    """The least a step can take, and whether memory or arithmetic says so."""
    queries, shared = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = config.hidden * (2 * queries + 2 * shared) + 3 * config.hidden * config.intermediate
    table = config.vocab * config.hidden
    tokens, ends = sum(len(row.tokens) for row in step), [row.start + len(row.tokens) for row in step]
    pairs = sum((row.start + 1 + end) / 2 * len(row.tokens) for row, end in zip(step, ends, strict=True))
    attention = 4 * pairs * queries * config.layers
    products = 2 * (tokens * layer * config.layers + len(step) * table)
    per_s = most.bf16_per_s if weights == "bfloat16" else most.int8_per_s
    arithmetic_s = (products / per_s + attention / most.bf16_per_s) / threads
    held = weights_bytes - 2 * table  # without the embedding, of which only a few rows are read
    memory_s = (held + sum(ends) * 4 * shared * config.layers) / most.read_bytes_per_s
    return 1e3 * max(arithmetic_s, memory_s), "arithmetic" if arithmetic_s > memory_s else "memory"


def decoding(rows: int, context: int) -> list[StepRow]:
    """A step in which each of ``rows`` computes one token at position ``context``."""
    width = context // BLOCK_TOKENS + 1
    return [
        StepRow(i, [FIRST_ID + i], context, list(range(i * width, (i + 1) * width)), True, 0, GREEDY)
        for i in range(rows)
    ]


def prompt(tokens: int) -> list[StepRow]:
    """A step that computes one whole prompt."""
    return [
        StepRow(0, [FIRST_ID + i for i in range(tokens)], 0, list(range(-(-tokens // BLOCK_TOKENS))), True, 0, GREEDY)
    ]


def time_step(runner: Runner, weights: str, step: list[StepRow], repeats: int, most: Peaks, threads: int) -> Timed:
    """The median of ``repeats`` runs of the same step."""
    for _ in range(WARM_UPS):
        runner.step(step)
    runner.phases_s()
    times = []
    for _ in range(repeats):
        began = perf_counter()
        runner.step(step)
        times.append(1e3 * (perf_counter() - began))
    phases = {name: 1e3 * seconds / repeats for name, seconds in runner.phases_s().items()}
    limit, bound = limit_ms(runner.config, weights, runner.weights_bytes, step, most, threads)
    median = statistics.median(times)
    tokens, context = sum(len(row.tokens) for row in step), step[0].start
    return Timed(weights, len(step), tokens, context, median, min(times), limit, bound, limit / median, phases)


def table(report: StepsReport) -> Table:
    """The report for people."""
    out = Table("weights", "step", "ms", "least", "limit, ms", "share", "by phase, ms", title=str(report.kernels))
    for one in report.timed:
        what = f"{one.rows} rows at {one.context}" if one.tokens == one.rows else f"a prompt of {one.tokens}"
        phases = ", ".join(f"{name} {ms:.2f}" for name, ms in one.phases_ms.items())
        numbers = f"{one.step_ms:.2f}", f"{one.least_ms:.2f}", f"{one.limit_ms:.2f} ({one.bound})", f"{one.share:.2f}"
        out.add_row(one.weights, what, *numbers, phases)
    return out


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", default="smollm2-135m", help="Alias or GGUF file.")
@click.option("--weights", multiple=True, default=("bfloat16", "int8", "native"), help="How weights are held.")
@click.option("--kernels", type=click.Choice(["auto", "native", "torch"]), default="auto", help="Who computes.")
@click.option("--rows", multiple=True, type=click.IntRange(1), default=(1, 8, 32), help="Rows that decode at once.")
@click.option("--context", type=click.IntRange(0), default=256, help="Tokens before a decoded one.")
@click.option("--prompts", multiple=True, type=click.IntRange(1), default=(128, 1024), help="Lengths of prompts.")
@click.option("--threads", type=click.IntRange(1), default=None, help="By default one a processor.")
@click.option("--repeats", type=click.IntRange(1), default=15, help="Runs of a step.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    model: str,
    weights: tuple[str, ...],
    kernels: Kernels,
    rows: tuple[int, ...],
    context: int,
    prompts: tuple[int, ...],
    threads: int | None,
    repeats: int,
    as_json: bool,
) -> None:
    """Time steps of the model alone."""
    threads = threads or len(os.sched_getaffinity(0))
    try:
        most = peaks(threads)
    except KernelsUnavailable as error:
        raise click.ClickException(str(error)) from None
    timed, words = list[Timed](), dict[str, str]()
    steps = [*(decoding(count, context) for count in rows), *map(prompt, prompts)]
    blocks = max(1 + max(block for row in step for block in row.blocks) for step in steps)
    for held in weights:
        try:
            runner = Runner(ensure(model), weights=held, kernels=kernels, blocks=blocks, threads=threads)
        except (ModelFileError, KernelsUnavailable, MemoryBudgetError) as error:
            raise click.ClickException(f"{held}: {error}") from None
        words[held] = runner.kernels
        timed += [time_step(runner, held, step, repeats, most, threads) for step in steps]
    report = StepsReport(threads, most, words, timed)
    if as_json:
        click.echo(msgspec.json.encode(report))
    else:
        most_line = f"{most.read_bytes_per_s / 1e9:.0f} GB/s, {most.bf16_per_s / 1e9:.0f} GFLOP/s of bfloat16 and "
        Console().print(table(report), f"peaks: {most_line}{most.int8_per_s / 1e9:.0f} GOP/s of int8 a processor")


if __name__ == "__main__":
    main()
