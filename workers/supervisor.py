"""The supervisor: the run directory and the processes of a server, as ``engine.health`` decides about them.

It holds no request and forwards none. When it dies, however it dies, its children see their lifeline end and exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import uvloop

from baton.engine.effects import Died, Dump, Inquire, Kill, Note, Opened, Over, Spawn, StopAsked
from baton.engine.health import HealthCore
from baton.engine.watch import Place
from baton.ipc import doorbell
from baton.ipc.board import Board
from baton.ipc.clock import epoch_offset_ns, now_ns
from baton.ipc.frames import Address, AnyFrame, Role, Tell
from baton.ipc.log import make_log
from baton.ipc.ring import Ring
from baton.ipc.rundir import RunDirectory, default_base
from baton.ipc.shell import Shell
from baton.ipc.zmq_link import ZmqLinks
from baton.workers.card import make_card
from baton.workers.config import Card, Launch, Settings
from baton.workers.dump import STACKS_SIGNAL, STORY_SUFFIX, write_dump
from baton.workers.greeting import greeting
from baton.workers.model.gguf import ModelFileError

#: who reads which ring; the token ring's readers are the scheduler and the detokenizer
BELLS = [(Role.WORKER, 0, "plans"), (Role.SCHEDULER, 0, "tokens"), (Role.DETOKENIZER, 0, "tokens")]
RANKS = sum(role is Role.WORKER for role, _, _ in BELLS)


def places(settings: Settings) -> list[tuple[Role, int]]:
    """Every place of a server, in the order in which they are started (the slowest first)."""
    tokenizers = [(Role.TOKENIZER, index) for index in range(settings.tokenizers)]
    engine = [(Role.WORKER, 0), *tokenizers, (Role.DETOKENIZER, 0), (Role.SCHEDULER, 0)]
    return [*engine, *((Role.FRONTEND, index) for index in range(settings.frontends))]


#: signals that somebody sends; a process that dies of one is not to blame, nor is what it was doing
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
#: for torch's threads and memory: they must not spin for long, for the other processes live on the same cores; weights
#: are read faster from huge pages
QUIET_THREADS = {"GOMP_SPINCOUNT": "10000", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class ServeError(Exception):
    """The server cannot start or go on; one line for people."""


class Supervisor:
    """Carries out what its core decides. Invariant: the core hears of one death for each process it asked for."""

    def __init__(self, settings: Settings, card: Card, directory: RunDirectory) -> None:
        self.settings = settings
        self.card = card
        self.directory = directory
        limits, path = settings.limits, directory.path
        self.board = Board.create(path / "board", settings.frontends, limits.requests_per_frontend_max)
        Ring.create(path / "plans", limits.plan_ring_bytes, RANKS).close()
        Ring.create(path / "tokens", limits.token_ring_bytes, 2).close()
        self.bells = {f"{role.name.lower()}-{index}/{ring}": doorbell.make() for role, index, ring in BELLS}
        self.lifeline, self.lifeline_held = os.pipe()
        me = Address(Role.SUPERVISOR, card.name, 0, 0, 1)
        self.log = make_log("supervisor", settings.log_level)
        self.offset_ns = epoch_offset_ns()
        self.processes: dict[tuple[Role, int], asyncio.subprocess.Process] = {}
        self.over: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stillborn: set[tuple[Role, int]] = set()  # to be killed as soon as they are started
        self.began_ns = now_ns()
        self.core = HealthCore(me, self.board, places(settings), self._look, limits)
        self.links = ZmqLinks(path, me, limits, self.board, self._deliver, self._report)
        self.shell = Shell(
            self.core,
            self.links,
            emit=lambda span: None,
            note=self._note,
            beat=lambda: None,
            fatal=self._fatal,
            now_ns=now_ns,
            perform={
                Spawn: self._spawn,
                Inquire: self._inquire,
                Dump: self._dump,
                Kill: self._kill,
                Opened: self._opened,
                Over: self._over,
            },
        )

    async def serve(self) -> None:
        """Start every process and serve until all have ended; ``ServeError`` says why they could not be kept up."""
        self.shell.start()
        failure = await self.over
        if failure is not None:
            raise ServeError(failure)

    def stop(self) -> None:
        """Somebody wants the server to end; a second time, at once."""
        self.shell.feed(StopAsked())

    async def close(self) -> None:
        """Leave nothing behind: no process, no descriptor, no file."""
        self.shell.stop()
        for task in self._tasks:
            task.cancel()
        for process in list(self.processes.values()):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        self.links.close()
        self.board.close()
        for fd in (self.lifeline, self.lifeline_held, *self.bells.values()):
            os.close(fd)
        self.directory.remove()

    # -------------------------------------------------------------------------------- what the core asks for

    def _spawn(self, effect: Spawn) -> None:
        self._stillborn.discard((effect.role, effect.index))
        task = asyncio.get_running_loop().create_task(self._run(effect))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, spawn: Spawn) -> None:
        """Start one process and await its end; it is reaped when the core hears of it."""
        try:
            how, fault = await self._life(spawn)
        except OSError as error:
            how, fault = f"it could not be started: {error.strerror}", True
        self.shell.feed(Died(spawn.role, spawn.index, spawn.incarnation, how, fault))

    async def _life(self, spawn: Spawn) -> tuple[str, bool]:
        """How a process ended, and whether it was its own fault."""
        place = (spawn.role, spawn.index)
        child = self.core.children[place]
        launch = Launch(
            role=spawn.role,
            index=spawn.index,
            incarnation=spawn.incarnation,
            directory=str(self.directory.path),
            settings=self._settings_for(),
            card=self.card,
            doorbells=self.bells,
            lifeline=self.lifeline,
            epoch_offset_ns=self.offset_ns,
        )
        file = self.directory.path / f"{child.name}.json"
        file.write_bytes(msgspec.json.encode(launch))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "baton.workers.child",
            str(file),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            pass_fds=[*self.bells.values(), self.lifeline],
            start_new_session=True,
            env={**(QUIET_THREADS if place[0] is Role.WORKER else {}), **os.environ},
        )
        self.processes[place] = process
        self.board.set_pid(*place, process.pid)
        if place in self._stillborn:
            process.kill()
        status = await process.wait()
        del self.processes[place]
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return how, -status not in FROM_OUTSIDE

    def _settings_for(self) -> Settings:
        """The settings; the first frontend finds the port, and all that come later take the same."""
        port = urlsplit(self.core.children[(Role.FRONTEND, 0)].detail.get("http", "")).port
        return self.settings if port is None else msgspec.structs.replace(self.settings, port=port)

    def _look(self) -> list[tuple[Place, str]]:
        """Every place whose process runs, with the kernel's letter for its state."""
        return [
            (place, process_state(self.processes[(place.role, place.index)].pid))
            for place in self.board.places()
            if (place.role, place.index) in self.processes
        ]

    def _inquire(self, effect: Inquire) -> None:
        """Ask for what may explain it: the stories of the others, and the stacks of all."""
        for (role, index), process in self.processes.items():
            if (role, index) != (effect.role, effect.index):
                story = self.directory.path / f"{role.name.lower()}-{index}{STORY_SUFFIX}"
                self.links.send(role, index, Tell(str(story)))
            if catches(process.pid, STACKS_SIGNAL):  # it would kill a process that has only just been started
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(STACKS_SIGNAL)

    def _dump(self, effect: Dump) -> None:
        name = f"{effect.role.name.lower()}-{effect.index}"
        dump = write_dump(self.directory.path, self.board, name, effect.why, self.settings.limits.dumps_max)
        self.log.error("process_condemned", name=name, why=effect.why, dump=str(dump))

    def _kill(self, effect: Kill) -> None:
        process = self.processes.get((effect.role, effect.index))
        if process is None:
            self._stillborn.add((effect.role, effect.index))
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    def _opened(self, effect: Opened) -> None:
        self._tell_start()
        bound = self.core.children[(Role.FRONTEND, 0)].detail
        for line in greeting(self.card.name, bound["http"], bound["websocket"], bound["zmq"]):
            sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def _tell_start(self) -> None:
        """Where the time of the start went: a line for each process, in ms, and one for all."""
        for place in self.board.places():
            name, began_ms = f"{place.role.name.lower()}-{place.index}", (place.since_ns - self.began_ns) / 1e6
            self.log.info("process_started", name=name, began_ms=round(began_ms, 1), **place.start_ms())
        before_ms, since_ms = age_ms(), (now_ns() - self.began_ns) / 1e6
        self.log.info("server_started", ms=round(before_ms), before_spawning_ms=round(before_ms - since_ms))

    def _over(self, effect: Over) -> None:
        self.over.set_result(effect.failure)

    # -------------------------------------------------------------------------------- frames, and what goes wrong

    def _deliver(self, frame: AnyFrame) -> None:
        self.shell.feed(frame)

    def _fatal(self, error: BaseException) -> None:
        self.log.error("fatal", error=repr(error), exc_info=error)
        if not self.over.done():
            self.over.set_exception(error)

    def _note(self, note: Note) -> None:
        self.log.log(note.level, note.event, **note.fields)

    def _report(self, event: str, detail: str) -> None:
        self.log.warning(event, detail=detail)


