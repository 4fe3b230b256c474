"""What both kinds of links have in common: which frame may go from whom to whom, numbering, and opening what came.

A frame that does not decode, speaks another version, or is none that its sender may send or its receiver takes, is the
peer's fault: it is counted, reported and dropped, and the link goes on. It knows no socket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec

from baton.engine.limits import Limits
from baton.ipc.board import Board
from baton.ipc.frames import (
    PLACES_MAX,
    PROTOCOL_VERSION,
    Address,
    Admitted,
    AnyFrame,
    Cancel,
    CancelAck,
    Closed,
    Credit,
    Damaged,
    Drained,
    Envelope,
    Flush,
    Halt,
    Handed,
    Lease,
    Life,
    Ping,
    Ready,
    Recall,
    Relay,
    Returned,
    Role,
    Serving,
    StartFailed,
    StopFound,
    Submit,
    Tell,
    Text,
    WorkerHello,
)

F, T, S, W, D, SUPERVISOR = Role
Roles = tuple[Role, ...]
OWNERS, CHILDREN = (T, S, D), (F, T, S, W, D)

#: frame -> (who may send it, who takes it)
ROUTES: dict[type, tuple[Roles, Roles]] = {
    Submit: ((F,), (T,)),
    Handed: ((T,), (S,)),
    Flush: ((S,), (D,)),
    Closed: (OWNERS, (F,)),
    Returned: (OWNERS, (F,)),
    Admitted: ((S,), (F,)),
    Lease: ((S,), (D,)),
    StopFound: ((D,), (S,)),
    Text: ((D,), (F,)),
    Credit: ((F,), (S,)),
    Relay: ((F,), (F,)),
    Cancel: ((F,), OWNERS),
    CancelAck: (OWNERS, (F,)),
    Recall: ((F,), OWNERS),
    WorkerHello: ((W,), (S,)),
    Ready: (CHILDREN, (SUPERVISOR,)),
    StartFailed: (CHILDREN, (SUPERVISOR,)),
    Damaged: ((S, W, D), (SUPERVISOR,)),
    Drained: ((F,), (SUPERVISOR,)),
    Life: ((SUPERVISOR,), CHILDREN),
    Ping: ((SUPERVISOR,), CHILDREN),
    Tell: ((SUPERVISOR,), CHILDREN),
    Serving: ((SUPERVISOR,), (F,)),
    Halt: ((SUPERVISOR,), CHILDREN),
}

Deliver = Callable[[AnyFrame], None]
Report = Callable[[str, str], None]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


class LinkGap(Exception):
    """A frame was lost between two living processes."""


class Links(Protocol):
    """All links of one process, over sockets or in memory. Frames to a peer leave in the order they were sent."""

    @property
    def counts(self) -> Counter[str]: ...
    def send(self, role: Role, index: int, frame: AnyFrame) -> None: ...
    def close(self, linger_s: float = 0.0) -> None: ...


class Post:
    """Seals what one process says and opens what it hears. Frames are numbered for each pair of incarnations.

    Invariant: of two living processes the receiver opens every frame that could be read, in order, or raises.
    """

    def __init__(self, me: Address, limits: Limits, board: Board, report: Report) -> None:
        self.me = me
        self.counts: Counter[str] = Counter()
        self._bytes_max = limits.frame_bytes_max
        self._board = board
        self._report = report
        self._said: Counter[tuple[Role, int]] = Counter()
        self._heard: dict[tuple[Role, int], tuple[int, int]] = {}
        self._unread = 0  # frames that came and could not be read: each explains one missing number

    def seal(self, role: Role, index: int, frame: AnyFrame) -> bytes:
        """The next frame for a place, as it travels."""
        self._said[(role, index)] += 1
        return _encoder.encode(Envelope(PROTOCOL_VERSION, self.me, self._said[(role, index)], frame))

    def open(self, data: bytes) -> AnyFrame | None:
        """The frame that came, or None where it is dropped; ``LinkGap`` where one before it is missing."""
        envelope = self._read(data)
        if envelope is None:
            return None
        sender, frame = envelope.sender, envelope.frame
        self._number(sender, envelope.number)
        senders, receivers = ROUTES[type(frame)]
        if sender.role not in senders or self.me.role not in receivers:
            self._drop("unexpected_frame", f"{type(frame).__name__} of {sender}")
        elif self._astray(frame):
            self._drop("astray_frame", f"{type(frame).__name__} of {sender} names what there is not")
        else:
            return frame
        return None

    def _read(self, data: bytes) -> Envelope | None:
        if len(data) > self._bytes_max:
            return self._unreadable("oversized_frame", f"{len(data)} bytes")
        try:
            envelope = _decoder.decode(data)
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            return self._unreadable("malformed_frame", str(error)[:200])
        if envelope.version != PROTOCOL_VERSION:
            what = f"{envelope.sender} speaks version {envelope.version}, this is {PROTOCOL_VERSION}"
            return self._unreadable("foreign_frame", what)
        return envelope

    def _number(self, sender: Address, number: int) -> None:
        """Nothing may be missing between two frames of a living sender; late frames of a dead one are counted."""
        incarnation, last = self._heard.get(sender.place, (0, 0))
        if sender.incarnation < incarnation:
            self.counts["frames_of_the_dead"] += 1
            return
        if sender.incarnation == incarnation:
            missing = number - last - 1
            if not 0 <= missing <= self._unread:
                raise LinkGap(f"frame {number} of {sender} follows {last}")
            self._unread -= missing
        self._heard[sender.place] = (sender.incarnation, number)

    def _astray(self, frame: AnyFrame) -> bool:
        """Whether a frame is about a row, a frontend or a rank that this server cannot have."""
        rows, frontends = self._board.frontends * self._board.slots_per_frontend, self._board.frontends
        match frame:
            case Submit() | Handed() | Flush():
                return frame.key.slot >= rows or frame.home.index >= frontends
            case Closed() | Returned():
                return frame.key.slot >= rows
            case Lease():
                return frame.slot >= rows or frame.home.index >= frontends
            case Recall():
                return frame.key.slot >= rows or frame.home >= frontends
            case Cancel():
                return frame.home >= frontends
            case WorkerHello():
                return not frame.rank < len(frame.group) <= PLACES_MAX
            case _:
                return False

    def _unreadable(self, event: str, detail: str) -> Envelope | None:
        self._unread += 1
        self._drop(event, detail)
        return None

    def _drop(self, event: str, detail: str) -> None:
        self.counts[f"{event}s"] += 1
        self._report(event, detail)
