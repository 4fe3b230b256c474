"""What the tests of the cores share: a real board, addresses, a token ring in a list, and short ways to say things."""

from __future__ import annotations

from collections import deque
from typing import TypeVar

import msgspec

from baton.engine.batch import sampling_of
from baton.engine.effects import Doorbell, Effect, Plan, Send, StepDone, TokenRecord
from baton.engine.limits import Limits
from baton.engine.ownership import BoardRow
from baton.engine.policies import Policies
from baton.engine.scheduler import SchedulerCore
from baton.engine.states import STATE_NUMBERS, owner_of
from baton.engine.worker import WorkerCore
from baton.ipc.board import Board
from baton.ipc.frames import Address, AnyFrame, Flush, Handed, Key, KVLayout, Params, Role, Terms, WorkerHello
from baton.workers.fake import ScriptedRunner, choose, follow

FoundT = TypeVar("FoundT")
TRACE = bytes(range(1, 25)) + b"\x01"
END, VOCAB = 1, 32
PLAIN = Policies(prefix_cache=False, admission="optimistic")


def address(role: Role, incarnation: int = 1) -> Address:
    """Whoever fills place 0 of a role."""
    return Address(role, "m", 0, 0, incarnation)


def make_board(slots: int = 8) -> Board:
    """A real board where every place is filled by its first incarnation."""
    board = Board.format(bytearray(Board.size(1, slots)), 1, slots)
    for role in Role:
        board.set_live(role, 0, 1, 0)
    return board


def hand(board: Board, slot: int, state: str, sender: Role, epoch: int = 1, sent_by: int = 1, to: int = 1) -> Key:
    """Write the row that a hand-over leaves: the owner of ``state`` is named and has not taken it."""
    generation = board.row(slot).generation
    row = BoardRow(
        generation=generation,
        epoch=epoch,
        role=owner_of(state),
        incarnation=to,
        from_role=sender,
        from_incarnation=sent_by,
        state=STATE_NUMBERS[state],
    )
    board.write(slot, row)
    return Key(slot, generation, epoch)


def owner(board: Board, slot: int) -> tuple[int, str, bool]:
    """(epoch, owning role's name, taken)."""
    row = board.row(slot)
    return row.epoch, Role(row.role).name.lower() if row.role else "", row.taken


def frames(effects: list[Effect], kind: type[FoundT]) -> list[FoundT]:
    """The frames of one kind among effects, in order."""
    return [effect.frame for effect in effects if isinstance(effect, Send) and isinstance(effect.frame, kind)]


def only(effects: list[Effect], kind: type[FoundT]) -> FoundT:
    """The one effect, or frame, of a kind."""
    found = [effect for effect in effects if isinstance(effect, kind)] + frames(effects, kind)
    assert len(found) == 1, f"{len(found)} of {kind.__name__} in {effects}"
    return found[0]


def truth(prompt: list[int], params: Params, count: int, mean_tokens: int = 1 << 30) -> list[int]:
    """The first ``count`` tokens that the scripted runner must say."""
    state, ids = 0, list[int]()
    for token in prompt:
        state = follow(state, token)
    sampling = sampling_of(params, (END,))
    while len(ids) < count:
        ids.append(choose(state, sampling, VOCAB, mean_tokens, len(ids)))
        state = follow(state, ids[-1])
    return ids


class Tape:
    """A token ring as one reader sees it."""

    def __init__(self) -> None:
        self.steps: list[StepDone] = []

    def read(self) -> list[StepDone]:
        """What was written since."""
        steps, self.steps = self.steps, []
        return steps

    def write(self, *records: TokenRecord) -> None:
        """One committed step of the first worker."""
        self.steps.append(StepDone(1, 0, list(records)))


