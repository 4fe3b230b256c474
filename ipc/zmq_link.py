"""Links over ZeroMQ: one PULL socket a process to be spoken to, one PUSH socket a peer to speak.

Both ends block rather than drop; what a socket does not take now waits here, in order and within a bound. What a frame
must be to be delivered is ``ipc.link``'s. This is the only module of the engine that knows ZeroMQ.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from pathlib import Path

import zmq

from baton.engine.limits import Limits
from baton.ipc.board import Board
from baton.ipc.frames import Address, AnyFrame, Role
from baton.ipc.link import Deliver, Post, Report


class _Peer:
    """The speaking end of one link, with what its socket has not taken yet."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.fd = int(socket.getsockopt(zmq.FD))
        self.waiting: deque[bytes] = deque()


class ZmqLinks:
    """All links of one process. Invariant: frames to a peer leave in the order they were sent."""

    def __init__(
        self,
        directory: Path,
        me: Address,
        limits: Limits,
        board: Board,
        deliver: Deliver,
        report: Report,
    ) -> None:
        self.directory = directory
        self.limits = limits
        self._deliver = deliver
        self._post = Post(me, limits, board, report)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._peers: dict[tuple[Role, int], _Peer] = {}
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

    @property
    def counts(self) -> Counter[str]:
        """What was dropped, by kind."""
        return self._post.counts

    def send(self, role: Role, index: int, frame: AnyFrame) -> None:
        """Send a frame; it leaves now or as soon as the peer takes it. Never blocks."""
        peer = self._peers.get((role, index)) or self._connect(role, index)
        data = self._post.seal(role, index, frame)
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
            if self._inbox.closed or not int(self._inbox.get(zmq.EVENTS)) & zmq.POLLIN:
                return
            frame = self._post.open(self._inbox.recv(zmq.DONTWAIT))
            if frame is not None:
                self._deliver(frame)
        self._wake()
