"""What a worker keeps, and which plans it obeys."""

from __future__ import annotations

import pytest

from baton.engine.batch import INVALID_FLAG, Sampled, Sampling
from baton.engine.effects import Plan, Row, Start
from baton.engine.worker import WorkerCore

SAMPLING = Sampling(1.0, 1.0, 0, 3, (1,))


def start(slot: int = 2, tokens: int = 5) -> Start:
    return Start(slot, 4, 6, list(range(10, 10 + tokens)), tokens, SAMPLING)


def plan(*rows: Row, starts: tuple[Start, ...] = (), ends: tuple[int, ...] = (), step: int = 1, who: int = 1) -> Plan:
    return Plan((who,), step, list(ends), list(starts), list(rows))


def test_a_sequence_is_computed_in_chunks_and_then_token_by_token() -> None:
    core = WorkerCore(0, (1,), 4)
    (row,) = core.apply(plan(Row(2, 0, 3, [7, 8], False), starts=(start(),))) or []
    assert (row.tokens, row.start, row.blocks, row.sample) == ([10, 11, 12], 0, [7, 8], False)
    second = plan(Row(2, 3, 2, [], True), step=2)
    rows = core.apply(second) or []
    assert (rows[0].tokens, rows[0].start, rows[0].position) == ([13, 14], 3, 0)
    done = core.commit(second, rows, [Sampled(99, -0.5, 0)])
    (record,) = done.records
    assert (done.incarnation, done.step) == (1, 2)
    assert (record.slot, record.generation, record.run, record.position, record.token) == (2, 4, 6, 0, 99)
    (row,) = core.apply(plan(Row(2, 5, 1, [], True), step=3)) or []
    assert (row.tokens, row.position) == ([99], 1)


def test_plans_for_another_incarnation_or_rank_are_dropped() -> None:
    core = WorkerCore(0, (2,), 4)
    assert core.apply(plan(starts=(start(),))) is None
    assert WorkerCore(1, (1, 1), 4).apply(plan(starts=(start(),))) is None
    assert (core.slots, core.dropped_plans) == ({}, 1)


def test_a_new_scheduler_finds_an_empty_worker() -> None:
    core = WorkerCore(0, (1,), 4)
    core.apply(plan(starts=(start(2), start(3))))
    core.apply(plan(starts=(start(5),), step=1 << 32))
    assert list(core.slots) == [5]


def test_after_a_lost_plan_the_scheduler_is_not_obeyed_until_it_is_another() -> None:
    core = WorkerCore(0, (1,), 4)
    core.apply(plan(starts=(start(2),), step=3 << 32))
    core.mistrust(3)
    assert core.apply(plan(starts=(start(3),), step=(3 << 32) + 2)) is None
    assert core.apply(plan(starts=(start(5),), step=4 << 32)) == []
    assert list(core.slots) == [5]


def test_slots_are_forgotten_before_they_are_filled_again() -> None:
    core = WorkerCore(0, (1,), 4)
    core.apply(plan(starts=(start(2, 5),)))
    core.apply(plan(starts=(start(2, 3),), ends=(2,), step=2))
    assert core.slots[2].tokens == [10, 11, 12]


def test_a_token_that_is_none_is_reported_and_not_kept() -> None:
    core, step = WorkerCore(0, (1,), 4), plan(Row(2, 0, 5, [0, 1], True), starts=(start(),))
    rows = core.apply(step) or []
    assert core.commit(step, rows, [Sampled(0, 0.0, INVALID_FLAG)]).records[0].flags == INVALID_FLAG
    assert len(core.slots[2].tokens) == 5


def test_a_row_beyond_its_blocks_or_its_tokens_is_a_defect() -> None:
    with pytest.raises(AssertionError, match="table too short"):
        WorkerCore(0, (1,), 4).apply(plan(Row(2, 0, 5, [7], True), starts=(start(),)))
    with pytest.raises(AssertionError, match="asked for 6 of 5"):
        WorkerCore(0, (1,), 4).apply(plan(Row(2, 0, 6, [7, 8], True), starts=(start(),)))
