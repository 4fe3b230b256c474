"""One step ahead: the next step is planned while one runs, and nothing that this step shows makes it wrong."""

from __future__ import annotations

import pytest

from baton.engine.batch import UNKNOWN, Sampled
from baton.engine.effects import Doorbell
from baton.engine.limits import Limits
from baton.ipc.frames import Cancel, Flush, Life, Params, Role
from tests.engine.rig import END, VOCAB, Engine, frames, truth

PROMPT = [5, 6, 7, 8]


def params(max_tokens: int = 8, seed: int = 1, ignore_eos: bool = True) -> Params:
    return Params(max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos)


def ending_seed(position: int) -> int:
    """A seed whose answer to the prompt ends by itself at this output position."""
    for seed in range(100_000):
        said = truth(PROMPT, params(seed=seed, ignore_eos=False), position + 1, mean_tokens=4)
        if said[position] == END and END not in said[:position]:
            return seed
    raise AssertionError("no such seed")


def test_two_steps_are_under_way_and_the_second_takes_a_token_nobody_knows_yet() -> None:
    engine = Engine(in_flight=2)
    engine.submit(0, PROMPT, params(6))
    assert len(engine.waiting) == 1, "who comes while the first step runs is in the second"
    engine.step()
    assert [(row.start, row.count, row.sample) for plan in engine.waiting for row in plan.rows] == [
        (4, 1, True),
        (5, 1, True),
    ]
    assert engine.core.sequences[0].pending == 2
    engine.run()
    assert engine.flushed()[0].length == 6


def test_no_step_is_planned_for_a_token_past_the_last() -> None:
    engine = Engine(in_flight=2)
    engine.submit(0, PROMPT, params(3))
    engine.run()
    assert sum(row.sample for plan in engine.plans for row in plan.rows) == 3


def test_no_step_is_planned_past_the_clients_credit() -> None:
    engine = Engine(in_flight=2)
    engine.submit(0, PROMPT, params(), credit=3)
    engine.run()
    assert (engine.output(0), engine.core.sequences[0].held.state) == (truth(PROMPT, params(), 3), "paused")


def test_who_ends_unforeseen_is_passed_over_in_the_next_step_and_the_others_are_not() -> None:
    engine = Engine(in_flight=2)
    engine.runner.mean_tokens = 4
    seed = ending_seed(2)
    engine.submit(0, PROMPT, params(seed=seed, ignore_eos=False))
    engine.submit(1, PROMPT, params(seed=seed + 1))
    while END not in engine.core.sequences[0].output:
        engine.step()
    assert 0 not in engine.flushed(), "a step in flight still names it"
    assert 0 in [row.slot for row in engine.waiting[0].rows]
    assert engine.core.sequences[0].blocks
    engine.compute()
    assert [record.slot for record in engine.tape.steps[0].records] == [1]
    engine.tell(Doorbell())
    assert (engine.flushed()[0].reason, engine.flushed()[0].length) == ("stop", 3)
    engine.run()
    assert engine.flushed()[1].length == 8


def test_a_cancel_waits_for_both_steps() -> None:
    engine = Engine(in_flight=2)
    engine.submit(0, PROMPT, params())
    engine.step()
    engine.board.set_cancel(0, 1)
    assert frames(engine.tell(Cancel(0, 1, 0)), Flush) == []
    engine.step()
    assert engine.flushed() == {}
    engine.step()
    assert engine.flushed()[0].reason == "cancelled"
    assert engine.plan is None


@pytest.mark.parametrize("in_flight", [1, 2])
def test_many_long_requests_in_a_tiny_pool_all_say_what_they_say_alone(in_flight: int) -> None:
    engine = Engine(Limits(step_tokens_max=16), blocks=12, block_tokens=4, in_flight=in_flight)
    said: dict[int, list[int]] = {}
    for slot in range(20):
        engine.submit(slot, PROMPT, params(30, slot))
    for _ in range(5000):
        said.update((slot, seq.output) for slot, seq in engine.core.sequences.items())
        if not engine.step():
            break
    assert len(engine.flushed()) == 20
    assert all(said[slot] == truth(PROMPT, params(30, slot), 30) for slot in range(20))
    assert engine.core.batcher.preemptions > 0
    pool = engine.core.batcher.pool
    assert pool is not None and pool.available == pool.total


def test_who_is_preempted_in_flight_leaves_when_its_steps_have_landed() -> None:
    engine = Engine(blocks=6, block_tokens=4, in_flight=2)
    engine.submit(0, PROMPT, params(16, 1))
    engine.submit(1, PROMPT, params(16, 2))
    while not engine.core.sequences[1].leaving:
        engine.step()
    younger, pool = engine.core.sequences[1], engine.core.batcher.pool
    assert pool is not None and younger.blocks and younger.in_flight
    named = younger.in_flight
    preemptions = engine.core.batcher.preemptions
    for _ in range(named):
        assert younger.held.state != "preempted"
        engine.step()
    assert younger.held.state == "preempted"
    assert engine.core.batcher.preemptions == preemptions + 1, "blocks on their way back count"
    engine.run()
    assert {slot: flush.length for slot, flush in engine.flushed().items()} == {0: 16, 1: 16}


def test_a_worker_that_dies_over_two_steps_makes_the_rows_of_both_suspects() -> None:
    engine = Engine(in_flight=2)
    engine.submit(0, PROMPT, params(8, 1))
    engine.submit(1, PROMPT, params(8, 2))
    engine.step()
    assert [[row.slot for row in plan.rows] for plan in engine.waiting] == [[0, 1], [0, 1]]
    engine.compute()
    engine.waiting.clear()
    engine.board.set_live(Role.WORKER, 0, 2, 0)
    engine.tell(Life(Role.WORKER, 0, 2, fault=True))
    assert engine.output(0) == truth(PROMPT, params(seed=1), 2), "what was committed counts"
    assert {seq.held.slot for seq in engine.core.batcher.suspects} == {0, 1}
    engine.start_worker(2, 64)
    assert [[row.slot for row in plan.rows] for plan in engine.waiting] == [[0]]
    engine.step()
    assert [[row.slot for row in plan.rows] for plan in engine.waiting] == [[1]], "a suspect is alone in flight, too"
    engine.run()
    assert {slot: flush.length for slot, flush in engine.flushed().items()} == {0: 8, 1: 8}


def test_a_device_may_be_given_a_step_before_the_last_was_collected() -> None:
    engine, said = Engine(in_flight=2), truth(PROMPT, params(seed=4), 8)
    engine.submit(0, PROMPT, params(seed=4))
    engine.step()
    first, second = engine.waiting
    worker, runner = engine.worker, engine.runner
    one = worker.apply(first) or []
    begun = runner.launch(one)
    two = worker.apply(second) or []
    assert (two[0].tokens, two[0].position) == ([UNKNOWN], 2)
    later = runner.launch(two)
    records = worker.commit(first, one, runner.collect(begun)).records
    records += worker.commit(second, two, runner.collect(later)).records
    assert [(record.position, record.token) for record in records] == [(1, said[1]), (2, said[2])]


def test_what_a_device_samples_past_an_end_is_no_record() -> None:
    engine = Engine(in_flight=2)
    engine.submit(0, PROMPT, params(seed=4))
    engine.step()
    first, second = engine.waiting
    one = engine.worker.apply(first) or []
    two = engine.worker.apply(second) or []
    assert len(engine.worker.commit(first, one, [Sampled(END, -1.0, 1)]).records) == 1
    assert engine.worker.commit(second, two, [Sampled(VOCAB - 1, -1.0, 0)]).records == []
