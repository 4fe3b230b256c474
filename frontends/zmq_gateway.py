"""The ZeroMQ door: the SDK's requests in, their output out, many streams of one client in one message a step.

A ROUTER does not report a lost peer, but with ``ROUTER_MANDATORY`` a message to one fails: every client is pinged
several times a second, so a killed one is noticed by the next ping at the latest, and all its requests are cancelled.
Nothing here waits: a client whose pipe is full keeps what is new for it in one merged update, whose size is bounded by
the credit of its streams.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace

import zmq
from zmq.utils import z85

import baton
from baton.engine.effects import Keep
from baton.frontends import traceparent
from baton.frontends.client import wire
from baton.frontends.client.keys import ServerKeys
from baton.frontends.client.port import Port, Sent
from baton.frontends.errors import Refused, bad_request, failure_of, retry_after_s
from baton.frontends.keeping import checked_key, keep, request_id_of
from baton.frontends.metrics import Metrics
from baton.frontends.reception import Reception
from baton.frontends.stream import Delta, Stream
from baton.frontends.validate import GenerateRequest, Validator
from baton.ipc.frames import Candidate, Failure, PromptScored, Scored

log = logging.getLogger("baton.zmq")

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ENVELOPE_BYTES_MAX = 1 << 16
_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 5000


def socket_name(index: int) -> str:
    """The door of a frontend in the run directory; the SDK takes any that is there."""
    return f"client-{index}.sock" if index else "client.sock"


class Gateway:
    """The door. Invariant: every client in ``clients`` said hello and was reachable at the last ping."""

    def __init__(self, reception: Reception, metrics: Metrics) -> None:
        self.reception = reception
        self.limits = reception.limits
        self.metrics = metrics
        self.validator = Validator(reception.card, self.limits)
        self.clients: dict[bytes, _Client] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._port: Port | None = None
        self._guard: Port | None = None
        self._pinger: asyncio.TimerHandle | None = None

    def start(self, address: str, keys: ServerKeys | None) -> str:
        """Bind and listen; returns the address bound. OSError says why that is impossible."""
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, self.limits.client_outbox_messages_max)
        socket.setsockopt(zmq.MAXMSGSIZE, self.limits.body_bytes_max + _ENVELOPE_BYTES_MAX)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            self._guard = self._admit_only(keys)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close()
            self.stop()
            raise OSError(error.errno, error.strerror) from None
        self._port = Port(socket, self._received)
        self._ping_later()
        bound = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return bound.rstrip(b"\0").decode()

    def stop(self) -> None:
        """Tell the clients, cancel what is open, and close."""
        for client in list(self.clients.values()):
            client.goodbye("the server is shutting down", stopping=True)
        if self._pinger is not None:
            self._pinger.cancel()
        if self._port is not None:
            self._port.close(linger_s=0.1)
        if self._guard is not None:
            self._guard.close()
        self._context.term()

    def send(self, identity: bytes, message: wire.ToClient) -> Sent:
        """To one client, without waiting."""
        assert self._port is not None
        return self._port.send([identity, wire.encode(message)])

    def _admit_only(self, keys: ServerKeys) -> Port:
        """Answer libzmq's question whether a public key may connect (ZAP, RFC 27)."""
        allowed = {z85.decode(key) for key in keys.clients}
        socket = self._context.socket(zmq.REP)
        socket.bind(_ZAP_ADDRESS)

        def answer(parts: list[bytes]) -> None:
            version, number = parts[0], parts[1]
            status = b"200" if parts[5:7] in [[b"CURVE", key] for key in allowed] else b"400"
            port.send([version, number, status, b"", b"", b""])

        port = Port(socket, answer)
        return port

    def _received(self, parts: list[bytes]) -> None:
        identity, client = parts[0], self.clients.get(parts[0])
        try:
            if len(parts) != 2:
                raise wire.WireError("a message is one part")
            message = wire.read_by_server(parts[1])
            if isinstance(message, wire.Hello):
                client = self._hello(identity, message)
            if client is None:
                raise wire.WireError("the connection was closed; say hello again")
            client.received(message)
        except wire.WireError as error:
            self.send(identity, wire.Goodbye(str(error)))
            if client is not None:
                client.drop()

    def _hello(self, identity: bytes, message: wire.Hello) -> _Client:
        if identity in self.clients:
            raise wire.WireError("hello was said before")
        if len(self.clients) >= self.limits.connections_max:
            raise wire.WireError("too many clients are connected; try again later")
        client = _Client(self, identity)
        self.clients[identity] = client
        self.send(
            identity,
            wire.Welcome(
                server=baton.__version__,
                model=self.reception.card.name,
                report_tokens=self.reception.report_tokens,
                ping_s=self.limits.client_ping_s,
                body_bytes_max=self.limits.body_bytes_max,
                resume_s=self.limits.resume_s_max,
            ),
        )
        log.debug("client connected", extra={"client": message.client[: self.limits.label_chars_max]})
        return client

    def _ping_later(self) -> None:
        self._pinger = self.reception.loop.call_later(self.limits.client_ping_s, self._ping)

    def _ping(self) -> None:
        for client in list(self.clients.values()):
            client.ping()
        self._ping_later()


