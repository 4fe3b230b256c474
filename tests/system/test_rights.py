"""What clients have a right to while a server is busy, is mended or goes away; whichever door they came through."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import aiohttp
import pytest

from baton import AsyncClient
from baton.frontends.client import NotConnected
from tests.system.server import Server

SCRIPTED = ("--worker", "scripted")
MODEL = "smollm2-135m"


async def test_ready_says_no_while_a_worker_is_replaced_and_requests_wait_for_it() -> None:
    async with Server(*SCRIPTED, environment={"BATON_SCRIPTED_STEP_MS": "4"}) as server:
        events = server.stream(prompt=[5, 6, 7], max_tokens=300, ignore_eos=True)
        chunks = [await anext(events)]
        server.kill("worker")
        late = asyncio.create_task(server.complete(prompt=[8], max_tokens=3, ignore_eos=True))
        async with asyncio.timeout(5):
            while True:
                async with server.session.get(f"{server.url}/ready") as response:
                    if response.status == 503:
                        assert (await response.json())["state"] == "recovering"
                        break
        async with server.session.get(f"{server.url}/health") as response:
            assert response.status == 200
        chunks += [chunk async for chunk in events]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert (await late)["usage"]["completion_tokens"] == 3
        await server.until_ready()


async def test_a_prompt_of_many_steps_completes_whole_and_streamed() -> None:
    async with Server(*SCRIPTED, "--max-step-tokens", "64") as server:
        prompt = [2 + number % 1000 for number in range(5 * 64 + 7)]
        whole = await server.complete(prompt=prompt, max_tokens=4, ignore_eos=True, seed=3)
        assert whole["usage"]["prompt_tokens"] == len(prompt)
        ids: list[int] = []
        ask: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "seed": 3, "return_token_ids": True}
        async for chunk in server.stream(prompt=prompt, **ask):
            ids += [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
        assert ids == whole["choices"][0]["token_ids"]


async def test_a_flood_is_answered_or_told_when_to_come_back_and_never_queued_without_bound() -> None:
    environment = {"BATON_SCRIPTED_STEP_MS": "2", "BATON_LIMITS__REQUESTS_PER_FRONTEND_MAX": "16"}
    async with Server(*SCRIPTED, environment=environment) as server:
        body = {"model": MODEL, "prompt": [5], "max_tokens": 20, "ignore_eos": True}

        async def one() -> int:
            async with server.session.post(f"{server.url}/v1/completions", json=body) as response:
                answer = await response.json()
                if response.status == 200:
                    assert answer["usage"]["completion_tokens"] == 20
                else:
                    assert (response.status, answer["error"]["code"]) == (429, "overloaded")
                    assert int(response.headers["Retry-After"]) >= 1
                return response.status

        statuses = await asyncio.gather(*(one() for _ in range(200)))
        assert statuses.count(200) >= 16 and statuses.count(429) > 0
        await server.idle(1)
        assert await one() == 200


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_finds_the_queue_full_is_told_when_to_come_back(streamed: bool) -> None:
    limits = {"RUNNING_REQUESTS_MAX": "1", "QUEUE_TOKENS_MAX": "300"}
    environment = {"BATON_SCRIPTED_STEP_MS": "5", **{f"BATON_LIMITS__{name}": bound for name, bound in limits.items()}}
    async with Server(*SCRIPTED, environment=environment) as server:
        body = {"model": MODEL, "prompt": [5], "max_tokens": 100, "ignore_eos": True, "stream": streamed}

        async def one() -> int:
            async with server.session.post(f"{server.url}/v1/completions", json=body) as response:
                answer = await response.text()
                if response.status == 429:
                    error = json.loads(answer)["error"]
                    assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
                    assert int(response.headers["Retry-After"]) >= 1
                return response.status

        statuses = await asyncio.gather(*(one() for _ in range(20)))
        assert set(statuses) == {200, 429} and statuses.count(200) >= 3
        await server.idle(1)
        assert await one() == 200


async def test_a_termination_lets_the_streams_of_every_door_finish_and_then_says_goodbye() -> None:
    async with Server(*SCRIPTED, "--frontends", "2", environment={"BATON_SCRIPTED_STEP_MS": "10"}) as server:
        ask: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
        http = server.stream(prompt=[5], **ask)
        await anext(http)
        async with (
            AsyncClient(server.zmq) as client,
            client.stream(prompt=[6], **ask) as sdk,
            server.session.ws_connect(server.socket_url) as socket,
        ):
            create = {"type": "response.create", "model": MODEL, "input": [7], "ignore_eos": True}
            await socket.send_json({**create, "max_output_tokens": 60})
            await socket.receive()
            await anext(sdk)
            server.process.send_signal(signal.SIGTERM)
            chunks = [chunk async for chunk in http]
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            done = await sdk.result()
            assert (done.usage.completion_tokens, done.finish_reason) == (60, "length")
            last: dict[str, Any] = {}
            while (message := await socket.receive()).type is aiohttp.WSMsgType.TEXT:
                last = json.loads(message.data)
            assert last["type"] == "response.incomplete" and last["response"]["usage"]["output_tokens"] == 60
            assert socket.close_code == aiohttp.WSCloseCode.GOING_AWAY
            assert await server.wait() == 0
            with pytest.raises(NotConnected):
                await client.complete([1], max_tokens=1)


async def test_a_client_that_is_away_does_not_hold_up_a_termination_for_longer_than_it_is_waited_for() -> None:
    environment = {"BATON_SCRIPTED_STEP_MS": "10", "BATON_LIMITS__RESUME_S_MAX": "1"}
    async with Server(*SCRIPTED, environment=environment) as server:
        async with aiohttp.ClientSession() as session, session.ws_connect(server.socket_url) as socket:
            create = {"type": "response.create", "model": MODEL, "input": [7], "ignore_eos": True, "resumable": True}
            await socket.send_json({**create, "max_output_tokens": 4000})
            await socket.receive()
        server.process.send_signal(signal.SIGTERM)
        assert await server.wait(10) == 0
