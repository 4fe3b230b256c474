"""Several ranks: one dies, those that live begin again with its successor, and no token is lost, doubled or changed."""

from __future__ import annotations

from baton.engine.effects import Doorbell, Effect, Plan
from baton.engine.worker import WorkerCore
from baton.ipc.frames import Address, KVLayout, Life, Params, Role, WorkerHello
from baton.workers.fake import ScriptedRunner
from tests.engine.rig import VOCAB, Engine, only, truth

PROMPT = [5, 6, 7, 8]
PARAMS = Params(max_tokens=6, seed=3, ignore_eos=True)
BLOCKS, BLOCK_TOKENS = 64, 4


class Ranks(Engine):
    """An engine whose worker is rank 0 of several; the others are there by their hellos alone."""

    def __init__(self, ranks: int) -> None:
        self.count = ranks
        super().__init__()

    def start_worker(self, incarnation: int, blocks: int) -> list[Effect]:
        for rank in range(self.count):
            self.board.set_live(Role.WORKER, rank, incarnation, 0)
        self.runner = ScriptedRunner(VOCAB, blocks, self.block_tokens, 1 << 30)
        self.worker = WorkerCore(0, self.group, self.block_tokens)
        return [effect for rank in range(self.count) for effect in self.greet(rank)]

    @property
    def group(self) -> tuple[int, ...]:
        return tuple(self.board.live(Role.WORKER, rank) for rank in range(self.count))

    def greet(self, rank: int, group: tuple[int, ...] | None = None) -> list[Effect]:
        group = group or self.group
        address = Address(Role.WORKER, "m", 0, rank, group[rank])
        layout = KVLayout(self.block_tokens, BLOCKS, 1, 1, 1, 1, "float32")
        return self.tell(WorkerHello(address, rank, group, layout, "w", VOCAB, 4096))

    def replace(self, rank: int) -> None:
        """A rank dies and is replaced; nobody has said so yet."""
        self.board.set_live(Role.WORKER, rank, self.board.live(Role.WORKER, rank) + 1, 0)

    def hear(self, rank: int, fault: bool = False) -> list[Effect]:
        return self.tell(Life(Role.WORKER, rank, self.board.live(Role.WORKER, rank), fault))


def test_nothing_is_planned_before_every_rank_has_greeted() -> None:
    engine = Ranks(3)
    engine.submit(0, PROMPT, PARAMS)
    engine.step()
    engine.replace(1)
    engine.hear(1)
    engine.waiting.clear()
    for rank in (2, 0):
        assert not [effect for effect in engine.greet(rank) if isinstance(effect, Plan)]
    assert only(engine.greet(1), Plan).incarnations == (1, 2, 1)


def test_whichever_rank_dies_the_answer_is_the_same() -> None:
    for rank in range(3):
        engine = Ranks(3)
        engine.submit(0, PROMPT, PARAMS)
        engine.step()
        engine.step()
        engine.waiting.clear()
        engine.replace(rank)
        engine.hear(rank)
        if rank == 0:
            engine.runner = ScriptedRunner(VOCAB, BLOCKS, BLOCK_TOKENS, 1 << 30)
            engine.worker = WorkerCore(0, engine.group, BLOCK_TOKENS)
        else:
            engine.worker.join(engine.group)
        for number in (2, 0, 1):
            engine.greet(number)
        before = engine.output(0)
        assert before == truth(PROMPT, PARAMS, 2)
        engine.run()
        assert engine.flushed()[0].length == 6


def test_a_greeting_from_before_the_loss_counts_for_nothing_and_one_ahead_of_the_news_is_believed() -> None:
    engine = Ranks(2)
    engine.submit(0, PROMPT, PARAMS)
    engine.waiting.clear()
    old = engine.group
    engine.replace(1)
    engine.greet(0, old)
    assert engine.core.counts["stale_hellos"] == 1
    engine.greet(1)
    engine.greet(0)
    plan = engine.plan
    assert plan is not None and plan.incarnations == (1, 2)
    assert not [effect for effect in engine.hear(1) if isinstance(effect, Plan)]


def test_who_was_running_is_suspect_also_where_a_greeting_comes_before_the_news_of_the_death() -> None:
    for fault in (True, False):
        engine = Ranks(2)
        engine.submit(0, PROMPT, PARAMS)
        engine.waiting.clear()
        engine.replace(1)
        engine.greet(1)
        engine.hear(1, fault)
        assert [seq.held.slot for seq in engine.core.batcher.suspects] == [0] * fault


def test_a_second_greeting_before_the_news_does_not_hide_whom_the_first_death_hit() -> None:
    engine = Ranks(2)
    engine.submit(0, PROMPT, PARAMS)
    engine.waiting.clear()
    engine.replace(1)
    engine.greet(1)
    engine.replace(0)
    engine.greet(0)
    engine.hear(1, fault=True)
    assert [seq.held.slot for seq in engine.core.batcher.suspects] == [0]


def test_a_word_that_a_living_rank_committed_late_is_counted_as_the_detokenizer_counts_it() -> None:
    engine = Ranks(2)
    engine.submit(0, PROMPT, PARAMS)
    engine.step()
    plan = engine.waiting.popleft()
    rows = engine.worker.apply(plan) or []
    late = engine.worker.commit(plan, rows, engine.runner.step(rows))
    engine.replace(1)
    engine.hear(1)
    engine.tape.steps.append(late)
    engine.tell(Doorbell())
    assert engine.output(0) == truth(PROMPT, PARAMS, 2)
    assert engine.core.sequences[0].held.state == "preempted"
    engine.worker.join(engine.group)
    engine.greet(0)
    engine.greet(1)
    engine.run()
    assert engine.flushed()[0].length == 6


def test_a_second_loss_while_they_gather_begins_the_gathering_again() -> None:
    engine = Ranks(2)
    engine.submit(0, PROMPT, PARAMS)
    engine.waiting.clear()
    engine.replace(1)
    engine.hear(1)
    engine.greet(0)
    engine.replace(1)
    engine.hear(1)
    assert engine.greet(1) == []
    assert only(engine.greet(0), Plan).incarnations == (1, 3)


def test_a_rank_that_joins_another_group_forgets_what_it_held_and_drops_older_plans() -> None:
    engine = Ranks(2)
    engine.submit(0, PROMPT, PARAMS)
    plan = engine.plan
    assert plan is not None
    engine.worker.apply(plan)
    engine.worker.join((1, 1))
    assert engine.worker.slots
    engine.worker.join((1, 2))
    assert not engine.worker.slots
    assert engine.worker.apply(plan) is None
