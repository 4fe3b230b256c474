"""The scheduler's core with a scripted worker in lock step: order, chunks, preemption, pauses, ends and roll-backs."""

from __future__ import annotations

import msgspec
import pytest

from baton.engine.effects import Plan, Send
from baton.engine.limits import Limits
from baton.engine.scores import unpack
from baton.ipc.frames import (
    Admitted,
    Cancel,
    CancelAck,
    Closed,
    Credit,
    Flush,
    Handed,
    Lease,
    Life,
    Params,
    Recall,
    Returned,
    Role,
    StopFound,
    Terms,
)
from tests.engine.rig import TRACE, Engine, address, frames, hand, only, owner, truth

PROMPT = [5, 6, 7, 8]


def params(max_tokens: int = 8, seed: int = 1, ignore_eos: bool = True) -> Params:
    return Params(max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos)


def test_a_request_is_admitted_leased_run_and_handed_to_the_detokenizer() -> None:
    engine = Engine()
    out = engine.submit(3, PROMPT, params(5))
    assert only(out, Admitted) == Admitted(3, 1, 2, PROMPT)
    lease, plan = only(out, Lease), only(out, Plan)
    assert (lease.run, lease.token_ids, lease.base) == (2, [], 0)
    kinds = [type(effect.frame if isinstance(effect, Send) else effect) for effect in out]
    assert kinds.index(Lease) < kinds.index(Plan), "the detokenizer hears of a run before its first token"
    assert plan.starts[0].token_ids == PROMPT
    assert engine.run() == 5
    flush = engine.flushed()[3]
    assert (flush.length, flush.reason, flush.run, flush.key.epoch) == (5, "length", 2, 3)
    assert owner(engine.board, 3) == (3, "detokenizer", False)
    assert engine.core.batcher.pool is not None
    assert engine.core.batcher.pool.available == 64


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    engine = Engine(Limits(step_tokens_max=5))
    engine.submit(0, list(range(2, 15)), params(2))
    engine.run()
    rows = [(row.start, row.count, row.sample) for plan in engine.plans for row in plan.rows]
    assert rows == [(0, 5, False), (5, 5, False), (10, 3, True), (13, 1, True)]


def test_decodes_go_before_chunks_within_one_budget() -> None:
    engine = Engine(Limits(step_tokens_max=4))
    engine.submit(0, PROMPT, params(6))
    engine.submit(1, list(range(2, 14)), params(2, 2))
    engine.step()
    assert [[(row.slot, row.count) for row in plan.rows] for plan in engine.plans[:2]] == [[(0, 4)], [(0, 1), (1, 3)]]
    engine.run()
    assert all(sum(row.count for row in plan.rows) <= 4 for plan in engine.plans)


def test_first_come_is_first_served() -> None:
    engine = Engine(Limits(running_requests_max=1))
    for slot in range(5):
        engine.submit(slot, PROMPT, params(2, slot))
    engine.run()
    assert list(engine.flushed()) == [0, 1, 2, 3, 4]


def test_many_long_requests_in_a_tiny_pool_all_finish_and_say_what_they_say_alone() -> None:
    engine = Engine(Limits(step_tokens_max=16), blocks=12, block_tokens=4)
    said: dict[int, list[int]] = {}
    for slot in range(30):
        engine.submit(slot, PROMPT, params(30, slot))
    for _ in range(5000):
        for slot, seq in engine.core.sequences.items():
            said[slot] = seq.output
        if not engine.step():
            break
    assert {slot: flush.length for slot, flush in engine.flushed().items()} == dict.fromkeys(range(30), 30)
    assert all(said[slot] == truth(PROMPT, params(30, slot), 30) for slot in range(30))
    assert engine.core.batcher.preemptions > 0
    assert list(engine.flushed()) == list(range(30)), "a preempted request lost its place"


