"""Starts a server of our own as a subprocess for a measurement, and reads what each of its processes costs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.ipc.board import Board
from baton.ipc.rundir import live_instances

#: the door for the SDK in a run directory
CLIENT_SOCKET = "client.sock"
STOP_S_MAX = 40.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ServerFailed(Exception):
    """There is no server to measure."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server that said it is ready. ``pids`` are its processes by name, the supervisor's among them."""

    model: str
    url: str
    zmq: str
    pids: dict[str, int]


def scripted_server(
    model: str, step_ms: float, settings: Mapping[str, str] | None = None
) -> AbstractContextManager[Running]:
    """A server whose worker makes tokens up, each step in ``step_ms``."""
    scripted = {"BATON_WORKER": "scripted", "BATON_SCRIPTED_STEP_MS": str(step_ms)}
    return server(model, scripted | dict(settings or {}))


@contextmanager
def server(model: str, settings: Mapping[str, str]) -> Iterator[Running]:
    """A server on a free port; ended and cleaned up behind the block.

    ``settings`` are environment variables. ``ServerFailed`` where it does not come up; what was wrong is on stderr,
    said by the server itself.
    """
    shm = Path("/dev/shm")
    base = Path(tempfile.mkdtemp(prefix="baton-bench-", dir=shm if os.access(shm, os.W_OK) else None))
    command = [sys.executable, "-m", "baton", "serve", "--port", "0", "--model", model]
    command += ["--run-directory", str(base), "--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | settings)
    said = process.stdout
    assert said is not None
    try:
        ready = next((line for line in said if line.startswith("ready: ")), None)
        if ready is None:
            raise ServerFailed("the server did not come up")
        name, _, url = ready.removeprefix("ready: ").strip().partition(" at ")
        directory = live_instances(base)[0]
        board = Board.open(directory / "board", readonly=True)
        pids = {f"{place.role.name.lower()}-{place.index}": place.pid for place in board.places()}
        board.close()
        yield Running(name, url, f"ipc://{directory / CLIENT_SOCKET}", {**pids, "supervisor": process.pid})
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        said.close()  # not before: the server has more to say
        shutil.rmtree(base, ignore_errors=True)


def cpu_seconds(pid: int) -> float:
    """User and system time a process has taken so far, from procfs."""
    # The command's name may hold anything, also spaces and brackets; the fields begin behind its last bracket.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
