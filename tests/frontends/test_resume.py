"""Resuming: a connection is lost, and another one brings the rest, exactly once and under the same numbers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from baton.engine.limits import Limits
from baton.frontends.client import AsyncClient, NotConnected, RequestFailed
from baton.ipc.frames import Failure
from tests.frontends.conftest import House, opened
from tests.frontends.double import Job, admit, play
from tests.frontends.talk import CHAT, TEXT

CREATE: dict[str, Any] = {"model": "model-1", "input": "hi", "resumable": True}
LIMITS = Limits(client_ping_s=0.02, sweep_interval_s=0.02, resume_s_max=5)


async def until(socket: aiohttp.ClientWebSocketResponse, kind: str, at_least: int = 0) -> list[dict[str, Any]]:
    """Events up to the first one of a kind whose number is large enough."""
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] != kind or events[-1]["sequence_number"] < at_least:
        events.append(json.loads(await asyncio.wait_for(socket.receive_str(), 5)))
        assert events[-1]["type"] != "error", events[-1]
    return events


def text(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


async def deserted(house: House) -> None:
    """Nobody listens to the one answer that there is."""
    await house.engine.until(lambda: not house.engine.desk.heard)


async def sse(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    """Named events, parsed; each name is the event's type."""
    events = []
    async for line in response.content:
        if line.startswith(b"event: "):
            name = line[7:].strip().decode()
        elif line.startswith(b"data: "):
            events.append(json.loads(line[6:]))
            assert events[-1]["type"] == name
    return events


@pytest.mark.parametrize("seen", [0, 3, 4, 5, 6])
async def test_a_socket_resumes_behind_the_event_it_has(house: House, seen: int) -> None:
    house.engine.on_submit = admit
    async with house.client.ws_connect(house.places["websocket"]) as socket:
        await socket.send_json({"type": "response.create", "stream_id": "s", **CREATE})
        job = await house.engine.job()
        job.say("a")
        before = await until(socket, "response.output_text.delta")
        job.say("b")
        before += await until(socket, "response.output_text.delta")
        job.say("c")
        before += await until(socket, "response.output_text.delta")
    await deserted(house)
    job.say("d")
    assert not job.cancelled.is_set()
    async with house.client.ws_connect(house.places["websocket"]) as socket:
        resume = {"type": "response.resume", "response_id": before[0]["response_id"], "starting_after": seen}
        await socket.send_json(resume)
        await house.engine.until(lambda: len(house.engine.desk.heard) == 1)
        job.say("e").finish(tail="!")
        after = await until(socket, "response.completed")
    kept = [event for event in before if event["sequence_number"] <= seen]
    assert text(kept) + text(after) == "abcde!"
    numbers = [event["sequence_number"] for event in [*kept, *after]]
    assert numbers == sorted(set(numbers)) and min(event["sequence_number"] for event in after) > seen
    known = {event["sequence_number"]: event for event in before}
    for event in after:
        earlier = known.get(event["sequence_number"])
        assert earlier is None or earlier["type"] == event["type"]
    assert {event["stream_id"] for event in after} == {"s"}
    assert after[-1]["response"]["output"][0]["content"][0]["text"] == "abcde!"
    assert after[-1]["sequence_number"] == 4 + 5 + 1 + 3
    await house.engine.empty()


async def test_without_asking_for_it_a_lost_connection_cancels_at_once(house: House) -> None:
    house.engine.on_submit = admit
    async with house.client.ws_connect(house.places["websocket"]) as socket:
        await socket.send_json({"type": "response.create", **CREATE, "resumable": False})
        job = await house.engine.job()
        (created,) = await until(socket, "response.created")
    await asyncio.wait_for(job.cancelled.wait(), 5)
    await house.engine.empty()
    async with house.client.get(f"{house.url}/v1/responses/{created['response_id']}") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "response_not_found"


