"""The supervisor: makes the run directory, starts every process, restarts the dead, drains, and cleans up.

It owns the life table: an incarnation is raised only after the process before it is reaped, then everyone is told. It
holds no request and forwards none. When it dies, however it dies, its children see their lifeline end and exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import uvloop

from baton.engine.limits import Limits
from baton.ipc import doorbell
from baton.ipc.board import Board
from baton.ipc.clock import epoch_offset_ns, now_ns
from baton.ipc.frames import Address, AnyFrame, Drained, Halt, Life, Ping, Ready, Role, Serving, StartFailed, Tell
from baton.ipc.log import make_log
from baton.ipc.ring import Ring
from baton.ipc.rundir import RunDirectory, default_base
from baton.ipc.zmq_link import Links
from baton.workers.card import make_card
from baton.workers.config import Card, Launch, Settings
from baton.workers.dump import STACKS_SIGNAL, STORY_SUFFIX, write_dump
from baton.workers.greeting import greeting
from baton.workers.model.gguf import ModelFileError
from baton.workers.watch import STOPPED, Watch, process_state

#: every place of this server, in the order in which they are started (the slowest first)
PLACES = (
    (Role.WORKER, 0),
    (Role.TOKENIZER, 0),
    (Role.DETOKENIZER, 0),
    (Role.SCHEDULER, 0),
    (Role.FRONTEND, 0),
)
FRONTENDS = sum(role is Role.FRONTEND for role, _ in PLACES)
RANKS = sum(role is Role.WORKER for role, _ in PLACES)
#: who reads which ring; the token ring's readers are the scheduler and the detokenizer
BELLS = [(role, index, "plans") for role, index in PLACES if role is Role.WORKER] + [
    (Role.SCHEDULER, 0, "tokens"),
    (Role.DETOKENIZER, 0, "tokens"),
]


#: signals that somebody sends; a process that dies of one is not to blame, nor is what it was doing
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


#: a worker's threads must not spin for long: the other processes live on the same cores
QUIET_THREADS = {"GOMP_SPINCOUNT": "1000"}


class ServeError(Exception):
    """The server cannot start or go on; one line for people."""


@dataclass(slots=True)
class Child:
    """One place and the process that fills it now."""

    role: Role
    index: int
    incarnation: int = 0
    process: asyncio.subprocess.Process | None = None
    ready: bool = False
    detail: dict[str, str] = field(default_factory=dict)
    condemned: str | None = None
    deaths: deque[float] = field(default_factory=deque)

    @property
    def name(self) -> str:
        return f"{self.role.name.lower()}-{self.index}"


class Supervisor:
    """Invariant: at most one living process a place, and the life table names it or its reaped predecessor."""

    def __init__(self, settings: Settings, card: Card, directory: RunDirectory) -> None:
        self.settings = settings
        self.limits: Limits = settings.limits
        self.card = card
        self.directory = directory
        path = directory.path
        self.board = Board.create(path / "board", FRONTENDS, self.limits.requests_per_frontend_max)
        Ring.create(path / "plans", self.limits.plan_ring_bytes, RANKS).close()
        Ring.create(path / "tokens", self.limits.token_ring_bytes, 2).close()
        self.bells = {f"{role.name.lower()}-{index}/{ring}": doorbell.make() for role, index, ring in BELLS}
        self.lifeline, self.lifeline_held = os.pipe()
        self.me = Address(Role.SUPERVISOR, card.name, 0, 0, 1)
        self.log = make_log("supervisor", settings.log_level)
        self.offset_ns = epoch_offset_ns()
        self.children = {place: Child(*place) for place in PLACES}
        self.changed = asyncio.Event()
        self.failure: str | None = None
        self.serving = False
        self.draining = False
        self.drained: set[int] = set()
        self.stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.links = Links(path, self.me, self.limits, self._deliver, self._report)
        self.watch = Watch(self.limits)
        self._task(self._keep_watch())

    # -------------------------------------------------------------------------------- starting and restarting

    async def start(self) -> None:
        """Start every process and wait until all are ready; ``ServeError`` says why they are not."""
        for child in self.children.values():
            await self._spawn(child)
        try:
            async with asyncio.timeout(self.limits.start_s_max):
                await self._until(lambda: all(child.ready for child in self.children.values()))
        except TimeoutError:
            late = ", ".join(child.name for child in self.children.values() if not child.ready)
            raise ServeError(f"not ready within {self.limits.start_s_max:g} s: {late}") from None

    async def _spawn(self, child: Child, fault: bool = False) -> None:
        """Fill a place: life table first, then everyone is told, then the process begins."""
        child.incarnation += 1
        child.ready, child.condemned = False, None
        self.board.set_live(child.role, child.index, child.incarnation, now_ns())
        self._broadcast(Life(child.role, child.index, child.incarnation, fault))
        launch = Launch(
            role=child.role,
            index=child.index,
            incarnation=child.incarnation,
            directory=str(self.directory.path),
            settings=self._settings_for(child),
            card=self.card,
            doorbells=self.bells,
            lifeline=self.lifeline,
            epoch_offset_ns=self.offset_ns,
        )
        file = self.directory.path / f"{child.name}.json"
        file.write_bytes(msgspec.json.encode(launch))
        child.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "baton.workers.child",
            str(file),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            pass_fds=[*self.bells.values(), self.lifeline],
            start_new_session=True,
            env={**QUIET_THREADS, **os.environ},
        )
        self.board.set_pid(child.role, child.index, child.process.pid)
        self._task(self._await_death(child, child.process))

    def _settings_for(self, child: Child) -> Settings:
        """The settings; a frontend that comes back takes the port its predecessor was given."""
        port = urlsplit(child.detail.get("http", "")).port
        return self.settings if port is None else msgspec.structs.replace(self.settings, port=port)

    async def _await_death(self, child: Child, process: asyncio.subprocess.Process) -> None:
        """Wait for the end of a process; it is reaped when this goes on."""
        status = await process.wait()
        child.ready = False
        if self.stopping:
            self._notice()
            return
        how = child.condemned or (f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}")
        fault = child.condemned not in (None, STOPPED) or -status not in FROM_OUTSIDE
        if not self.serving:
            self.failure = self.failure or f"{child.name} died while starting ({how})"
            self._notice()
            return
        self.log.error("process_died", name=child.name, incarnation=child.incarnation, how=how)
        self._tell_serving()
        now = time.monotonic()
        child.deaths.append(now)
        while child.deaths[0] < now - self.limits.restart_window_s:
            child.deaths.popleft()
        if len(child.deaths) > self.limits.restarts_max:
            deaths, window = len(child.deaths), self.limits.restart_window_s
            self.failure = f"{child.name} died {deaths} times in {window:g} s, the last time of {how}"
            self._notice()
            return
        if len(child.deaths) > 1:
            await asyncio.sleep(self.limits.restart_backoff_s * 2 ** (len(child.deaths) - 2))
        if not self.stopping:
            await self._spawn(child, fault)

    # -------------------------------------------------------------------------------- watching

    async def _keep_watch(self) -> None:
        """Look at every child again and again; one that is hung is dumped and killed, and dies like any other."""
        while not self.stopping:
            await asyncio.sleep(self.limits.watch_interval_s)
            for place in list(self.board.places()):
                child = self.children[(place.role, place.index)]
                process = child.process
                if process is None or process.returncode is not None or child.condemned is not None:
                    continue
                ping, why = self.watch.look(place, process_state(process.pid), now_ns())
                if ping:
                    self.links.send(place.role, place.index, Ping())
                if why is not None:
                    child.condemned = why
                    self._task(self._condemn(child, process, why))

    async def _condemn(self, child: Child, process: asyncio.subprocess.Process, why: str) -> None:
        """Keep what may explain it, then kill."""
        run = self.directory.path
        for other in self.children.values():
            if other.process is not None and other.process.returncode is None and other is not child:
                self.links.send(other.role, other.index, Tell(str(run / f"{other.name}{STORY_SUFFIX}")))
            if other.process is not None and other.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    other.process.send_signal(STACKS_SIGNAL)
        await asyncio.sleep(self.limits.tell_s_max)
        dump = write_dump(run, self.board, child.name, why, self.limits.dumps_max)
        self.log.error("process_hung", name=child.name, why=why, dump=str(dump))
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    # -------------------------------------------------------------------------------- frames and news

    def _deliver(self, frame: AnyFrame) -> None:
        match frame:
            case Ready():
                child = self.children[frame.address.place]
                if frame.address.incarnation == child.incarnation:
                    child.ready, child.detail = True, frame.detail
                    self._tell_serving()
            case StartFailed():
                self.failure = self.failure or frame.reason
            case Drained():
                self.drained.add(frame.address.index)
            case _:
                self._report("unexpected_frame", type(frame).__name__)
        self._notice()

    def _tell_serving(self) -> None:
        """Let the doors know whether everything is up."""
        ready = all(child.ready for child in self.children.values())
        digest = self.children[(Role.WORKER, 0)].detail.get("weights", "")
        for role, index in PLACES:
            if role is Role.FRONTEND:
                self.links.send(role, index, Serving(ready, self.draining, digest))

    def _broadcast(self, frame: AnyFrame) -> None:
        for role, index in PLACES:
            self.links.send(role, index, frame)

    def _report(self, event: str, detail: str) -> None:
        self.log.warning(event, detail=detail)

    def _notice(self) -> None:
        self.changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that frames or deaths bring about; ``ServeError`` if the server failed meanwhile."""
        while not condition():
            if self.failure is not None:
                raise ServeError(self.failure)
            self.changed.clear()
            await self.changed.wait()

    def _task(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -------------------------------------------------------------------------------- serving and stopping

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until asked to stop; ``ServeError`` when a process cannot be kept alive."""
        self.serving = True
        asked = asyncio.ensure_future(stop.wait())
        failed = asyncio.ensure_future(self._until(lambda: False))
        done, pending = await asyncio.wait({asked, failed}, return_when=asyncio.FIRST_COMPLETED)
        for future in pending:
            future.cancel()
        if failed in done:
            failed.result()

    async def drain(self, hurry: asyncio.Event) -> None:
        """Refuse new work and let what runs finish, within ``drain_s_max`` or until somebody is in a hurry."""
        self.draining = True
        self._tell_serving()
        self.log.info("draining", bound_s=self.limits.drain_s_max)
        finished = asyncio.ensure_future(self._until(lambda: len(self.drained) == FRONTENDS))
        hurried = asyncio.ensure_future(hurry.wait())
        await asyncio.wait({finished, hurried}, timeout=self.limits.drain_s_max, return_when=asyncio.FIRST_COMPLETED)
        for future in (finished, hurried):
            future.cancel()

    async def stop(self, reason: str) -> None:
        """Halt every process, kill what does not halt in time, and remove the run directory."""
        self.stopping = True
        self._broadcast(Halt(reason))
        living = [c.process for c in self.children.values() if c.process is not None and c.process.returncode is None]
        waits = [asyncio.ensure_future(process.wait()) for process in living]
        if waits:
            await asyncio.wait(waits, timeout=self.limits.stop_s_max)
        for process in living:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if waits:
            await asyncio.wait(waits)
        for task in list(self._tasks):
            task.cancel()
        self.links.close()
        self.board.close()
        os.close(self.lifeline)
        os.close(self.lifeline_held)
        for fd in self.bells.values():
            os.close(fd)
        self.directory.remove()


async def _serve(settings: Settings) -> int:
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def asked() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked)
    card = make_card(settings)
    base = Path(settings.run_directory) if settings.run_directory else default_base()
    supervisor = Supervisor(settings, card, RunDirectory.create(base))
    reason = "the server is shutting down"
    try:
        starting = asyncio.ensure_future(supervisor.start())
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not starting.done():
            starting.cancel()
            return 0
        starting.result()
        bound = supervisor.children[(Role.FRONTEND, 0)].detail
        for line in greeting(card.name, bound["http"], bound["websocket"], bound["zmq"]):
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
        await supervisor.serve(stop)
        await supervisor.drain(hurry)
        return 0
    except ServeError as error:
        reason = str(error)
        raise
    finally:
        await supervisor.stop(reason)


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
