"""The supervisor's core: which process is started, restarted, killed, and when the server as a whole begins and ends.

It fills the life table: an incarnation is raised only after the process before it is reaped, then everyone is told,
then the next one begins. It holds no request. What it cannot do itself (start, kill, dump) it asks its shell for, and
hears of in ``Died`` and the children's frames.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.engine.buggify import buggify
from baton.engine.effects import (
    Died,
    Dump,
    Effect,
    Inquire,
    Kill,
    Note,
    Opened,
    Over,
    Send,
    Spawn,
    StopAsked,
    Tick,
    Wake,
)
from baton.engine.limits import Limits
from baton.engine.watch import STOPPED, Place, Watch
from baton.ipc.frames import (
    Address,
    AnyFrame,
    Damaged,
    Drained,
    Halt,
    Life,
    Ping,
    Ready,
    Role,
    Serving,
    StartFailed,
)

SHUTTING_DOWN = "the server is shutting down"


class LifeTable(Protocol):
    """The life table, which the supervisor alone writes."""

    def set_live(self, role: int, index: int, incarnation: int, since_ns: int) -> None: ...


@dataclass(slots=True)
class Child:
    """One place and the process that fills it now, if ``alive``."""

    role: Role
    index: int
    incarnation: int = 0
    alive: bool = False
    ready: bool = False
    detail: dict[str, str] = field(default_factory=dict)
    condemned: str | None = None
    fault: bool = False
    deaths: deque[int] = field(default_factory=deque)
    false_starts: int = 0  # lives in a row that ended before they were ready, however long they took

    @property
    def name(self) -> str:
        """The place's name, for people."""
        return f"{self.role.name.lower()}-{self.index}"


