"""What a step costs the scheduler: ``python -m baton.ops.bench.planning``.

The production core with a board in memory and, in the workers' place, a tape that says one token for every row: so many
requests decode, and each step is timed from the doorbell to the plan. That is counting the tokens of the last step,
ending what has ended, and planning the next.
"""

from __future__ import annotations

import gc
import statistics
from pathlib import Path
from time import perf_counter_ns, process_time_ns
from typing import Any

import click
import msgspec
from rich.table import Table

from baton.engine.effects import Doorbell, StepDone, TokenRecord
from baton.engine.limits import Limits
from baton.ipc.frames import KVLayout, Params
from baton.ops.bench.lockstep import Lockstep
from baton.ops.terminal import out

SIZES = (16, 32, 64, 128, 256, 512, 1024)
BLOCK_TOKENS = 16


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """One size. Times are of the processor, in µs a step: medians, and the 99th percentile of the whole."""

    running: int
    steps: int
    plan_us: float
    whole_us: float
    whole_p99_us: float


class Decoding:
    """``running`` requests that decode for as long as they are stepped."""

    def __init__(self, running: int, prompt_tokens: int, output_tokens: int) -> None:
        context = prompt_tokens + output_tokens
        layout = KVLayout(BLOCK_TOKENS, 2 * running * context // BLOCK_TOKENS, 1, 1, 1, 1, "float32")
        limits = Limits(running_requests_max=running, step_tokens_max=max(8192, running))
        self.engine = Lockstep(running, layout, 50_000, context, limits)
        self.positions: dict[int, int] = {}
        self.runs: dict[int, tuple[int, int]] = {}
        for slot in range(running):
            prompt = [1 + (slot * 7919 + at) % 49_000 for at in range(prompt_tokens)]
            self.engine.submit(slot, prompt, Params(max_tokens=output_tokens, ignore_eos=True, seed=slot))

    def say(self) -> int:
        """One token for every row of the oldest plan that samples, for the scheduler to read; how many."""
        plan = self.engine.plans.popleft()
        for start in plan.starts:
            self.positions[start.slot], self.runs[start.slot] = 0, (start.generation, start.run)
        records = []
        for row in plan.rows:
            if row.sample:
                position = self.positions[row.slot]
                self.positions[row.slot] = position + 1
                token = 1 + (row.slot + position) % 49_000
                records.append(TokenRecord(row.slot, *self.runs[row.slot], position, token, 0, -1.0))
        self.engine.tape.steps.append(StepDone(1, plan.step, records))
        return len(records)


def measure(running: int, steps: int, prompt_tokens: int) -> Cost:
    """Time ``steps`` steps in which every request decodes."""
    bench = Decoding(running, prompt_tokens, 2 * steps + 200)
    tell = bench.engine.tell
    while bench.say() < running:  # the prompts first
        tell(Doorbell())
    for _ in range(4):
        tell(Doorbell())
        bench.say()
    core, taken, planned = bench.engine.core, [], []
    plan = core._plan

    def timed(*given: Any) -> None:  # whatever the core gives its own method
        began = process_time_ns()
        plan(*given)
        planned.append(process_time_ns() - began)

    core._plan = timed  # type: ignore[assignment,method-assign]
    gc.collect()
    for _ in range(steps):
        began = process_time_ns()
        tell(Doorbell())
        taken.append(process_time_ns() - began)
        assert bench.say() == running, "a request sat a step out"
    taken.sort()
    return Cost(
        running=running,
        steps=steps,
        plan_us=round(statistics.median(planned) / 1e3, 1),
        whole_us=round(statistics.median(taken) / 1e3, 1),
        whole_p99_us=round(taken[len(taken) * 99 // 100] / 1e3, 1),
    )


@click.command()
@click.option("--steps", type=click.IntRange(10), default=300, show_default=True, help="Steps timed at each size.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=500, show_default=True, help="Tokens a prompt.")
@click.option("--json", "json_path", metavar="PATH", help="Write the figures as JSON.")
def main(steps: int, prompt_tokens: int, json_path: str | None) -> None:
    """Measure what a step costs the scheduler, from 16 to 1,024 running requests."""
    began = perf_counter_ns()
    costs = [measure(running, steps, prompt_tokens) for running in SIZES]
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("running", "planning µs", "ns a request", "with counting µs", "ns a request", "p99 µs"):
        shown.add_column(name, justify="right")
    for cost in costs:
        row = [str(cost.running)]
        for us in (cost.plan_us, cost.whole_us):
            row += [f"{us:,.0f}", f"{1e3 * us / cost.running:,.0f}"]
        shown.add_row(*row, f"{cost.whole_p99_us:,.0f}")
    out().print(shown)
    out().print(f"{steps} steps a size, {(perf_counter_ns() - began) / 1e9:.0f} s in all")
    if json_path is not None:
        Path(json_path).write_bytes(msgspec.json.format(msgspec.json.encode(costs), indent=2) + b"\n")


if __name__ == "__main__":
    main()
