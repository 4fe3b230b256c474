"""The production scheduler in one process, one event at a time, for measurements that want no process around it.

A board in memory, the token ring as a list; whoever measures stands in the workers' place: it takes the plans in order
and says what each step yielded.
"""

from __future__ import annotations

from collections import deque

from baton.engine.effects import Doorbell, Effect, Plan, StepDone
from baton.engine.limits import Limits
from baton.engine.ownership import BoardRow
from baton.engine.policies import Policies
from baton.engine.scheduler import SchedulerCore
from baton.engine.states import STATE_NUMBERS
from baton.ipc.board import Board
from baton.ipc.frames import Address, Handed, Key, KVLayout, Params, Role, Terms, WorkerHello

_TRACE = bytes(25)  # not sampled


class Tape:
    """The token ring, as a list."""

    def __init__(self) -> None:
        self.steps: list[StepDone] = []

    def read(self) -> list[StepDone]:
        """What was said since."""
        steps, self.steps = self.steps, []
        return steps


class Lockstep:
    """A scheduler for up to ``slots`` requests at a time; ``plans`` are those not yet answered, oldest first."""

    def __init__(
        self,
        slots: int,
        layout: KVLayout,
        vocab: int,
        context_tokens_max: int,
        limits: Limits,
        policies: Policies | None = None,
        host_blocks: int = 0,
    ) -> None:
        self.tape = Tape()
        self.board = Board.format(bytearray(Board.size(1, slots)), 1, slots)
        for role in Role:
            self.board.set_live(role, 0, 1, 0)
        me = Address(Role.SCHEDULER, "m", 0, 0, 1)
        self.core = SchedulerCore(me, self.board, self.tape, (), limits, policies)
        self.plans: deque[Plan] = deque()
        self.now_ns = 0
        worker = Address(Role.WORKER, "m", 0, 0, 1)
        self.tell(WorkerHello(worker, 0, (1,), layout, "w", vocab, context_tokens_max, host_blocks=host_blocks))

    def submit(self, slot: int, prompt_ids: list[int], params: Params) -> None:
        """A request comes from the tokenizer, in a row that is free."""
        generation = self.board.row(slot).generation
        row = BoardRow(generation, 1, Role.SCHEDULER, 0, 1, False, Role.TOKENIZER, 0, 1, STATE_NUMBERS["queued"], 0)
        self.board.write(slot, row)
        home = Address(Role.FRONTEND, "m", 0, 0, 1)
        key = Key(slot, generation, 1)
        self.tell(Handed(key, home, _TRACE, Terms("m"), params, prompt_ids, [], params.max_tokens or 1 << 20))

    def answer(self, done: StepDone) -> None:
        """The oldest plan was carried out."""
        self.plans.popleft()
        self.tape.steps.append(done)
        self.tell(Doorbell())

    def tell(self, event: object) -> list[Effect]:
        """One event for the scheduler."""
        self.now_ns += 1_000_000
        effects = self.core.handle(event, self.now_ns)
        self.plans += [effect for effect in effects if isinstance(effect, Plan)]
        return effects
