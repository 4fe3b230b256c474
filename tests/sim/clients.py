"""Clients and their doors: they open, read fast, slowly or never, cancel, go away, and take or ignore their end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.engine.effects import Answered, Begin, Deliver, Finish, Gone, Open, Taken
from baton.engine.frontend import FrontendCore
from baton.ipc.frames import Role, Terms
from tests.sim.script import MS, Wish, reference

if TYPE_CHECKING:
    from tests.sim.world import Process, World


class Client:
    """One request as its client sees it. ``state``: waiting, open, ended, gone (hung up), lost (its frontend died)."""

    def __init__(self, wish: Wish, world: World) -> None:
        self.wish = wish
        self.world = world
        self.answer = reference(wish, world.shape)
        self.request_id = wish.number.to_bytes(16, "big")
        self.trace = wish.number.to_bytes(16, "big") + bytes(7) + b"\x01\x01"
        self.state = "waiting"
        self.process: Process | None = None
        self.began: Begin | None = None
        self.ids: list[int] = []
        self.texts: list[str] = []
        self.taken = 0
        self.taking = False
        self.finish: Finish | None = None
        self.room = True
        self.cancelled = ""
        self.deadline_ns = 0

    def arrive(self) -> None:
        """The request reaches its frontend, or tries again a little later while there is none."""
        world, wish = self.world, self.wish
        process = world.live.get((Role.FRONTEND, wish.frontend))
        if process is None:
            world.at(5 * MS, self.arrive)
            return
        assert not hasattr(process, "runner")
        self.process, self.state = process, "open"
        assert isinstance(process.core, FrontendCore)
        self.room = bool(process.core.free)
        if wish.deadline_after_ns is not None:
            self.deadline_ns = world.now + wish.deadline_after_ns
        if wish.cancel_after_ns is not None:
            world.at(wish.cancel_after_ns, self._give_up)
        terms = Terms("m", deadline_ns=self.deadline_ns)
        attributes: dict[str, str | int | float | bool] = {"number": wish.number}
        event = Open(
            *(wish.number, self.request_id, self.trace, self.trace[16:24], None),
            *(terms, wish.params, wish.prompt, world.now, attributes),
        )
        world.tell(process, event)

    def hear(self, process: Process, effect: Begin | Deliver | Finish) -> None:
        """What the frontend says to this door."""
        oracles = self.world.oracles
        oracles.check(process is self.process, f"{self} hears from a stranger")
        oracles.check(self.state == "open", f"{self} hears {effect} while {self.state}")
        match effect:
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
                    last = Answered(self.wish.number) if self.wish.wants_end else Gone(self.wish.number, "gone", False)
                    self.world.at(self.world.rng.randrange(10 * MS), self._say, last)

    def disconnect(self, frontend: int) -> None:
        """The frontend died, and the connection with it."""
        if self.process is not None and self.wish.frontend == frontend and self.state == "open":
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
        self._say(Taken(self.wish.number, self.taken))
        self._read()

    def _give_up(self) -> None:
        if self.state != "open":
            return
        self.cancelled = "cancelled"
        if not self.wish.wants_end:
            self.state = "gone"
        self._say(Gone(self.wish.number, "cancelled", self.wish.wants_end))
        if self.world.rng.random() < 0.3:
            self._say(Gone(self.wish.number, "cancelled", self.wish.wants_end))

    def _say(self, event: Taken | Gone | Answered) -> None:
        if self.process is not None:
            self.world.tell(self.process, event)

    def __str__(self) -> str:
        return f"client {self.wish.number}"
