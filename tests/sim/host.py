"""Level two: the real shells of all roles on one simulated machine, from one seed, among faults, judged by oracles.

Everything a process is made of is the production code: its role's ``run``, its shell, links, rings, doorbells and the
supervisor's core. The host decides when frames arrive and what befalls whom, never what is done about it.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from baton.engine.buggify import armed
from baton.engine.effects import Died, Dump, Inquire, Kill, Note, Opened, Over, Spawn, StopAsked
from baton.engine.health import HealthCore
from baton.engine.watch import Place as Seen
from baton.ipc.frames import Address, AnyFrame, Ping, Role
from baton.ipc.memory_link import Network, Place
from baton.ipc.ring import CURSORS, WRITTEN
from baton.ipc.shell import Shell
from baton.ipc.virtual_clock import Asleep, VirtualLoop
from baton.workers.config import Card, Launch, Settings
from baton.workers.memory import Bell, MemoryMachine
from tests.sim.chance import chance
from tests.sim.faults import SPAN_NS, Fault, limits_of, make_faults, places_of
from tests.sim.forger import forged
from tests.sim.members import Member
from tests.sim.model import card, encode
from tests.sim.oracles import Broken, Oracles
from tests.sim.policies import policy_settings
from tests.sim.script import MS
from tests.sim.shapes import make_shape, with_bounds
from tests.sim.visitors import Visitor
from tests.sim.wishes import make_ranked_wishes

HISTORY_S_MAX = 12.0
JUDGE_EVERY_S = 0.0017  # and no more often than a few times a step
JUDGE_IDLE_S = 0.05
START_NS = 10_000_000 * MS  # late enough that a request may have been received long ago


class Host:
    """Invariant: a place has at most one living member, and its successor starts only when the supervisor says so."""

    def __init__(self, seed: int, record: bool = False, forgeries: int = 0) -> None:
        """With ``forgeries`` so many frames come that nobody should have sent."""
        self.seed = seed
        self.forgeries = forgeries
        self.rng = rng = random.Random(seed)
        self.rare: set[str] = set()
        shape = make_shape(rng)
        self.places = places_of(shape)
        self.faults = make_faults(rng, self.places, shape)
        self.shape = shape = with_bounds(seed, replace(shape, repeats=False), limits_of(rng, shape, self.faults))
        self.record = record
        self.lines: list[str] = []
        self.loop = VirtualLoop(START_NS)
        self.events = 0  # so that the oracles look at owners every time they are asked
        self.deaths = self.handled = 0
        self.began_ns = START_NS
        self.struck: Counter[str] = Counter()  # faults that struck, by name
        self.said: Counter[str] = Counter()  # what processes logged, by role and event
        self.stop_asked = self.over = False
        self.clients = [Visitor(wish, self) for wish in make_ranked_wishes(seed, rng, shape, encode)]
        self.stop_at_ns = rng.randrange(SPAN_NS) if rng.random() < 0.2 else None
        self.settings = Settings(
            worker="scripted",
            scripted_step_ms=rng.choice((0.0, 0.3, 1.0, 8.0, 30.0)),
            **policy_settings(seed),
            limits=shape.limits,
            frontends=shape.frontends,
        )
        self.card: Card = card(shape.context_tokens)
        self._digest = hashlib.blake2b(digest_size=16)
        self._slowness: dict[tuple[Place, Place], int] = {}
        self._outside = contextvars.copy_context()
        self._members: dict[Place, Member] = {}
        self._unborn: set[Place] = set()
        self._pending = len(self.faults)
        self._judged = False
        self._damaged: set[Role] = set()  # whose next frame in a ring is to be damaged
        self.network = Network(self.loop, self.loop.now_ns, self._delay_ns, self._lose)
        self.machine = MemoryMachine(self.loop, self.network, shape.limits, shape.frontends, 1, self._rung)
        self.board = self.machine.board
        self.oracles = Oracles(self)  # type: ignore[arg-type]  # it has what the oracles look at, as a world has
        self._end: asyncio.Future[None] = self.loop.create_future()

    # -------------------------------------------------------------------------------- the history

    def run(self) -> str:
        """Play the history to its end and return its hash; raises ``Broken`` when an oracle objects."""
        try:
            with armed(chance(self.seed, self.rare)):
                self.loop.run_until_complete(self._play())
        except Asleep:
            raise Broken(f"everybody waits for somebody else: {self.oracles.unfinished()}") from None
        except TimeoutError:
            raise Broken(f"stuck: {self.oracles.unfinished()}") from None
        finally:
            self.loop.bury()
        return self._digest.hexdigest()

    async def _play(self) -> None:
        self.loop.set_exception_handler(self._noticed)
        self.supervisor = self._make_supervisor()
        self.supervisor.start()
        judge = self.loop.create_task(self._judge())
        try:
            async with asyncio.timeout(HISTORY_S_MAX):
                await self._end
        finally:
            judge.cancel()
        self.supervisor.stop()
        left = [str(member.me) for member in self._members.values()]
        self.oracles.check(not left, f"the server is over, and these live: {left}")
        waiting = [f"{client} is {client.state}" for client in self.clients if client.state == "open"]
        self.oracles.check(not waiting, f"the server is over, and {waiting}")
        if not self._judged:
            self.oracles.at_the_end()

    async def _judge(self) -> None:
        """Look again and again, less often while nothing happens; when all is done, ask the server to end."""
        soon_s = pause_s = max(JUDGE_EVERY_S, self.settings.scripted_step_ms / 4000)
        said = self.handled
        while True:
            await asyncio.sleep(pause_s)
            pause_s, said = (min(2 * pause_s, JUDGE_IDLE_S) if said == self.handled else soon_s), self.handled
            members = list(self.live.values())
            if members:  # any one: its look is at all of them; only a scheduler is asked for more
                self.judge(self.oracles.after, max(members, key=lambda member: member.me.role == Role.SCHEDULER))
            if not self.stop_asked and self.stop_at_ns is None and self._done():
                self.judge(self.oracles.at_the_end)
                self._judged = True
                self.ask_to_stop()

    def _done(self) -> bool:
        quiet = not self._pending and not any(member.compartment.frozen for member in self._members.values())
        return quiet and self.health.phase == "serving" and not self.oracles.unfinished()

    @property
    def ending(self) -> bool:
        """Whether the server is on its way to its end, asked or because it cannot be kept up."""
        return self.health.phase in ("draining", "stopping")

    def ask_to_stop(self) -> None:
        """SIGTERM."""
        self.say("somebody wants the server to end")
        self.stop_asked = True
        self.supervisor.feed(StopAsked())

    def say(self, line: str) -> None:
        """One line of the history: hashed always, kept when recording."""
        self.handled += 1
        self._digest.update(f"{self.loop.now_ns()} {line}\n".encode())
        if self.record:
            self.lines.append(f"{(self.now - START_NS) / MS:9.3f} ms  {line}")

    def judge(self, oracle: Callable[..., None], *arguments: Any) -> None:
        """Ask an oracle; its objection ends the history."""
        try:
            oracle(*arguments)
        except Broken as broken:
            self.object(str(broken))

    def object(self, what: str) -> None:
        """The history is wrong."""
        if not self._end.done():
            self._end.set_exception(Broken(what))

    def jitter(self, slowness: int) -> float:
        """A short time, in seconds."""
        return self.rng.randrange(20_000, 300_000) * slowness / 1e9

    def later(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do something from outside of every process."""
        self.loop.call_at(self.loop.time() + delay_s, action, *arguments, context=self._outside)

    def _noticed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.object(f"{context.get('message')}: {context.get('exception')!r}")

    # -------------------------------------------------------------------------------- links

    def _delay_ns(self, sender: Address, receiver: Place, frame: AnyFrame) -> int:
        what = str(frame) if self.record else type(frame).__name__
        self.say(f"{sender} -> {receiver[0].name.lower()}-{receiver[1]}: {what}")
        member = self._members.get(sender.place)
        if member is not None and member.me == sender and member.speaks is not None:
            member.speaks -= 1
            if member.speaks == 0:
                self.later(0, self._kill_exactly, member)
        slowness = self._slowness.get((sender.place, receiver))
        if slowness is None:
            slowness = self.rng.choice((1, 1, 2, 60)) if self.shape.slow_links else 1
            self._slowness[(sender.place, receiver)] = slowness
        return int(self.jitter(slowness) * 1e9)

    def _lose(self, waiting: int) -> int:
        return self.rng.choice((0, waiting, self.rng.randint(0, waiting)))

    # -------------------------------------------------------------------------------- processes

    @property
    def now(self) -> int:
        """The time, as the oracles ask for it."""
        return self.loop.now_ns()

    @property
    def live(self) -> dict[Place, Member]:
        """Every process whose core runs."""
        return {place: member for place, member in self._members.items() if member.core is not None}

    def _make_supervisor(self) -> Shell:
        limits, me = self.shape.limits, Address(Role.SUPERVISOR, "m", 0, 0, 1)

        def deliver(frame: AnyFrame) -> None:
            shell.feed(frame)

        self.health = core = HealthCore(me, self.board, self.places, self._observe, limits)
        links = self.network.connect(me, limits, self.board, deliver, self._reported)
        shell = Shell(
            core,
            links,
            emit=lambda span: None,
            note=self._noted,
            beat=lambda: None,
            fatal=lambda error: self.object(f"the supervisor: {error!r}"),
            now_ns=self.loop.now_ns,
            perform={
                Spawn: self._spawn,
                Inquire: lambda effect: None,
                Dump: lambda effect: self.say(str(effect)),
                Kill: self._kill_asked,
                Opened: self._opened,
                Over: self._is_over,
            },
        )
        return shell

    def _noted(self, note: Note) -> None:
        self.say(f"the supervisor notes {note.event} {note.fields}")

    def _reported(self, event: str, detail: str) -> None:
        self.said[f"supervisor {event}"] += 1
        self.judge(self.oracles.check, self.forgeries > 0, f"the supervisor: {event} {detail}")

    def _observe(self) -> list[tuple[Seen, str]]:
        """Every place whose process runs, and how the kernel would call its state."""
        return [
            (place, "T" if self._members[(place.role, place.index)].stopped else "S")
            for place in self.board.places()
            if (place.role, place.index) in self._members
        ]

    def _spawn(self, effect: Spawn) -> None:
        self._unborn.add((effect.role, effect.index))
        self.later(self.jitter(self.rng.choice((1, 60))), self._bring_up, effect)

    def _bring_up(self, effect: Spawn) -> None:
        place = (effect.role, effect.index)
        if place not in self._unborn:
            self._reap(Address(effect.role, "m", 0, effect.index, effect.incarnation), "signal SIGKILL")
            return
        self._unborn.remove(place)
        launch = Launch(
            role=effect.role,
            index=effect.index,
            incarnation=effect.incarnation,
            directory="",
            settings=self.settings,
            card=self.card,
            doorbells={},
            lifeline=-1,
            epoch_offset_ns=0,
        )
        member = self._members[place] = Member(self, launch)
        self.say(f"{member.me} starts")
        member.compartment.run(self.loop.create_task, member.main())

    def ended(self, member: Member, status: int) -> None:
        """A process came to its end in good order."""
        left = member.compartment.left()
        own = [line for line in left if "coro=<Member.main()" not in line]
        self.judge(self.oracles.check, not own, f"{member.me} ended and left {own}")
        self.judge(self.oracles.check, self.ending, f"{member.me} ended by itself with {status}")
        self.later(0, self._exit, member, f"status {status}")

    def crashed(self, member: Member) -> None:
        """A process ended itself."""
        self.deaths += 1
        self.later(0, self._exit, member, "status 1", True)

    def _exit(self, member: Member, how: str, fault: bool = False) -> None:
        if self._members.get(member.place) is member:
            del self._members[member.place]
            member.compartment.kill()
            self.network.kill(member.me)
            self._reap(member.me, how, fault)

    def kill(self, place: Place) -> None:
        """SIGKILL: at once, with what its links lose; the supervisor will notice."""
        member = self._members.get(place)
        if member is not None:
            self.say(f"{member.me} is killed")
            self.deaths += 1
            for client in self.clients:
                client.disconnect(member)
            self._exit(member, "signal SIGKILL")

    def _kill_exactly(self, member: Member) -> None:
        if self._members.get(member.place) is member:
            self.kill(member.place)

    def _kill_asked(self, effect: Kill) -> None:
        """The supervisor kills who hangs, who damaged a ring, or lost what was in one, and nobody else."""
        place = (effect.role, effect.index)
        self._unborn.discard(place)
        member, condemned = self._members.get(place), self.health.children[place].condemned or ""
        hangs = member is None or member.compartment.frozen or "ring" in condemned or "could not read" in condemned
        self.judge(self.oracles.check, hangs, f"{place} is killed though it works")
        self.later(self.jitter(1), self.kill, (effect.role, effect.index))

    def _reap(self, me: Address, how: str, fault: bool = False) -> None:
        died = Died(me.role, me.index, me.incarnation, how, fault)
        self.later(self.jitter(self.rng.choice((1, 30))), self.supervisor.feed, died)

    # -------------------------------------------------------------------------------- what happens

    def _opened(self, effect: Opened) -> None:
        """The server is up: clients come, and troubles."""
        for client in self.clients:
            self.later(client.wish.at_ns / 1e9, client.arrive)
        for fault in self.faults:
            self.later(fault.at_ns / 1e9, self._strike, fault)
        for _ in range(self.forgeries):
            self.later(self.rng.randrange(SPAN_NS) / 1e9, self._forge)
        if self.stop_at_ns is not None:
            self.later(self.stop_at_ns / 1e9, self.ask_to_stop)
            if self.rng.random() < 0.2:
                self.later(self.stop_at_ns / 1e9 + self.jitter(60), self.ask_to_stop)

    def _is_over(self, effect: Over) -> None:
        self.over = True
        names = any(word in (effect.failure or "") for word in ("died", "failed to start"))
        spent = names and self.deaths > self.shape.limits.restarts_max
        self.judge(self.oracles.check, effect.failure is None or spent, f"the server failed: {effect.failure}")
        if not self._end.done():
            self._end.set_result(None)

    def _strike(self, fault: Fault) -> None:
        self._pending -= 1
        member = self._members.get(fault.place)
        if member is None or member.compartment.frozen:
            return
        self.say(f"{fault}")
        self.struck[f"fault: {fault.name}"] += 1
        match fault.name:
            case "kill":
                self.kill(fault.place)
            case "kill while speaking":
                member.speaks = fault.after_frames
            case "stop" | "hang":
                member.stopped = fault.name == "stop"
                member.compartment.freeze()
            case "slow" | "full ring":
                member.compartment.freeze()
                self.later(fault.for_ns / 1e9, member.compartment.thaw)
            case "out of memory":
                member.starved = True
            case "damage":
                self._damaged |= {fault.place[0]}
            case name:
                raise AssertionError(name)

    def _forge(self) -> None:
        """Somebody who is nobody speaks to a process or to the supervisor."""
        ghost, receiver = Address(Role.WORKER, "m", 9, 0, 0), self.rng.choice([*self.places, (Role.SUPERVISOR, 0)])
        self.network.carry(ghost, receiver, Ping(), forged(self.rng), self.forgeries)

    def _rung(self, bell: Bell) -> None:
        """Somebody wrote to a ring; if it is to be damaged, a byte of what was written last is turned over."""
        ring, writer = bell[2], Role.WORKER if bell[2] == "tokens" else Role.SCHEDULER
        if writer not in self._damaged:
            return
        view = self.machine.map_ring(ring)
        written, cursor = view.words[WRITTEN], view.words[CURSORS + (bell[0] == Role.DETOKENIZER)]
        if cursor < written:
            self._damaged -= {writer}
            at = self.rng.randrange(cursor, written) % view.capacity
            view.data[at] ^= 1 << self.rng.randrange(8)
            self.say(f"the {ring} ring is damaged at {at}")
        view.close()