class HealthCore:
    """Invariant: at most one living process a place, and the life table names it or its reaped predecessor.

    ``phase`` goes from starting over serving and draining to stopping, and may skip some.
    """

    def __init__(
        self,
        me: Address,
        table: LifeTable,
        places: Sequence[tuple[Role, int]],
        look: Callable[[], list[tuple[Place, str]]],
        limits: Limits,
    ) -> None:
        """``look`` reads every filled place, with the kernel's letter for the state of its process."""
        self.me = me
        self.table = table
        self.look = look
        self.limits = limits
        self.children = {place: Child(*place) for place in places}
        self.watch = Watch(limits)
        self.phase = "starting"
        self.failure: str | None = None
        self.drained: set[int] = set()

    def start(self, now_ns: int) -> list[Effect]:
        """Fill every place, in the order given; other frontends follow once the first has found a port."""
        out: list[Effect] = []
        for child in self.children.values():
            if child.role != Role.FRONTEND or child.index == 0:
                self._spawn(child, now_ns, out)
        out.append(self._wake(now_ns, self.limits.watch_interval_s, "watch"))
        return out

    def handle(self, event: object, now_ns: int) -> list[Effect]:
        """One event in, effects out."""
        out: list[Effect] = []
        match event:
            case Tick():
                self._tick(event.name, now_ns, out)
            case Died():
                self._died(event, now_ns, out)
            case Ready() | StartFailed() | Drained():
                child = self.children.get(event.address.place)
                if child is not None and child.alive and event.address.incarnation == child.incarnation:
                    self._heard(child, event, now_ns, out)
            case Damaged():
                self._damaged(event, now_ns, out)
            case StopAsked():
                self._stop_asked(now_ns, out)
            case _:
                raise AssertionError(f"no such event for a supervisor: {event!r}")
        return out

    def _heard(self, child: Child, event: Ready | StartFailed | Drained, now_ns: int, out: list[Effect]) -> None:
        match event:
            case Ready():
                child.ready, child.detail, child.false_starts = True, event.detail, 0
                self._follow(child, now_ns, out)
                self._opened(out)
                self._tell_serving(out)
            case StartFailed():
                self._fail(event.reason, now_ns, out)
            case Drained():
                self.drained.add(child.index)
                if self.phase == "draining" and self.drained >= self._frontends():
                    self._stop(SHUTTING_DOWN, now_ns, out)

    def _tick(self, name: str, now_ns: int, out: list[Effect]) -> None:
        match name.split():
            case ["watch"]:
                self._look(now_ns, out)
            case ["drained"]:
                if self.phase == "draining":
                    self._stop(SHUTTING_DOWN, now_ns, out)
            case ["stopped"]:
                out.extend(Kill(child.role, child.index) for child in self.children.values() if child.alive)
            case [what, number, index]:
                child = self.children[(Role(int(number)), int(index))]
                if what == "restart":
                    self._restart(child, now_ns, out)
                else:
                    self._execute(child, out)
            case _:
                raise AssertionError(f"no such timer: {name}")

    # -------------------------------------------------------------------------------- births and deaths

    def _spawn(self, child: Child, now_ns: int, out: list[Effect]) -> None:
        """Fill a place: life table first, then everyone is told, then the process begins."""
        child.incarnation += 1
        child.alive, child.ready, child.condemned = True, False, None
        self.table.set_live(child.role, child.index, child.incarnation, now_ns)
        self._broadcast(Life(child.role, child.index, child.incarnation, child.fault), out)
        out.append(Spawn(child.role, child.index, child.incarnation))

    def _follow(self, first: Child, now_ns: int, out: list[Effect]) -> None:
        """The first frontend is up for the first time: the others listen where it does."""
        if first.role == Role.FRONTEND and first.index == 0:
            for child in self.children.values():
                if child.role == Role.FRONTEND and not child.incarnation:
                    self._spawn(child, now_ns, out)

    def _died(self, event: Died, now_ns: int, out: list[Effect]) -> None:
        child = self.children[(event.role, event.index)]
        assert child.alive and child.incarnation == event.incarnation, f"{event} but {child}"
        child.false_starts += not child.ready
        child.alive = child.ready = False
        how = child.condemned or event.how
        child.fault = event.fault if child.condemned is None else child.condemned != STOPPED
        if self.phase == "stopping":
            self._check_over(out)
        elif self.phase == "starting" and child.condemned is None:
            self._fail(f"{child.name} died while starting ({how})", now_ns, out)
        else:
            fields: dict[str, str | int | float] = {"name": child.name, "incarnation": child.incarnation, "how": how}
            out.append(Note("error", "process_died", fields))
            self._tell_serving(out)
            self._restart_later(child, how, now_ns, out)

    def _restart_later(self, child: Child, how: str, now_ns: int, out: list[Effect]) -> None:
        """The first death costs no wait, each further one twice the wait before; too many are the end.

        Lives that ended before they were ready are counted apart: each may have taken longer than the window.
        """
        limits, deaths = self.limits, child.deaths
        deaths.append(now_ns)
        while deaths[0] < now_ns - limits.restart_window_s * 1e9:
            deaths.popleft()
        if child.false_starts > limits.restarts_max:
            self._fail(f"{child.name} failed to start {child.false_starts} times, the last time: {how}", now_ns, out)
        elif len(deaths) > limits.restarts_max:
            window = limits.restart_window_s
            failure = f"{child.name} died {len(deaths)} times in {window:g} s, the last time of {how}"
            self._fail(failure, now_ns, out)
        elif len(deaths) > 1:
            wait_s = limits.restart_backoff_s * 2 ** (len(deaths) - 2)
            out.append(self._wake(now_ns, wait_s, f"restart {int(child.role)} {child.index}"))
        else:
            self._restart(child, now_ns, out)

    def _restart(self, child: Child, now_ns: int, out: list[Effect]) -> None:
        if self.phase != "stopping":
            self._spawn(child, now_ns, out)

    # -------------------------------------------------------------------------------- watching

    def _look(self, now_ns: int, out: list[Effect]) -> None:
        """Look at every child; one that is hung is inquired about and killed, and dies like any other."""
        if self.phase == "stopping":
            return
        out.append(self._wake(now_ns, self.limits.watch_interval_s, "watch"))
        for place, state in self.look():
            child = self.children[(place.role, place.index)]
            if not child.alive or child.condemned is not None:
                continue
            ping, why = self.watch.look(place, state, now_ns)
            if ping or buggify("ping"):
                out.append(Send(child.role, child.index, Ping()))
            if why is not None:
                self._condemn(child, why, now_ns, out)

    def _damaged(self, event: Damaged, now_ns: int, out: list[Effect]) -> None:
        """The writer is not to be trusted. A detokenizer that lost tokens goes too: the next is leased everything."""
        why = f"it wrote what {event.reader} could not read: {event.detail}"
        self._condemn_exactly(event.writer, why, now_ns, out)
        if event.reader.role == Role.DETOKENIZER:
            self._condemn_exactly(event.reader, "tokens for it are lost in a damaged ring", now_ns, out)

    def _condemn_exactly(self, address: Address, why: str, now_ns: int, out: list[Effect]) -> None:
        child = self.children.get(address.place)
        if child is not None and child.alive and child.incarnation == address.incarnation and child.condemned is None:
            self._condemn(child, why, now_ns, out)

    def _condemn(self, child: Child, why: str, now_ns: int, out: list[Effect]) -> None:
        child.condemned = why
        out.append(Inquire(child.role, child.index))
        out.append(self._wake(now_ns, self.limits.tell_s_max, f"execute {int(child.role)} {child.index}"))

    def _execute(self, child: Child, out: list[Effect]) -> None:
        """The others have had time to answer; unless it died meanwhile, what was condemned is killed."""
        if child.alive and child.condemned is not None:
            out += [Dump(child.role, child.index, child.condemned), Kill(child.role, child.index)]

    # -------------------------------------------------------------------------------- the server as a whole

    def _opened(self, out: list[Effect]) -> None:
        if self.phase == "starting" and all(child.ready for child in self.children.values()):
            self.phase = "serving"
            out.append(Opened())

    def _stop_asked(self, now_ns: int, out: list[Effect]) -> None:
        """Refuse new work and let what runs finish, within a bound or until somebody is in a hurry."""
        if self.phase != "serving":
            self._stop(SHUTTING_DOWN, now_ns, out)
            return
        self.phase = "draining"
        out.append(Note("info", "draining", {"bound_s": self.limits.drain_s_max}))
        out.append(self._wake(now_ns, self.limits.drain_s_max, "drained"))
        self._tell_serving(out)

    def _fail(self, why: str, now_ns: int, out: list[Effect]) -> None:
        self.failure = self.failure or why
        self._stop(why, now_ns, out)

    def _stop(self, reason: str, now_ns: int, out: list[Effect]) -> None:
        """Halt every process; what does not halt in time is killed."""
        if self.phase == "stopping":
            return
        self.phase = "stopping"
        self._broadcast(Halt(reason), out)
        out.append(self._wake(now_ns, self.limits.stop_s_max, "stopped"))
        self._check_over(out)

    def _check_over(self, out: list[Effect]) -> None:
        if not any(child.alive for child in self.children.values()):
            out.append(Over(self.failure))

    def _tell_serving(self, out: list[Effect]) -> None:
        """Let the doors know whether everything is up."""
        ready = all(child.ready for child in self.children.values())
        digest = next(
            child.detail.get("weights", "") for (role, _), child in self.children.items() if role == Role.WORKER
        )
        word = Serving(ready, self.phase == "draining", digest)
        out.extend(Send(role, index, word) for role, index in self.children if role == Role.FRONTEND)

    def _frontends(self) -> set[int]:
        return {index for role, index in self.children if role == Role.FRONTEND}

    def _broadcast(self, frame: AnyFrame, out: list[Effect]) -> None:
        out.extend(Send(role, index, frame) for role, index in self.children)

    def _wake(self, now_ns: int, wait_s: float, name: str) -> Wake:
        return Wake(now_ns + int(wait_s * 1e9), name)

    def story(self) -> str:
        """The phase and every child, a line each, for dumps."""
        return f"{self.phase}\n" + "".join(f"{child}\n" for child in self.children.values())
