"""The same load through each of Baton's three doors: so many streams at a time, one request after the other on each."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from time import perf_counter
from typing import cast

import msgspec

from baton import AsyncClient
from baton.frontends.client import BatonError
from baton.ops.bench.server import Running
from baton.ops.bench.stream import shown
from baton.ops.bench.websocket import WebSocket
from baton.ops.http import target

WEBSOCKET_PATH = "/v1/responses"
REQUEST_S_MAX = 120.0
VOCABULARY = range(1000, 20000)
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


class Events(asyncio.Protocol):
    """One streamed completion, counted and hardly read: what a client costs is taken from the server it measures.

    A delta cut in two by the network would not be counted; they are far smaller than what is read at a time.
    """

    DELTA, DONE = b'"finish_reason":null', b"data: [DONE]"
    USAGE = re.compile(rb'"completion_tokens":(\d+)')
    TAIL_BYTES = 2048

    def __init__(self, request: bytes) -> None:
        self.deltas = 0
        self.head = self.tail = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request

    @property
    def tokens(self) -> int | None:
        """The server's own count; None where it did not come to that."""
        found = self.USAGE.findall(self.tail)
        return int(found[-1]) if found and self.DONE in self.tail else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        cast(asyncio.Transport, transport).write(self._request)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        """Count, and keep the end."""
        self.deltas += data.count(self.DELTA)
        self.head = self.head or data
        self.tail = data if len(data) > self.TAIL_BYTES else (self.tail + data)[-self.TAIL_BYTES :]

    def connection_lost(self, exc: Exception | None) -> None:
        """The server closes behind its answer."""
        if not self.done.done():
            self.done.set_result(None)


async def over_http(running: Running, load: Load) -> Count:
    """Server-sent events, one connection a request."""
    count, where, draw = Count(), target(running.url), Random(0)
    loop, deadline = asyncio.get_running_loop(), perf_counter() + load.seconds
    body = {
        "model": running.model,
        "max_tokens": load.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }

    async def stream() -> None:
        while perf_counter() < deadline:
            prompt = draw.choices(VOCABULARY, k=load.prompt_tokens)
            request = where.request("POST", "/v1/completions", msgspec.json.encode(body | {"prompt": prompt}))
            async with asyncio.timeout(REQUEST_S_MAX):
                transport, events = await loop.create_connection(partial(Events, request), where.host, where.port)
                await events.done
            transport.close()
            if events.tokens is None:
                count.fail(shown(events.head))
                continue
            count.requests += 1
            count.tokens += events.tokens
            count.deltas += events.deltas

    async with asyncio.TaskGroup() as group:
        for _ in range(load.streams):
            group.create_task(stream())
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
