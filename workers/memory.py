"""Surroundings in memory: the board, rings, doorbells and links of one simulated machine, on a virtual clock.

The processes on it share one event loop; their code is the same as on a real machine. For simulation and tests.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from baton.engine.limits import Limits
from baton.ipc.board import Board
from baton.ipc.frames import Address, Role
from baton.ipc.link import Deliver, Links, Report
from baton.ipc.log import Log
from baton.ipc.memory_link import Network
from baton.ipc.ring import HEADER_BYTES, Ring
from baton.ipc.virtual_clock import Compartment, Killed, VirtualLoop
from baton.workers.surroundings import Spans

Bell = tuple[Role, int, str]


@dataclass(eq=False, slots=True)
class _Ear:
    """Who hears a bell; ``rung`` until the answer has been called."""

    answer: Callable[[], None]
    context: contextvars.Context
    rung: bool = False


class MemoryMachine:
    """What the processes of one simulated machine share. Invariant: it outlives every process on it.

    ``rung`` is called for every bell before its reader wakes: who wants to harm a ring does it there.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        network: Network,
        limits: Limits,
        frontends: int,
        ranks: int,
        rung: Callable[[Bell], None] = lambda bell: None,
    ) -> None:
        self.loop = loop
        self.network = network
        self._rung = rung
        slots = limits.requests_per_frontend_max
        self._board = bytearray(Board.size(frontends, slots))
        self.board = Board.format(self._board, frontends, slots)
        self._rings = {
            "plans": bytearray(HEADER_BYTES + limits.plan_ring_bytes),
            "tokens": bytearray(HEADER_BYTES + limits.token_ring_bytes),
        }
        for name, readers in (("plans", ranks), ("tokens", 2)):
            Ring.format(self._rings[name], readers).close()
        self._ears: dict[Bell, _Ear] = {}

    def map_board(self) -> Board:
        """One process's view of the board, closed apart from the others."""
        return Board(self._board)

    def map_ring(self, name: str) -> Ring:
        """One process's view of a ring."""
        return Ring(self._rings[name])

    def hear(self, bell: Bell, answer: Callable[[], None]) -> Callable[[], None]:
        """Call ``answer`` when the bell is rung, and once now: what is in the ring already counts as a ring."""
        ear = self._ears[bell] = _Ear(answer, contextvars.copy_context())
        self.ring_bell(bell)

        def stop() -> None:
            if self._ears.get(bell) is ear:
                del self._ears[bell]

        return stop

    def ring_bell(self, bell: Bell) -> None:
        """Wake whoever hears the bell; ringing again before it woke changes nothing."""
        self._rung(bell)
        ear = self._ears.get(bell)
        if ear is not None and not ear.rung:
            ear.rung = True
            self.loop.call_soon(self._answer, bell, ear, context=ear.context)

    def _answer(self, bell: Bell, ear: _Ear) -> None:
        ear.rung = False
        if self._ears.get(bell) is ear:
            ear.answer()


class MemorySurroundings:
    """The surroundings of one process on a simulated machine."""

    def __init__(self, machine: MemoryMachine, compartment: Compartment, me: Address, log: Log, spans: Spans) -> None:
        self.machine = machine
        self.compartment = compartment
        self.me = me
        self.board = machine.map_board()
        self.log = log
        self.spans = spans

    def now_ns(self) -> int:
        """The virtual clock."""
        return self.machine.loop.now_ns()

    def connect(self, limits: Limits, deliver: Deliver, report: Report) -> Links:
        """Bind this process's inbox."""
        return self.machine.network.connect(self.me, limits, self.board, deliver, report)

    def ring(self, name: str) -> Ring:
        """Map a ring of this server."""
        return self.machine.map_ring(name)

    def hear(self, ring: str, answer: Callable[[], None]) -> Callable[[], None]:
        """Call ``answer`` whenever this process's doorbell at ``ring`` is rung."""
        return self.machine.hear((self.me.role, self.me.index, ring), answer)

    def ring_bell(self, role: Role, index: int, ring: str) -> None:
        """Wake a reader of ``ring``."""
        self.machine.ring_bell((role, index, ring))

    def settled(self) -> None:
        """The interpreter's memory is not this process's alone."""

    def die(self) -> NoReturn:
        """End at once; nothing of this process runs any more."""
        self.compartment.kill()
        raise Killed
