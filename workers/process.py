"""What every child process is made of: who it is, its surroundings, its core's shell. It decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from baton.engine.effects import Note, Plan, Span, StepDone
from baton.ipc.frames import Address, AnyFrame, Damaged, Halt, Ping, Ready, Role, StartFailed, Tell
from baton.ipc.records import PlanReader, PlanWriter, StepReader, StepWriter
from baton.ipc.ring import RingDamaged, RingReader, RingWriter
from baton.ipc.shell import Core, Shell
from baton.workers.config import Launch
from baton.workers.surroundings import Surroundings

TRACE_FLUSH_S = 0.2
LINGER_S = 0.5


FrameT = TypeVar("FrameT")


class StartError(Exception):
    """Start-up cannot succeed; its text is the one line a person will read."""


class Process:
    """One child. Invariant: frames that come before ``run_core`` wait for it in order."""

    def __init__(self, launch: Launch, me: Address, surroundings: Surroundings) -> None:
        self.launch = launch
        self.settings = launch.settings
        self.limits = launch.settings.limits
        self.card = launch.card
        self.me = me
        self.surroundings = surroundings
        self.now_ns = surroundings.now_ns
        self.log = surroundings.log
        self.board = surroundings.board
        self.loop = asyncio.get_running_loop()
        self.halted = asyncio.Event()
        self.shell: Shell | None = None
        self._early: list[AnyFrame] = []
        self._listeners: dict[type, Callable[[Any], None]] = {}
        self._bells: list[Callable[[], None]] = []
        self._flushing: asyncio.TimerHandle | None = None
        self.links = surroundings.connect(self.limits, self._deliver, self._report)

    def run_core(self, core: Core, perform: dict[type, Callable[[Any], None]]) -> Shell:
        """Put a core behind a shell and let it begin; frames that came early are handled now."""
        role, index = self.me.place

        def beat() -> None:
            self.board.beat(role, index)

        self.shell = shell = Shell(core, self.links, self._emit, self._note, beat, self.fatal, self.now_ns, perform)
        shell.start()
        for frame in self._early:
            self._hand_on(frame)
        self._early.clear()
        return shell

    def feed(self, event: object) -> None:
        """An event for the core, of the role's own making."""
        assert self.shell is not None, "there is no core yet"
        self.shell.feed(event)

    def listen(self, kind: type[FrameT], answer: Callable[[FrameT], None]) -> None:
        """Call ``answer`` with every frame of this kind, before the core handles it."""
        self._listeners[kind] = answer

    def hear(self, ring: str, answer: Callable[[], None]) -> None:
        """Call ``answer`` when the doorbell of this process at ``ring`` is rung."""
        self._bells.append(self.surroundings.hear(ring, answer))

    def ready(self, detail: dict[str, str]) -> None:
        """Tell the supervisor that start-up is done."""
        self.phase("ready")
        self.surroundings.settled()
        self.links.send(Role.SUPERVISOR, 0, Ready(self.me, detail))

    def phase(self, name: str) -> None:
        """Show how far start-up has come."""
        self.board.set_phase(*self.me.place, name, self.now_ns())

    def close(self) -> None:
        """Let go of everything in good order."""
        for unhear in self._bells:
            unhear()
        if self.shell is not None:
            self.shell.stop()
        if self._flushing is not None:
            self._flushing.cancel()
        self.surroundings.spans.close()
        self.links.close(LINGER_S)
        self.board.close()

    def fatal(self, error: BaseException) -> NoReturn:
        """An error of ours: say so and die at once, to be restarted; what is held is taken over by the rules."""
        self.log.error("fatal", error=repr(error), exc_info=error)
        self.surroundings.spans.flush()
        self.surroundings.die()

    def loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop's exception handler. A failing task of a door or a broken connection is one client's trouble."""
        error = context.get("exception")
        if isinstance(error, BaseException) and not context.keys() & {"task", "future", "transport", "protocol"}:
            self.fatal(error)
        self.log.error("task_failed", detail=str(context.get("message")), exc_info=error)

    # -------------------------------------------------------------------------------- rings

    def steps(self, reader: int) -> StepReader:
        """A reading end of the token ring."""
        rows = self.board.frontends * self.board.slots_per_frontend
        ring = RingReader(self.surroundings.ring("tokens"), reader)
        return StepReader(ring, rows, lambda error: self._damaged(Role.WORKER, error))

    def plans(self, lost: Callable[[int], None]) -> PlanReader:
        """This rank's reading end of the plan ring; ``lost`` hears which scheduler's plans were damaged."""

        def damaged(error: RingDamaged) -> None:
            lost(self.board.live(Role.SCHEDULER, 0))
            self._damaged(Role.SCHEDULER, error)

        return PlanReader(RingReader(self.surroundings.ring("plans"), self.me.index), damaged)

    def plan_readers(self) -> int:
        """How many ranks read the plan ring: as many as there are."""
        ring = self.surroundings.ring("plans")
        readers = ring.readers
        ring.close()
        return readers

    def step_writer(self) -> Callable[[StepDone], bool]:
        """The writing end of the token ring: commits a step, or says that there is no room."""
        return StepWriter(RingWriter(self.surroundings.ring("tokens"))).write

    def plan_writer(self) -> Callable[[Plan], None]:
        """The writing end of the plan ring; every rank's bell is rung."""
        ring = self.surroundings.ring("plans")
        writer = PlanWriter(RingWriter(ring))

        def write(plan: Plan) -> None:
            assert writer.write(plan), "few steps are in flight, so the plan ring has room"
            for rank in range(ring.readers):
                self.surroundings.ring_bell(Role.WORKER, rank, "plans")

        return write

    def _damaged(self, role: Role, error: RingDamaged) -> None:
        """What was in the ring is given up; the supervisor sees to it that nothing is gone on with from there."""
        writer = Address(role, self.me.model, self.me.replica, 0, self.board.live(role, 0))
        self.log.error("ring_damaged", writer=str(writer), detail=str(error))
        self.links.send(Role.SUPERVISOR, 0, Damaged(self.me, writer, str(error)))

    # -------------------------------------------------------------------------------- what comes and goes

    def _deliver(self, frame: AnyFrame) -> None:
        if isinstance(frame, Ping):
            self.board.beat(*self.me.place)
            return
        if isinstance(frame, Tell):
            Path(frame.file).write_text("" if self.shell is None else self.shell.core.story())
            return
        if self.shell is None:
            self._early.append(frame)
        else:
            self._hand_on(frame)
        if isinstance(frame, Halt):
            self.halted.set()

    def _hand_on(self, frame: AnyFrame) -> None:
        """First to whoever listens for it, then to the core."""
        assert self.shell is not None
        listener = self._listeners.get(type(frame))
        if listener is not None:
            listener(frame)
        self.shell.feed(frame)

    def _emit(self, span: Span) -> None:
        self.surroundings.spans.emit(span)
        if self._flushing is None:
            self._flushing = self.loop.call_later(TRACE_FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._flushing = None
        self.surroundings.spans.flush()

    def _note(self, note: Note) -> None:
        self.log.log(note.level, note.event, **note.fields)

    def _report(self, event: str, detail: str) -> None:
        self.log.warning(event, detail=detail)


async def live(process: Process, role: Callable[[Process], Awaitable[None]]) -> int:
    """Run a role until it is halted; the exit status of its process."""
    try:
        await role(process)
    except StartError as error:
        process.links.send(Role.SUPERVISOR, 0, StartFailed(process.me, str(error)))
        process.close()
        return 3
    process.close()
    return 0
