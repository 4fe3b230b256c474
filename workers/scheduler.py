"""The scheduler process: the scheduler's core between the token ring and the plan ring."""

from __future__ import annotations

import msgspec

from baton.engine.effects import Doorbell, Plan
from baton.engine.policies import Policies
from baton.engine.scheduler import SchedulerCore
from baton.workers.process import Process

TOKEN_READER = 0


async def run(process: Process) -> None:
    """Serve until halted."""
    limits, flag = process.limits, process.settings.max_step_tokens
    if flag is not None:
        limits = msgspec.structs.replace(limits, step_tokens_max=flag)
    settings = process.settings
    policies = Policies(
        prefix_cache=settings.prefix_cache,
        share_prefixes=settings.share_prefixes,
        admission=settings.admission,
        order=settings.order,
        itl_target_ms=settings.itl_target_ms,
    )
    ring = process.steps(TOKEN_READER)
    core = SchedulerCore(process.me, process.board, ring, process.card.end_ids, limits, policies)
    process.run_core(core, {Plan: process.plan_writer()})

    def tokens_came() -> None:
        process.feed(Doorbell())

    process.hear("tokens", tokens_came)
    process.ready({})
    await process.halted.wait()
