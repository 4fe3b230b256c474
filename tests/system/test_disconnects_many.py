"""A thousand clients that leave at random moments, through every door, and nothing is left of any of them.

The seed is printed; a failure is played again with ``SEED``.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
from typing import Any

import aiohttp
import pytest

from baton import AsyncClient
from baton.engine.states import STATE_NAMES
from baton.frontends.client import BatonError
from baton.ipc.rundir import live_instances
from tests.system.server import Server

pytestmark = pytest.mark.alone

CLIENTS, AT_ONCE = 1000, 40
SEED: int | None = None
ENVIRONMENT = {
    "BATON_SCRIPTED_STEP_MS": "1",
    "BATON_LIMITS__MAILBOX_TOKENS_MAX": "16",  # so that some are paused
    "BATON_LIMITS__RUNNING_REQUESTS_MAX": "16",  # and some wait
    "BATON_LIMITS__RESUME_S_MAX": "0.2",
    "BATON_KV_BLOCKS": "64",  # and some are preempted
}


class Crowd:
    """The clients; each leaves after a random number of events, or after a random time, whichever it drew."""

    def __init__(self, server: Server, rng: random.Random) -> None:
        self.server = server
        self.rng = rng
        self.doors = {"http": self._http, "whole": self._whole, "socket": self._socket, "sdk": self._sdk}
        self.states: set[str] = set()

    async def one(self) -> None:
        """One client, from coming to leaving."""
        rng = self.rng
        door = self.doors[rng.choice(list(self.doors))]
        body = {"max_tokens": rng.choice((1, 5, 30, 400)), "seed": rng.randrange(1 << 30), "ignore_eos": True}
        patience_s = rng.choice((0.0, 0.001, 0.01, 0.05, 0.2, 1.0)) * rng.random()
        try:
            async with asyncio.timeout(patience_s):
                await door(body, [rng.randrange(2, 1000) for _ in range(rng.choice((1, 8, 200)))])
        except (TimeoutError, ConnectionError, aiohttp.ClientError, BatonError):
            pass

    async def _http(self, body: dict[str, Any], prompt: list[int]) -> None:
        ask = {"model": "smollm2-135m", "prompt": prompt, "stream": True, **body}
        reads = self.rng.randrange(1, 40)
        async with (
            aiohttp.ClientSession(headers=self._key()) as session,
            session.post(f"{self.server.url}/v1/completions", json=ask) as response,
        ):
            while reads and await response.content.readline():
                reads -= 1
            await asyncio.sleep(self.rng.random() / 4)  # without reading

    async def _whole(self, body: dict[str, Any], prompt: list[int]) -> None:
        ask = {"model": "smollm2-135m", "prompt": prompt, **body}
        async with (
            aiohttp.ClientSession(headers=self._key()) as session,
            session.post(f"{self.server.url}/v1/completions", json=ask) as response,
        ):
            await response.read()

    async def _socket(self, body: dict[str, Any], prompt: list[int]) -> None:
        create = {"type": "response.create", "model": "smollm2-135m", "input": prompt, "ignore_eos": True}
        create |= {"max_output_tokens": body["max_tokens"], "resumable": self.rng.random() < 0.3}
        async with aiohttp.ClientSession() as session, session.ws_connect(self.server.socket_url) as socket:
            for stream_id in range(self.rng.randrange(1, 4)):
                await socket.send_json({**create, "stream_id": str(stream_id)})
            if self.rng.random() < 0.3:
                await socket.send_json({"type": "response.cancel", "stream_id": "0"})
            for _ in range(self.rng.randrange(1, 60)):
                if (await socket.receive()).type is not aiohttp.WSMsgType.TEXT:
                    break

    async def _sdk(self, body: dict[str, Any], prompt: list[int]) -> None:
        (directory,) = live_instances(self.server.base)
        address = self.rng.choice(sorted(directory.glob("client*.sock")))
        async with AsyncClient(f"ipc://{address}") as client:
            more = {"resumable": self.rng.random() < 0.3, "idempotency_key": self._key().get("Idempotency-Key")}
            async with client.stream(prompt=prompt, **more, **body) as stream:
                for _ in range(self.rng.randrange(1, 20)):
                    await anext(stream, None)

    def _key(self) -> dict[str, str]:
        """Some repeat the key of others, whose body is another one mostly."""
        return {"Idempotency-Key": f"key-{self.rng.randrange(20)}"} if self.rng.random() < 0.3 else {}


async def watch(server: Server, seen: set[str]) -> None:
    """Look at the board again and again: in which states are requests that are to be cancelled?"""
    board = server.board()
    try:
        while True:
            seen |= {STATE_NAMES[view.row.state] for view in board.rows() if view.row.state}
            await asyncio.sleep(0)
    finally:
        board.close()


async def test_a_thousand_clients_that_leave_at_random_moments_leave_nothing_behind() -> None:
    seed = SEED if SEED is not None else random.SystemRandom().randrange(1 << 32)
    sys.stdout.write(f"SEED = {seed}\n")
    async with Server("--worker", "scripted", "--frontends", "2", environment=ENVIRONMENT) as server:
        start, seen = await server.idle(5), set[str]()
        crowd, watcher = Crowd(server, random.Random(seed)), asyncio.create_task(watch(server, seen))
        numbers = iter(range(CLIENTS))

        async def some() -> None:
            for _ in numbers:
                await crowd.one()

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))
        watcher.cancel()
        assert await server.idle(1.2) == start  # a second, and what the resumable ones are waited for
        board = server.board()
        assert list(board.rows()) == []
        board.close()
        assert {"tokenizing", "queued", "prefilling", "decoding", "paused", "flushing"} <= seen, seen
        async with server.session.get(f"{server.url}/metrics") as response:
            page = await response.text()
        released = re.search(r"^baton_cancel_release_seconds_count (\S+)$", page, re.M)
        late = re.search(r'^baton_cancel_release_seconds_bucket\{le="1.0"\} (\S+)$', page, re.M)
        assert released is not None and late is not None and float(released[1]) > 100
        assert float(late[1]) == float(released[1]), "every cancel was through within a second"
        assert "fatal" not in server.log() and "failed" not in server.log(), server.log()
