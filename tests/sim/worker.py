"""The worker's process in a world: the plan ring in, one step at a time, the token ring out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.engine.batch import StepRow
from baton.engine.effects import Plan, StepDone
from baton.engine.worker import WorkerCore
from baton.ipc.frames import Address, AnyFrame, KVLayout, Life, Role, WorkerHello
from baton.ipc.records import PlanReader, StepWriter
from baton.workers.fake import ScriptedRunner
from tests.sim.script import POISON, VOCAB

if TYPE_CHECKING:
    from tests.sim.world import World

FULL_WAIT_NS = 200_000


@dataclass(eq=False)
class Worker:
    """Rank 0. ``doomed`` kills it around the commit of its next step, or in the middle of it for want of memory."""

    world: World
    me: Address
    plans: PlanReader
    tokens: StepWriter
    doomed: str = ""
    busy: bool = False
    waiting: deque[Plan] = field(default_factory=deque)

    def __post_init__(self) -> None:
        shape = self.world.shape
        self.core = WorkerCore(0, self.me.incarnation, shape.block_tokens)
        self.runner = ScriptedRunner(
            *(VOCAB, shape.blocks, shape.block_tokens, shape.mean_tokens, 300_000, 20_000, shape.faulty),
            shape.tokens_per_row_max,
        )

    @property
    def incarnation(self) -> int:
        """This process among those that filled the place."""
        return self.me.incarnation

    def hello(self) -> None:
        """Tell the scheduler that this rank is up; also when the scheduler is new."""
        shape = self.world.shape
        layout = KVLayout(shape.block_tokens, shape.blocks, 1, 1, 1, 1, "float32")
        of_a_row = shape.tokens_per_row_max
        frame = WorkerHello(self.me, 0, 1, layout, "w", VOCAB, shape.context_tokens, of_a_row)
        self.world.send(self.me.place, self.incarnation, (Role.SCHEDULER, 0), frame)

    def hear(self, frame: AnyFrame) -> None:
        """A frame from a link: only the scheduler's new life matters here."""
        if isinstance(frame, Life) and frame.role == Role.SCHEDULER:
            self.hello()

    def look(self) -> None:
        """The plan ring's bell."""
        self.waiting.extend(self.plans.read())
        self._next()

    def _next(self) -> None:
        while self.waiting and not self.busy:
            plan = self.waiting.popleft()
            rows = self.core.apply(plan)
            if rows is not None:
                self.busy = True
                self.world.events += 1
                self.world.at(self.runner.cost_ns(rows), self._computed, plan, rows)

    def _computed(self, plan: Plan, rows: list[StepRow]) -> None:
        if not self._lives():
            return
        if self.doomed == "memory":  # there is none for this step; the process says so and ends
            self.world.kill(self.me.place, unexplained=True)
            return
        if self.world.shape.poison and any(row.sampling.seed == POISON and row.position == 1 for row in rows):
            self.world.kill(self.me.place, unexplained=True)
            return
        self.world.oracles.step(self.incarnation, plan, rows)
        self._commit(self.core.commit(plan, rows, self.runner.step(rows)))

    def _commit(self, done: StepDone) -> None:
        if not self._lives():
            return
        world = self.world
        last = self.doomed and world.rng.randrange(3)
        if last == 1 or not self.tokens.write(done):
            if last:
                world.kill(self.me.place)
            else:
                world.at(FULL_WAIT_NS, self._commit, done)
            return
        world.say(f"worker commits {done.step & 0xFFFF} {done.records}")
        if last == 2:
            world.kill(self.me.place)
            return
        world.oracles.sampled(done)
        for role in (Role.SCHEDULER, Role.DETOKENIZER):
            world.ring_bell((role, 0))
        self.busy = False
        self._next()

    def _lives(self) -> bool:
        return self.world.live.get(self.me.place) is self