async def test_a_response_is_seen_and_followed_over_http(house: House) -> None:
    house.engine.on_submit = admit
    async with house.post("/v1/responses", {**CREATE, "stream": True, "metadata": {"k": "v"}}) as response:
        assert response.content_type == "text/event-stream"
        job = await house.engine.job()
        job.say("a", "b")
        async for line in response.content:
            if line.startswith(b"data: ") and b'"delta":"ab"' in line:
                break
        place = f"{house.url}/v1/responses/resp_{response.headers['X-Baton-Request-Id']}"
        response.close()
    await deserted(house)
    async with house.client.get(place) as response:
        seen = await response.json()
        assert (seen["status"], seen["metadata"]) == ("in_progress", {"k": "v"})
        assert seen["output"][0]["content"][0]["text"] == "ab"
    async with house.client.get(place, params={"stream": "true", "starting_after": "4"}) as response:
        job.say("c").finish("length")
        events = await sse(response)
    assert [event["sequence_number"] for event in events if "delta" not in event] == [7, 8, 9, 10]
    assert text(events) == "bc" and events[0]["sequence_number"] > 4
    async with house.client.get(place) as response:
        seen = await response.json()
    assert seen == events[-1]["response"] and seen["status"] == "incomplete"
    async with house.client.get(place, params={"stream": "true", "starting_after": "9"}) as response:
        assert [event["sequence_number"] for event in await sse(response)] == [10]


async def test_responses_over_http_are_those_of_the_socket(house: House) -> None:
    house.engine.on_submit = play("Hel", "lo")
    client = AsyncOpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0)
    whole = await client.responses.create(model="model-1", input="hi", instructions="be brief")
    assert (whole.output_text, whole.status) == ("Hello", "completed")
    assert whole.usage is not None and whole.usage.total_tokens == 5
    stream = await client.responses.create(model="model-1", input="hi", stream=True)
    kinds = [event.type async for event in stream]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    await client.close()
    async with house.post("/v1/responses", {"model": "model-1"}) as response:
        assert response.status == 400 and (await response.json())["error"]["param"] == "input"
    await house.engine.empty()


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("resp_" + "0" * 32, 404, "response_id"),
        ("resp_ff" + "0" * 30, 404, "response_id"),
        ("nonsense", 404, "response_id"),
        ("resp_" + "0" * 32 + "?stream=true", 404, "response_id"),
        ("resp_" + "0" * 32 + "?stream=perhaps", 400, "stream"),
        ("resp_" + "0" * 32 + "?stream=true&starting_after=x", 400, "starting_after"),
        ("resp_" + "0" * 32 + "?stream=true&starting_after=-2", 400, "starting_after"),
    ],
)
async def test_what_cannot_be_followed_is_refused_by_name(house: House, path: str, status: int, param: str) -> None:
    async with house.client.get(f"{house.url}/v1/responses/{path}") as response:
        assert response.status == status
        assert (await response.json())["error"]["param"] == param


async def test_chats_with_a_key_are_no_responses(house: House) -> None:
    house.engine.on_submit = play("a")
    async with house.post("/v1/chat/completions", CHAT, headers={"Idempotency-Key": "k"}) as response:
        place = f"{house.url}/v1/responses/resp_{response.headers['X-Baton-Request-Id']}"
    for query in ("", "?stream=true"):
        async with house.client.get(place + query) as response:
            assert response.status == 404
    async with house.post("/v1/completions", {**TEXT, "idempotency_key": "k"}) as response:
        assert response.status == 400 and (await response.json())["error"]["param"] == "idempotency_key"
    async with house.post("/v1/completions", {**TEXT, "resumable": True}) as response:
        assert response.status == 400 and (await response.json())["error"]["param"] == "resumable"


@pytest.mark.parametrize("name", ["idempotency_key", "stream_id", "starting_after", "response_id", "traceparent"])
async def test_what_belongs_around_a_response_is_refused_by_name_where_it_would_not_be_read(
    house: House, name: str
) -> None:
    async with house.post("/v1/responses", {"model": "model-1", "input": "hi", name: "k"}) as response:
        assert response.status == 400 and (await response.json())["error"]["param"] == name
    async with house.client.ws_connect(house.places["websocket"]) as socket:
        inside = {"model": "model-1", "input": "hi", name: "k"}
        await socket.send_json({"type": "response.create", "response": inside})
        event = json.loads(await asyncio.wait_for(socket.receive_str(), 5))
        assert event["type"] == "error" and event["error"]["param"] == name


