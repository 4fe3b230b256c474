"""What a process stands on: a clock, the board, rings, doorbells, links, a log and a tracer; made here of real things.

``workers.memory`` makes the same of memory and a virtual clock. A role's code sees no difference.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

from baton.engine.effects import Span
from baton.engine.limits import Limits
from baton.ipc import doorbell
from baton.ipc.board import Board
from baton.ipc.clock import now_ns
from baton.ipc.frames import Address, Role
from baton.ipc.link import Deliver, Links, Report
from baton.ipc.log import Log, make_log
from baton.ipc.ring import Ring
from baton.ipc.tracing import Tracer
from baton.ipc.zmq_link import ZmqLinks
from baton.workers.config import Launch

#: young objects that start a collection; a step of many rows makes, and drops, thousands
GC_ALLOCATIONS = 20_000


class Spans(Protocol):
    """Where a process's spans go."""

    def emit(self, span: Span) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Surroundings(Protocol):
    """The ports of one process. ``hear`` gives back how to stop hearing; ``settled`` is told when start-up is done, so
    that what there is by then will stay; ``die`` ends the process at once.
    """

    @property
    def board(self) -> Board: ...
    @property
    def log(self) -> Log: ...
    @property
    def spans(self) -> Spans: ...
    def now_ns(self) -> int: ...
    def connect(self, limits: Limits, deliver: Deliver, report: Report) -> Links: ...
    def ring(self, name: str) -> Ring: ...
    def hear(self, ring: str, answer: Callable[[], None]) -> Callable[[], None]: ...
    def ring_bell(self, role: Role, index: int, ring: str) -> None: ...
    def settled(self) -> None: ...
    def die(self) -> NoReturn: ...


class Machine:
    """The real ones of a child: shared memory and sockets in the run directory, eventfds, the machine's clock."""

    def __init__(self, launch: Launch, me: Address) -> None:
        self.me = me
        self.directory: Path = launch.path
        self.doorbells = launch.doorbells
        self.board = Board.open(launch.path / "board")
        self.log = make_log(str(me), launch.settings.log_level)
        resource: dict[str, str | int | float | bool] = {
            "service.name": "baton",
            "process.pid": os.getpid(),
            "baton.instance": launch.path.name,
        }
        limits, role = launch.settings.limits, me.role.name.lower()
        self.spans = Tracer(
            role, me.index, launch.path, launch.epoch_offset_ns, limits, resource, incarnation=me.incarnation
        )
        self._loop = asyncio.get_running_loop()

    def now_ns(self) -> int:
        """The machine's monotonic clock."""
        return now_ns()

    def connect(self, limits: Limits, deliver: Deliver, report: Report) -> Links:
        """Bind this process's inbox; every frame for it goes to ``deliver`` from now on."""
        return ZmqLinks(self.directory, self.me, limits, self.board, deliver, report)

    def ring(self, name: str) -> Ring:
        """Map a ring of this server."""
        return Ring.open(self.directory / name)

    def hear(self, ring: str, answer: Callable[[], None]) -> Callable[[], None]:
        """Call ``answer`` whenever this process's doorbell at ``ring`` is rung."""
        return doorbell.hear(self._loop, self._bell(self.me.role, self.me.index, ring), answer)

    def ring_bell(self, role: Role, index: int, ring: str) -> None:
        """Wake a reader of ``ring``."""
        doorbell.ring(self._bell(role, index, ring))

    def settled(self) -> None:
        """What start-up made is never looked through again for cycles, and what is made later less often: a collection
        of a worker's modules alone takes longer than a step.
        """
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_ALLOCATIONS, *gc.get_threshold()[1:])

    def die(self) -> NoReturn:
        """End at once; nothing is cleaned up."""
        os._exit(1)

    def _bell(self, role: Role, index: int, ring: str) -> int:
        return self.doorbells[f"{role.name.lower()}-{index}/{ring}"]
