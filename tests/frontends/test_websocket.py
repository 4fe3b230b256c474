"""The WebSocket door over real sockets: order of events, lanes, cancels, refusals, limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai.types.responses import ResponsesServerEvent
from pydantic import TypeAdapter
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from baton.engine.limits import Limits
from baton.ipc.frames import Failure
from tests.frontends.conftest import House, opened
from tests.frontends.double import play

OFFICIAL: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)


def official(event: dict[str, Any]) -> dict[str, Any]:
    """An event as the official types know it: they list the codes of a failed response, and have none of ours."""
    if event["type"] != "response.failed":
        return event
    response = event["response"]
    return {**event, "response": {**response, "error": {**response["error"], "code": "server_error"}}}


class Client:
    """One socket and what came over it, by response."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def create(self, stream_id: str | None = None, **fields: Any) -> None:
        message: dict[str, Any] = {"type": "response.create", "model": "model-1", "input": "hi", **fields}
        if stream_id is not None:
            message["stream_id"] = stream_id
        await self.socket.send_json(message)

    async def cancel(self, **names: str) -> None:
        await self.socket.send_json({"type": "response.cancel", **names})

    async def event(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(await asyncio.wait_for(self.socket.receive_str(), 5))
        OFFICIAL.validate_python(official(event))
        assert {"type", "response_id", "stream_id", "sequence_number"} <= event.keys()
        return event

    async def until(self, kind: str) -> list[dict[str, Any]]:
        events = [await self.event()]
        while events[-1]["type"] != kind:
            events.append(await self.event())
        return events


@asynccontextmanager
async def connected(house: House, **rest: Any) -> AsyncIterator[Client]:
    async with house.client.ws_connect(house.places["websocket"], **rest) as socket:
        yield Client(socket)


async def test_events_come_in_order_and_the_official_types_parse_them(house: House) -> None:
    house.engine.on_submit = play("Hel", "", "lo", tail="!")
    async with connected(house) as client:
        await client.create("a", instructions="be brief", metadata={"k": "v"})
        events = await client.until("response.completed")
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in events] == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11], "one a token"
    assert {event["stream_id"] for event in events} == {"a"}
    assert len({event["response_id"] for event in events}) == 1
    final = events[-1]["response"]
    assert final["output"][0]["content"][0]["text"] == "Hello!"
    assert final["status"] == "completed" and final["metadata"] == {"k": "v"}
    assert (final["usage"]["input_tokens"], final["usage"]["output_tokens"]) == (3, 3)
    submit = house.engine.jobs[0].submit
    assert submit.prompt.messages is not None
    assert submit.prompt.messages[0] == {"role": "system", "content": "be brief"}
    await house.engine.empty()


