"""What leaves in one turn of the loop: frames of several streams in one write, whole and in order, without delay."""

from __future__ import annotations

import asyncio
import json
import socket

import aiohttp
import pytest
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from baton.frontends import websocket
from baton.frontends.websocket import text_frame
from tests.frontends.conftest import House
from tests.frontends.double import play


@pytest.mark.parametrize("length", [0, 1, 125, 126, 0xFFFF, 0x10000])
def test_a_frame_is_read_by_an_independent_reader(length: int) -> None:
    reader = ClientProtocol(parse_uri("ws://127.0.0.1/"), max_size=None)
    reader.state = reader.state.OPEN
    reader.parser = reader.parse()  # behind the handshake
    next(reader.parser)
    reader.receive_data(text_frame(b"x" * length) + text_frame(b"after"))
    frames = [event for event in reader.events_received() if isinstance(event, Frame)]
    assert [(frame.opcode, frame.fin, bytes(frame.data)) for frame in frames] == [
        (Opcode.TEXT, True, b"x" * length),
        (Opcode.TEXT, True, b"after"),
    ]


async def test_what_the_streams_of_a_socket_say_in_one_turn_leaves_in_one_write(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[int] = []
    flush = websocket._Connection._flush

    def counted(self: websocket._Connection) -> None:
        if self._frames:
            writes.append(len(self._frames))
        flush(self)

    monkeypatch.setattr(websocket._Connection, "_flush", counted)
    async with house.client.ws_connect(house.places["websocket"]) as client:

        async def event() -> dict[str, object]:
            found: dict[str, object] = json.loads(await asyncio.wait_for(client.receive_str(), 5))
            return found

        jobs = []
        for name in "abc":
            await client.send_json({"type": "response.create", "model": "model-1", "input": "hi", "stream_id": name})
            jobs.append((await house.engine.job()).admit())
        for _ in range(4 * len(jobs)):
            await event()
        for job in jobs:
            job.say("one", " two")
        said = [await event() for _ in jobs]
        assert [(one["stream_id"], one["delta"]) for one in said] == [(name, "one two") for name in "abc"]
        assert writes == [3]
        for job in jobs:  # the end does not overtake what was said in its turn
            job.say(" three").finish()
        rest = [await event() for _ in range(5 * len(jobs))]
        for name in "abc":
            own = [one for one in rest if one["stream_id"] == name]
            assert own[0]["delta"] == " three" and own[-1]["type"] == "response.completed"
    await house.engine.empty()


@pytest.mark.parametrize("version", [aiohttp.HttpVersion10, aiohttp.HttpVersion11])
async def test_the_body_is_whole_however_it_is_framed(house: House, version: aiohttp.HttpVersion) -> None:
    house.engine.on_submit = play("a", "b" * 40_000, "c")
    body = {"model": "model-1", "prompt": "hi", "stream": True}
    async with (
        asyncio.timeout(10),  # not when an idle connection is closed
        aiohttp.ClientSession(version=version) as client,
        client.post(house.url + "/v1/completions", json=body) as answer,
    ):
        assert answer.headers.get("Transfer-Encoding") == ("chunked" if version == aiohttp.HttpVersion11 else None)
        events = (await answer.text()).removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a" + "b" * 40_000 + "c"


async def test_nothing_waits_for_more_on_a_clients_connection(house: House) -> None:
    async with house.client.get(house.url + "/health"):
        assert house.doors._runner is not None and house.doors._runner.server is not None
        (connection,) = house.doors._runner.server.connections
        assert connection.transport is not None
        own = connection.transport.get_extra_info("socket")
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
