"""Links between processes: one PULL socket a process to be spoken to, one PUSH socket a peer to speak.

Both ends block rather than drop; what a socket does not take now waits here, in order and within a bound. Frames are
numbered for each pair of incarnations: a gap is an error. What does not decode is the peer's fault: counted, logged,
dropped. This is the only module of the engine that knows ZeroMQ.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from baton.engine.limits import Limits
from baton.ipc.frames import PROTOCOL_VERSION, Address, AnyFrame, Envelope, Role

Report = Callable[[str, str], None]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


class LinkGap(Exception):
    """A frame was lost between two living processes."""


class _Peer:
    """The speaking end of one link, with what its socket has not taken yet."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.fd = int(socket.getsockopt(zmq.FD))
        self.number = 0
        self.waiting: deque[bytes] = deque()


class Links:
    """All links of one process. Invariant: frames to a peer leave in the order they were sent."""

    def __init__(
        self,
        directory: Path,
        me: Address,
        limits: Limits,
        deliver: Callable[[AnyFrame], None],
        report: Report,
    ) -> None:
        self.directory = directory
        self.me = me
        self.limits = limits
        self.deliver = deliver
        self.report = report
        self.counts: Counter[str] = Counter()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._peers: dict[tuple[Role, int], _Peer] = {}
        self._heard: dict[tuple[Role, int], tuple[int, int]] = {}
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(limits.inbox_frames_max)
        self._inbox.setsockopt(zmq.MAXMSGSIZE, limits.frame_bytes_max)
        self._inbox.setsockopt(zmq.LINGER, 0)
        self._inbox.bind(self._address(me.role, me.index))
        self._loop = asyncio.get_running_loop()
        self._inbox_fd = int(self._inbox.getsockopt(zmq.FD))
        self._loop.add_reader(self._inbox_fd, self._receive)
        self._scheduled = False
        self._wake()

    def send(self, role: Role, index: int, frame: AnyFrame) -> None:
        """Send a frame; it leaves now or as soon as the peer takes it. Never blocks."""
        peer = self._peers.get((role, index)) or self._connect(role, index)
        peer.number += 1
        data = _encoder.encode(Envelope(PROTOCOL_VERSION, self.me, peer.number, frame))
        if not peer.waiting:
            try:
                peer.socket.send(data, zmq.DONTWAIT, copy=True)
                return
            except zmq.Again:
                self._loop.add_reader(peer.fd, self._flush, peer)
        peer.waiting.append(data)
        assert len(peer.waiting) <= self.limits.outbox_frames_max, f"{role.name}-{index} takes no frames"

    def close(self, linger_s: float = 0.0) -> None:
        """Close every socket; frames already handed over get ``linger_s`` to leave."""
        self._loop.remove_reader(self._inbox_fd)
        self._inbox.close()
        for peer in self._peers.values():
            self._loop.remove_reader(peer.fd)
            peer.socket.close(linger=int(linger_s * 1000))
        self._context.term()

    def _address(self, role: Role, index: int) -> str:
        return f"ipc://{self.directory}/{role.name.lower()}-{index}.sock"

    def _connect(self, role: Role, index: int) -> _Peer:
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(self.limits.inbox_frames_max)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 100)
        socket.connect(self._address(role, index))
        peer = self._peers[(role, index)] = _Peer(socket)
        return peer

    def _flush(self, peer: _Peer) -> None:
        """The socket's state changed: send what waits, as far as it is taken."""
        while peer.waiting:
            try:
                peer.socket.send(peer.waiting[0], zmq.DONTWAIT, copy=True)
            except zmq.Again:
                return
            peer.waiting.popleft()
        self._loop.remove_reader(peer.fd)

    def _wake(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        """Take frames until there are none, or until others on this loop should have their turn.

        The socket's descriptor tells of changes only, so whoever stops early must come back by himself.
        """
        self._scheduled = False
        for _ in range(self.limits.inbox_batch_frames_max):
            if self._inbox.closed:
                return
            try:
                data = self._inbox.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            frame = self._open(data)
            if frame is not None:
                self.deliver(frame)
        self._wake()

    def _open(self, data: bytes) -> AnyFrame | None:
        try:
            envelope = _decoder.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            self.counts["malformed_frames"] += 1
            self.report("malformed_frame", str(error)[:200])
            return None
        sender = envelope.sender
        if envelope.version != PROTOCOL_VERSION:
            self.counts["foreign_frames"] += 1
            self.report("foreign_frame", f"{sender} speaks version {envelope.version}, this is {PROTOCOL_VERSION}")
            return None
        incarnation, number = self._heard.get(sender.place, (0, 0))
        if sender.incarnation < incarnation:
            self.counts["frames_of_the_dead"] += 1
            return envelope.frame
        if sender.incarnation == incarnation and envelope.number != number + 1:
            raise LinkGap(f"frame {envelope.number} of {sender} follows {number}")
        self._heard[sender.place] = (sender.incarnation, envelope.number)
        return envelope.frame
