"""One connection of the SDK to one server, from hello to goodbye: a DEALER socket and the requests open on it.

It never reconnects: when it breaks, everything open on it hears so at once, and the client makes a new one for its next
request, or to go on with a resumable one. A server that died is noticed by its socket closing, one that hangs by its
silence.
"""

from __future__ import annotations

import asyncio
import os
from typing import Protocol

import zmq

from baton.frontends.client import wire
from baton.frontends.client.errors import BatonError, NotConnected, RequestFailed, SaidGoodbye
from baton.frontends.client.keys import ClientKeys
from baton.frontends.client.port import Port, Sent

_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 5000
_OUTBOX_MESSAGES_MAX = 4096
_LINGER_S = 0.2
#: practically never; but switching it off would throw away what the server said last
_RECONNECT_MS = 3_600_000
#: pings that may be missing before the server counts as hanging, and the least time that must be
_PINGS_MISSED_MAX = 10
_SILENCE_S_MIN = 5.0

_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Receiver(Protocol):
    """A request's end of the connection."""

    def began(self, began: wire.Began) -> None: ...
    def piece(self, piece: wire.Piece) -> None: ...
    def ended(self, ended: wire.Ended) -> None: ...
    def lost(self, error: BatonError, for_good: bool) -> None: ...


class Connection:
    """Invariant: a receiver registered here hears ``ended`` or ``lost`` exactly once, unless it closes first."""

    def __init__(self, address: str, keys: ClientKeys | None) -> None:
        self.address = address
        self.welcome: wire.Welcome | None = None
        self.error: BatonError | None = None
        self._loop = asyncio.get_running_loop()
        self._receivers: dict[int, Receiver] = {}
        self._taken: dict[int, int] = {}
        self._reported: dict[int, int] = {}
        self._tags = 0
        self._heard_s = self._loop.time()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._watch: asyncio.TimerHandle | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        try:
            _configure(socket, keys)
            monitor = socket.get_monitor_socket(_LOST)
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            self._context.destroy(linger=0)
            raise NotConnected(f"{address} is no address to connect to: {error.strerror}") from None
        self._monitor = Port(monitor, self._lost)
        self._port = Port(socket, self._received)

    async def open(self, timeout_s: float) -> wire.Welcome:
        """Say hello and wait for the answer. Raises ``NotConnected``."""
        self._send(wire.Hello(f"python/{os.getpid()}"))
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready
        except TimeoutError:
            self.fail(NotConnected(f"no answer from {self.address} within {timeout_s:g} s"))
        if self.error is not None:
            raise self.error
        assert self.welcome is not None
        self._watch_later()
        return self.welcome

    def generate(
        self,
        receiver: Receiver,
        operation: str,
        body: bytes,
        traceparent: str | None,
        idempotency_key: str | None,
        resumable: bool,
        choices: int = 1,
    ) -> int:
        """Send a request; returns its tag, that of the first of its choices. Raises ``NotConnected``, or
        ``RequestFailed`` where it is too large.
        """
        assert self.welcome is not None
        most = self.welcome.body_bytes_max
        if len(body) > most:
            message = f"the request is larger than {most} bytes"
            raise RequestFailed(wire.Problem(413, "invalid_request_error", message, None, "body_too_large"))
        tag = self._register(receiver, choices)
        self._send(wire.Generate(tag, operation, body, traceparent, idempotency_key, resumable))
        return tag

    def resume(self, receiver: Receiver, request_id: str, position: int) -> int:
        """Ask for what follows output token ``position`` of an earlier connection's request; returns its new tag."""
        tag = self._register(receiver)
        self._send(wire.Resume(tag, request_id, position))
        return tag

    def _register(self, receiver: Receiver, choices: int = 1) -> int:
        if self.error is not None:
            raise self.error
        first = self._tags + 1
        self._tags += choices
        self._receivers.update(dict.fromkeys(range(first, first + choices), receiver))
        return first

    def took(self, tag: int, position: int) -> None:
        """The application read up to ``position``. The server hears of it at its next ping, or after a good part of
        the stream's window.
        """
        assert self.welcome is not None
        if tag not in self._receivers:
            return
        self._taken[tag] = position
        if position - self._reported.get(tag, 0) >= self.welcome.report_tokens:
            self._report()

    def cancel(self, tag: int) -> None:
        """The application wants no more of this request: the server is told, and nothing is heard of it again."""
        if self._receivers.pop(tag, None) is not None and self.error is None:
            self._taken.pop(tag, None)
            self._reported.pop(tag, None)
            self._send(wire.Cancel(tag))

    def fail(self, error: BatonError, for_good: bool = False) -> None:
        """The connection is over: everything open on it fails, ``for_good`` also what could go on over another."""
        if self.error is not None:
            return
        self.error = error
        if self._watch is not None:
            self._watch.cancel()
        self._monitor.close()
        self._port.socket.disable_monitor()
        self._port.close(_LINGER_S)
        self._loop.run_in_executor(None, self._context.term)
        if not self._ready.done():
            self._ready.set_result(None)
        receivers, self._receivers = self._receivers, {}
        for receiver in dict.fromkeys(receivers.values()):
            receiver.lost(error, for_good)

    def close(self) -> None:
        """Say goodbye; the server cancels what is open."""
        if self.error is None:
            self._send(wire.Bye())
            self.fail(NotConnected("the client was closed"), for_good=True)

    # -------------------------------------------------------------------------------- what comes in

    def _received(self, parts: list[bytes]) -> None:
        self._heard_s = self._loop.time()
        try:
            message = wire.read_by_client(parts[-1])
        except wire.WireError as error:
            self.fail(NotConnected(f"{self.address}: {error}"))
            return
        match message:
            case wire.Update():
                self._update(message)
            case wire.Ping():
                self._report()
            case wire.Welcome():
                self.welcome = message
                if not self._ready.done():
                    self._ready.set_result(None)
            case wire.Goodbye():
                kind = SaidGoodbye if message.stopping else NotConnected
                self.fail(kind(f"{self.address}: {message.reason}"), for_good=True)

    def _update(self, message: wire.Update) -> None:
        receivers = self._receivers
        for began in message.began:
            if began.tag in receivers:
                receivers[began.tag].began(began)
        for piece in message.pieces:
            if piece.tag in receivers:
                receivers[piece.tag].piece(piece)
        for ended in message.ended:
            receiver = receivers.pop(ended.tag, None)
            self._taken.pop(ended.tag, None)
            self._reported.pop(ended.tag, None)
            if receiver is not None:
                receiver.ended(ended)

    def _lost(self, parts: list[bytes]) -> None:
        self._port.read()  # what the server said last
        self.fail(NotConnected(f"the connection to {self.address} broke or could not be made"))

    def _report(self) -> None:
        self._reported.update(self._taken)
        self._send(wire.Taken(self._taken))
        self._taken = {}

    def _send(self, message: wire.ToServer) -> None:
        if self._port.send([wire.encode(message)]) is not Sent.OK:
            self.fail(NotConnected(f"{self.address} takes no more messages"))

    def _watch_later(self) -> None:
        assert self.welcome is not None
        allowed_s = max(_SILENCE_S_MIN, _PINGS_MISSED_MAX * self.welcome.ping_s)
        self._watch = self._loop.call_later(allowed_s / 4, self._check, allowed_s)

    def _check(self, allowed_s: float) -> None:
        silence_s = self._loop.time() - self._heard_s
        if silence_s > allowed_s:
            self._send(wire.Bye())  # for when it wakes up
            self.fail(NotConnected(f"nothing was heard from {self.address} for {silence_s:.1f} s"))
        else:
            self._watch_later()


def _configure(socket: zmq.Socket[bytes], keys: ClientKeys | None) -> None:
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.SNDHWM, _OUTBOX_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, _OUTBOX_MESSAGES_MAX)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
