"""Several tokens of a sequence in one step, as speculation yields: what counts, what is dropped, what it holds."""

from __future__ import annotations

from baton.engine.batch import END_FLAG, INVALID_FLAG, Sampled
from baton.engine.batcher import Batcher
from baton.engine.effects import Doorbell, Plan, StepDone
from baton.ipc.frames import Cancel, Lease, Params, Role
from tests.engine.rig import END, Engine, only, truth

PROMPT = [5, 6, 7, 8]
PARAMS = Params(max_tokens=6, seed=1, ignore_eos=True)


class Speculating(Engine):
    """An engine whose worker yields what a test says, of up to four tokens a row and step."""

    tokens_per_row_max = 4

    def yields(self, *tokens: int, flags: dict[int, int] | None = None) -> None:
        """The step at hand gives its one row these tokens; ``flags`` are set on some of them, by place."""
        assert self.plan is not None
        plan = self.waiting.popleft()
        rows = self.worker.apply(plan)
        assert rows is not None
        made = [Sampled(token, -1.0, (flags or {}).get(at, 0)) for at, token in enumerate(tokens)]
        made[0].more = tuple(made[1:])
        self.tape.steps.append(self.worker.commit(plan, rows, made[:1]))
        self.tell(Doorbell())


def batcher(engine: Engine) -> Batcher:
    return engine.core.batcher


def test_every_token_of_a_step_counts_and_all_but_the_last_are_computed() -> None:
    engine = Speculating()
    engine.submit(0, PROMPT, PARAMS)
    engine.yields(20, 21, 22)
    assert engine.output(0) == [20, 21, 22]
    assert engine.plan is not None
    (row,) = engine.plan.rows
    assert (row.start, row.count, row.sample) == (len(PROMPT) + 2, 1, True)
    (step,) = engine.worker.apply(engine.plan) or []
    assert (step.tokens, step.position) == ([22], 3)


def test_tokens_past_max_tokens_are_dropped_and_never_counted() -> None:
    engine = Speculating()
    engine.submit(0, PROMPT, PARAMS)
    engine.yields(20, 21, 22, 23)
    engine.yields(24, 25, 26, 27)
    flush = engine.flushed()[0]
    assert (flush.length, flush.reason) == (6, "length")
    assert [row.sampled for row in engine.board.rows()] == [6]
    assert engine.core.counts["skipped_records"] == 2


def test_tokens_past_an_end_id_are_dropped() -> None:
    engine = Speculating()
    engine.submit(0, PROMPT, Params(max_tokens=6, seed=1))
    engine.yields(20, END, 22, flags={1: END_FLAG})
    flush = engine.flushed()[0]
    assert (flush.length, flush.reason) == (2, "stop")
    assert [row.sampled for row in engine.board.rows()] == [2]


def test_a_token_that_is_none_ends_the_request_behind_those_before_it() -> None:
    engine = Speculating()
    engine.submit(0, PROMPT, PARAMS)
    engine.yields(20, 21, 0, flags={2: INVALID_FLAG})
    flush = engine.flushed()[0]
    assert (flush.length, flush.reason) == (2, "error")


def test_a_cancelled_request_has_no_more_tokens_than_it_would_have_had() -> None:
    engine = Speculating()
    engine.submit(0, PROMPT, PARAMS)
    engine.yields(20, 21, 22, 23)
    engine.board.set_cancel(0, 1)
    engine.tell(Cancel(0, 1, 0))
    engine.yields(24, 25, 26, 27)
    flush = engine.flushed()[0]
    assert (flush.length, flush.reason) == (6, "cancelled")


def test_a_cancelled_request_whose_tokens_end_it_was_stopped() -> None:
    engine = Speculating()
    engine.submit(0, PROMPT, Params(max_tokens=6, seed=1))
    engine.yields(20)
    engine.board.set_cancel(0, 1)
    engine.tell(Cancel(0, 1, 0))
    engine.yields(21, END, 22, flags={1: END_FLAG})
    flush = engine.flushed()[0]
    assert (flush.length, flush.reason) == (3, "stop")


def test_a_step_has_room_for_what_it_may_yield_but_not_beyond_the_last_token() -> None:
    engine = Speculating(block_tokens=1)
    engine.submit(0, PROMPT, PARAMS)
    engine.yields(20)
    (seq,) = batcher(engine).running
    assert len(seq.blocks) == len(PROMPT) + 4
    engine.yields(21, 22, 23, 24)
    assert len(seq.blocks) == len(PROMPT) + 6


def test_a_step_takes_only_the_room_that_is_to_spare() -> None:
    engine = Speculating(blocks=10, block_tokens=1)
    engine.submit(0, PROMPT, PARAMS)
    engine.submit(1, PROMPT, PARAMS)
    pool = batcher(engine).pool
    assert pool is not None
    engine.yields(20)
    first, second = engine.core.sequences[0], engine.core.sequences[1]
    assert (len(first.blocks), len(second.blocks), pool.free) == (8, 0, 2)
    pool.allocate(1)  # as if somebody else had it
    engine.yields(21, 22, 23, 24)
    assert (len(first.blocks), pool.free) == (9, 0)


def test_what_a_dead_worker_committed_of_a_step_counts_whole() -> None:
    engine = Speculating()
    engine.submit(0, PROMPT, PARAMS)
    plan = engine.plan
    assert plan is not None
    rows = engine.worker.apply(plan) or []
    made = Sampled(20, -1.0, 0, more=(Sampled(21, -1.0, 0), Sampled(22, -1.0, 0)))
    done = engine.worker.commit(plan, rows, [made])
    engine.tape.steps.append(StepDone(done.incarnation, done.step, done.records))
    out = engine.start_worker(2, 64)
    assert engine.output(0) == [20, 21, 22]
    again = [effect for effect in out if isinstance(effect, Plan)][-1]
    assert again.starts[0].token_ids == [*PROMPT, 20, 21, 22]


def test_the_scripted_runner_yields_the_same_tokens_in_bursts_as_one_by_one() -> None:
    engine = Engine()
    engine.runner.tokens_per_row_max = 4
    engine.core.batcher.tokens_per_row = 4
    long = Params(max_tokens=40, seed=3, ignore_eos=True)
    only(engine.submit(0, PROMPT, long), Plan)
    seen: list[int] = []
    steps = 0
    while engine.step():
        steps += 1
        seen = engine.output(0) if 0 in engine.core.sequences else seen
    assert seen == truth(PROMPT, long, len(seen))
    assert len(seen) > 20
    assert steps < 35


def test_a_new_detokenizer_is_leased_no_token_past_an_end_that_does_not_show_in_its_id() -> None:
    engine = Speculating()
    engine.submit(0, PROMPT, Params(max_tokens=6, seed=1))
    engine.board.set_live(Role.DETOKENIZER, 0, 2, 0)
    engine.yields(END, 27, flags={0: END_FLAG})
    leases = [frame for frame in engine.sent if isinstance(frame, Lease)]
    assert (leases[-1].incarnation, leases[-1].token_ids, leases[-1].params.max_tokens) == (2, [END], 1)
    assert engine.flushed()[0].length == 1