def test_a_request_that_can_never_fit_is_refused_with_both_numbers_and_the_next_is_served() -> None:
    engine = Engine(blocks=4, block_tokens=4)
    closed = only(engine.submit(0, PROMPT, params(13)), Closed)
    assert closed.reason == "refused"
    assert closed.failure is not None
    assert closed.failure.status == 400
    assert "17 tokens" in closed.failure.message and "16 in all" in closed.failure.message
    assert owner(engine.board, 0) == (3, "frontend", False)
    engine.submit(1, PROMPT, params(12))
    engine.run()
    assert engine.flushed()[1].length == 12


def test_a_request_without_a_bound_gets_as_many_tokens_as_there_is_room_for() -> None:
    engine = Engine(blocks=4, block_tokens=4)
    engine.submit(0, PROMPT, Params(ignore_eos=True))
    engine.run()
    assert engine.flushed()[0].length == 16 - len(PROMPT)
    (lease,) = [frame for frame in engine.sent if isinstance(frame, Lease)]
    assert lease.params.max_tokens == 16 - len(PROMPT)


def test_a_prompt_that_never_fits_is_named_itself() -> None:
    engine = Engine(blocks=4, block_tokens=4)
    closed = only(engine.submit(0, [1] * 16, params(1)), Closed)
    assert closed.failure is not None and closed.failure.param == "prompt"


def test_requests_wait_for_the_first_worker() -> None:
    engine = Engine()
    engine.board.set_live(Role.WORKER, 0, 2, 0)
    engine.tell(Life(Role.WORKER, 0, 2))
    assert frames(engine.submit(0, PROMPT, params(2)), Admitted) == []
    assert only(engine.start_worker(2, 64), Admitted).slot == 0
    engine.run()
    assert engine.flushed()[0].length == 2


def test_without_credit_a_request_pauses_and_goes_on_where_it_was() -> None:
    engine = Engine()
    engine.submit(0, PROMPT, params(6), credit=2)
    engine.run()
    assert (engine.output(0), engine.core.sequences[0].held.state) == (truth(PROMPT, params(), 2), "paused")
    engine.tell(Credit(0, 1, 99, 6))
    engine.tell(Credit(0, 2, 2, 6))
    assert engine.plan is None, "credit for another run or generation"
    engine.tell(Credit(0, 1, 2, 3))
    engine.run()
    assert len(engine.output(0)) == 3
    engine.tell(Credit(0, 1, 2, 6))
    engine.run()
    assert engine.flushed()[0].length == 6


def test_a_paused_request_gives_way_to_one_that_could_run() -> None:
    engine = Engine(Limits(running_requests_max=2), blocks=4, block_tokens=4)
    engine.submit(0, PROMPT, params(8), credit=5)
    engine.run()
    assert engine.core.sequences[0].held.state == "paused"
    engine.submit(1, PROMPT, params(8, 2))
    engine.run()
    assert engine.flushed()[1].length == 8
    assert engine.core.sequences[0].held.state == "preempted"
    engine.tell(Credit(0, 1, 2, 8))
    starts = [start for start in engine.plans[-1].starts if start.slot == 0]
    assert starts[0].token_ids == PROMPT + truth(PROMPT, params(), 5)
    assert starts[0].run == 2
    engine.run()
    assert engine.flushed()[0].length == 8


def test_paused_requests_take_no_seats() -> None:
    engine = Engine(Limits(running_requests_max=1))
    engine.submit(0, PROMPT, params(4), credit=1)
    engine.run()
    engine.submit(1, PROMPT, params(4))
    engine.run()
    assert list(engine.flushed()) == [1]


def test_running_work_is_aborted_only_when_its_step_is_over() -> None:
    engine = Engine()
    engine.submit(0, PROMPT, params(6))
    engine.step()
    engine.board.set_cancel(0, 1)
    out = engine.tell(Cancel(0, 1, 0))
    assert only(out, CancelAck) == CancelAck(0, 1)
    assert frames(out, Flush) == []
    assert engine.core.sequences[0].held.state == "aborting"
    assert engine.core.sequences[0].blocks
    engine.run()
    assert (engine.flushed()[0].reason, engine.flushed()[0].length) == ("cancelled", 2)


