"""Keys and resumed streams on a whole server of several frontends, wherever the client's connections happen to end."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from baton import AsyncClient
from baton.engine.answers import home_of
from baton.engine.states import STATE_NUMBERS
from baton.ipc.rundir import live_instances
from tests.system.server import Server
from tests.system.test_frontends import counted

FLAGS = ("--worker", "scripted", "--frontends", "2")
ENVIRONMENT = {
    "BATON_SCRIPTED_STEP_MS": "2",
    "BATON_LIMITS__RESTARTS_MAX": "50",
    "BATON_LIMITS__MAILBOX_TOKENS_MAX": "64",
    "BATON_LIMITS__RESUME_S_MAX": "2",
}
ASK: dict[str, Any] = {"model": "smollm2-135m", "prompt": [5, 6, 7], "ignore_eos": True, "return_token_ids": True}
RESPONSE: dict[str, Any] = {"model": "smollm2-135m", "input": [5, 6, 7], "ignore_eos": True, "resumable": True}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with Server(*FLAGS, environment=ENVIRONMENT) as running:
        yield running


async def ask(server: Server, key: str, stream: bool, **body: Any) -> tuple[str, list[int]]:
    """The id and the tokens of an answer, over a connection of its own."""
    request = {**ASK, **body, "stream": stream}
    async with (
        aiohttp.ClientSession(headers={"Idempotency-Key": key}) as session,
        session.post(f"{server.url}/v1/completions", json=request) as response,
    ):
        assert response.status == 200, await response.text()
        if not stream:
            answer = await response.json()
            return answer["id"], answer["choices"][0]["token_ids"]
        ids: list[int] = []
        async for line in response.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                for choice in chunk["choices"]:
                    ids += choice.get("token_ids") or []
        return chunk["id"], ids


async def held(server: Server, state: str) -> int:
    """How many requests the board shows in a state."""
    board = server.board()
    try:
        return sum(view.row.state == STATE_NUMBERS[state] for view in board.rows())
    finally:
        board.close()


async def test_twenty_repeats_of_five_keys_are_five_requests(server: Server) -> None:
    keys = [f"key-{number}" for number in range(5)]
    waves, before = [], Counter(await counted(server.url))
    for wave in range(2):  # the first while they run, the second after they ended
        waves.append(
            await asyncio.gather(
                *(
                    ask(server, key, (n + wave) % 2 == 0, max_tokens=150, seed=seed)
                    for seed, key in enumerate(keys)
                    for n in range(4)
                )
            )
        )
    for number in range(5):
        same = [answer for wave in waves for answer in wave[4 * number : 4 * number + 4]]
        assert all(answer == same[0] for answer in same) and len(same[0][1]) == 150
    assert len({wave[4 * number][0] for wave in waves for number in range(5)}) == 5
    totals = Counter(await counted(server.url))
    for total, more in (("baton_completion_tokens_total", 5 * 150), ('baton_requests_total{reason="length"}', 5)):
        assert totals[total] - before[total] == more
    async with server.session.post(
        f"{server.url}/v1/completions", json={**ASK, "max_tokens": 3}, headers={"Idempotency-Key": keys[0]}
    ) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (409, "idempotency_conflict")


async def test_a_keyed_request_goes_on_without_its_first_client_and_ends_with_its_last(server: Server) -> None:
    tasks = [asyncio.create_task(ask(server, "k", True, max_tokens=4000)) for _ in range(6)]
    async with asyncio.timeout(10):
        while await held(server, "decoding") + await held(server, "paused") == 0:
            await asyncio.sleep(0.01)
    for task in tasks[:-1]:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert (await server.gauges())["requests_running"] == 1
    tasks[-1].cancel()
    await server.idle(1)


async def events(socket: aiohttp.ClientWebSocketResponse, count: int) -> list[dict[str, Any]]:
    """So many events, or all that there are."""
    got: list[dict[str, Any]] = []
    while len(got) < count:
        got.append(json.loads((await asyncio.wait_for(socket.receive(), 10)).data))
        assert got[-1]["type"] not in ("error", "response.failed"), got[-1]
        if got[-1]["type"] in ("response.incomplete", "response.completed"):
            break
    return got


async def test_a_response_that_is_cut_off_again_and_again_has_every_token_once(server: Server) -> None:
    tokens, got = 400, list[dict[str, Any]]()
    async with aiohttp.ClientSession() as session, session.ws_connect(server.socket_url) as socket:
        await socket.send_json({"type": "response.create", **RESPONSE, "max_output_tokens": tokens, "seed": 3})
        got += await events(socket, 20)
    while got[-1]["type"] != "response.incomplete":
        async with aiohttp.ClientSession() as session, session.ws_connect(server.socket_url) as socket:
            last = {"response_id": got[0]["response_id"], "starting_after": got[-1]["sequence_number"]}
            await socket.send_json({"type": "response.resume", **last})
            got += await events(socket, 40)
    numbers = [event["sequence_number"] for event in got]
    assert numbers == sorted(set(numbers))
    text = "".join(event["delta"] for event in got if event["type"] == "response.output_text.delta")
    whole = await server.complete(prompt=[5, 6, 7], max_tokens=tokens, seed=3, ignore_eos=True, temperature=1)
    assert text == whole["choices"][0]["text"] == got[-1]["response"]["output"][0]["content"][0]["text"]
    assert got[-1]["response"]["usage"]["output_tokens"] == tokens


async def test_nobody_computes_for_a_client_that_is_away_and_it_is_cancelled_in_the_end(server: Server) -> None:
    async with aiohttp.ClientSession() as session, session.ws_connect(server.socket_url) as socket:
        await socket.send_json({"type": "response.create", **RESPONSE, "max_output_tokens": 4000})
        created = (await events(socket, 10))[0]
    async with asyncio.timeout(5):
        while not await held(server, "paused"):
            await asyncio.sleep(0.01)
    board = server.board()
    (view,) = board.rows()
    assert view.sampled <= view.delivered + 64 and view.sampled < 4000
    board.close()
    async with server.session.get(f"{server.url}/v1/responses/{created['response_id']}") as response:
        assert (await response.json())["status"] == "in_progress"
    await server.idle(2 + 3)
    async with server.session.get(f"{server.url}/v1/responses/{created['response_id']}") as response:
        assert response.status == 404


async def test_sdk_streams_survive_the_death_of_the_frontend_they_are_not_kept_at(server: Server) -> None:
    (directory,) = live_instances(server.base)
    whole = await server.complete(prompt=[5, 6, 7], max_tokens=300, ignore_eos=True, seed=3)
    async with AsyncClient(f"ipc://{directory}/client-1.sock") as client:
        key = next(key for key in map(str, range(64)) if home_of("", key, 2) == 0)
        ask: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True, "seed": 3, "temperature": 0}
        async with client.stream(**ask, return_token_ids=True, idempotency_key=key, resumable=True) as stream:
            for _ in range(10):
                await anext(stream)
            assert stream.request_id.startswith("00")
            server.kill("frontend-1", signal.SIGKILL)
            client._address = f"ipc://{directory}/client.sock"
            async for _ in stream:
                pass
        assert stream.token_ids == whole["choices"][0]["token_ids"]
