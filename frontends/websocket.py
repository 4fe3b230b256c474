"""The WebSocket door: many responses at once over one socket, as OpenAI's Responses events.

A client sends ``response.create`` and ``response.cancel``. Responses of one ``stream_id`` run one after the other,
those of different ones side by side. Every cancel is acknowledged: by the terminal event of what it ended, or by an
``error`` event where there was nothing to end. When the socket closes, all its responses are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass

from aiohttp import WSCloseCode, WSMsgType, web

from baton.frontends import origin, parameters, traceparent
from baton.frontends.errors import Refused, bad_request
from baton.frontends.fields import Fields, Shape
from baton.frontends.metrics import Metrics
from baton.frontends.responses import ResponseEvents, error_event
from baton.frontends.stream import Reception, Stream, new_id
from baton.frontends.validate import GenerateRequest, Validator
from baton.ipc.frames import Failure
from baton.workers.config import Settings

log = logging.getLogger("baton.websocket")

ROUTE = "/v1/responses"

ENVELOPE = Shape("Envelope", (*parameters.ENVELOPE, "response"))

#: finished responses that a late cancel is told about by name
_FINISHED_MAX = 1024
#: how long a client may take to answer a close
_CLOSE_S_MAX = 1.0


class WebSocketDoor:
    """What the connections share."""

    def __init__(self, reception: Reception, settings: Settings, metrics: Metrics) -> None:
        self.reception = reception
        self.limits = settings.limits
        self.origins = settings.origins
        self.metrics = metrics
        self.validator = Validator(reception.card, self.limits)
        self.sockets: set[_Socket] = set()

    def routes(self) -> list[web.RouteDef]:
        """For the application of the HTTP door."""
        return [web.get(ROUTE, self.serve)]

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        """One connection, from upgrade to close."""
        if not origin.allowed(request.headers.get("Origin"), request.host, self.origins):
            foreign = "pages of this origin may not use this server"
            raise Refused(Failure(403, "invalid_request_error", foreign, None, "origin_not_allowed"))
        socket = _Socket(
            compress=False,
            max_msg_size=self.limits.body_bytes_max,
            writer_limit=1,
            heartbeat=2 * self.limits.stalled_s_max,
            timeout=_CLOSE_S_MAX,
        )
        await socket.prepare(request)
        self.sockets.add(socket)
        try:
            await _Connection(self, request, socket).run()
        except Exception:
            log.exception("a connection failed")
            await socket.close(code=WSCloseCode.INTERNAL_ERROR)
        finally:
            self.sockets.discard(socket)
        return socket

    async def close(self) -> None:
        """Tell the clients that the server goes away."""
        going = [socket.close(code=WSCloseCode.GOING_AWAY, message=b"shutting down") for socket in self.sockets]
        await asyncio.gather(*going, return_exceptions=True)


class _Socket(web.WebSocketResponse):
    """Says the limit when it closes on a message above it."""

    async def close(self, *, code: int = WSCloseCode.OK, message: bytes = b"", drain: bool = True) -> bool:
        if code == WSCloseCode.MESSAGE_TOO_BIG and not message:
            message = b"messages may have at most %d bytes" % self._max_msg_size
        return await super().close(code=code, message=message, drain=drain)


@dataclass(slots=True)
class _Job:
    """One response of a connection. ``stream`` is there once it is its turn."""

    request: GenerateRequest
    request_id: bytes
    received_ns: int
    parent: bytes | None
    events: ResponseEvents
    stream: Stream | None = None
    cancelled: bool = False


class _Connection:
    """One socket. Invariant: the first job of each lane has a task, the others wait; ``jobs`` are all of them."""

    def __init__(self, door: WebSocketDoor, request: web.Request, socket: _Socket) -> None:
        self.door = door
        self.request = request
        self.socket = socket
        self.parent = traceparent.of_headers(request.headers.getall("traceparent", []))
        self.jobs: dict[str, _Job] = {}
        self.lanes: dict[str | None, deque[_Job]] = {}
        self.finished: OrderedDict[str, None] = OrderedDict()
        self.tasks = asyncio.TaskGroup()
        self.running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the socket closes; then whatever still runs is cancelled."""
        async with self.tasks:
            try:
                await self._read()
            finally:
                for task in self.running:
                    task.cancel()

    async def _read(self) -> None:
        while True:
            message = await self.socket.receive()
            if message.type is WSMsgType.TEXT:
                await self._message(message.data.encode())
            elif message.type is WSMsgType.BINARY:
                await self._message(message.data)
            else:
                return

    async def _message(self, body: bytes) -> None:
        stream_id = response_id = None
        try:
            envelope = ENVELOPE.read(body)
            stream_id = envelope.text("stream_id", self.door.limits.label_chars_max)
            response_id = envelope.text("response_id", self.door.limits.label_chars_max)
            kind = envelope.text("type", self.door.limits.label_chars_max)
            if kind == "response.create":
                await self._create(envelope, body, stream_id)
            elif kind == "response.cancel":
                await self._cancel(response_id, stream_id)
            else:
                raise bad_request("type must be response.create or response.cancel", "type")
        except Refused as refused:
            self.door.metrics.refused("websocket", refused.failure.status)
            await self._send(error_event(refused.failure, response_id, stream_id))

    async def _create(self, envelope: Fields, body: bytes, stream_id: str | None) -> None:
        received_ns = self.door.reception.now_ns()
        if "response" in envelope:
            request = self.door.validator.response(envelope.raws["response"], "response")
        else:
            request = self.door.validator.response(body)
        if request.ignored:
            self.door.metrics.ignored("websocket", len(request.ignored))
        most = self.door.limits.streams_per_connection_max
        if len(self.jobs) >= most:
            full = f"{most} responses are open on this connection, which is the limit"
            raise Refused(Failure(429, "rate_limit_error", full, None, "too_many_streams"))
        header = envelope.text("traceparent", self.door.limits.label_chars_max)
        parent = self.parent if header is None else traceparent.parse(header)
        request_id = new_id()
        events = ResponseEvents(request_id, stream_id, request, int(time.time()))
        job = _Job(request, request_id, received_ns, parent, events)
        lane = self.lanes.setdefault(stream_id, deque())
        first = not lane
        lane.append(job)
        self.jobs[events.id] = job
        await self._send(events.begin(queued=not first))
        if first:
            task = self.tasks.create_task(self._run_lane(stream_id, lane))
            self.running.add(task)
            task.add_done_callback(self.running.discard)

    async def _cancel(self, response_id: str | None, stream_id: str | None) -> None:
        if response_id is None and stream_id is None:
            raise bad_request("response_id or stream_id is required", "response_id")
        if response_id is not None:
            jobs = [self.jobs[response_id]] if response_id in self.jobs else []
        else:
            jobs = list(self.lanes.get(stream_id, ()))
        if not jobs:
            if response_id in self.finished:
                over = Failure(409, "invalid_request_error", "the response is over", "response_id", "response_finished")
                raise Refused(over)
            name = "stream_id" if response_id is None else "response_id"
            raise Refused(Failure(404, "invalid_request_error", "no such response", name, "response_not_found"))
        for job in jobs:
            job.cancelled = True
            if job.stream is not None:
                job.stream.cancel()
            elif job is not self.lanes[job.events.stream_id][0]:
                self.lanes[job.events.stream_id].remove(job)
                self._forget(job)
                await self._send(job.events.never_started())

    async def _run_lane(self, stream_id: str | None, lane: deque[_Job]) -> None:
        """The responses of one stream id, one after the other."""
        with suppress(ConnectionError):  # the reader hears of it too, and ends the connection
            while lane:
                await self._run(lane[0])
                self._forget(lane.popleft())
            del self.lanes[stream_id]

    async def _run(self, job: _Job) -> None:
        door, events = self.door, job.events
        attributes: dict[str, str | int | float | bool] = {
            "baton.door": "websocket",
            "http.route": ROUTE,
            "baton.stream_id": events.stream_id or "",
        }
        transport = self.request.transport
        if transport is None:
            raise ConnectionResetError("the client left")
        reception = door.reception
        with reception.open(
            job.request, job.parent, job.received_ns, attributes, job.request_id, transport.abort
        ) as stream:
            job.stream = stream
            if job.cancelled:
                stream.cancel()
            with suppress(Refused):  # its terminal event tells why
                await stream.begin()
                for event in events.admitted():
                    await self._send(event)
                async for delta in stream:
                    text = delta.text
                    if text:
                        await self._send(events.delta(text))
                    stream.took(delta.position)
            assert stream.final is not None
            for event in events.finish(stream.final):
                await self._send(event)
            stream.answered()

    async def _send(self, event: bytes) -> None:
        await self.socket.send_frame(event, WSMsgType.TEXT)

    def _forget(self, job: _Job) -> None:
        del self.jobs[job.events.id]
        self.finished[job.events.id] = None
        if len(self.finished) > _FINISHED_MAX:
            self.finished.popitem(last=False)
