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

import click
import msgspec
from rich.table import Table

from baton.engine.effects import Doorbell, Effect, Plan, StepDone, TokenRecord
from baton.engine.limits import Limits
from baton.engine.ownership import BoardRow
from baton.engine.scheduler import SchedulerCore
from baton.engine.states import STATE_NUMBERS
from baton.ipc.board import Board
from baton.ipc.frames import Address, Handed, Key, KVLayout, Params, Role, Terms, WorkerHello
from baton.ops.terminal import out

SIZES = (16, 32, 64, 128, 256, 512, 1024)
BLOCK_TOKENS = 16
TRACE = bytes(24) + b"\x00"


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """One size. Times are of the processor, in µs a step; ``per_request_ns`` is the median over the requests."""

    running: int
    steps: int
    p50_us: float
    p99_us: float
    per_request_ns: float


class Tape:
    """The token ring, as a list."""

    def __init__(self) -> None:
        self.steps: list[StepDone] = []

    def read(self) -> list[StepDone]:
        """What was said since."""
        steps, self.steps = self.steps, []
        return steps


class Bench:
    """A scheduler with ``running`` requests that decode for as long as they are stepped."""

    def __init__(self, running: int, prompt_tokens: int, output_tokens: int) -> None:
        self.tape = Tape()
        self.board = Board.format(bytearray(Board.size(1, running)), 1, running)
        for role in Role:
            self.board.set_live(role, 0, 1, 0)
        tokens = (prompt_tokens + output_tokens) * running
        limits = Limits(running_requests_max=running, step_tokens_max=max(8192, running))
        me = Address(Role.SCHEDULER, "m", 0, 0, 1)
        self.core = SchedulerCore(me, self.board, self.tape, (0,), limits)
        self.positions: dict[int, int] = {}
        self.runs: dict[int, int] = {}
        self.plans: list[Plan] = []
        self.now_ns = 0
        layout = KVLayout(BLOCK_TOKENS, 2 * tokens // BLOCK_TOKENS, 1, 1, 1, 1, "float32")
        worker = Address(Role.WORKER, "m", 0, 0, 1)
        self.tell(WorkerHello(worker, 0, 1, layout, "w", 50_000, prompt_tokens + output_tokens))
        for slot in range(running):
            self._submit(slot, prompt_tokens, output_tokens)

    def _submit(self, slot: int, prompt_tokens: int, output_tokens: int) -> None:
        generation = self.board.row(slot).generation
        row = BoardRow(generation, 1, Role.SCHEDULER, 0, 1, False, Role.TOKENIZER, 0, 1, STATE_NUMBERS["queued"], 0)
        self.board.write(slot, row)
        home = Address(Role.FRONTEND, "m", 0, 0, 1)
        prompt = [1 + (slot * 7919 + at) % 49_000 for at in range(prompt_tokens)]
        params = Params(max_tokens=output_tokens, ignore_eos=True, seed=slot)
        self.tell(Handed(Key(slot, generation, 1), home, TRACE, Terms("m"), params, prompt, [], output_tokens))

    def tell(self, event: object) -> list[Effect]:
        """One event; plans wait for ``answer``."""
        self.now_ns += 1_000_000
        effects = self.core.handle(event, self.now_ns)
        self.plans += [effect for effect in effects if isinstance(effect, Plan)]
        return effects

    def answer(self) -> int:
        """Say one token for every row of the oldest plan that samples; how many."""
        plan = self.plans.pop(0)
        for start in plan.starts:
            self.positions[start.slot], self.runs[start.slot] = 0, start.run
        records = []
        for row in plan.rows:
            if row.sample:
                position = self.positions[row.slot]
                self.positions[row.slot] = position + 1
                token = 1 + (row.slot + position) % 49_000
                generation = self.board.row(row.slot).generation
                records.append(TokenRecord(row.slot, generation, self.runs[row.slot], position, token, 0, -1.0))
        self.tape.steps.append(StepDone(1, plan.step, records))
        return len(records)


def measure(running: int, steps: int, prompt_tokens: int) -> Cost:
    """Time ``steps`` steps in which every request decodes."""
    bench = Bench(running, prompt_tokens, 2 * steps + 200)
    while bench.answer() < running:  # the prompts first
        bench.tell(Doorbell())
    for _ in range(4):
        bench.tell(Doorbell())
        bench.answer()
    taken = []
    gc.collect()
    for _ in range(steps):
        began = process_time_ns()
        bench.tell(Doorbell())
        taken.append(process_time_ns() - began)
        assert bench.answer() == running, "a request sat a step out"
    taken.sort()
    middle = statistics.median(taken)
    return Cost(
        running=running,
        steps=steps,
        p50_us=round(middle / 1e3, 1),
        p99_us=round(taken[len(taken) * 99 // 100] / 1e3, 1),
        per_request_ns=round(middle / running, 1),
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
    for name in ("running", "p50 µs", "p99 µs", "ns a request"):
        shown.add_column(name, justify="right")
    for cost in costs:
        shown.add_row(str(cost.running), f"{cost.p50_us:,.0f}", f"{cost.p99_us:,.0f}", f"{cost.per_request_ns:,.0f}")
    out().print(shown)
    out().print(f"{steps} steps a size, {(perf_counter_ns() - began) / 1e9:.0f} s in all")
    if json_path is not None:
        Path(json_path).write_bytes(msgspec.json.format(msgspec.json.encode(costs), indent=2) + b"\n")


if __name__ == "__main__":
    main()
