"""The scheduler process: the scheduler's core between the token ring and the plan ring."""

from __future__ import annotations

import msgspec

from baton.engine.effects import Doorbell, Plan
from baton.engine.scheduler import SchedulerCore
from baton.ipc import doorbell
from baton.ipc.frames import Role
from baton.ipc.records import PlanWriter, StepReader
from baton.ipc.ring import Ring, RingReader, RingWriter
from baton.workers.process import Process

TOKEN_READER = 0


async def run(process: Process) -> None:
    """Serve until halted."""
    directory, board = process.launch.path, process.board
    tokens = StepReader(RingReader(Ring.open(directory / "tokens"), TOKEN_READER))
    plans = Ring.open(directory / "plans")
    writer = PlanWriter(RingWriter(plans))
    bells = [process.bell(Role.WORKER, rank, "plans") for rank in range(plans.readers)]
    limits = msgspec.structs.replace(process.limits, step_tokens_max=process.settings.max_step_tokens)
    core = SchedulerCore(process.me, board, tokens, process.card.end_ids, limits)

    def write_plan(plan: Plan) -> None:
        assert writer.write(plan), "one step is in flight at most, so the plan ring has room"
        for bell in bells:
            doorbell.ring(bell)

    shell = process.run_core(core, {Plan: write_plan})

    def tokens_came() -> None:
        shell.feed(Doorbell())

    process.hear("tokens", tokens_came)
    process.ready({})
    await process.halted.wait()
