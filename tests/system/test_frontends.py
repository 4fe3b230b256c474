"""Several frontends of one server: one port, one set of metrics, one drain; and two servers never share a port."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import aiohttp
import pytest
import pytest_asyncio

from baton import AsyncClient
from baton.ipc.rundir import live_instances
from tests.system.server import Server

FLAGS = ("--worker", "scripted", "--frontends", "3")
ENVIRONMENT = {"BATON_SCRIPTED_STEP_MS": "5", "BATON_LIMITS__RESTARTS_MAX": "50"}
LONG = {"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True}
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with Server(*FLAGS, environment=ENVIRONMENT) as running:
        yield running


async def counted(url: str) -> dict[str, float]:
    """The counters, as one scrape over a new connection has them."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        text = await response.text()
    return {m[1]: float(m[2]) for m in re.finditer(r"^(baton_\w+_total(?:\{.*\})?) ([\d.e+]+)$", text, re.M)}


def slices(server: Server) -> set[int]:
    """The frontends that hold rows."""
    board = server.board()
    try:
        return {view.slot // board.slots_per_frontend for view in board.rows()}
    finally:
        board.close()


async def test_connections_are_spread_and_any_frontend_tells_the_metrics_of_all(server: Server) -> None:
    left = 'baton_requests_total{reason="disconnected"}'
    before = (await counted(server.url)).get(left, 0)
    streams = [server.stream(**LONG, seed=seed) for seed in range(24)]
    for stream in streams:
        await anext(stream)
    assert slices(server) == {0, 1, 2}
    for stream in streams:
        await stream.aclose()
    await server.idle(1)
    async with asyncio.timeout(5):
        while (await counted(server.url)).get(left, 0) - before != 24:
            await asyncio.sleep(0.01)
    scrapes = [await counted(server.url) for _ in range(12)]
    assert all(scrape == scrapes[0] for scrape in scrapes)


async def test_each_frontend_has_a_door_for_the_sdk(server: Server) -> None:
    (directory,) = live_instances(server.base)
    assert {path.name for path in directory.glob("client*.sock")} == {"client.sock", "client-1.sock", "client-2.sock"}
    for path in directory.glob("client*.sock"):
        async with AsyncClient(f"ipc://{path}") as client:
            answer = await client.complete([5, 6, 7], max_tokens=3, ignore_eos=True)
            assert answer.usage.completion_tokens == 3


async def test_a_second_server_cannot_have_the_port(server: Server) -> None:
    port = str(urlsplit(server.url).port)
    for frontends in ("1", "2"):
        other = await Server("--worker", "scripted", "--port", port, "--frontends", frontends).launch()
        assert await other.wait() != 0
        assert "the port is taken" in other.log().splitlines()[-1]
        await other.__aexit__()


async def test_a_killed_frontend_leaves_the_others_alone_and_comes_back_to_the_port(server: Server) -> None:
    for number in range(6):
        await server.complete(prompt=[number], max_tokens=2)
    before = (await counted(server.url))['baton_requests_total{reason="length"}']
    for name in ("frontend-1", "frontend"):
        incarnation = server.places()[name].incarnation
        server.kill(name, signal.SIGKILL)
        async with asyncio.timeout(20):
            while server.places()[name].incarnation == incarnation or not server.places()[name].ready:
                await asyncio.sleep(0.02)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        for number in range(24):
            body = {"model": "smollm2-135m", "prompt": [number], "max_tokens": 2, "ignore_eos": True}
            async with session.post(f"{server.url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
    assert (await counted(server.url))['baton_requests_total{reason="length"}'] == before + 24


async def test_a_drain_waits_for_the_streams_of_every_frontend() -> None:
    async with Server(*FLAGS, environment=ENVIRONMENT) as server:
        streams = [server.stream(prompt=[seed], max_tokens=60, ignore_eos=True) for seed in range(12)]
        for stream in streams:
            await anext(stream)
        assert len(slices(server)) > 1
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            chunks = [chunk async for chunk in stream]
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert await server.wait() == 0
