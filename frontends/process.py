"""The frontend process: the doors in front of the frontend's core."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from baton.engine.desk import DeskCore
from baton.engine.effects import Account, Begin, Deliver, Finish, Named, Seen
from baton.frontends.doors import Doors
from baton.frontends.doors import StartError as DoorError
from baton.frontends.reception import Reception
from baton.frontends.status import Gauges, Sources, Status
from baton.ipc.board import PHASES, PlaceView
from baton.ipc.frames import Serving
from baton.workers.config import Settings
from baton.workers.process import Process, StartError

STOP_GRACE = 1 / 3  # of the time the supervisor waits for the process to end


class Entrance(Protocol):
    """All doors together, as ``Doors`` is; the simulator's visitors come in by one without sockets."""

    async def start(
        self, reception: Reception, settings: Settings, sources: Sources, directory: Path, joins: bool
    ) -> dict[str, str]: ...
    def observe(self, account: Account) -> None: ...
    async def stop(self, grace_s: float) -> None: ...


def status(word: Serving | None, seen: Iterable[PlaceView]) -> Status:
    """What ``/ready`` says, by the supervisor's last word, and how long each phase of each process's start took; while
    it says no, how far each process has come.
    """
    if word is not None and word.draining:
        return Status(False, "draining")
    places = list(seen)
    start = {f"{place.role.name.lower()}-{place.index}": place.start_ms() for place in places}
    if word is not None and word.ready:
        return Status(True, "ready", start_ms=start)
    last = len(PHASES) - 1
    reached = {f"{place.role.name.lower()}-{place.index}": place.phase for place in places}
    percent = 100 * sum(map(PHASES.index, reached.values())) // (last * max(1, len(reached)))
    return Status(False, "starting" if word is None else "recovering", {"percent": percent, **reached}, start)


async def run(process: Process, entrance: Entrance | None = None) -> None:
    """Serve until halted; then give the answers in progress a moment to leave."""
    board, word = process.board, None
    doors: Entrance = entrance if entrance is not None else Doors()
    settings, index = process.settings, process.me.index
    core = DeskCore(process.me, board, board.slice(index), process.limits, settings.frontends)

    reception = Reception(
        process.feed,
        process.now_ns,
        process.card,
        process.limits,
        settings.trace_sample_ratio,
        index,
        settings.frontends,
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
            cached_tokens=effect.cached_tokens,
            completion_tokens=effect.completion_tokens,
            ms=round((effect.closed_ns - effect.received_ns) / 1e6, 1),
            lives=effect.lives,
        )

    process.listen(Serving, heard)
    said: dict[type, Callable[[Any], None]] = dict.fromkeys((Named, Begin, Deliver, Finish, Seen), reception.perform)
    process.run_core(core, {**said, Account: account})
    totals = [board.totals(number) for number in range(settings.frontends)]

    def gauges() -> Gauges:
        lives = {(place.role.name.lower(), place.index): place.incarnation for place in board.places()}
        restarts = {place: max(0, incarnation - 1) for place, incarnation in lives.items()}
        return Gauges(**board.gauges(), restarts=restarts)

    sources = Sources(lambda: status(word, board.places()), gauges, totals, index)
    try:
        joins = settings.frontends > 1 and (index, process.me.incarnation) != (0, 1)
        bound = await doors.start(reception, settings, sources, process.launch.path, joins)
    except DoorError as error:
        raise StartError(str(error)) from error
    process.ready(bound)
    await process.halted.wait()
    await doors.stop(STOP_GRACE * process.limits.stop_s_max)
