"""The frontend process: the doors in front of the frontend's core."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec

from baton.engine.effects import Account, Begin, Deliver, Finish
from baton.engine.frontend import FrontendCore
from baton.frontends.doors import Doors
from baton.frontends.doors import StartError as DoorError
from baton.frontends.status import Gauges, Sources, Status
from baton.frontends.stream import Reception
from baton.ipc.frames import Serving
from baton.workers.config import Settings
from baton.workers.process import Process, StartError

STOP_GRACE = 1 / 3  # of the time the supervisor waits for the process to end


class Entrance(Protocol):
    """All doors together, as ``Doors`` is; the simulator's visitors come in by one without sockets."""

    async def start(
        self, reception: Reception, settings: Settings, sources: Sources, directory: Path
    ) -> dict[str, str]: ...
    def observe(self, account: Account) -> None: ...
    async def stop(self, grace_s: float) -> None: ...


def status(word: Serving | None) -> Status:
    """What ``/ready`` says, by the supervisor's last word."""
    if word is None:
        return Status(False, "starting")
    if word.draining:
        return Status(False, "draining")
    return Status(True, "ready") if word.ready else Status(False, "recovering")


async def run(process: Process, entrance: Entrance | None = None) -> None:
    """Serve until halted; then give the answers in progress a moment to leave."""
    board, word = process.board, None
    doors: Entrance = entrance if entrance is not None else Doors()
    core = FrontendCore(process.me, board, board.slice(process.me.index), process.limits)

    reception = Reception(
        process.feed, process.now_ns, process.card, process.limits, process.settings.trace_sample_ratio
    )

    def heard(serving: Serving) -> None:
        nonlocal word
        word = serving
        reception.card = msgspec.structs.replace(process.card, weights_digest=serving.weights_digest)

    def account(effect: Account) -> None:
        doors.observe(effect)
        process.log.info(
            "request",
            request_id=effect.request_id.hex(),
            trace_id=effect.trace[:16].hex(),
            reason=effect.reason,
            prompt_tokens=effect.prompt_tokens,
            completion_tokens=effect.completion_tokens,
            ms=round((effect.closed_ns - effect.received_ns) / 1e6, 1),
            lives=effect.lives,
        )

    process.listen(Serving, heard)
    perform = reception.perform
    process.run_core(core, {Begin: perform, Deliver: perform, Finish: perform, Account: account})
    sources = Sources(lambda: status(word), lambda: Gauges(**board.gauges()))
    try:
        bound = await doors.start(reception, process.settings, sources, process.launch.path)
    except DoorError as error:
        raise StartError(str(error)) from error
    process.ready(bound)
    await process.halted.wait()
    await doors.stop(STOP_GRACE * process.limits.stop_s_max)
