"""``store``: a response that was to be stored can be asked for again; everywhere else it is a label in the trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from baton.engine.limits import Limits
from tests.frontends.conftest import House, opened
from tests.frontends.double import play
from tests.frontends.talk import CHAT, PATHS

INPUT: dict[str, Any] = {"model": "model-1", "input": "hi"}


async def found(house: House, response_id: str) -> tuple[int, dict[str, Any]]:
    """What ``GET`` says of a response."""
    async with house.client.get(f"{house.url}/v1/responses/{response_id}") as response:
        return response.status, await response.json()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stored_response_is_there_afterwards(house: House, stream: bool) -> None:
    house.engine.on_submit = play("a", "b")
    async with AsyncOpenAI(base_url=f"{house.url}/v1", api_key="-") as client:
        if stream:
            events = [each async for each in await client.responses.create(**INPUT, store=True, stream=True)]
            made = events[-1].response
        else:
            made = await client.responses.create(**INPUT, store=True)
        assert made.store is True
        again = await client.responses.retrieve(made.id)
    assert (again.output_text, again.status, again.store) == ("ab", "completed", True)
    assert again.usage == made.usage
    await house.engine.empty()


@pytest.mark.parametrize("store", [{}, {"store": False}, {"store": None}])
async def test_one_that_was_not_to_be_stored_is_not(house: House, store: dict[str, Any]) -> None:
    house.engine.on_submit = play("a")
    async with house.post("/v1/responses", {**INPUT, **store}) as response:
        made = await response.json()
    assert made["store"] is False
    status, body = await found(house, made["id"])
    assert (status, body["error"]["code"]) == (404, "response_not_found")
    await house.engine.empty()


async def test_a_socket_stores_too(house: House) -> None:
    house.engine.on_submit = play("a", "b")
    async with house.client.ws_connect(house.places["websocket"]) as socket:
        await socket.send_json({"type": "response.create", **INPUT, "store": True})
        event: dict[str, Any] = {"type": ""}
        while event["type"] != "response.completed":
            event = json.loads(await socket.receive_str(timeout=5))
            assert event["type"] != "error", event
    status, body = await found(house, event["response"]["id"])
    assert (status, body["output"][0]["content"][0]["text"]) == (200, "ab")
    await house.engine.empty()


async def test_it_is_kept_for_a_while_only(tmp_path: Path) -> None:
    async with opened(tmp_path, Limits(idempotency_s_max=0.05, sweep_interval_s=0.02)) as house:
        house.engine.on_submit = play("a")
        async with house.post("/v1/responses", {**INPUT, "store": True}) as response:
            made = await response.json()
        await house.engine.until(lambda: not house.engine.desk.answers.by_id)
        assert (await found(house, made["id"]))[0] == 404
        await house.engine.empty()


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("store", [True, False])
async def test_elsewhere_it_is_a_label(house: House, path: str, body: dict[str, Any], store: bool) -> None:
    house.engine.on_submit = play("a")
    async with house.post(path, {**body, "store": store}) as response:
        assert response.status == 200
    await house.engine.empty()
    (root,) = (span for span in house.engine.spans if span.server)
    assert root.attributes["baton.store"] == ("true" if store else "false")
    assert not house.engine.desk.answers.by_id


@pytest.mark.parametrize("value", [1, "true", [], {}])
async def test_it_is_true_or_false(house: House, value: object) -> None:
    for path, body in (*PATHS, ("/v1/responses", INPUT)):
        async with house.post(path, {**body, "store": value}) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "store")
    assert not house.engine.jobs


async def test_a_key_is_not_used_otherwise_by_storing_or_hurrying(house: House) -> None:
    house.engine.on_submit = play("a")
    headers = {"Idempotency-Key": "k"}
    for more in ({}, {"store": True}, {"service_tier": "flex"}):
        async with house.post("/v1/chat/completions", {**CHAT, **more}, headers=headers) as response:
            assert response.status == 200
    assert len(house.engine.jobs) == 1
    await house.engine.empty()
