"""The same load through each of Baton's three doors: so many streams at a time, one request after the other on each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import perf_counter

import msgspec

from baton import AsyncClient
from baton.frontends.client import BatonError
from baton.ops.bench.load import Plan, drive
from baton.ops.bench.server import Running
from baton.ops.bench.stream import Outcome
from baton.ops.bench.websocket import WebSocket
from baton.ops.http import target

WEBSOCKET_PATH = "/v1/responses"
REQUEST_S_MAX = 120.0
#: streams that share one connection, where a door carries many
STREAMS_PER_SOCKET = 16


@dataclass(slots=True)
class Count:
    """What came through a door; tokens are the server's own count, deltas what carried text."""

    requests: int = 0
    failed: int = 0
    tokens: int = 0
    deltas: int = 0
    error: str = ""

    def fail(self, error: str) -> None:
        """One request more that failed; the first error is kept as an example."""
        self.failed += 1
        self.error = self.error or error


@dataclass(frozen=True, slots=True)
class Load:
    """How many streams, how long their answers, and for how many seconds requests are started."""

    streams: int
    output_tokens: int
    prompt_tokens: int
    seconds: float


async def over_http(running: Running, load: Load) -> Count:
    """Server-sent events, one connection a request."""
    count = Count()
    plan = Plan(
        model=running.model,
        concurrency=load.streams,
        requests=None,
        seconds=load.seconds,
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        vocabulary=range(1000, 20000),
        text=None,
        ignore_eos=True,
        timeout_s=REQUEST_S_MAX,
        seed=0,
    )

    def ended(outcome: Outcome) -> None:
        if outcome.error is not None:
            count.fail(outcome.error)
            return
        count.requests += 1
        count.tokens += outcome.tokens
        count.deltas += outcome.deltas

    await drive(target(running.url), plan, ended)
    return count


class Used(msgspec.Struct):
    """A response's own count."""

    output_tokens: int = 0


class Response(msgspec.Struct):
    """A response object, as far as it matters here."""

    status: str = ""
    usage: Used | None = None


class Event(msgspec.Struct):
    """An event of the WebSocket door, as far as it matters here."""

    type: str
    stream_id: str | None = None
    response: Response | None = None


class SocketStreams:
    """Streams on one WebSocket; the answer to each is a future its stream waits for."""

    def __init__(self, count: Count) -> None:
        self.count = count
        self.why = ""
        self.answers: dict[str, asyncio.Future[Response | None]] = {}
        self._decoder = msgspec.json.Decoder(Event)

    def heard(self, text: bytes) -> None:
        """Count a delta, or end the stream whose response is over."""
        event = self._decoder.decode(text)
        if event.type == "response.output_text.delta":
            self.count.deltas += 1
        elif event.type in ("response.completed", "response.incomplete", "response.failed", "error"):
            if event.type in ("response.failed", "error"):
                self.why = text[:300].decode(errors="replace")
            answer = self.answers.pop(event.stream_id or "", None)
            if answer is not None and not answer.done():
                answer.set_result(event.response if event.type != "error" else None)

    def lost(self, why: str) -> None:
        """No answer will come any more."""
        self.why = why
        for answer in self.answers.values():
            if not answer.done():
                answer.set_result(None)
        self.answers.clear()


async def over_websocket(running: Running, load: Load) -> Count:
    """Several sockets with several streams each."""
    count, where = Count(), target(running.url)
    loop, deadline = asyncio.get_running_loop(), perf_counter() + load.seconds
    body = {
        "type": "response.create",
        "model": running.model,
        "input": "word " * load.prompt_tokens,
        "max_output_tokens": load.output_tokens,
        "ignore_eos": True,
    }

    async def stream(socket: WebSocket, streams: SocketStreams, name: str) -> None:
        text = msgspec.json.encode(body | {"stream_id": name})
        while perf_counter() < deadline and not socket.closed:
            answer = streams.answers[name] = loop.create_future()
            socket.send(text)
            async with asyncio.timeout(REQUEST_S_MAX):
                response = await answer
            if response is None or response.usage is None or response.status == "failed":
                count.fail(streams.why)
                continue
            count.requests += 1
            count.tokens += response.usage.output_tokens

    sockets = []
    try:
        async with asyncio.TaskGroup() as group:
            for first in range(0, load.streams, STREAMS_PER_SOCKET):
                streams = SocketStreams(count)
                socket = WebSocket(where, WEBSOCKET_PATH, streams.heard, streams.lost)
                await socket.open()
                sockets.append(socket)
                for number in range(first, min(first + STREAMS_PER_SOCKET, load.streams)):
                    group.create_task(stream(socket, streams, f"s{number}"))
    finally:
        for socket in sockets:
            socket.close()
    return count


async def over_sdk(running: Running, load: Load) -> Count:
    """One client of the ZeroMQ SDK with all streams."""
    count, deadline = Count(), perf_counter() + load.seconds
    prompt = "word " * load.prompt_tokens

    async def stream(client: AsyncClient) -> None:
        while perf_counter() < deadline:
            answer = client.stream(
                prompt=prompt, max_tokens=load.output_tokens, ignore_eos=True, timeout_s=REQUEST_S_MAX
            )
            try:
                async with answer:
                    async for _ in answer:
                        count.deltas += 1
            except BatonError as error:
                count.fail(str(error))
                continue
            assert answer.usage is not None
            count.requests += 1
            count.tokens += answer.usage.completion_tokens

    async with AsyncClient(running.zmq) as client, asyncio.TaskGroup() as group:
        for _ in range(load.streams):
            group.create_task(stream(client))
    return count


DOORS: dict[str, Callable[[Running, Load], Awaitable[Count]]] = {
    "http": over_http,
    "websocket": over_websocket,
    "zmq": over_sdk,
}
