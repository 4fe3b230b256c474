"""Two desks side by side, with a test in the place of the engine behind them."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from baton.engine.answers import home_of
from baton.engine.desk import DeskCore
from baton.engine.effects import (
    Account,
    Begin,
    Deliver,
    DoorEffect,
    Effect,
    Finish,
    Keep,
    Named,
    Open,
    Seen,
    Send,
    Tick,
)
from baton.engine.limits import Limits
from baton.ipc.board import Board
from baton.ipc.frames import (
    Address,
    Admitted,
    Closed,
    Params,
    Piece,
    Prompt,
    Relay,
    Role,
    Terms,
    Text,
)
from tests.engine.rig import TRACE, hand

SECOND = 1_000_000_000
FRONTENDS, SLOTS = 2, 2
LIMITS = Limits(
    mailbox_tokens_max=4, resume_s_max=5, idempotency_s_max=50, stalled_s_max=20, listeners_per_answer_max=3
)
#: a key whose answers live at each frontend
KEYS = {home_of("", f"key-{number}", FRONTENDS): f"key-{number}" for number in range(16)}
BODY = {"endpoint": b"e", "prompt": b"p"}


@dataclass
class House:
    """Two desks whose frames for each other arrive at once; the test is the engine behind them."""

    limits: Limits = LIMITS
    now_ns: int = 0
    board: Board = field(init=False)
    heard: dict[tuple[int, int], list[DoorEffect]] = field(default_factory=dict)
    frames: list[object] = field(default_factory=list)
    accounts: list[Account] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.board = Board.format(bytearray(Board.size(FRONTENDS, SLOTS)), FRONTENDS, SLOTS)
        for role in Role:
            for index in range(FRONTENDS):
                self.board.set_live(role, index, 1, 0)
        self.desks = [self.desk(index, 1) for index in range(FRONTENDS)]

    def desk(self, index: int, incarnation: int) -> DeskCore:
        me = Address(Role.FRONTEND, "m", 0, index, incarnation)
        return DeskCore(me, self.board, self.board.slice(index), self.limits, FRONTENDS)

    def tell(self, index: int, event: object) -> list[object]:
        """One event and all that follows from it; the frames it sent to the engine."""
        self.now_ns += 1
        before = len(self.frames)
        self._carry_out(index, self.desks[index].handle(event, self.now_ns))
        return self.frames[before:]

    def _carry_out(self, index: int, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(role=Role.FRONTEND, frame=Relay() as frame):
                    self._carry_out(effect.index, self.desks[effect.index].handle(frame, self.now_ns))
                case Send():
                    self.frames.append(effect.frame)
                case Named() | Begin() | Deliver() | Finish() | Seen():
                    self.heard.setdefault((index, effect.door), []).append(effect)
                case Account():
                    self.accounts.append(effect)

    def open(
        self,
        index: int,
        door: int,
        key: str = "",
        body: dict[str, bytes] = BODY,
        resumable: bool = False,
        stored: bool = False,
    ) -> None:
        home = home_of("", key, FRONTENDS) if key else index
        keep = Keep(key, body, resumable, b"memo", stored)
        request_id = bytes([home]) + bytes([index, door]) * 7 + b"!"
        terms, prompt = Terms("m"), Prompt(text="hello")
        args = (request_id, TRACE, TRACE[16:24], None, terms, Params(), prompt, self.now_ns)
        self.tell(index, Open(door, *args, {}, keep))

    def runs(self, slot: int) -> None:
        key = hand(self.board, slot, "queued", Role.TOKENIZER, 2)
        self.board.write(slot, msgspec.structs.replace(self.board.row(slot), taken=True))
        self.tell(slot // SLOTS, Admitted(slot, key.generation, 2, [5, 6]))

    def say(self, slot: int, start: int, *ids: int) -> None:
        generation = self.board.row(slot).generation
        piece = Piece(slot, generation, 2, start, list(ids), [f"t{token} " for token in ids], [])
        self.tell(slot // SLOTS, Text([piece]))

    def close(self, slot: int, length: int, reason: str = "length") -> None:
        key = hand(self.board, slot, "closed", Role.DETOKENIZER, 4)
        self.board.write(slot, msgspec.structs.replace(self.board.row(slot), index=slot // SLOTS))
        self.tell(slot // SLOTS, Closed(key, TRACE, length, reason, None, "!", None, [5, 6]))

    def slot(self, index: int) -> int:
        """The row that a desk's first request has."""
        return self.desks[index].front.slots[0]

    def sweep(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND)
        for index in range(FRONTENDS):
            self.tell(index, Tick("sweep"))

    # what a door heard

    def ids(self, index: int, door: int) -> list[int]:
        return [token for one in self.heard[index, door] if isinstance(one, Deliver) for token in one.token_ids]

    def named(self, index: int, door: int) -> Named:
        (named,) = (one for one in self.heard[index, door] if isinstance(one, Named))
        return named

    def end(self, index: int, door: int) -> Finish:
        (finish,) = (one for one in self.heard[index, door] if isinstance(one, Finish))
        return finish

    def ended(self, index: int, door: int) -> bool:
        return any(isinstance(one, Finish) for one in self.heard.get((index, door), ()))


def count(frames: list[object], kind: type) -> int:
    return sum(isinstance(frame, kind) for frame in frames)
