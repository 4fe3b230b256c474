"""The worker's process in a world: the plan ring in, one step at a time, the token ring out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.engine.batch import StepRow
from baton.engine.blocks import Move
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
    """One rank. Rank 0 commits a step once every rank has computed it. ``doomed`` kills it around its next step, or in
    the middle of it for want of memory.
    """

    world: World
    me: Address
    plans: PlanReader
    tokens: StepWriter
    doomed: str = ""
    step: Plan | None = None  # what it computes now
    rows: list[StepRow] | None = None  # what it has computed and not committed
    waiting: deque[Plan] = field(default_factory=deque)

    def __post_init__(self) -> None:
        shape = self.world.shape
        self.core = WorkerCore(self.me.index, self._group(), shape.block_tokens)
        self.runner = ScriptedRunner(
            *(VOCAB, shape.blocks, shape.block_tokens, shape.mean_tokens, 300_000, 20_000, shape.faulty),
            shape.tokens_per_row_max,
            host_blocks=shape.host_blocks,
        )

    @property
    def incarnation(self) -> int:
        """This process among those that filled the place."""
        return self.me.incarnation

    def hello(self) -> None:
        """Join the ranks of the moment and tell the scheduler so; as ``workers.gpu`` does."""
        shape, before = self.world.shape, self.core.group
        self.core.join(self._group())
        layout = KVLayout(shape.block_tokens, shape.blocks, 1, 1, 1, 1, "float32")
        of_a_row, group = shape.tokens_per_row_max, self.core.group
        of_the_model = (layout, "w", VOCAB, shape.context_tokens, of_a_row)
        frame = WorkerHello(self.me, self.me.index, group, *of_the_model, host_blocks=shape.host_blocks)
        self.world.send(self.me.place, self.incarnation, (Role.SCHEDULER, 0), frame)
        if before != self.core.group:
            self._next()

    def hear(self, frame: AnyFrame) -> None:
        """A frame from a link: only the new life of a scheduler or of another rank matters here."""
        if isinstance(frame, Life) and frame.role in (Role.SCHEDULER, Role.WORKER):
            self.hello()

    def look(self) -> None:
        """The plan ring's bell."""
        self.waiting.extend(self.plans.read())
        if self.step is None:
            self._next()

    def _group(self) -> tuple[int, ...]:
        return tuple(self.world.board.live(Role.WORKER, rank) for rank in range(self.world.shape.ranks))

    def _next(self) -> None:
        self.step = self.rows = None
        while self.waiting and self.step is None:
            plan = self.waiting.popleft()
            rows = self.core.apply(plan)
            if rows is not None:
                self.runner.move(plan.moves)
                if self.world.swap_strikes and any(kind == Move.OUT for kind, *_ in plan.moves):
                    self.world.swap_strikes -= 1
                    self.world.at(self.world.rng.randrange(10_000_000), self.world.strike, self.me.place)
                self.step = plan
                self.world.events += 1
                self.world.at(self.runner.cost_ns(rows), self._computed, plan, rows)

    def _computed(self, plan: Plan, rows: list[StepRow]) -> None:
        if not self._at(plan):
            return
        if self.doomed == "memory":  # there is none for this step; the process says so and ends
            self.world.kill(self.me.place, unexplained=True)
            return
        last = self.me.index == self.world.shape.ranks - 1
        poisoned = any(row.sampling.seed == POISON and row.position == 1 for row in rows)
        if last and self.world.shape.poison and poisoned:
            self.world.kill(self.me.place, unexplained=True)
            return
        if self.doomed and self.me.index:
            self.world.kill(self.me.place)
            return
        self.rows = rows
        first = self.world.live.get((Role.WORKER, 0))
        if isinstance(first, Worker):
            first.gather()

    def gather(self) -> None:
        """Rank 0: commit the step that every rank has computed."""
        plan, rows = self.step, self.rows
        if plan is None or rows is None:
            return
        peers = [self.world.live.get((Role.WORKER, rank)) for rank in range(self.world.shape.ranks)]
        for peer in peers:
            if not isinstance(peer, Worker) or peer.step != plan or peer.rows is None:
                return
        self.rows = None
        self.world.oracles.step(self.incarnation, plan, rows)
        done = self.core.commit(plan, rows, self.runner.step(rows))
        for peer in peers:
            if isinstance(peer, Worker) and peer is not self and peer.rows is not None:
                peer.core.commit(plan, peer.rows, peer.runner.step(peer.rows))
                peer._next()
        self._commit(plan, done)

    def _commit(self, plan: Plan, done: StepDone) -> None:
        if not self._at(plan):
            return
        world = self.world
        if self._group() != plan.incarnations:
            self._next()
            return
        last = self.doomed and world.rng.randrange(3)
        if last == 1 or not self.tokens.write(done):
            if last:
                world.kill(self.me.place)
            else:
                world.at(FULL_WAIT_NS, self._commit, plan, done)
            return
        world.say(f"worker commits {done.step & 0xFFFF} {done.records}")
        if last == 2:
            world.kill(self.me.place)
            return
        world.oracles.sampled(done)
        for role in (Role.SCHEDULER, Role.DETOKENIZER):
            world.ring_bell((role, 0))
        self._next()

    def _at(self, plan: Plan) -> bool:
        """Whether this process lives and is still at this step."""
        return self.world.live.get(self.me.place) is self and self.step is plan
