"""One world: virtual time, the real cores, board, rings and frames; links that delay and lose; deaths and successors.

Everything random comes from one ``random.Random(seed)``, so a seed is a history. The world decides when things happen,
never what: that is the cores'.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec

from baton.engine.buggify import armed
from baton.engine.desk import DeskCore
from baton.engine.detokenizer import DetokenizerCore
from baton.engine.effects import (
    Account,
    Begin,
    Deliver,
    Died,
    Doorbell,
    Encode,
    Encoded,
    Finish,
    Named,
    Over,
    Plan,
    Send,
    Span,
    Spawn,
    Tick,
    Wake,
)
from baton.engine.health import HealthCore
from baton.engine.scheduler import SchedulerCore
from baton.engine.tokenizer import TokenizerCore
from baton.ipc.board import Board
from baton.ipc.frames import PROTOCOL_VERSION, Address, AnyFrame, Envelope, Life, Ready, Role
from baton.ipc.records import PlanReader, PlanWriter, StepReader, StepWriter
from baton.ipc.ring import HEADER_BYTES, Ring, RingReader, RingWriter
from tests.sim import policies
from tests.sim.chance import chance
from tests.sim.clients import DOORS, Client
from tests.sim.faults import STRIKES
from tests.sim.oracles import Broken, Oracles
from tests.sim.processes import Killed, Link, Place, Process
from tests.sim.script import END, MS, TABLE, tokenize
from tests.sim.shapes import make_shape, with_bounds
from tests.sim.wishes import keep_some, make_ranked_wishes
from tests.sim.worker import Worker

QUIET_NS = 3_000 * MS
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


class World:
    """Invariant: only processes in ``live`` handle events, and the life table is raised after a death only."""

    def __init__(self, seed: int, record: bool = False) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.rare: set[str] = set()
        ranks, shape = random.Random(~seed).choice((1, 1, 1, 2, 3)), make_shape(self.rng)
        shape = with_bounds(seed, shape, shape.limits)
        self.shape = replace(shape, ranks=ranks, policies=policies.make_policies(seed))
        self.now = 0
        self.events = 0
        self.last_event_ns = 0
        self.busy = 0  # events under way that are not sweeps
        self.record = record
        self.lines: list[str] = []
        self._heap: list[tuple[int, int, bool, Callable[..., None], tuple[Any, ...]]] = []
        self._ties = count()
        self._digest = hashlib.blake2b(digest_size=16)
        limits, frontends = self.shape.limits, self.shape.frontends
        slots = limits.requests_per_frontend_max
        self.board = Board.format(bytearray(Board.size(frontends, slots)), frontends, slots)
        self.tokens = Ring.format(bytearray(HEADER_BYTES + self.shape.token_ring_bytes), 2)
        self.plans = Ring.format(bytearray(HEADER_BYTES + self.shape.plan_ring_bytes), self.shape.ranks)
        self.live: dict[Place, Process | Worker] = {}
        self.links: dict[tuple[Place, int, Place], Link] = {}
        self.deaths = 0
        self.began_ns = 0
        self.struck: Counter[str] = Counter()  # faults that struck, by name
        self.swap_strikes = random.Random(f"swap strikes {seed}").choice((0, 0, 1, 3))  # soon after a swap to the host
        wishes = keep_some(seed, make_ranked_wishes(seed, self.rng, self.shape), self.shape)
        self.clients = [Client(wish, self) for wish in wishes]
        self.oracles = Oracles(self)
        self.places: list[Place] = [(Role.FRONTEND, index) for index in range(frontends)]
        self.places += [(Role.TOKENIZER, index) for index in range(self.shape.tokenizers)]
        self.places += [(Role.SCHEDULER, 0), (Role.DETOKENIZER, 0)]
        self.places += [(Role.WORKER, rank) for rank in range(self.shape.ranks)]
        restless = msgspec.structs.replace(limits, restarts_max=1000, restart_backoff_s=1e-9, watch_interval_s=1.0)
        supervisor = Address(Role.SUPERVISOR, "m", 0, 0, 1)
        self.health = HealthCore(supervisor, self.board, self.places, lambda: [], restless)

    # -------------------------------------------------------------------------------- time

    def run(self) -> str:
        """Play the history to its end and return its hash; raises ``Broken`` when an oracle objects."""
        with armed(chance(self.seed, self.rare)):
            return self._play()

    def _play(self) -> str:
        rng = self.rng
        self._oversee(self.health.start(0))
        for client in self.clients:
            self.at(client.wish.at_ns, client.arrive)
        for _ in range(rng.choice((0, 1, 1, 2, 3, 5, 9))):
            at_ns = rng.randrange(rng.choice((40, 120)) * MS)
            self.at(at_ns, self.strike, rng.choice([*self.places, (Role.SCHEDULER, 0)]))
            if rng.random() < 0.3:  # troubles come together
                self.at(at_ns + rng.randrange(20 * MS), self.strike, rng.choice(self.places))
        while self._heap and not self._done():
            self.now, _, busy, action, arguments = heapq.heappop(self._heap)
            self.busy -= busy
            action(*arguments)
            if busy:
                self.last_event_ns = self.now
            elif self.now - self.last_event_ns > QUIET_NS:
                raise Broken(f"stuck: {self.oracles.unfinished()}")
        self.oracles.at_the_end()
        return self._digest.hexdigest()

    @property
    def handled(self) -> int:
        """Events that the cores handled, and steps."""
        return self.events

    def at(self, delay_ns: int, action: Callable[..., None], *arguments: Any, busy: bool = True) -> None:
        """Do something later; what is not ``busy`` (a sweep) does not count as something going on."""
        self.busy += busy
        heapq.heappush(self._heap, (self.now + delay_ns, next(self._ties), busy, action, arguments))

    def say(self, line: str) -> None:
        """One line of the history: hashed always, kept when recording."""
        self._digest.update(f"{self.now} {line}\n".encode())
        if self.record:
            self.lines.append(f"{self.now / MS:9.3f} ms  {line}")

    def _done(self) -> bool:
        return self.busy == 0 and not self.oracles.unfinished()

    # -------------------------------------------------------------------------------- processes

    def _spawn(self, place: Place, incarnation: int) -> None:
        role, index = place
        me = Address(role, "m", 0, index, incarnation)
        limits = self.shape.limits
        if role == Role.WORKER:
            worker = Worker(self, me, PlanReader(RingReader(self.plans, index)), StepWriter(RingWriter(self.tokens)))
            self.live[place] = worker
            worker.hello()
            self._arrived(place)
            return
        core: Any
        if role == Role.FRONTEND:
            core = DeskCore(me, self.board, self.board.slice(index), limits, self.shape.frontends)
        elif role == Role.TOKENIZER:
            core = TokenizerCore(me, self.board, self.shape.context_tokens, 8, limits)
        elif role == Role.SCHEDULER:
            steps = StepReader(RingReader(self.tokens, 0))
            core = SchedulerCore(me, self.board, steps, (END,), limits, self.shape.policies)
        else:
            core = DetokenizerCore(me, self.board, StepReader(RingReader(self.tokens, 1)), TABLE, limits)
        process = self.live[place] = Process(place, incarnation, core)
        self.say(f"{me} starts")
        self._perform(process, core.start(self.now))
        if role in (Role.SCHEDULER, Role.DETOKENIZER):
            self.ring_bell(place)
        self._arrived(place)

    def tell(self, process: Process, event: object) -> None:
        """One event for one process, unless it is dead by now."""
        if self.live.get(process.place) is not process:
            return
        self.events += 1
        if self.record:
            self.say(f"{process.place[0].name.lower()}-{process.place[1]}#{process.incarnation} <- {event}")
        else:
            self.say(f"{process.place} {type(event).__name__}")
        told = self.oracles.before(process, event)
        try:
            if process.doomed == "writes":
                self.board.write = self._deadly_write  # type: ignore[method-assign]
            effects = process.core.handle(event, self.now)
        except Killed:
            self.kill(process.place)
            return
        except AssertionError as error:
            raise Broken(f"{process.place[0].name} asserts: {error!r} at {event}") from error
        finally:
            self.board.__dict__.pop("write", None)
        self.oracles.heard(process, event, told)
        if process.doomed == "effects":
            self._perform(process, effects[: self.rng.randint(0, len(effects))])
            self.kill(process.place)
        else:
            self._perform(process, effects)
        self.oracles.after(process)

    def _deadly_write(self, slot: int, row: Any) -> None:
        fate = self.rng.randrange(4)
        if fate == 0:
            raise Killed
        Board.write(self.board, slot, row)
        if fate == 1:
            raise Killed

    def _perform(self, process: Process, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self.send(process.place, process.incarnation, (effect.role, effect.index), effect.frame)
                case Wake():
                    token = process.timers[effect.name] = next(self._ties)
                    self.at(max(0, effect.at_ns - self.now), self._tick, process, effect.name, token, busy=False)
                case Span():
                    self.oracles.span(effect)
                case Account():
                    self.oracles.account(effect)
                case Encode():
                    ids = tokenize(effect.prompt.text or "")
                    self.at(self._jitter(2), self.tell, process, Encoded(effect.slot, effect.generation, ids, None))
                case Plan():
                    if not PlanWriter(RingWriter(self.plans)).write(effect):
                        raise Broken("the plan ring is full with few steps in flight")
                    for rank in range(self.shape.ranks):
                        self.ring_bell((Role.WORKER, rank))
                case Named() | Begin() | Deliver() | Finish():
                    self.clients[effect.door % DOORS].hear(process, effect)
                case _:
                    raise Broken(f"no such effect: {effect}")

    def _tick(self, process: Process, name: str, token: int) -> None:
        if process.timers.get(name) == token:
            self.tell(process, Tick(name))

    # -------------------------------------------------------------------------------- links and bells

    def send(self, sender: Place, incarnation: int, receiver: Place, frame: AnyFrame) -> None:
        """A frame sets out on its link; it arrives after those before it."""
        if receiver[0] == Role.SUPERVISOR:
            return
        key = (sender, incarnation, receiver)
        link = self.links.get(key)
        if link is None:
            slowness = self.rng.choice((1, 2, 60)) if self.shape.slow_links else 1
            link = self.links[key] = Link(receiver, slowness)
        address = Address(sender[0], "m", 0, sender[1], incarnation)
        link.frames.append(_encoder.encode(Envelope(PROTOCOL_VERSION, address, 1, frame)))
        link.last_ns = max(link.last_ns, self.now + self._jitter(link.slowness))
        self.at(link.last_ns - self.now, self._arrive, link)

    def _arrive(self, link: Link) -> None:
        process = self.live.get(link.receiver)
        if not link.frames:
            return
        if process is None:
            link.due += 1
            return
        data = link.frames.popleft()
        self._digest.update(data)
        self._hear(link.receiver, data)
        if self.shape.repeats and self.rng.random() < 0.1:
            self.at(self._jitter(self.rng.choice((1, 10, 100))), self._hear, link.receiver, data)

    def _hear(self, place: Place, data: bytes) -> None:
        frame, process = _decoder.decode(data).frame, self.live.get(place)
        if isinstance(process, Worker):
            process.hear(frame)
        elif process is not None:
            self.tell(process, frame)

    def _arrived(self, place: Place) -> None:
        """Somebody is there again: what waited for the place comes in."""
        for link in self.links.values():
            if link.receiver == place:
                for _ in range(link.due):
                    self.at(0, self._arrive, link)
                link.due = 0

    def ring_bell(self, place: Place) -> None:
        """Whoever fills the place looks at its ring soon."""
        self.at(self._jitter(self.rng.choice((1, 1, 20))) // 8, self._bell, place)

    def _bell(self, place: Place) -> None:
        process = self.live.get(place)
        if isinstance(process, Worker):
            process.look()
        elif process is not None:
            self.tell(process, Doorbell())

    def _jitter(self, slowness: int) -> int:
        return self.rng.randrange(20_000, 300_000) * slowness

    # -------------------------------------------------------------------------------- death and succession

    def strike(self, place: Place) -> None:
        """Something happens to whoever fills the place, now or with its next event."""
        process = self.live.get(place)
        how = self.rng.choice(("now", "effects", "effects", "writes"))
        if place[0] == Role.WORKER and not self.shape.poison and self.rng.random() < 0.25:
            how = "memory"
        if process is not None:
            self.struck[f"fault: {STRIKES[how]}"] += 1
        if process is None or how == "now":
            self.kill(place)
        else:
            process.doomed = how

    def kill(self, place: Place, unexplained: bool = False) -> None:
        """SIGKILL: at once, with what its links lose; the supervisor will notice."""
        process = self.live.pop(place, None)
        if process is None:
            return
        self.deaths += 1
        self.say(f"{place[0].name.lower()}-{place[1]}#{process.incarnation} is killed")
        for (sender, incarnation, _), link in self.links.items():
            if link.receiver == place:
                self._lose(link, link.frames.popleft)
            if sender == place and incarnation == process.incarnation:
                self._lose(link, link.frames.pop)
        if place[0] == Role.FRONTEND:
            for client in self.clients:
                client.disconnect(place[1])
        self.at(self._jitter(self.rng.choice((2, 50))), self._reap, place, process.incarnation, unexplained)

    def _lose(self, link: Link, take: Callable[[], bytes]) -> None:
        waiting = len(link.frames)
        for _ in range(self.rng.choice((0, waiting, self.rng.randint(0, waiting)))):
            take()

    def _reap(self, place: Place, incarnation: int, unexplained: bool) -> None:
        self.say(f"{place[0].name.lower()}-{place[1]} is reaped")
        if not self.shape.poison:  # nothing is guilty there, but may look so
            unexplained = self.rng.random() < 0.5
        self._supervise(Died(*place, incarnation, "signal SIGKILL", unexplained))

    def _supervise(self, event: object) -> None:
        """The supervisor hears of something; it is never down."""
        self._oversee(self.health.handle(event, self.now))

    def _oversee(self, effects: list[Any]) -> None:
        """What the supervisor wants done. Its word to the doors, pings and dumps are level two's."""
        for effect in effects:
            match effect:
                case Spawn() if self.health.phase == "starting":
                    self._spawn((effect.role, effect.index), effect.incarnation)
                    address = Address(effect.role, "m", 0, effect.index, effect.incarnation)
                    self._supervise(Ready(address, {}))
                case Spawn():
                    self._tell_of(effect, effects)
                    delay_ns = self._jitter(self.rng.choice((1, 60)))
                    self.at(delay_ns, self._spawn, (effect.role, effect.index), effect.incarnation)
                case Wake():
                    delay_ns = max(0, effect.at_ns - self.now)
                    self.at(delay_ns, self._supervise, Tick(effect.name), busy=effect.name.startswith("restart"))
                case Over():
                    raise Broken(f"the supervisor gave up: {effect.failure}")
                case _:
                    pass

    def _tell_of(self, spawn: Spawn, effects: list[Any]) -> None:
        """Everyone hears of a new life, in any order."""
        lives = [effect for effect in effects if isinstance(effect, Send) and isinstance(effect.frame, Life)]
        lives = [life for life in lives if (life.role, life.index) != (spawn.role, spawn.index)]
        self.rng.shuffle(lives)
        for life in lives:
            self.send((Role.SUPERVISOR, 0), 1, (life.role, life.index), life.frame)