def age_ms() -> float:
    """How long ago this process was started, imports and all."""
    ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b") ")[2].split()[19])
    return (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")) * 1e3


def process_state(pid: int) -> str:
    """The kernel's letter for the state of a process; "X" if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return chr(file.read().rpartition(b") ")[2][0])
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return "X"


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next(line.split()[1] for line in file if line.startswith("SigCgt:"))
    except (FileNotFoundError, ProcessLookupError, StopIteration):
        return False
    return bool(int(caught, 16) >> (number - 1) & 1)


async def _serve(settings: Settings) -> int:
    loop = asyncio.get_running_loop()
    supervisor: Supervisor | None = None

    def stop() -> None:
        assert supervisor is not None, "the loop calls this when the server is awaited, not before"
        supervisor.stop()

    for number in (signal.SIGTERM, signal.SIGINT):  # before there is a file that could be left behind
        loop.add_signal_handler(number, stop)
    card = make_card(settings)
    base = Path(settings.run_directory) if settings.run_directory else default_base()
    supervisor = Supervisor(settings, card, RunDirectory.create(base))
    try:
        await supervisor.serve()
        return 0
    finally:
        await supervisor.close()


def main(settings: Settings) -> int:
    """Run a server in this process until it is told to stop; the exit status. Errors are one line on stderr."""
    try:
        return uvloop.run(_serve(settings))
    except (ServeError, ModelFileError) as error:
        sys.stderr.write(f"baton: {error}\n")
    except OSError as error:
        what = str(error) if error.errno is None else os.strerror(error.errno)
        name = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"baton: {name}{what}\n")
    return 1
