"""The WebSocket door: many responses at once over one socket, as OpenAI's Responses events.

A client sends ``response.create``, ``response.cancel`` and ``response.resume``. Responses of one ``stream_id`` run one
after the other, those of different ones side by side. Every cancel is acknowledged: by the terminal event of what it
ended, or by an ``error`` event where there was nothing to end. When the socket closes, its responses are cancelled, but
for the ``resumable`` ones: those wait a while for a ``response.resume`` over another one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass

from aiohttp import WSCloseCode, WSMsgType, web

from baton.engine.desk import NOT_FOUND
from baton.engine.effects import Keep
from baton.frontends import origin, parameters, traceparent
from baton.frontends.errors import Refused, bad_request
from baton.frontends.fields import Fields, Shape
from baton.frontends.keeping import RESPONSES, checked_key, keep, response_request_id
from baton.frontends.metrics import Metrics
from baton.frontends.reception import Reception
from baton.frontends.responses import ResponseEvents, error_event, tokens_before
from baton.frontends.stream import Stream
from baton.frontends.validate import GenerateRequest, Validator
from baton.ipc.frames import Failure
from baton.workers.config import Settings

log = logging.getLogger("baton.websocket")

ROUTE = "/v1/responses"

ENVELOPE = Shape("Envelope", (*parameters.ENVELOPE, "response"))

#: finished responses that a late cancel is told about by name
_FINISHED_MAX = 1024
#: so much may wait for the end of a turn of the loop
_TURN_BYTES_MAX = 16 << 10
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
        except Exception as error:
            if not _gone(error):
                log.exception("a connection failed")
                await socket.close(code=WSCloseCode.INTERNAL_ERROR)
        finally:
            self.sockets.discard(socket)
        return socket

    async def close(self) -> None:
        """Tell the clients that the server goes away."""
        going = [socket.close(code=WSCloseCode.GOING_AWAY, message=b"shutting down") for socket in self.sockets]
        await asyncio.gather(*going, return_exceptions=True)


def _gone(error: Exception) -> bool:
    """Whether all that went wrong is that the client left."""
    rest = error.split(ConnectionError)[1] if isinstance(error, ExceptionGroup) else error
    return rest is None or isinstance(rest, ConnectionError)


def text_frame(text: bytes) -> bytes:
    """A whole message from a server (RFC 6455, section 5.2): FIN, opcode 1, the length in one of three widths."""
    length = len(text)
    if length < 126:
        return b"\x81%c%b" % (length, text)
    if length < 1 << 16:
        return b"\x81\x7e%b%b" % (length.to_bytes(2, "big"), text)
    return b"\x81\x7f%b%b" % (length.to_bytes(8, "big"), text)


class _Socket(web.WebSocketResponse):
    """Says the limit when it closes on a message above it."""

    async def close(self, *, code: int = WSCloseCode.OK, message: bytes = b"", drain: bool = True) -> bool:
        if code == WSCloseCode.MESSAGE_TOO_BIG and not message:
            message = b"messages may have at most %d bytes" % self._max_msg_size
        return await super().close(code=code, message=message, drain=drain)


@dataclass(slots=True)
class _Job:
    """One response of a connection: a new one (``request``), or one that is taken up again after event ``after``.

    ``stream`` is there once it is its turn, ``events`` once it is known which response it is: at once, unless kept.
    """

    request: GenerateRequest | None
    request_id: bytes
    received_ns: int
    parent: bytes | None
    stream_id: str | None
    lane: str | bytes | None
    keep: Keep | None = None
    after: int = -1
    events: ResponseEvents | None = None
    stream: Stream | None = None
    cancelled: bool = False

    @property
    def id(self) -> str:
        """The response's id, as far as it is known."""
        return "resp_" + self.request_id.hex()