@pytest.mark.parametrize("began", [True, False])
async def test_nothing_is_behind_the_last_event_of_a_response_that_is_over(house: House, began: bool) -> None:
    async with house.client.ws_connect(house.places["websocket"]) as socket:
        await socket.send_json({"type": "response.create", "stream_id": "s", **CREATE})
        job = await house.engine.job()
        if began:
            job.admit().say("a", "b").finish(tail="!")
        else:
            job.refuse(Failure(400, "invalid_request_error", "too long", "input", "context_length_exceeded"))
        final = (await until(socket, "response.completed" if began else "response.failed"))[-1]
    last = final["sequence_number"]
    place = f"{house.url}/v1/responses/{final['response_id']}"
    for after, status, count in ((last - 1, 200, 1), (last, 200, 0), (last + 1, 400, 0), (999, 400, 0)):
        async with house.client.get(place, params={"stream": "true", "starting_after": str(after)}) as response:
            assert response.status == status
            if status == 400:
                assert (await response.json())["error"]["param"] == "starting_after"
            else:
                assert await sse(response) == [final] * count
    async with house.client.ws_connect(house.places["websocket"]) as socket:
        for after in (last - 1, last, last + 1, 999):
            resume = {"type": "response.resume", "response_id": final["response_id"], "starting_after": after}
            await socket.send_json(resume)
            event = json.loads(await asyncio.wait_for(socket.receive_str(), 5))
            if after <= last:
                assert event == final
            else:
                assert (event["type"], event["status"], event["param"]) == ("error", 400, "starting_after")
                assert (event["response_id"], event["stream_id"]) == (final["response_id"], "s")
    await house.engine.empty()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("response.create", {"starting_after": 3}),
        ("response.create", {"response_id": "resp_" + "0" * 32}),
        ("response.create", {"temperature": 0.5, "response": {"model": "model-1", "input": "hi"}}),
        ("response.resume", {"stream_id": "s"}),
        ("response.resume", {"temperature": 0.5}),
        ("response.resume", {"foo": 1}),
        ("response.resume", {"traceparent": "00-" + "1" * 32 + "-" + "1" * 16 + "-01"}),
        ("response.resume", {"idempotency_key": "k"}),
        ("response.resume", {"response": {"model": "model-1", "input": "hi"}}),
        ("response.cancel", {"starting_after": 3}),
        ("response.cancel", {"temperature": 0.5}),
        ("response.cancel", {"foo": 1}),
        ("response.cancel", {"idempotency_key": "k"}),
    ],
)
async def test_what_means_nothing_in_a_type_of_message_is_refused_by_name(
    house: House, kind: str, fields: dict[str, Any]
) -> None:
    name = next(iter(fields))
    if kind != "response.create":
        fields = {"response_id": "resp_" + "0" * 32, **fields}
    elif "response" not in fields:
        fields = {"model": "model-1", "input": "hi", **fields}
    async with house.client.ws_connect(house.places["websocket"]) as socket:
        await socket.send_json({"type": kind, "event_id": "e", **fields})
        event = json.loads(await asyncio.wait_for(socket.receive_str(), 5))
    assert (event["type"], event["status"], event["code"]) == ("error", 400, "unsupported_parameter")
    assert event["param"] == name and event["message"].startswith(name)
    assert not house.engine.jobs


@pytest.mark.parametrize("kind", ["response.create", "response.resume", "response.cancel"])
async def test_an_event_id_is_a_string(house: House, kind: str) -> None:
    async with house.client.ws_connect(house.places["websocket"]) as socket:
        await socket.send_json({"type": kind, "event_id": 5, "model": "model-1", "input": "hi"})
        event = json.loads(await asyncio.wait_for(socket.receive_str(), 5))
    assert (event["type"], event["status"], event["param"]) == ("error", 400, "event_id")
    assert not house.engine.jobs


async def test_a_resumed_response_is_cancelled_by_the_stream_it_was_created_in(house: House) -> None:
    house.engine.on_submit = admit
    async with house.client.ws_connect(house.places["websocket"]) as socket:
        await socket.send_json({"type": "response.create", "stream_id": "s", **CREATE})
        (created,) = await until(socket, "response.created")
        job = await house.engine.job()
    await deserted(house)
    name = {"response_id": created["response_id"]}
    async with house.client.ws_connect(house.places["websocket"]) as socket:
        await socket.send_json({"type": "response.resume", **name})
        await until(socket, "response.in_progress")
        await socket.send_json({"type": "response.cancel", "stream_id": "another", **name})
        event = json.loads(await asyncio.wait_for(socket.receive_str(), 5))
        while event["type"] != "error":
            event = json.loads(await asyncio.wait_for(socket.receive_str(), 5))
        assert event["code"] == "response_not_found" and not job.cancelled.is_set()
        await socket.send_json({"type": "response.cancel", "stream_id": "s"})
        final = (await until(socket, "response.incomplete"))[-1]
        assert final["response"]["status"] == "cancelled" and final["stream_id"] == "s"
    await asyncio.wait_for(job.cancelled.wait(), 5)
    await house.engine.empty()


