"""A client that goes away cancels its request, at every door."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from baton import AsyncClient
from tests.system.server import Server

pytestmark = [pytest.mark.alone, pytest.mark.asyncio(loop_scope="module")]

STREAMS, TOKENS = 20, 5
LONG = {"max_tokens": 4000, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with Server("--worker", "scripted", environment={"BATON_SCRIPTED_STEP_MS": "5"}) as running:
        yield running


async def test_http_streams_dropped_after_five_tokens_free_everything_within_a_second(server: Server) -> None:
    start = await server.idle(1)

    async def drop(number: int) -> None:
        async with aiohttp.ClientSession() as session:
            body = {"model": "smollm2-135m", "prompt": [number], "stream": True, **LONG}
            async with session.post(f"{server.url}/v1/completions", json=body) as response:
                for _ in range(TOKENS):
                    await response.content.readuntil(b"\n\n")
                response.close()

    await asyncio.gather(*(drop(number) for number in range(STREAMS)))
    assert await server.idle(1) == start


async def test_http_answers_that_nobody_waits_for_free_everything_within_a_second(server: Server) -> None:
    start = await server.idle(1)
    whole = [asyncio.create_task(server.complete(prompt=[number], **LONG)) for number in range(STREAMS)]
    async with asyncio.timeout(5):
        while (await server.gauges())["requests_running"] < STREAMS:
            await asyncio.sleep(0.01)
    for task in whole:
        task.cancel()
    await asyncio.gather(*whole, return_exceptions=True)
    assert await server.idle(1) == start


async def test_a_closed_web_socket_frees_everything_within_a_second(server: Server) -> None:
    start = await server.idle(1)
    async with server.session.ws_connect(server.socket_url) as socket:
        for number in range(STREAMS):
            create = {"type": "response.create", "stream_id": str(number), "model": "smollm2-135m", "input": "hello"}
            await socket.send_str(json.dumps({**create, "max_output_tokens": 4000, "ignore_eos": True}))
        deltas = dict.fromkeys(map(str, range(STREAMS)), 0)
        while min(deltas.values()) < TOKENS:
            event = json.loads((await socket.receive()).data)
            assert event["type"] != "error", event
            deltas[event["stream_id"]] += event["type"] == "response.output_text.delta"
    assert await server.idle(1) == start


async def test_client_streams_left_early_free_everything_within_a_second(server: Server) -> None:
    start = await server.idle(1)
    async with AsyncClient(server.zmq) as client:

        async def leave(number: int) -> None:
            async with client.stream(prompt=[number], **LONG) as stream:
                for _ in range(TOKENS):
                    await anext(stream)

        await asyncio.gather(*(leave(number) for number in range(STREAMS)))
        assert await server.idle(1) == start


async def test_a_killed_client_frees_everything_within_a_second(server: Server) -> None:
    import sys

    start = await server.idle(1)
    script = (
        "import asyncio, sys\nfrom baton import AsyncClient\n"
        "async def one(c, n):\n"
        "    async with c.stream(prompt=[n], max_tokens=4000, ignore_eos=True) as s:\n"
        "        for _ in range(5): await anext(s)\n"
        "        print(n, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "async def main():\n"
        "    async with AsyncClient(sys.argv[1]) as c:\n"
        f"        await asyncio.gather(*(one(c, n) for n in range({STREAMS})))\n"
        "asyncio.run(main())\n"
    )
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, server.zmq, stdout=asyncio.subprocess.PIPE
    )
    assert client.stdout is not None
    for _ in range(STREAMS):
        assert await client.stdout.readline()
    client.kill()
    await client.wait()
    assert await server.idle(1) == start
