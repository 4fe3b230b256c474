"""The rules of handing over: give, take, recall, cancel. Every owner uses these and nothing else to move a request.

Rules (each is there because leaving it out loses or doubles a request):
  * a row has one writer, its owner; a hand-over writes the new owner at epoch + 1 and then sends the frame;
  * a frame is taken only if the row names *my incarnation* at that generation and epoch, is untaken, and is newer than
    anything taken for that row before; then ``taken`` is written first and the cancel word read second;
  * a state is left only here, and leaving it emits its span, so a trace is the request's story.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from baton.engine.effects import Effect, Span
from baton.engine.states import STATE_NAMES, STATE_NUMBERS, check_move, owner_of
from baton.ipc.frames import PLACES_MAX, Address, Key, Role


class BoardRow(msgspec.Struct, frozen=True, gc=False):
    """One row of the board as its owner last wrote it. ``role`` 0 is a free row."""

    generation: int = 0
    epoch: int = 0
    role: int = 0
    index: int = 0
    incarnation: int = 0
    taken: bool = False
    from_role: int = 0
    from_index: int = 0
    from_incarnation: int = 0
    state: int = 0
    since_ns: int = 0


class Board(Protocol):
    """The shared tables, as a core sees them (``ipc.board`` keeps them in shared memory)."""

    def row(self, slot: int) -> BoardRow: ...
    def write(self, slot: int, row: BoardRow) -> None: ...
    def count(self, slot: int, prompt_tokens: int, sampled: int) -> None: ...
    def cancelled(self, slot: int, generation: int) -> bool: ...
    def live(self, role: int, index: int) -> int: ...


class SchedulerBoard(Board, Protocol):
    """What the scheduler may do besides: show its gauges."""

    def set_gauges(self, values: tuple[int, ...]) -> None: ...


class HomeBoard(Board, Protocol):
    """What a frontend may do besides, on its own slice only."""

    def claim(self, slot: int, request_id: bytes, trace: bytes) -> None: ...
    def identity(self, slot: int) -> tuple[bytes, bytes]: ...
    def set_cancel(self, slot: int, generation: int) -> None: ...
    def set_delivered(self, slot: int, tokens: int) -> None: ...


@dataclass(slots=True)
class Held:
    """What an owner knows of a row it holds."""

    slot: int
    generation: int
    epoch: int
    state: str
    since_ns: int
    trace: bytes
    spans: int = 0
    span_ns: int = -1  # where the next span begins: earlier than the state, once flips have become events
    events: list[tuple[str, int]] = field(default_factory=list)


class Ownership:
    """One process's hands. Invariant: a ``Held`` in its keeping names a row that names this process."""

    def __init__(self, board: Board, me: Address, spans_max: int = 64) -> None:
        self.board = board
        self.me = me
        self.spans_max = spans_max
        self.newest: dict[int, tuple[int, int]] = {}
        self.counts: Counter[str] = Counter()

    def names_me(self, row: BoardRow, key: Key) -> bool:
        """Whether the row names this very process at the key's generation and epoch."""
        return (row.generation, row.epoch, row.role, row.index, row.incarnation) == (
            key.generation,
            key.epoch,
            self.me.role,
            self.me.index,
            self.me.incarnation,
        )

    def may_take(self, key: Key) -> bool:
        """Rule 2 of the hand-over."""
        row = self.board.row(key.slot)
        if not self.names_me(row, key) or row.taken:
            return False
        return (key.generation, key.epoch) > self.newest.get(key.slot, (-1, -1))

    def take(self, key: Key, trace: bytes) -> Held | None:
        """Take what the key names, or None where the frame is stale, repeated or overtaken (counted)."""
        if not self.may_take(key):
            self.counts["stale_frames"] += 1
            return None
        row = self.board.row(key.slot)
        self.newest[key.slot] = (key.generation, key.epoch)
        self.board.write(key.slot, msgspec.structs.replace(row, taken=True))
        return Held(key.slot, key.generation, key.epoch, STATE_NAMES[row.state], row.since_ns, trace)

    def cancelled(self, held: Held) -> bool:
        """Whether the cancel word means this request."""
        return self.board.cancelled(held.slot, held.generation)

    def move(self, held: Held, state: str, now_ns: int, out: list[Effect]) -> None:
        """Change the state without changing the owner."""
        if state == held.state:
            return
        check_move(held.state, state)
        assert owner_of(state) == self.me.role, f"{state} is not ours"
        if held.spans < self.spans_max:
            self.leave(held, now_ns, out)
        else:
            held.span_ns = held.since_ns if held.span_ns < 0 else held.span_ns
            held.events.append((held.state, held.since_ns))
            del held.events[: -self.spans_max]
        held.state, held.since_ns = state, now_ns
        self.write(held, self.me, taken=True)

    def spread(self, role: Role, number: int) -> int:
        """Which of a role's places gets the ``number``-th request: rows are spread, a further life tries the next."""
        there = sum(self.board.live(role, index) > 0 for index in range(PLACES_MAX))
        return number % max(1, there)

    def give(self, held: Held, to: Role, index: int, state: str, now_ns: int, out: list[Effect]) -> Key:
        """Hand over: the row names the new owner when this returns; the frame must be the next effect for it."""
        check_move(held.state, state)
        assert owner_of(state) == to, f"{state} does not belong to {to.name}"
        self.leave(held, now_ns, out)
        held.epoch += 1
        held.state, held.since_ns = state, now_ns
        receiver = Address(to, self.me.model, self.me.replica, index, self.board.live(to, index))
        self.write(held, receiver, taken=False)
        return Key(held.slot, held.generation, held.epoch)

    def recall(self, key: Key, trace: bytes, home: int, now_ns: int, out: list[Effect]) -> Key | None:
        """Rule 4: give an untaken row back to its frontend; None where it was taken or is not ours."""
        row = self.board.row(key.slot)
        if not self.names_me(row, key) or row.taken:
            return None
        self.newest[key.slot] = (key.generation, key.epoch)
        held = Held(key.slot, key.generation, key.epoch, STATE_NAMES[row.state], row.since_ns, trace)
        return self.give(held, Role.FRONTEND, home, "received", now_ns, out)

    def leave(self, held: Held, now_ns: int, out: list[Effect], error: str | None = None) -> None:
        """Emit the span of the state that ends now."""
        start_ns = held.since_ns if held.span_ns < 0 else held.span_ns
        out.append(state_span(held.state, held.trace, start_ns, now_ns, str(self.me), tuple(held.events), error))
        held.events.clear()
        held.span_ns = -1
        held.spans += 1

    def write(self, held: Held, owner: Address, taken: bool) -> None:
        self.board.write(
            held.slot,
            BoardRow(
                generation=held.generation,
                epoch=held.epoch,
                role=owner.role,
                index=owner.index,
                incarnation=owner.incarnation,
                taken=taken,
                from_role=self.me.role,
                from_index=self.me.index,
                from_incarnation=self.me.incarnation,
                state=STATE_NUMBERS[held.state],
                since_ns=held.since_ns,
            ),
        )


def state_span(
    state: str,
    trace: bytes,
    start_ns: int,
    end_ns: int,
    owner: str,
    events: tuple[tuple[str, int], ...] = (),
    error: str | None = None,
) -> Span:
    """The span of one owner state; ``error`` is set where somebody else closes it for a dead owner."""
    return Span(state, trace, start_ns, end_ns, {"baton.owner": owner}, error=error, events=events)
