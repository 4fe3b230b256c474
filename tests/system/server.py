"""A whole server as its users start it: real processes, real sockets, one run directory of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from baton.ipc.board import Board, PlaceView, RowView
from baton.ipc.rundir import live_instances

START_S = 90.0
DUMPS = (".json", ".story")  # what the last inquiries left, one a place


class Server:
    """One ``baton serve``. Use as an async context manager; leaving it checks that nothing is left behind."""

    def __init__(self, *flags: str, base: Path | None = None, environment: dict[str, str] | None = None) -> None:
        self.flags = flags
        self._own_base = base is None
        self.base = base or Path(tempfile.mkdtemp(prefix="baton-", dir="/dev/shm"))
        self.environment = {**os.environ, "BATON_RUN_DIRECTORY": str(self.base), **(environment or {})}
        self.lines: list[str] = []
        self.ids: dict[str, list[int]] = {}  # what a test learnt of its prompts
        self.process: asyncio.subprocess.Process
        self.url = self.socket_url = self.zmq = ""
        self.session: aiohttp.ClientSession

    async def launch(self) -> Server:
        """Start the command; ``wait_ready`` or ``wait`` comes next."""
        self.stderr = tempfile.TemporaryFile()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "baton", "serve", "--port", "0", *self.flags,
            stdout=asyncio.subprocess.PIPE, stderr=self.stderr, env=self.environment,
        )  # fmt: skip
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def wait_ready(self) -> None:
        """Read the doors' lines; AssertionError with what the server said if it ends instead."""
        assert self.process.stdout is not None
        async with asyncio.timeout(START_S):
            while len(self.lines) < 4:
                line = await self.process.stdout.readline()
                assert line, f"the server ended while starting: {self.log()}"
                self.lines.append(line.decode().rstrip())
        text = "\n".join(self.lines)
        self.url = re.search(r"http://[\d.:]+", text)[0]  # type: ignore[index]
        self.socket_url = re.search(r"ws://\S+", text)[0]  # type: ignore[index]
        self.zmq = re.search(r"ipc://[^'\" ]+", text)[0]  # type: ignore[index]

    async def __aenter__(self) -> Server:
        await self.launch()
        try:
            await self.wait_ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        if self.process.returncode is None:
            await self.stop()
        self.stderr.close()
        left = list(self.base.iterdir())
        if self._own_base:
            shutil.rmtree(self.base)
        assert not left, f"left behind: {left}"

    def log(self) -> str:
        """Standard error so far."""
        self.stderr.seek(0)
        return self.stderr.read().decode()

    async def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return await self.wait()

    async def wait(self, seconds: float = 40.0) -> int:
        """The exit status, once there is one."""
        async with asyncio.timeout(seconds):
            return await self.process.wait()

    # -------------------------------------------------------------------------------- looking inside

    def board(self) -> Board:
        """The live board, to be closed by the caller."""
        (instance,) = live_instances(self.base)
        return Board.open(instance / "board", readonly=True)

    def places(self) -> dict[str, PlaceView]:
        """Every child by its role's name, with its index from the second one on."""
        board = self.board()
        try:
            return {
                place.role.name.lower() + (f"-{place.index}" if place.index else ""): place for place in board.places()
            }
        finally:
            board.close()

    def board_rows(self) -> list[RowView]:
        """Every live request on the board."""
        board = self.board()
        try:
            return list(board.rows())
        finally:
            board.close()

    def kill(self, role: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to the process of a role; its process id."""
        pid = self.places()[role].pid
        assert pid > 1, f"{role} is being restarted"  # 0 would be our own process group
        os.kill(pid, number)
        return pid

    async def gauges(self) -> dict[str, float]:
        """What the engine holds, as ``/metrics`` says."""
        async with self.session.get(f"{self.url}/metrics") as response:
            text = await response.text()
        names = r"requests_running|requests_waiting|kv_blocks_\w+"
        return {m[1]: float(m[2]) for m in re.finditer(rf"^baton_({names}) ([\d.e+]+)$", text, re.M)}

    async def idle(self, seconds: float) -> dict[str, float]:
        """Wait until nothing runs, nothing waits and nobody holds a block; the gauges then, cached blocks as free."""
        async with asyncio.timeout(seconds):
            while True:
                now = await self.gauges()
                busy = now["requests_running"] or now["requests_waiting"]
                now["kv_blocks_free"] += now.pop("kv_blocks_cached")
                if not busy and now["kv_blocks_free"] == now["kv_blocks_total"]:
                    return now
                await asyncio.sleep(0.01)

    async def until_ready(self, seconds: float = 30.0) -> None:
        """Wait until ``/ready`` answers 200."""
        async with asyncio.timeout(seconds):
            while True:
                async with self.session.get(f"{self.url}/ready") as response:
                    if response.status == 200:
                        return
                await asyncio.sleep(0.02)

    def holdings(self) -> dict[str, Counter[str]]:
        """What each process of the server has open, by kind, its numbers left out; the supervisor its processes too."""
        supervisor = psutil.Process(self.process.pid)
        pids = {name: place.pid for name, place in self.places().items()} | {"supervisor": supervisor.pid}
        held = {name: _open_files(pid) for name, pid in pids.items()}
        held["supervisor"]["process"] = len(supervisor.children(recursive=True))
        (instance,) = live_instances(self.base)
        files = [path for path in instance.iterdir() if path.is_file()]
        held["supervisor"].update(path.name for path in files if path.suffix not in DUMPS)
        return held

    async def hang_up(self) -> None:
        """Close the connections that were kept for later questions."""
        await self.session.close()
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    # -------------------------------------------------------------------------------- asking

    async def complete(self, **body: Any) -> dict[str, Any]:
        """One whole completion by token ids."""
        request = {"model": "smollm2-135m", "temperature": 0, "return_token_ids": True, **body}
        async with self.session.post(f"{self.url}/v1/completions", json=request) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer  # type: ignore[no-any-return]

    async def stream(self, path: str = "/v1/completions", **body: Any) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed answer, parsed; the ``[DONE]`` mark is not one."""
        request = {"model": "smollm2-135m", "temperature": 0, "stream": True, **body}
        async with self.session.post(f"{self.url}{path}", json=request) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line[6:])


def _open_files(pid: int) -> Counter[str]:
    """What a process has open, by kind: its names without their numbers; none of a process that is gone."""
    kinds, folder = Counter[str](), Path(f"/proc/{pid}/fd")
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            with contextlib.suppress(OSError):
                kinds[re.sub(r"\d+", "N", os.readlink(file))] += 1
    return kinds
