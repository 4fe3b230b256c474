"""What a client says of its time, at every door: deadline, time in the queue, priority; and cached prompt tokens."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from baton.engine.limits import Limits
from baton.frontends.client import AsyncClient, RequestFailed
from baton.ipc.frames import Terms
from tests.frontends.conftest import House, opened
from tests.frontends.double import Job, admit
from tests.frontends.talk import CHAT, TEXT, events

INPUT: dict[str, Any] = {"model": "model-1", "input": "hi"}
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]

#: asks one door; answers with the error's code and field, or with the usage
Ask = Callable[..., Awaitable[dict[str, Any]]]


def http(path: str, body: dict[str, Any]) -> Ask:
    async def ask(house: House, **fields: Any) -> dict[str, Any]:
        async with house.post(path, {**body, **fields}) as response:
            found: dict[str, Any] = await response.json()
            return found.get("error") or found["usage"]

    return ask


async def websocket(house: House, **fields: Any) -> dict[str, Any]:
    async with house.client.ws_connect(house.places["websocket"]) as socket:
        await socket.send_json({"type": "response.create", **INPUT, **fields})
        while True:
            event = json.loads(await socket.receive_str())
            if event["type"] == "error":
                found: dict[str, Any] = event["error"]
                return found
            if event["type"] in ("response.completed", "response.failed"):
                error = event["response"]["error"]
                return error or event["response"]["usage"]


async def sdk(house: House, **fields: Any) -> dict[str, Any]:
    async with AsyncClient(house.places["zmq"]) as client:
        try:
            usage = (await client.chat(HI, **fields)).usage
        except RequestFailed as error:
            return {"code": error.code, "param": error.param, "message": str(error)}
    return {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}


DOORS = {
    "chat": http("/v1/chat/completions", CHAT),
    "completion": http("/v1/completions", TEXT),
    "response": http("/v1/responses", INPUT),
    "websocket": websocket,
    "sdk": sdk,
}
every_door = pytest.mark.parametrize(
    "ask", [pytest.param(ask, id=name, marks=[pytest.mark.sdk] * (name == "sdk")) for name, ask in DOORS.items()]
)


def finish(cached_tokens: int) -> Callable[[Job], None]:
    return lambda job: job.admit().say("x").finish(cached_tokens=cached_tokens)


@every_door
async def test_the_terms_say_what_the_client_said(house: House, ask: Ask) -> None:
    house.engine.on_submit = finish(0)
    await ask(house, deadline_ms=5000, queue_ms_max=700, priority=-3)
    await ask(house)
    first, second = (job.submit.terms for job in house.engine.jobs)
    assert first.priority == -3 and first.deadline_ns - first.queue_until_ns == 4300 * 1_000_000
    assert (second.priority, second.queue_until_ns) == (0, 0)
    assert second.deadline_ns - first.deadline_ns > (house.engine.limits.request_s_max - 6) * 1e9
    await house.engine.empty()


@every_door
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("deadline_ms", value) for value in (0, -5, 1.5, "5", True, 10**9, 10**30)),
        *(("queue_ms_max", value) for value in (0, -1, [1], 10**9)),
        *(("priority", value) for value in (101, -101, 0.5, "high", False)),
    ],
)
async def test_a_bound_that_is_none_is_refused_by_name(house: House, ask: Ask, field: str, value: object) -> None:
    assert (await ask(house, **{field: value}))["param"] == field
    assert not house.engine.jobs


@every_door
async def test_a_tier_is_a_priority_unless_the_client_names_one(house: House, ask: Ask) -> None:
    house.engine.on_submit = finish(0)
    classes = house.engine.limits.tier_classes
    told = [
        ({"service_tier": "flex"}, classes),
        ({"service_tier": "priority"}, -classes),
        ({"service_tier": "fast"}, -classes),
        *(({"service_tier": tier}, 0) for tier in ("auto", "default", "scale", None)),
        ({"service_tier": "flex", "priority": 0}, 0),
        ({"service_tier": "priority", "priority": 7}, 7),
    ]
    for fields, _ in told:
        await ask(house, **fields)
    assert [job.submit.terms.priority for job in house.engine.jobs] == [priority for _, priority in told]
    await house.engine.empty()


@pytest.mark.parametrize(
    ("asked", "told"),
    [({"service_tier": "flex"}, "flex"), ({"service_tier": "auto"}, "default"), ({}, None)],
)
async def test_the_answer_says_which_tier_it_had(house: House, asked: dict[str, Any], told: str | None) -> None:
    house.engine.on_submit = finish(0)
    async with house.post("/v1/chat/completions", {**CHAT, **asked}) as response:
        assert (await response.json()).get("service_tier") == told
    async with house.post("/v1/responses", {**INPUT, **asked}) as response:
        assert (await response.json())["service_tier"] == (told or "default")
    async with house.post("/v1/chat/completions", {**CHAT, **asked, "stream": True}) as response:
        chunks = [chunk for chunk in await events(response) if isinstance(chunk, dict)]
    assert chunks and {chunk.get("service_tier") for chunk in chunks} == {told}
    await house.engine.empty()


@every_door
async def test_a_deadline_ends_a_request_wherever_it_is(tmp_path: Path, ask: Ask) -> None:
    async with opened(tmp_path, Limits(sweep_interval_s=0.02)) as house:
        house.engine.on_submit = admit
        error = await ask(house, deadline_ms=30)
        assert error["code"] == "deadline_exceeded" and "deadline" in error["message"]
        await house.engine.empty()
        assert house.engine.accounts[0].reason == "deadline_exceeded"


@every_door
async def test_time_in_the_queue_is_bounded(tmp_path: Path, ask: Ask) -> None:
    async with opened(tmp_path, Limits(sweep_interval_s=0.02)) as house:
        error = await ask(house, queue_ms_max=30)
        assert error["code"] == "queue_timeout" and "waited" in error["message"]
        await house.engine.empty()
        assert house.engine.accounts[0].reason == "queue_timeout"


async def test_the_statuses_of_time_that_ran_out(tmp_path: Path) -> None:
    async with opened(tmp_path, Limits(sweep_interval_s=0.02)) as house:
        async with house.post("/v1/completions", {**TEXT, "deadline_ms": 20}) as response:
            assert response.status == 504 and (await response.json())["error"]["code"] == "deadline_exceeded"
        async with house.post("/v1/completions", {**TEXT, "queue_ms_max": 20}) as response:
            assert response.status == 503 and (await response.json())["error"]["code"] == "queue_timeout"
            assert response.headers["Retry-After"]


@every_door
async def test_cached_prompt_tokens_are_in_the_usage(house: House, ask: Ask) -> None:
    house.engine.on_submit = finish(cached_tokens=2)
    usage = await ask(house)
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
    assert details["cached_tokens"] == 2
    await house.engine.empty()
    assert house.doors.metrics is not None
    assert b"baton_prompt_cached_tokens_total 2.0" in house.doors.metrics.page()


def test_terms_without_bounds_have_none() -> None:
    assert (Terms("m").queue_until_ns, Terms("m").priority) == (0, 0)
