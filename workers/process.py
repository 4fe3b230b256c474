"""What every child process is made of: its launch file, board, links, tracer and log. It decides nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from baton.engine.effects import Note, Span
from baton.ipc import doorbell
from baton.ipc.board import Board
from baton.ipc.frames import Address, AnyFrame, Halt, Ping, Ready, Role, Tell
from baton.ipc.log import make_log
from baton.ipc.shell import Core, Shell
from baton.ipc.tracing import Tracer
from baton.ipc.zmq_link import Links
from baton.workers.config import Launch

TRACE_FLUSH_S = 0.2
LINGER_S = 0.5


FrameT = TypeVar("FrameT")


class StartError(Exception):
    """Start-up cannot succeed; its text is the one line a person will read."""


class Process:
    """One child. Invariant: frames that come before ``run_core`` wait for it in order."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.settings = launch.settings
        self.limits = launch.settings.limits
        self.card = launch.card
        self.me = Address(Role(launch.role), launch.card.name, 0, launch.index, launch.incarnation)
        self.log = make_log(str(self.me), self.settings.log_level)
        self.board = Board.open(launch.path / "board")
        resource: dict[str, str | int | float | bool] = {
            "service.name": "baton",
            "process.pid": os.getpid(),
            "baton.instance": launch.path.name,
        }
        self.tracer = Tracer(
            self.me.role.name.lower(),
            self.me.index,
            launch.path,
            launch.epoch_offset_ns,
            self.limits,
            resource,
            self.me.incarnation,
        )
        self.loop = asyncio.get_running_loop()
        self.halted = asyncio.Event()
        self.shell: Shell | None = None
        self._early: list[AnyFrame] = []
        self._listeners: dict[type, Callable[[Any], None]] = {}
        self._flush_planned = False
        self.links = Links(launch.path, self.me, self.limits, self._deliver, self._report)

    def run_core(self, core: Core, perform: dict[type, Callable[[Any], None]]) -> Shell:
        """Put a core behind a shell and let it begin; frames that came early are handled now."""
        role, index = self.me.place

        def beat() -> None:
            self.board.beat(role, index)

        shell = Shell(core, self.links, self._emit, self._note, beat, self.fatal, perform)
        shell.start()
        self.shell = shell
        for frame in self._early:
            shell.feed(frame)
        self._early.clear()
        return shell

    def listen(self, kind: type[FrameT], answer: Callable[[FrameT], None]) -> None:
        """Call ``answer`` with every frame of this kind, before the core handles it."""
        self._listeners[kind] = answer

    def hear(self, ring: str, answer: Callable[[], None]) -> None:
        """Call ``answer`` when the doorbell of this process at ``ring`` is rung."""
        doorbell.hear(self.loop, self.bell(self.me.role, self.me.index, ring), answer)

    def bell(self, role: Role, index: int, ring: str) -> int:
        """The doorbell of a reader of ``ring``."""
        return self.launch.doorbells[f"{role.name.lower()}-{index}/{ring}"]

    def ready(self, detail: dict[str, str]) -> None:
        """Tell the supervisor that start-up is done."""
        self.phase("ready")
        self.links.send(Role.SUPERVISOR, 0, Ready(self.me, detail))

    def phase(self, name: str) -> None:
        """Show how far start-up has come."""
        self.board.set_phase(*self.me.place, name)

    def close(self) -> None:
        """Let go of everything in good order."""
        if self.shell is not None:
            self.shell.stop()
        self.tracer.close()
        self.links.close(LINGER_S)
        self.board.close()

    def fatal(self, error: BaseException) -> NoReturn:
        """An error of ours: say so and die at once, to be restarted; what is held is taken over by the rules."""
        self.log.error("fatal", error=repr(error), exc_info=error)
        self.tracer.flush()
        os._exit(1)

    def loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop's exception handler. A failing task of a door or a broken connection is one client's trouble."""
        error = context.get("exception")
        if isinstance(error, BaseException) and not context.keys() & {"task", "future", "transport", "protocol"}:
            self.fatal(error)
        self.log.error("task_failed", detail=str(context.get("message")), exc_info=error)

    def _deliver(self, frame: AnyFrame) -> None:
        if isinstance(frame, Ping):
            self.board.beat(*self.me.place)
            return
        if isinstance(frame, Tell):
            Path(frame.file).write_text("" if self.shell is None else self.shell.core.story())
            return
        listener = self._listeners.get(type(frame))
        if listener is not None:
            listener(frame)
        if self.shell is None:
            self._early.append(frame)
        else:
            self.shell.feed(frame)
        if isinstance(frame, Halt):
            self.halted.set()

    def _emit(self, span: Span) -> None:
        self.tracer.emit(span)
        if not self._flush_planned:
            self._flush_planned = True
            self.loop.call_later(TRACE_FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        self.tracer.flush()

    def _note(self, note: Note) -> None:
        self.log.log(note.level, note.event, **note.fields)

    def _report(self, event: str, detail: str) -> None:
        self.log.warning(event, detail=detail)
