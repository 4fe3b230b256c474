"""Clients of level two, and the door they come in by: they speak to a frontend's ``Reception`` as a real door does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.engine.desk import DeskCore
from baton.engine.effects import Account, Begin, Finish
from baton.frontends.errors import Refused
from baton.frontends.reception import Reception
from baton.frontends.status import Sources
from baton.frontends.stream import Stream
from baton.frontends.validate import GenerateRequest
from baton.ipc.frames import Role
from baton.workers.config import Settings
from tests.sim.script import MS, Wish, reference

if TYPE_CHECKING:
    from tests.sim.host import Host
    from tests.sim.members import Member

#: what a client is told when the server ends
ENDINGS = ("shutting_down", "engine_stopped")
TRY_AGAIN_S = 0.005


class Entrance:
    """The one door of a frontend of level two. ``reception`` is there while it is open."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.reception: Reception | None = None
        self.visits: set[asyncio.Task[None]] = set()

    async def start(
        self, reception: Reception, settings: Settings, sources: Sources, directory: Path, joins: bool
    ) -> dict[str, str]:
        """Open."""
        self.reception = reception
        return {}

    def observe(self, account: Account) -> None:
        """An account was written."""
        self.host.judge(self.host.oracles.account, account)

    async def stop(self, grace_s: float) -> None:
        """Close; visitors may stay for ``grace_s``."""
        reception = self.reception
        assert reception is not None
        try:
            async with asyncio.timeout(grace_s):
                await reception.idle()
        except TimeoutError:
            pass
        for visit in list(self.visits):
            visit.cancel()
        if self.visits:
            await asyncio.wait(self.visits)
        self.reception = None
        reception.close()


class Visitor:
    """One request as its client sees it. ``state``: waiting, open, ended, gone (hung up), lost (its frontend died)."""

    def __init__(self, wish: Wish, host: Host) -> None:
        self.wish = wish
        self.host = host
        self.answer = reference(wish, host.shape)
        self.request_id = wish.number.to_bytes(16, "big")
        self.trace = wish.number.to_bytes(16, "big") + bytes(7) + b"\x01\x01"
        self.state = "waiting"
        self.began: Begin | None = None
        self.ids: list[int] = []
        self.texts: list[str] = []
        self.taken = 0
        self.finish: Finish | None = None
        self.room = True
        self.cancelled = ""
        self.deadline_ns = 0
        self._member: Member | None = None
        self._visit: asyncio.Task[None] | None = None
        self._stream: Stream | None = None

    def arrive(self) -> None:
        """The request reaches its frontend, or tries again a little later while there is none."""
        host, wish = self.host, self.wish
        member = host.live.get((Role.FRONTEND, wish.frontend))
        reception = member.entrance.reception if member is not None else None
        if member is None or reception is None or member.compartment.frozen:
            if not host.over:
                host.loop.call_later(TRY_AGAIN_S, self.arrive)
            return
        self._member, self.state = member, "open"
        self._visit = member.compartment.run(host.loop.create_task, self._stay(reception))
        member.entrance.visits.add(self._visit)
        self._visit.add_done_callback(self._left)
        if wish.cancel_after_ns is not None:
            host.loop.call_later(wish.cancel_after_ns / 1e9, self._give_up)

    def disconnect(self, member: Member) -> None:
        """Its frontend died, and the connection with it."""
        if self._member is member and self.state == "open":
            self.state = "lost"

    async def _stay(self, reception: Reception) -> None:
        """From the request to its end."""
        host, wish = self.host, self.wish
        received_ns = host.loop.now_ns()
        deadline_ms = None if wish.deadline_after_ns is None else wish.deadline_after_ns // MS
        self.deadline_ns = received_ns + MS * (deadline_ms or int(host.shape.limits.request_s_max * 1e3))
        assert self._member is not None and isinstance(self._member.core, DeskCore)
        self.room = bool(self._member.core.front.free)
        request = GenerateRequest("text_completion", "m", wish.params, wish.prompt, deadline_ms=deadline_ms)
        with reception.open(request, self.trace, received_ns, {}, self.request_id) as stream:
            self._stream = stream
            try:
                await stream.begin()
            except Refused:
                pass
            else:
                await self._read(stream)
            assert stream.final is not None
            self._ended(stream.final)
            if wish.answers:
                await asyncio.sleep(host.jitter(10))
                stream.answered()
            else:
                await asyncio.sleep(2 * host.shape.limits.answer_s_max)

    async def _read(self, stream: Stream) -> None:
        host, oracles = self.host, self.host.oracles
        if stream.prompt_ids or stream.final is None:
            self.began = Begin(stream.door, stream.prompt_ids)
            right = stream.prompt_ids == self.wish.prompt_ids
            host.judge(oracles.check, right, f"{self} begins with {stream.prompt_ids}")
        async for delta in stream:
            self.ids += delta.token_ids
            self.texts += delta.texts
            host.say(f"{self} hears {len(delta.token_ids)}")
            host.judge(oracles.delivered, self, delta)
            if self.wish.reads == "fast":
                await asyncio.sleep(host.jitter(1))
            elif self.wish.reads == "slow":
                await asyncio.sleep(host.jitter(60))
            if self.wish.reads != "stalled" or not self.taken:
                self.taken = delta.position
                stream.took(delta.position)

    def _ended(self, finish: Finish) -> None:
        if self.state != "open":
            return
        self.state, self.finish = "ended", finish
        self.host.say(f"{self} ends: {finish.reason}")
        if finish.failure is not None and finish.failure.code in ENDINGS:
            self.room = self.room and finish.failure.code != "shutting_down"  # refused at the door: no account
            self.host.judge(self.host.oracles.check, self.host.ending, f"{self} is told that the server ends")
            return
        self.host.judge(self.host.oracles.finished, self, finish)

    def _give_up(self) -> None:
        if self.state != "open" or self._visit is None or self._stream is None or self._member is None:
            return
        self.host.say(f"{self} gives up")
        self.cancelled = "cancelled"
        if self.wish.wants_end:
            for _ in range(self.host.rng.choice((1, 1, 2))):
                self._member.compartment.run(self.host.loop.call_soon, self._stream.cancel)
        else:
            self.state, self.cancelled = "gone", "disconnected"
            self._visit.cancel()

    def _left(self, visit: asyncio.Task[Any]) -> None:
        assert self._member is not None
        self._member.entrance.visits.discard(visit)
        if visit.cancelled():
            if self.state == "open":
                self.state = "gone"
        elif (error := visit.exception()) is not None:
            self.host.object(f"{self}: {error!r}")

    def __str__(self) -> str:
        return f"client {self.wish.number}"
