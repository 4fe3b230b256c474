"""Clients and their doors: they open, read fast, slowly or never, cancel, go away, and take or ignore their end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.engine.answers import home_of
from baton.engine.desk import DeskCore
from baton.engine.effects import Answered, Attach, Begin, Deliver, Finish, Gone, Keep, Named, Open, Taken
from baton.ipc.frames import Role, Terms
from tests.sim.script import MS, NEVER, Wish, reference

if TYPE_CHECKING:
    from tests.sim.processes import Process
    from tests.sim.world import World

#: a client's doors are its number and this much more for each time it came back
DOORS = 1000


class Client:
    """One request as its client sees it. ``state``: waiting, open, away (it lost its connection and means to come
    back), ended, gone (hung up), lost (its frontend died).
    """

    def __init__(self, wish: Wish, world: World) -> None:
        self.wish = wish
        self.world = world
        self.answer = reference(wish, world.shape)
        frontends = world.shape.frontends
        self.home = home_of("", wish.key, frontends) if wish.key else wish.frontend
        self.request_id = bytes([self.home]) + wish.number.to_bytes(15, "big")
        self.trace = wish.number.to_bytes(16, "big") + bytes(7) + b"\x01\x01"
        self.state = "waiting"
        self.door = wish.number
        self.process: Process | None = None
        self.named: Named | None = None
        self.began: Begin | None = None
        self.ids: list[int] = []
        self.texts: list[str] = []
        self.taken = 0
        self.taking = False
        self.finish: Finish | None = None
        self.room = True
        self.cancelled = ""
        self.deadline_ns = 0
        self.left_ns = 0
        self.away_ns = 0  # the longest it was away

    @property
    def place(self) -> int:
        """The frontend that its connection goes to, or went to last."""
        return self.process.place[1] if self.process is not None else self.wish.frontend

    @property
    def owner(self) -> Client:
        """The client whose request answers it: itself, or the first one with its key."""
        return self.world.clients[int.from_bytes(self.named.request_id[1:], "big")] if self.named is not None else self

    def arrive(self) -> None:
        """The request reaches its frontend, or tries again a little later while there is none."""
        world, wish = self.world, self.wish
        process = world.live.get((Role.FRONTEND, wish.frontend))
        if process is None:
            world.at(5 * MS, self.arrive)
            return
        assert not hasattr(process, "runner")
        self.process, self.state = process, "open"
        assert isinstance(process.core, DeskCore)
        self.room = bool(process.core.front.free)
        if wish.deadline_after_ns is not None:
            self.deadline_ns = world.now + wish.deadline_after_ns
        if wish.cancel_after_ns is not None:
            world.at(wish.cancel_after_ns, self._give_up)
        if wish.drops:
            world.at(wish.drops[0][0], self._lose_connection, 0)
        terms = Terms("m", deadline_ns=self.deadline_ns, priority=wish.number % 3 - 1)
        attributes: dict[str, str | int | float | bool] = {"number": wish.number}
        keep = Keep(wish.key, {"body": repr(wish.params).encode()}, wish.resumable, b"memo") if wish.kept else None
        event = Open(
            *(self.door, self.request_id, self.trace, self.trace[16:24], None),
            *(terms, wish.params, wish.prompt, world.now, attributes, keep),
        )
        world.tell(process, event)

    def hear(self, process: Process, effect: Named | Begin | Deliver | Finish) -> None:
        """What the frontend says to this door."""
        oracles = self.world.oracles
        oracles.check(process is self.process and effect.door == self.door, f"{self} hears from a stranger")
        oracles.check(self.state == "open", f"{self} hears {effect} while {self.state}")
        match effect:
            case Named():
                oracles.named(self, effect)
                self.named = effect
            case Begin():
                oracles.check(self.began is None, f"{self} begins twice")
                oracles.check(effect.prompt_ids == self.wish.prompt_ids, f"{self} begins with {effect.prompt_ids}")
                self.began = effect
            case Deliver():
                oracles.check(self.began is not None, f"{self} gets tokens before it begins")
                self.ids += effect.token_ids
                self.texts += effect.texts
                oracles.delivered(self, effect)
                self._read()
            case Finish():
                self.state, self.finish = "ended", effect
                oracles.finished(self, effect)
                if self.wish.answers:
                    last = Answered(self.door) if self.wish.wants_end else Gone(self.door, "gone", False)
                    self.world.at(self.world.rng.randrange(10 * MS), self._say, last)

    def _lose_connection(self, number: int) -> None:
        """The connection breaks; what the socket had not taken never came."""
        if self.state == "open" and self.named is not None:
            self._is_away(number)
            self._say(Gone(self.door, "disconnected", False))
        elif number + 1 < len(self.wish.drops):
            self.world.at(self.wish.drops[number + 1][0], self._lose_connection, number + 1)

    def _is_away(self, number: int) -> None:
        self.state, self.left_ns = "away", self.world.now
        del self.ids[self.taken :], self.texts[self.taken :]
        back_ns = self.wish.drops[number][1]
        if back_ns == NEVER:
            self.state = "gone"
        else:
            self.world.at(back_ns, self._return, number)

    def _return(self, number: int) -> None:
        """Another connection asks for the rest."""
        world, named = self.world, self.named
        assert named is not None
        process = world.live.get((Role.FRONTEND, self.wish.drops[number][2]))
        if process is None:
            world.at(5 * MS, self._return, number)
            return
        assert not hasattr(process, "runner")
        self.away_ns = max(self.away_ns, world.now - self.left_ns)
        self.process, self.state, self.began = process, "open", None
        self.door += DOORS
        if number + 1 < len(self.wish.drops):
            world.at(self.wish.drops[number + 1][0], self._lose_connection, number + 1)
        world.tell(process, Attach(self.door, named.request_id, len(self.ids)))

    def disconnect(self, frontend: int) -> None:
        """The frontend died, and the connection with it."""
        if self.process is not None and self.place == frontend and self.state == "open":
            if self.wish.drops and self.named is not None:
                self._is_away(len(self.wish.drops) - 1)
            else:
                self.state = "lost"

    def _read(self) -> None:
        if not self.taking and self.taken < len(self.ids) and not (self.wish.reads == "stalled" and self.taken):
            self.taking = True
            rng = self.world.rng
            delay = rng.randrange(200_000) if self.wish.reads == "fast" else rng.randrange(20 * MS)
            self.world.at(delay, self._take)

    def _take(self) -> None:
        self.taking = False
        some = len(self.ids) if self.wish.reads == "fast" else self.taken + self.world.rng.randrange(1, 5)
        self.taken = min(len(self.ids), some)
        self._say(Taken(self.door, self.taken))
        self._read()

    def _give_up(self) -> None:
        if self.state != "open":
            return
        self.cancelled = "cancelled"
        if not self.wish.wants_end:
            self.state = "gone"
        self._say(Gone(self.door, "cancelled", self.wish.wants_end))
        if self.world.rng.random() < 0.3:
            self._say(Gone(self.door, "cancelled", self.wish.wants_end))

    def _say(self, event: Taken | Gone | Answered) -> None:
        if self.process is not None:
            self.world.tell(self.process, event)

    def __str__(self) -> str:
        return f"client {self.wish.number}"