async def test_socket_resumes_that_cannot_be_are_errors(house: House) -> None:
    house.engine.on_submit = admit
    async with house.client.ws_connect(house.places["websocket"]) as socket:
        await socket.send_json({"type": "response.create", **CREATE})
        (created,) = await until(socket, "response.created")
        for fields, status, param in (
            ({}, 400, "response_id"),
            ({"response_id": "resp_" + "0" * 32}, 404, "response_id"),
            ({"response_id": created["response_id"]}, 409, "response_id"),
            ({"response_id": "resp_" + "0" * 32, "starting_after": -2}, 400, "starting_after"),
        ):
            await socket.send_json({"type": "response.resume", **fields})
            error = json.loads(await asyncio.wait_for(socket.receive_str(), 5))
            while error["type"] != "error":
                error = json.loads(await asyncio.wait_for(socket.receive_str(), 5))
            assert (error["status"], error["param"]) == (status, param)


def cut(client: AsyncClient) -> None:
    """The connection breaks; the server hears nothing."""
    connection = client._connection
    assert connection is not None
    connection.fail(NotConnected("cut"))


@pytest.mark.sdk
async def test_the_sdk_goes_on_over_another_connection(tmp_path: Path) -> None:
    async with opened(tmp_path, LIMITS) as house:
        house.engine.on_submit = admit
        async with (
            AsyncClient(house.places["zmq"]) as client,
            client.stream(messages=CHAT["messages"], resumable=True, return_token_ids=True) as stream,
        ):
            job: Job = await house.engine.job()
            for number, word in enumerate("abcdef"):
                job.say(word)
                if number % 2:
                    cut(client)
                assert (await anext(stream)).text == word
            cut(client)
            job.finish(tail="!")
            assert [delta.text async for delta in stream] == ["!"]
            assert (stream.text, stream.token_ids) == ("abcdef!", [10, 11, 12, 13, 14, 15])
            assert stream.usage is not None and stream.usage.completion_tokens == 6
        assert not job.cancelled.is_set()


@pytest.mark.sdk
async def test_the_sdk_hears_that_nothing_is_kept_and_of_a_server_that_is_gone(tmp_path: Path) -> None:
    limits = Limits(client_ping_s=0.02, sweep_interval_s=0.02, resume_s_max=0.1)
    async with opened(tmp_path, limits) as house:
        house.engine.on_submit = admit
        async with AsyncClient(house.places["zmq"]) as client:
            stream = client.stream(messages=CHAT["messages"], resumable=True)
            await stream.__aenter__()
            job = await house.engine.job()
            cut(client)
            await asyncio.wait_for(job.cancelled.wait(), 5)
            with pytest.raises(RequestFailed) as gone:
                await anext(stream)
            assert gone.value.code == "response_not_found"
            last = client.stream(messages=CHAT["messages"], resumable=True)
            await last.__aenter__()
            client._address = f"ipc://{tmp_path}/nowhere"
            cut(client)
            with pytest.raises(NotConnected):
                await anext(last)


@pytest.mark.parametrize("how", ["leave", "close"])
@pytest.mark.sdk
async def test_an_sdk_stream_that_is_left_is_cancelled_at_once_resumable_or_not(tmp_path: Path, how: str) -> None:
    async with opened(tmp_path, LIMITS) as house:
        house.engine.on_submit = admit
        client = AsyncClient(house.places["zmq"])
        stream = client.stream(messages=CHAT["messages"], resumable=True)
        await stream.__aenter__()
        job = await house.engine.job()
        await (stream.aclose() if how == "leave" else client.close())
        await asyncio.wait_for(job.cancelled.wait(), 1)
        await client.close()
        await house.engine.empty()
