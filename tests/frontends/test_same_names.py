"""What clients call their requests is a label: under one name, at one time, two requests stay two."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from baton import AsyncClient
from tests.frontends.conftest import House
from tests.frontends.double import Job
from tests.frontends.talk import TEXT

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
WAIT_S = 10


async def both_live(house: House) -> list[Job]:
    """Two requests that live at once, each answered with its own prompt."""
    jobs = [await house.engine.job(), await house.engine.job()]
    assert jobs[0].slot != jobs[1].slot
    assert len({house.engine.board.identity(job.slot)[0] for job in jobs}) == 2
    for job in jobs:
        ids = job.submit.prompt.token_ids
        job.admit().say(str(job.submit.prompt.text or ids)).finish()
    return jobs


@pytest.mark.parametrize("headers", [{"X-Request-Id": "the same"}, {"traceparent": PARENT}])
async def test_over_http(house: House, headers: dict[str, str]) -> None:
    async def ask(prompt: str) -> tuple[str, str]:
        async with house.post("/v1/completions", {**TEXT, "prompt": prompt}, headers=headers) as response:
            answer = await response.json()
            return answer["id"], answer["choices"][0]["text"]

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(f"prompt {number}")) for number in range(2)]
        await both_live(house)
    answers = [task.result() for task in tasks]
    assert [text for _, text in answers] == ["prompt 0", "prompt 1"]
    assert answers[0][0] != answers[1][0]
    await house.engine.empty()


async def test_over_two_sockets_with_one_stream_id(house: House) -> None:
    async def ask(prompt: list[int]) -> tuple[str, str]:
        async with house.client.ws_connect(house.places["websocket"]) as socket:
            await socket.send_json({"type": "response.create", "stream_id": "a", "model": "model-1", "input": prompt})
            text = ""
            while True:
                event: dict[str, Any] = json.loads(await socket.receive_str())
                assert event["stream_id"] == "a"
                text += event.get("delta", "")
                if event["type"] == "response.completed":
                    return event["response_id"], text

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask([number])) for number in (5, 6)]
        await both_live(house)
    answers = [task.result() for task in tasks]
    assert [text for _, text in answers] == ["[5]", "[6]"]
    assert answers[0][0] != answers[1][0]
    await house.engine.empty()


@pytest.mark.sdk
async def test_over_the_sdk_where_every_client_counts_from_the_same_number(house: House) -> None:
    async def ask(prompt: str) -> tuple[str, str]:
        async with AsyncClient(house.places["zmq"]) as client:
            answer = await client.complete(prompt)
            return answer.request_id, answer.text

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(f"prompt {number}")) for number in range(2)]
        await both_live(house)
    answers = [task.result() for task in tasks]
    assert [text for _, text in answers] == ["prompt 0", "prompt 1"]
    assert answers[0][0] != answers[1][0]
    await house.engine.empty()