async def test_reaching_the_limit_is_incomplete(house: House) -> None:
    house.engine.on_submit = play("x", reason="length")
    async with connected(house) as client:
        await client.create(max_output_tokens=1)
        final = (await client.until("response.incomplete"))[-1]["response"]
    assert final["status"] == "incomplete" and final["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_parameters_may_stand_in_a_field_of_their_own(house: House) -> None:
    house.engine.on_submit = play("x")
    async with connected(house) as client:
        body = {"model": "model-1", "input": [7, 8, 9], "max_output_tokens": 5, "tempratur": 1}
        await client.socket.send_json({"type": "response.create", "response": body})
        events = await client.until("response.completed")
    assert house.engine.jobs[0].submit.prompt.token_ids == [7, 8, 9]
    assert events[0]["ignored_params"] == ["tempratur"]


async def test_streams_run_side_by_side_and_a_lane_in_turn(house: House) -> None:
    async with connected(house) as client:
        for lane in ("a", "b", "a"):
            await client.create(lane)
        first, second = await house.engine.job(), await house.engine.job()
        first.admit().say("1")
        second.admit().say("2")
        second.finish()
        assert len(house.engine.jobs) == 2
        first.finish()
        third = await house.engine.job()
        third.admit().say("3").finish()
        events: list[dict[str, Any]] = []
        while sum(event["type"] == "response.completed" for event in events) < 3:
            events.append(await client.event())
    created = [event for event in events if event["type"] == "response.created"]
    assert [event["response"]["status"] for event in created] == ["in_progress", "in_progress", "queued"]
    for event in created:
        own = [one for one in events if one["response_id"] == event["response_id"]]
        assert [one["sequence_number"] for one in own] == list(range(len(own)))
    await house.engine.empty()


@pytest.mark.parametrize("by", ["response_id", "stream_id"])
@pytest.mark.parametrize("when", ["before_begin", "in_the_middle"])
async def test_a_cancel_is_answered_by_the_terminal_event(house: House, by: str, when: str) -> None:
    async with connected(house) as client:
        await client.create("a")
        created = await client.event()
        job = await house.engine.job()
        if when == "in_the_middle":
            job.admit().say("some")
            await client.until("response.output_text.delta")
        await client.cancel(**{by: created[by]})
        await asyncio.wait_for(job.cancelled.wait(), 5)
        final = (await client.until("response.incomplete"))[-1]
        assert final["response"]["status"] == "cancelled"
        assert final["response_id"] == created["response_id"]
        await client.cancel(response_id=created["response_id"])
        late = await client.event()
        assert (late["type"], late["code"]) == ("error", "response_finished")
    await house.engine.empty()


async def test_a_queued_response_is_cancelled_without_being_started(house: House) -> None:
    async with connected(house) as client:
        await client.create("a")
        await client.create("a")
        await client.event()
        queued = await client.event()
        await client.cancel(response_id=queued["response_id"])
        final = await client.event()
        assert final["response"]["status"] == "cancelled" and final["response_id"] == queued["response_id"]
        job = await house.engine.job()
        job.admit().finish()
        await client.until("response.completed")
    assert len(house.engine.jobs) == 1


async def test_a_cancel_of_nothing_is_acknowledged(house: House) -> None:
    async with connected(house) as client:
        for names in ({"response_id": "resp_0"}, {"stream_id": "z"}):
            await client.cancel(**names)
            event = await client.event()
            assert (event["type"], event["code"]) == ("error", "response_not_found")
        await client.cancel()
        assert (await client.event())["param"] == "response_id"


async def test_a_stream_goes_on_after_a_cancel(house: House) -> None:
    async with connected(house) as client:
        await client.create("a")
        await client.create("a")
        job = await house.engine.job()
        job.admit().say("x")
        first = (await client.until("response.output_text.delta"))[0]
        await client.cancel(response_id=first["response_id"])
        await client.until("response.incomplete")
        (await house.engine.job()).admit().say("y").finish()
        final = (await client.until("response.completed"))[-1]
        assert final["response_id"] != first["response_id"]


async def test_refusals_say_what_http_says(house: House) -> None:
    async with connected(house) as client:
        for body, param in (
            (b"{", None),
            (b"[]", None),
            (b'{"type":"response.create","model":"model-1"}', "input"),
            (b'{"type":"response.create","model":"model-1","input":"x","temperature":3}', "temperature"),
            (b'{"type":"response.create","model":"model-1","input":"x","tools":[1]}', "tools"),
            (b'{"type":"response.create","model":"other","input":"x"}', "model"),
            (b'{"type":"response.create","model":"model-1","input":"x","store":1}', "store"),
            (b'{"type":"response.create","response":3}', "response"),
            (b'{"type":"nonsense"}', "type"),
            (b'{"stream_id":5}', "stream_id"),
        ):
            await client.socket.send_str(body.decode())
            event = await client.event()
            assert event["type"] == "error" and event["param"] == param, body
    assert not house.engine.jobs


async def test_the_engines_refusals_fail_the_response(house: House) -> None:
    async with connected(house) as client:
        await client.create("a")
        job = await house.engine.job()
        job.refuse(Failure(400, "invalid_request_error", "the prompt is too long", "input", "context_length_exceeded"))
        final = (await client.until("response.failed"))[-1]["response"]
        assert final["error"]["message"] == "the prompt is too long" and final["error"]["param"] == "input"
        assert final["error"]["code"] == "context_length_exceeded"
        await client.create("a")
        job = await house.engine.job()
        job.admit().say("half").finish("error", failure=Failure(500, "server_error", "it broke"))
        final = (await client.until("response.failed"))[-1]["response"]
        assert final["error"]["code"] == "server_error" and final["output"][0]["content"][0]["text"] == "half"
    await house.engine.empty()


async def test_a_refusal_for_want_of_room_says_when_to_come_back(house: House) -> None:
    async with connected(house) as client:
        await client.create("a")
        job = await house.engine.job()
        job.refuse(Failure(429, "rate_limit_error", "9000 tokens wait", None, "queue_full", 17))
        final = (await client.until("response.failed"))[-1]["response"]
        assert final["error"]["retry_after_s"] == 17
        await client.create("b")
        job = await house.engine.job()
        job.refuse(Failure(400, "invalid_request_error", "too long", "input", None))
        final = (await client.until("response.failed"))[-1]["response"]
        assert "retry_after_s" not in final["error"]
    await house.engine.empty()


@pytest.mark.parametrize("when", ["before_begin", "queued", "in_the_middle"])
async def test_closing_the_socket_cancels_everything(house: House, when: str) -> None:
    async with connected(house) as client:
        await client.create("a")
        if when == "queued":
            await client.create("a")
        job = await house.engine.job()
        if when == "in_the_middle":
            job.admit().say("x")
            await client.until("response.output_text.delta")
    await asyncio.wait_for(job.cancelled.wait(), 5)
    await house.engine.empty()
    assert len(house.engine.jobs) == 1


async def test_streams_on_a_connection_are_limited(tmp_path: Path) -> None:
    async with opened(tmp_path, Limits(streams_per_connection_max=2)) as house, connected(house) as client:
        for lane in ("a", "b", "c"):
            await client.create(lane)
        events = [await client.event() for _ in range(3)]
        assert events[-1]["code"] == "too_many_streams" and events[-1]["stream_id"] == "c"


async def test_a_message_over_the_limit_closes_with_the_limit(tmp_path: Path) -> None:
    async with (
        opened(tmp_path, Limits(body_bytes_max=10_000)) as house,
        connect(house.places["websocket"], max_size=None) as socket,
    ):
        with suppress(ConnectionClosed):
            await socket.send("x" * 20_000_000)
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        assert socket.close_code == 1009
        assert "10000" in (socket.close_reason or "")


@pytest.mark.parametrize(
    ("page", "served"),
    [("http://evil.example", False), ("null", False), ("http://localhost:3000", True), (None, True)],
)
async def test_pages_of_other_origins_are_kept_out(house: House, page: str | None, served: bool) -> None:
    headers = {"Origin": page} if page else {}
    if served:
        async with connect(house.places["websocket"], additional_headers=headers):
            return
    with pytest.raises(InvalidStatus) as refusal:
        async with connect(house.places["websocket"], additional_headers=headers):
            pass
    assert refusal.value.response.status_code == 403


async def test_a_configured_origin_is_let_in(tmp_path: Path) -> None:
    page = "https://app.example"
    async with (
        opened(tmp_path, origins=(page,)) as house,
        connect(house.places["websocket"], additional_headers={"Origin": page}),
    ):
        pass


async def test_a_server_that_stops_says_so(tmp_path: Path) -> None:
    async with opened(tmp_path) as house, connect(house.places["websocket"]) as socket:
        await house.doors.stop(0)
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        assert (socket.close_code, socket.close_reason) == (1001, "shutting down")