def test_a_nudge_without_the_word_is_acknowledged_and_changes_nothing() -> None:
    engine = Engine()
    engine.submit(0, PROMPT, params(3))
    assert only(engine.tell(Cancel(0, 1, 0)), CancelAck) == CancelAck(0, 1)
    assert only(engine.tell(Cancel(7, 3, 0)), CancelAck) == CancelAck(7, 3)
    engine.run()
    assert engine.flushed()[0].reason == "length"


def test_what_comes_late_for_a_request_that_ended_is_acknowledged_and_changes_nothing() -> None:
    engine = Engine()
    engine.submit(0, [5, 6], Params(max_tokens=2, ignore_eos=True))
    run, generation = engine.core.sequences[0].run, engine.board.row(0).generation
    engine.run()
    assert 0 in engine.flushed() and not engine.core.sequences
    free = engine.core.batcher.pool.available if engine.core.batcher.pool is not None else 0
    for late in (Credit(0, generation, run, 99), StopFound(0, generation, run, 1, "x")):
        assert engine.tell(late) == []
    engine.board.set_cancel(0, generation)
    assert only(engine.tell(Cancel(0, generation, 0)), CancelAck) == CancelAck(0, generation)
    assert engine.core.batcher.pool is not None and engine.core.batcher.pool.available == free
    assert len(engine.flushed()) == 1


def test_the_cancel_word_is_read_when_taking() -> None:
    engine = Engine()
    engine.board.set_cancel(0, 1)
    assert only(engine.submit(0, PROMPT, params()), Flush).reason == "cancelled"


@pytest.mark.parametrize(("delivered", "reason"), [([9, 1], "stop"), ([9, 9, 1], "stop"), ([9, 9, 9], "length")])
def test_a_resubmission_at_its_end_is_ended_at_once(delivered: list[int], reason: str) -> None:
    engine = Engine()
    out = engine.submit(0, PROMPT, params(3, ignore_eos=False), tuple(delivered))
    flush = only(out, Flush)
    assert (flush.reason, flush.length, flush.base) == (reason, len(delivered), len(delivered))
    assert only(out, Lease).token_ids == delivered
    assert frames(out, Plan) == []


def test_a_resubmission_goes_on_from_the_delivered_tokens() -> None:
    engine, whole = Engine(), truth(PROMPT, params(), 8)
    engine.submit(0, PROMPT, params(), tuple(whole[:3]))
    assert engine.plans[0].starts[0].token_ids == PROMPT + whole[:3]
    assert engine.plans[0].starts[0].prompt_tokens == len(PROMPT)
    for _ in range(4):
        engine.step()
    assert engine.output(0) == whole[:7]


def test_a_reported_stop_ends_the_run_that_it_names() -> None:
    engine = Engine()
    engine.submit(0, PROMPT, params())
    for _ in range(3):
        engine.step()
    engine.tell(StopFound(0, 1, 9, 2, "x"))
    assert engine.core.sequences[0].end is None
    engine.tell(StopFound(0, 1, 2, 2, "x"))
    engine.run()
    flush = engine.flushed()[0]
    assert (flush.reason, flush.stop_reason, flush.length) == ("stop", "x", 2)


def test_numbers_that_are_not_finite_end_one_request_with_an_error() -> None:
    engine = Engine()
    engine.runner.faulty = {7: 2}
    engine.submit(0, PROMPT, params(5, 7))
    engine.submit(1, PROMPT, params(5, 8))
    engine.run()
    assert (engine.flushed()[0].reason, engine.flushed()[0].length) == ("error", 2)
    assert engine.flushed()[0].failure is not None
    assert (engine.flushed()[1].reason, engine.flushed()[1].length) == ("length", 5)