class Engine:
    """A scheduler and a scripted worker in lock step, with a test in the places of all others.

    At most ``in_flight`` steps are under way, by default one, so that a test sees one decision after the other; and
    unless ``policies`` say so nobody begins with what another computed, and a seat is promised what is there at the
    moment, so that a small pool is soon full.
    """

    tokens_per_row_max = 1
    swap_bytes_per_s = 0

    def __init__(
        self,
        limits: Limits | None = None,
        blocks: int = 64,
        block_tokens: int = 4,
        in_flight: int = 1,
        policies: Policies | None = None,
        host_blocks: int = 0,
    ) -> None:
        limits = msgspec.structs.replace(limits or Limits(), steps_in_flight_max=in_flight)
        self.board = make_board(64)
        self.tape = Tape()
        self.core = SchedulerCore(address(Role.SCHEDULER), self.board, self.tape, (END,), limits, policies or PLAIN)
        self.block_tokens = block_tokens
        self.host_blocks = host_blocks
        self.now_ns = 0
        self.waiting: deque[Plan] = deque()
        self.plans: list[Plan] = []
        self.sent: list[AnyFrame] = []
        self.start_worker(1, blocks)

    def start_worker(self, incarnation: int, blocks: int) -> list[Effect]:
        """Another worker fills the place, with an empty cache, and says hello."""
        self.runner = ScriptedRunner(VOCAB, blocks, self.block_tokens, 1 << 30, host_blocks=self.host_blocks)
        self.worker = WorkerCore(0, (incarnation,), self.block_tokens)
        self.board.set_live(Role.WORKER, 0, incarnation, 0)
        layout = KVLayout(self.block_tokens, blocks, 1, 1, 1, 1, "float32")
        me, most = address(Role.WORKER, incarnation), self.tokens_per_row_max
        hello = WorkerHello(me, 0, (incarnation,), layout, "w", VOCAB, 4096, most)
        hello = msgspec.structs.replace(hello, host_blocks=self.host_blocks, swap_bytes_per_s=self.swap_bytes_per_s)
        return self.tell(hello)

    @property
    def plan(self) -> Plan | None:
        """The plan that the worker runs next."""
        return self.waiting[0] if self.waiting else None

    def tell(self, event: object) -> list[Effect]:
        """One event for the scheduler; its plans wait for ``step``."""
        self.now_ns += 1_000_000  # a step takes a millisecond or two
        out = self.core.handle(event, self.now_ns)
        for effect in out:
            if isinstance(effect, Plan):
                self.waiting.append(effect)
                self.plans.append(effect)
            elif isinstance(effect, Send):
                self.sent.append(effect.frame)
        return out

    def submit(
        self, slot: int, prompt: list[int], params: Params, delivered: tuple[int, ...] = (), credit: int = 1 << 20
    ) -> list[Effect]:
        """A request comes from the tokenizer."""
        key = hand(self.board, slot, "queued", Role.TOKENIZER, self.board.row(slot).epoch + 2)
        home = address(Role.FRONTEND)
        return self.tell(
            Handed(key, home, TRACE, Terms("m"), params, prompt, list(delivered), credit, begun=bool(delivered))
        )

    def step(self) -> bool:
        """The worker runs the plan that waits, and the scheduler hears of it; False if none waits."""
        if not self.waiting:
            return False
        if self.compute():
            self.tell(Doorbell())
        return True

    def compute(self) -> bool:
        """The worker runs the plan that waits, and nobody hears of it yet; False if the plan is for another."""
        plan = self.waiting.popleft()
        rows = self.worker.apply(plan)
        if rows is not None:
            self.runner.move(plan.moves)
            self.tape.steps.append(self.worker.commit(plan, rows, self.runner.step(rows)))
        return rows is not None

    def run(self, steps_max: int = 10_000) -> int:
        """Step until nothing is planned; the number of steps."""
        for steps in range(steps_max):
            if not self.step():
                return steps
        raise AssertionError(f"still going after {steps_max} steps")

    def flushed(self) -> dict[int, Flush]:
        """What was handed to the detokenizer so far, by slot."""
        return {frame.key.slot: frame for frame in self.sent if isinstance(frame, Flush)}

    def output(self, slot: int) -> list[int]:
        """The output tokens of a sequence that is still here."""
        return list(self.core.sequences[slot].output)