class _Connection:
    """One socket. Invariant: the first job of each lane has a task, the others wait; ``jobs`` are all of them."""

    def __init__(self, door: WebSocketDoor, request: web.Request, socket: _Socket) -> None:
        self.door = door
        self.request = request
        self.socket = socket
        self.parent = traceparent.of_headers(request.headers.getall("traceparent", []))
        self.jobs: dict[str, _Job] = {}
        self.lanes: dict[str | bytes | None, deque[_Job]] = {}
        self.finished: OrderedDict[str, None] = OrderedDict()
        self.tasks = asyncio.TaskGroup()
        self.running: set[asyncio.Task[None]] = set()
        self._frames: list[bytes] = []  # of this turn of the loop
        self._frames_bytes = 0

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
            envelope.text("event_id", self.door.limits.label_chars_max)  # the client's own label
            if kind not in parameters.REFUSED_IN_MESSAGE:
                raise bad_request("type must be response.create, response.resume or response.cancel", "type")
            envelope.refuse(parameters.REFUSED_IN_MESSAGE[kind])
            if kind == "response.create":
                await self._create(envelope, body, stream_id)
                return
            envelope.refuse_unknown(parameters.FOREIGN)
            if kind == "response.resume":
                self._resume(envelope, response_id)
            else:
                await self._cancel(response_id, stream_id)
        except Refused as refused:
            self.door.metrics.refused("websocket", refused.failure.status)
            await self._send(error_event(refused.failure, response_id, stream_id))

    async def _create(self, envelope: Fields, body: bytes, stream_id: str | None) -> None:
        door, limits = self.door, self.door.limits
        received_ns = door.reception.now_ns()
        key = checked_key(envelope.text("idempotency_key", limits.label_chars_max), "idempotency_key")
        whole = "response" if "response" in envelope else None
        if whole:
            envelope.refuse_unknown(parameters.INSIDE)
        said = envelope.raws["response"] if whole else body
        request = door.validator.response(said, whole, socket=True)
        if request.ignored:
            door.metrics.ignored("websocket", len(request.ignored))
        header = envelope.text("traceparent", limits.label_chars_max)
        parent = self.parent if header is None else traceparent.parse(header)
        request_id, created = door.reception.new_id(key), int(time.time())
        kept = keep(request, RESPONSES, said, key, created, stream_id)
        job = _Job(request, request_id, received_ns, parent, stream_id, stream_id, kept)
        first = self._add(job)
        if kept is None:
            job.events = ResponseEvents(request_id, stream_id, request, created)
            await self._send_all(job.events.begin(queued=not first))
        if first:
            self._begin(job)

    def _resume(self, envelope: Fields, response_id: str | None) -> None:
        """Take up a kept response where another connection lost it; it waits for no other of its stream."""
        if response_id is None:
            raise bad_request("response_id is required", "response_id")
        request_id = response_request_id(response_id)
        if response_id in self.jobs:
            open_ = Failure(409, "invalid_request_error", "the response is open here", "response_id", "response_open")
            raise Refused(open_)
        after = envelope.integer("starting_after", -1, None)
        received_ns = self.door.reception.now_ns()
        job = _Job(None, request_id, received_ns, None, None, request_id, after=-1 if after is None else after)
        if self._add(job):
            self._begin(job)

    def _add(self, job: _Job) -> bool:
        """Take a job in; whether it is the first of its lane. Others are run by the task of the first."""
        most = self.door.limits.streams_per_connection_max
        if len(self.jobs) >= most:
            full = f"{most} responses are open on this connection, which is the limit"
            raise Refused(Failure(429, "rate_limit_error", full, None, "too_many_streams"))
        self.jobs[job.id] = job
        lane = self.lanes.setdefault(job.lane, deque())
        lane.append(job)
        return len(lane) == 1

    def _begin(self, job: _Job) -> None:
        task = self.tasks.create_task(self._run_lane(job.lane, self.lanes[job.lane]))
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    async def _cancel(self, response_id: str | None, stream_id: str | None) -> None:
        if response_id is None and stream_id is None:
            raise bad_request("response_id or stream_id is required", "response_id")
        named = (
            self.jobs.values() if response_id is None else [self.jobs[response_id]] if response_id in self.jobs else []
        )
        jobs = [job for job in named if stream_id in (None, job.stream_id)]
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
            elif job is not self.lanes[job.lane][0]:
                self.lanes[job.lane].remove(job)
                self._forget(job)
                await self._never_started(job)

    async def _never_started(self, job: _Job) -> None:
        """A response that was cancelled while it waited ends, and begins before that if its client has no id for it."""
        events = job.events
        if events is None:
            assert job.request is not None
            events = ResponseEvents(job.request_id, job.stream_id, job.request, int(time.time()))
            await self._send_all(events.begin(queued=True))
        await self._send_all(events.never_started())

    async def _run_lane(self, name: str | bytes | None, lane: deque[_Job]) -> None:
        """The responses of one stream id, one after the other."""
        with suppress(ConnectionError):  # the reader hears of it too, and ends the connection
            while lane:
                try:
                    await self._run(lane[0])
                except Refused as refused:
                    self.door.metrics.refused("websocket", refused.failure.status)
                    job = lane[0]
                    await self._send(
                        error_event(refused.failure, job.id if job.request is None else None, job.stream_id)
                    )
                self._forget(lane.popleft())
            del self.lanes[name]

    async def _run(self, job: _Job) -> None:
        """One response, from its opening to its end. Raises ``Refused`` where no response came about."""
        with self._open(job) as stream:
            job.stream = stream
            if job.cancelled:
                stream.cancel()
            try:
                await stream.named()
                events = job.events or await self._name(job, stream)
            except Refused:
                stream.answered()
                raise
            with suppress(Refused):  # its terminal event tells why
                await stream.begin()
                await self._send_all(events.admitted())
                await stream.flow(lambda delta: self._write(events.delta(delta)), self.request.writer.drain)
            assert stream.final is not None
            await self._send_all(events.finish(stream.final, again=True))  # who resumed is never left waiting
            stream.answered()

    def _open(self, job: _Job) -> Stream:
        transport = self.request.transport
        if transport is None:
            raise ConnectionResetError("the client left")
        reception = self.door.reception
        if job.request is None:
            return reception.attach(job.request_id, tokens_before(job.after), transport.abort)
        attributes: dict[str, str | int | float | bool] = {
            "baton.door": "websocket",
            "http.route": ROUTE,
            "baton.stream_id": job.stream_id or "",
        }
        return reception.open(
            job.request, job.parent, job.received_ns, attributes, job.request_id, transport.abort, job.keep
        )

    async def _name(self, job: _Job, stream: Stream) -> ResponseEvents:
        """A kept response is known by now; it may be that of an earlier request."""
        memo = stream.memo
        if memo is None or memo.endpoint != RESPONSES:
            raise Refused(NOT_FOUND)
        del self.jobs[job.id]
        job.request_id = stream.id
        self.jobs[job.id] = job
        if job.request is None:
            job.stream_id = memo.stream_id
        before = (stream.start, stream.text_before, stream.scores_before)
        events = ResponseEvents(stream.id, job.stream_id, memo.request, memo.created, job.after, *before)
        events.check(await stream.ended_before(tokens_before(job.after)), stream.began)
        job.events = events
        await self._send_all(events.begin(queued=False))
        return events

    def _write(self, events: list[bytes]) -> bool:
        """Events of one of the streams, to be written with those of the others in one system call at the end of the
        turn; whether the client keeps up. What is large is written at once: only then is it known what the socket took.
        """
        transport = self.request.transport
        if transport is None or transport.is_closing() or self.socket.closed:
            raise ConnectionResetError("the client is gone")
        if events and not self._frames:
            self.door.reception.loop.call_soon(self._flush)
        self._frames += map(text_frame, events)
        self._frames_bytes += sum(map(len, events))
        if self._frames_bytes > _TURN_BYTES_MAX:
            self._flush()
        return not self.request.protocol.writing_paused

    def _flush(self) -> None:
        frames, self._frames, self._frames_bytes = self._frames, [], 0
        transport = self.request.transport
        if frames and transport is not None and not transport.is_closing() and not self.socket.closed:
            transport.write(b"".join(frames))

    async def _send_all(self, events: list[bytes]) -> None:
        for event in events:
            await self._send(event)

    async def _send(self, event: bytes) -> None:
        self._flush()  # what was said before goes before
        await self.socket.send_frame(event, WSMsgType.TEXT)

    def _forget(self, job: _Job) -> None:
        self.jobs.pop(job.id, None)
        self.finished[job.id] = None
        if len(self.finished) > _FINISHED_MAX:
            self.finished.popitem(last=False)