def test_a_lost_worker_costs_no_committed_token_and_keeps_the_run() -> None:
    engine, whole = Engine(), truth(PROMPT, params(), 8)
    engine.submit(0, PROMPT, params())
    engine.step()
    assert engine.compute()
    engine.board.set_live(Role.WORKER, 0, 2, 0)
    engine.tell(Life(Role.WORKER, 0, 2))
    assert engine.output(0) == whole[:2]
    assert engine.core.sequences[0].held.state == "preempted"
    engine.start_worker(2, 64)
    assert engine.plans[-1].starts[0].token_ids == PROMPT + whole[:2]
    assert (engine.plans[-1].starts[0].run, engine.plans[-1].incarnations) == (2, (2,))
    engine.step()
    assert engine.output(0) == whole[:3]


def test_the_cancelled_end_when_their_worker_is_lost() -> None:
    engine = Engine()
    engine.submit(0, PROMPT, params())
    engine.board.set_cancel(0, 1)
    engine.tell(Cancel(0, 1, 0))
    engine.board.set_live(Role.WORKER, 0, 2, 0)
    assert only(engine.tell(Life(Role.WORKER, 0, 2)), Flush).reason == "cancelled"


def test_a_begun_request_that_fits_no_more_ends_with_an_error_by_the_usual_way() -> None:
    engine = Engine(blocks=8, block_tokens=4)
    engine.submit(0, PROMPT, params(20))
    engine.step()
    flush = only(engine.start_worker(2, 2), Flush)
    assert (flush.reason, flush.length) == ("error", 1)
    assert flush.failure is not None


def test_a_new_detokenizer_is_leased_every_token_that_the_old_one_may_have_read() -> None:
    engine, whole = Engine(), truth(PROMPT, params(), 8)
    engine.submit(0, PROMPT, params())
    engine.step()
    assert engine.compute()
    engine.board.set_live(Role.DETOKENIZER, 0, 2, 0)
    lease = only(engine.tell(Life(Role.DETOKENIZER, 0, 2)), Lease)
    assert (lease.incarnation, lease.token_ids, lease.base) == (2, whole[:2], 0)
    assert frames(engine.tell(Life(Role.DETOKENIZER, 0, 2)), Lease) == []


def test_a_lease_has_the_rivals_of_every_token_of_this_life() -> None:
    engine, asked = Engine(), msgspec.structs.replace(params(20), logprobs=True, top_logprobs=2)
    engine.submit(0, PROMPT, asked, truth(PROMPT, asked, 1))
    engine.step()
    engine.step()
    engine.board.set_live(Role.DETOKENIZER, 0, 2, 0)
    lease = only(engine.tell(Life(Role.DETOKENIZER, 0, 2)), Lease)
    known = [[token for token, _ in unpack(tops)] for tops in lease.tops]
    assert known[0] == [], "its client has the first one"
    assert [tokens[0] for tokens in known[1:]] == lease.token_ids[1:] and all(len(two) == 2 for two in known[1:])


def test_a_stale_hello_is_ignored() -> None:
    engine = Engine()
    engine.submit(0, PROMPT, params())
    engine.board.set_live(Role.WORKER, 0, 5, 0)
    engine.start_worker(6, 64)
    engine.board.set_live(Role.WORKER, 0, 7, 0)
    before = engine.core.ranks[0]
    engine.core.handle(msgspec.structs.replace(before, address=address(Role.WORKER, 5)), 0)
    assert engine.core.ranks[0] is before
    assert engine.core.counts["stale_hellos"] == 1


def test_an_untaken_request_is_recalled_and_its_frame_dropped() -> None:
    engine = Engine()
    key = hand(engine.board, 0, "queued", Role.TOKENIZER, 2)
    returned = only(engine.tell(Recall(key, 0, TRACE)), Returned)
    assert (returned.key.epoch, owner(engine.board, 0)) == (3, (3, "frontend", False))
    engine.tell(Handed(key, address(Role.FRONTEND), TRACE, Terms("m"), params(), PROMPT, [], 8))
    assert engine.core.sequences == {}


def test_an_unknown_event_is_a_defect() -> None:
    with pytest.raises(AssertionError, match="no such event"):
        Engine().tell(object())
