"""What every child process is made of: its launch file, board, links, tracer, log and lifeline; and its entry point.

``python -m baton.workers.process LAUNCH_FILE`` imports only what its role needs and runs that role until it is told to
halt or its supervisor is gone. It decides nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop

from baton.engine.effects import Note, Span
from baton.ipc import doorbell
from baton.ipc.board import Board
from baton.ipc.frames import Address, AnyFrame, Halt, Ready, Role, StartFailed
from baton.ipc.log import make_log
from baton.ipc.shell import Core, Shell
from baton.ipc.tracing import Tracer
from baton.ipc.zmq_link import Links
from baton.workers.config import Launch

MODULES = {
    Role.FRONTEND: "baton.frontends.process",
    Role.TOKENIZER: "baton.workers.tokenizer",
    Role.SCHEDULER: "baton.workers.scheduler",
    Role.WORKER: "baton.workers.gpu",
    Role.DETOKENIZER: "baton.workers.detokenizer",
}
TRACE_FLUSH_S = 0.2
LINGER_S = 0.5
_PR_SET_PDEATHSIG = 1


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
        shell = Shell(core, self.links, self._emit, self._note, lambda: self.board.beat(role, index), perform)
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
        self.board.set_ready(*self.me.place)
        self.links.send(Role.SUPERVISOR, 0, Ready(self.me, detail))

    def close(self) -> None:
        """Let go of everything in good order."""
        if self.shell is not None:
            self.shell.stop()
        self.tracer.close()
        self.links.close(LINGER_S)
        self.board.close()

    def _deliver(self, frame: AnyFrame) -> None:
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


async def _run(launch: Launch) -> int:
    process = Process(launch)
    loop = asyncio.get_running_loop()
    loop.add_reader(launch.lifeline, _orphaned)
    failures: list[BaseException] = []

    def failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        process.log.error("fatal", detail=str(context.get("message")), error=repr(error), exc_info=error)
        failures.append(error or RuntimeError(str(context.get("message"))))
        process.halted.set()

    loop.set_exception_handler(failed)
    try:
        role = importlib.import_module(MODULES[process.me.role])
        await role.run(process)
    except StartError as error:
        process.links.send(Role.SUPERVISOR, 0, StartFailed(process.me, str(error)))
        process.close()
        return 3
    if failures:
        os._exit(1)  # an error of ours: die at once and be restarted; what is held is taken over by the rules
    process.close()
    return 0


def _orphaned() -> None:
    os._exit(4)


def main(argv: list[str]) -> int:
    """Run the process that the launch file describes; the exit status is 0 after a halt."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    launch = msgspec.json.decode(Path(argv[0]).read_bytes(), type=Launch)
    return uvloop.run(_run(launch))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
