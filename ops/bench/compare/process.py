"""A server of the table as a process: started, waited for, and gone afterwards with all it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import psutil

from baton.ops.bench import loop
from baton.ops.bench.compare.servers import Server
from baton.ops.bench.server import STOP_S_MAX, ServerFailed
from baton.ops.http import Exchange, Target, target

LOOK_EVERY_S = 0.1
PROBE_S_MAX = 5.0
CHILDREN_S_MAX, KILLED_S_MAX = 2.0, 2.0
LAST_WORDS_LINES = 15


@dataclass(frozen=True, slots=True)
class Started:
    """A server that said it is ready, ``start_s`` after its process began."""

    server: Server
    process: subprocess.Popen[bytes]
    where: Target
    start_s: float

    def gone(self, wait_s: float) -> bool:
        """Whether its first process has ended, or does so within some seconds."""
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True


@contextmanager
def started(server: Server, log: Path) -> Iterator[Started]:
    """A server on a free port, its output in ``log``; ``ServerFailed`` where it dies or is not ready in time."""
    port = free_port()
    ready, url = server.at(port), f"http://127.0.0.1:{port}"
    environment = os.environ | ready.environment
    log.parent.mkdir(parents=True, exist_ok=True)
    began = monotonic()
    with log.open("wb") as said:
        try:
            process = subprocess.Popen(
                ready.command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise ServerFailed(f"{server.name}: cannot be started: {error}") from None
    try:
        where = target(url)
        while not loop.run(answers(where, server.ready)):
            if process.poll() is not None:
                raise ServerFailed(
                    f"{server.name}: ended with status {process.returncode} while starting\n{words(log)}"
                )
            if monotonic() - began > server.start_s_max:
                raise ServerFailed(
                    f"{server.name}: GET {server.ready} did not give 200 within {server.start_s_max:g} s\n{words(log)}"
                )
            sleep(LOOK_EVERY_S)
        yield Started(server, process, where, round(monotonic() - began, 2))
    finally:
        end(process)


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


async def answers(where: Target, path: str) -> bool:
    """Whether a GET of the path gives 200."""
    here, exchange = asyncio.get_running_loop(), None
    try:
        async with asyncio.timeout(PROBE_S_MAX):
            _, exchange = await here.create_connection(
                lambda: Exchange(where.request("GET", path), lambda piece: None), where.host, where.port
            )
            await exchange.done
    except (OSError, TimeoutError):
        return False
    finally:
        if exchange is not None:
            exchange.close()
    return exchange.status == 200


def words(log: Path) -> str:
    """The last lines of what a server said, and where there is more."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_WORDS_LINES:]
    return "\n".join([*(f"  | {line}" for line in lines), f"all it said: {log}"])


def family(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it, as far as they still live."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def session(leader: int) -> list[psutil.Process]:
    """All that live in a process's session: also the children of one that is gone."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(one.pid) == leader:
                found.append(one)
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to stop; after a while kill it, and whoever of its children is left."""
    members = {*family(process.pid), *session(process.pid)}
    asked = process.poll() is None
    if asked:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(
        [one for one in members if one.pid != process.pid], timeout=CHILDREN_S_MAX if asked else 0
    )
    for one in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(left, timeout=KILLED_S_MAX)


def version(server: Server) -> str:
    """What the table's command for it prints, "" without one; ``ServerFailed`` where it fails."""
    command = server.at(0).version
    if not command:
        return ""
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | server.at(0).environment, check=False
    )
    if done.returncode:
        raise ServerFailed(f"{server.name}: {' '.join(command)} failed: {done.stderr.strip()[-300:]}")
    return done.stdout.strip()
