"""Links in memory: what ``ipc.zmq_link`` does over sockets, among processes that share one event loop.

Frames are really encoded, numbered and decoded. A wire leads from one incarnation of a process to one place; its
frames arrive in order, each after a delay that is given from outside, so frames of different wires overtake each other.
Inboxes are bounded: what finds one full waits on its wire. When a process is killed, what stood in its inbox is lost,
and as much of its wires as is decided outside. For simulation and tests.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter, defaultdict, deque
from collections.abc import Callable

from baton.engine.limits import Limits
from baton.ipc.board import Board
from baton.ipc.frames import Address, AnyFrame, Role
from baton.ipc.link import Deliver, Post, Report

Place = tuple[Role, int]


class _Wire:
    """Frames on their way from one incarnation to one place; the first ``due`` of them have arrived."""

    def __init__(self, sender: Address, receiver: Place) -> None:
        self.sender = sender
        self.receiver = receiver
        self.frames: deque[bytes] = deque()
        self.due = 0
        self.last_ns = 0


class Network:
    """All wires of one simulated machine. Invariant: the frames of a wire arrive in the order in which they were sent.

    ``delay_ns(sender, receiver, frame)`` is asked for each frame; ``lose(waiting)`` says how many of a killed process's
    frames are lost.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        now_ns: Callable[[], int],
        delay_ns: Callable[[Address, Place, AnyFrame], int] = lambda sender, receiver, frame: 0,
        lose: Callable[[int], int] = lambda waiting: waiting,
    ) -> None:
        self._loop = loop
        self._now_ns = now_ns
        self._delay_ns = delay_ns
        self._lose = lose
        self._context = contextvars.copy_context()  # frames travel on when their sender is dead
        self._bound: dict[Place, MemoryLinks] = {}
        self._wires: dict[tuple[Place, int, Place], _Wire] = {}
        self._to: defaultdict[Place, list[_Wire]] = defaultdict(list)  # the same, by who they lead to

    def connect(self, me: Address, limits: Limits, board: Board, deliver: Deliver, report: Report) -> MemoryLinks:
        """The links of one process; what waits for its place begins to come in."""
        links = MemoryLinks(self, me, limits, board, deliver, report)
        assert me.place not in self._bound, f"somebody is at {me} already"
        self._bound[me.place] = links
        self.refill(links)
        return links

    def kill(self, me: Address) -> None:
        """A process is no more: its inbox is lost, with some frames to it that had left and some that had not."""
        links = self._bound.get(me.place)
        if links is not None and links.me == me:
            del self._bound[me.place]
        for wire in self._wires.values():
            if wire.receiver == me.place:
                for _ in range(self._lose(wire.due)):
                    wire.frames.popleft()
                    wire.due -= 1
            if wire.sender == me:
                for _ in range(self._lose(len(wire.frames) - wire.due)):
                    wire.frames.pop()

    def unbind(self, links: MemoryLinks) -> None:
        """A process closed its links; what it sent is still delivered."""
        if self._bound.get(links.me.place) is links:
            del self._bound[links.me.place]

    def waiting(self) -> int:
        """Frames on the wires between the living."""
        return sum(len(wire.frames) for wire in self._wires.values() if wire.receiver in self._bound)

    def carry(self, sender: Address, receiver: Place, frame: AnyFrame, data: bytes, waiting_max: int) -> None:
        """Put a frame on its wire."""
        key = (sender.place, sender.incarnation, receiver)
        wire = self._wires.get(key)
        if wire is None:
            wire = self._wires[key] = _Wire(sender, receiver)
            self._to[receiver].append(wire)
        wire.frames.append(data)
        assert len(wire.frames) <= waiting_max, f"{receiver} takes no frames"
        wire.last_ns = max(wire.last_ns, self._now_ns() + self._delay_ns(sender, receiver, frame))
        self._loop.call_at(wire.last_ns / 1e9, self._arrive, wire, context=self._context)

    def refill(self, links: MemoryLinks) -> None:
        """There is room in an inbox: a frame from each wire in turn, until it is full."""
        while links.room and (ready := [wire for wire in self._to[links.me.place] if wire.due]):
            for wire in ready:
                self._move(wire, links)

    def _arrive(self, wire: _Wire) -> None:
        if wire.due < len(wire.frames):  # else it was lost on the way
            wire.due += 1
        links = self._bound.get(wire.receiver)
        if links is not None:
            self._move(wire, links)

    def _move(self, wire: _Wire, links: MemoryLinks) -> None:
        if wire.due and links.room:
            wire.due -= 1
            links.take(wire.frames.popleft())


class MemoryLinks:
    """All links of one process, in memory."""

    def __init__(
        self, network: Network, me: Address, limits: Limits, board: Board, deliver: Deliver, report: Report
    ) -> None:
        self.me = me
        self.limits = limits
        self._network = network
        self._deliver = deliver
        self._post = Post(me, limits, board, report)
        self._inbox: deque[bytes] = deque()
        self._context = contextvars.copy_context()
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Handle | None = None

    @property
    def counts(self) -> Counter[str]:
        """What was dropped, by kind."""
        return self._post.counts

    @property
    def room(self) -> int:
        """How many more frames the inbox takes."""
        return self.limits.inbox_frames_max - len(self._inbox)

    def send(self, role: Role, index: int, frame: AnyFrame) -> None:
        """Send a frame; it leaves now, whoever is there. Never blocks."""
        data = self._post.seal(role, index, frame)
        waiting_max = self.limits.inbox_frames_max + self.limits.outbox_frames_max
        self._network.carry(self.me, (role, index), frame, data, waiting_max)

    def close(self, linger_s: float = 0.0) -> None:
        """Hear nothing any more; what was sent travels on."""
        self._network.unbind(self)
        if self._next is not None:
            self._next.cancel()

    def take(self, data: bytes) -> None:
        """A frame came in; it is handled in this process's own time."""
        self._inbox.append(data)
        if self._next is None:
            self._next = self._loop.call_soon(self._receive, context=self._context)

    def _receive(self) -> None:
        """Take frames until there are none, or until others on this loop should have their turn."""
        self._next = None
        for _ in range(min(len(self._inbox), self.limits.inbox_batch_frames_max)):
            frame = self._post.open(self._inbox.popleft())
            self._network.refill(self)
            if frame is not None:
                self._deliver(frame)
        if self._inbox and self._next is None:
            self._next = self._loop.call_soon(self._receive, context=self._context)