@dataclass(slots=True)
class _Job:
    """One request of a client; ``sent`` is the output position of the last piece for it."""

    tag: int
    stream: Stream
    task: asyncio.Task[None] | None = None
    sent: int = 0


class _Client:
    """One connected client, its open requests and what is new for it."""

    def __init__(self, gateway: Gateway, identity: bytes) -> None:
        self.gateway = gateway
        self.identity = identity
        self.heard_s = gateway.reception.loop.time()
        self.jobs: dict[int, _Job] = {}
        self.began: list[wire.Began] = []
        self.pieces: dict[int, wire.Piece] = {}
        self.ended: list[wire.Ended] = []
        self.flushing = False

    def received(self, message: wire.ToServer) -> None:
        """Carry out a message. Raises ``WireError`` where it breaks the protocol."""
        self.heard_s = self.gateway.reception.loop.time()
        match message:
            case wire.Generate():
                self._generate(message)
            case wire.Resume():
                self._resume(message)
            case wire.Taken():
                for tag, position in message.positions.items():
                    job = self.jobs.get(tag)
                    if job is not None:
                        job.stream.took(min(position, job.sent))
            case wire.Cancel():
                job = self.jobs.get(message.tag)
                if job is not None:
                    job.stream.cancel()
            case wire.Bye():
                self.drop(for_good=True)

    def _generate(self, message: wire.Generate) -> None:
        gateway, tag = self.gateway, message.tag
        received_ns = gateway.reception.now_ns()
        if tag in self.jobs:
            raise wire.WireError(f"tag {tag} is in use")
        try:
            request, kept = self._parse(message)
        except Refused as refused:
            self._refuse(tag, refused.failure)
            return
        if request.ignored:
            gateway.metrics.ignored("zmq", len(request.ignored))
        parent = traceparent.parse(message.traceparent)
        stream = gateway.reception.open(request, parent, received_ns, {"baton.door": "zmq"}, keep=kept)
        for choice, each in enumerate(stream.split()):
            self._serve_soon(_Job(tag + choice, each))

    def _resume(self, message: wire.Resume) -> None:
        tag = message.tag
        if tag in self.jobs:
            raise wire.WireError(f"tag {tag} is in use")
        try:
            self._check_room()
            request_id = request_id_of(message.request_id)
        except Refused as refused:
            self._refuse(tag, refused.failure)
            return
        stream = self.gateway.reception.attach(request_id, message.position)
        self._serve_soon(_Job(tag, stream, sent=message.position))

    def _serve_soon(self, job: _Job) -> None:
        self.jobs[job.tag] = job
        job.task = self.gateway.reception.loop.create_task(self._serve(job))

    def _refuse(self, tag: int, failure: Failure) -> None:
        self.gateway.metrics.refused("zmq", failure.status)
        self._end(wire.Ended(tag, "refused", None, 0, 0, _problem(failure)))

    def _check_room(self, more: int = 1) -> None:
        most = self.gateway.limits.streams_per_connection_max
        if len(self.jobs) + more > most:
            full = f"{most} requests are open on this connection, which is the limit"
            raise Refused(Failure(429, "rate_limit_error", full, None, "too_many_streams"))

    def _parse(self, message: wire.Generate) -> tuple[GenerateRequest, Keep | None]:
        self._check_room()
        key, validator = checked_key(message.idempotency_key, "idempotency_key"), self.gateway.validator
        if message.operation == "chat":
            request, endpoint = validator.chat(message.body), "chat.completions"
        elif message.operation == "text_completion":
            request, endpoint = validator.completion(message.body), "completions"
        else:
            raise bad_request("operation must be chat or text_completion", "operation")
        if request.best_of > request.n:
            why = "best_of above n is not known before the end: it cannot be streamed, and this door streams"
            raise bad_request(why, "best_of", "unsupported_parameter")
        self._check_room(request.n)
        if any(message.tag + choice in self.jobs for choice in range(request.n)):
            raise wire.WireError(f"a tag from {message.tag} on is in use: a request of {request.n} choices has as many")
        request = replace(request, resumable=message.resumable)
        return request, keep(request, endpoint, message.body, key, int(time.time()))

    async def _serve(self, job: _Job) -> None:
        stream, tag = job.stream, job.tag
        try:
            await stream.begin()
            request = stream.request
            prompt_ids = stream.prompt_ids if request.return_token_ids else []
            self.began.append(wire.Began(tag, stream.id.hex(), prompt_ids, request.ignored))
            self._flush_soon()
            await stream.pump(lambda delta: self._add(job, delta))
        except Refused:
            pass  # its end tells why
        finish = stream.final
        assert finish is not None
        failure = failure_of(finish)
        problem = None if failure is None else _problem(failure)
        used = finish.prompt_tokens, finish.completion_tokens
        told = [_prompt_scored(each) for each in finish.prompt_scores]
        self._end(wire.Ended(tag, finish.reason, finish.stop_reason, *used, problem, finish.cached_tokens, told))

    def _add(self, job: _Job, delta: Delta) -> bool:
        """More for the next message; how far the client is behind is for its own reports to say."""
        tag, job.sent = job.tag, delta.position
        waiting = self.pieces.get(tag)
        token_ids, texts, logprobs = delta.token_ids, delta.texts, delta.logprobs
        scores = [_scored(each) for each in delta.scores] if delta.scores else []
        if waiting is not None:
            token_ids = waiting.token_ids + token_ids
            texts = waiting.texts + texts
            logprobs = waiting.logprobs + logprobs
            scores = waiting.scores + scores
        self.pieces[tag] = wire.Piece(tag, delta.position, token_ids, texts, logprobs, delta.tail, scores)
        self._flush_soon()
        return True

    def _end(self, ended: wire.Ended) -> None:
        self.ended.append(ended)
        self._flush_soon()

    def _flush_soon(self) -> None:
        """One message for all streams that have something new in this turn of the loop."""
        if not self.flushing:
            self.flushing = True
            self.gateway.reception.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self.flushing = False
        if not (self.began or self.pieces or self.ended):
            return
        sent = self.gateway.send(self.identity, wire.Update(self.began, list(self.pieces.values()), self.ended))
        if sent is Sent.GONE:
            self.drop()
        elif sent is Sent.OK:
            told, self.began, self.pieces, self.ended = self.ended, [], {}, []
            for ended in told:
                job = self.jobs.pop(ended.tag, None)
                if job is not None:
                    job.stream.answered()

    def ping(self) -> None:
        """See whether the client is still there, and send what it had no room for."""
        silence_s = self.gateway.reception.loop.time() - self.heard_s
        if silence_s > self.gateway.limits.client_silence_s_max:
            self.goodbye("nothing was heard from you for too long")
        elif self.gateway.send(self.identity, wire.Ping()) is Sent.GONE:
            self.drop()
        else:
            self._flush()

    def goodbye(self, reason: str, stopping: bool = False) -> None:
        """End the connection from this side."""
        self.gateway.send(self.identity, wire.Goodbye(reason, stopping))
        self.drop()

    def drop(self, for_good: bool = False) -> None:
        """The client is gone: so are its requests, but for the resumable ones if it did not say goodbye."""
        if self.gateway.clients.pop(self.identity, None) is None:
            return
        for job in self.jobs.values():
            if job.task is not None:
                job.task.cancel()
            job.stream.gone(for_good)
        self.jobs.clear()
        self.began, self.pieces, self.ended = [], {}, []


def _scored(scored: Scored) -> wire.Scored:
    return wire.Scored(scored.piece, _candidates(scored.top))


def _prompt_scored(scored: PromptScored) -> wire.PromptScored:
    return wire.PromptScored(scored.token, scored.logprob, scored.piece, scored.rank, _candidates(scored.top))


def _candidates(found: list[Candidate]) -> list[wire.Candidate]:
    return [wire.Candidate(each.token, each.logprob, each.piece) for each in found]


def _problem(failure: Failure) -> wire.Problem:
    wait_s = retry_after_s(failure)
    return wire.Problem(failure.status, failure.kind, failure.message, failure.param, failure.code, wait_s)
