"""Who sits down, when, and with what promise: the scheduler with every policy and order, in pools too small for all."""

from __future__ import annotations

import msgspec
import pytest

from baton.engine.admission import Policy
from baton.engine.limits import Limits
from baton.engine.order import MOVES, Order
from baton.engine.policies import Policies
from baton.ipc.frames import Admitted, Closed, Flush, Handed, Life, Params, Role, Terms
from tests.engine.rig import TRACE, Engine, address, frames, hand, only, truth

PROMPT = [5, 6, 7, 8]
MS = 1_000_000


def params(max_tokens: int = 8, seed: int = 1) -> Params:
    return Params(max_tokens=max_tokens, seed=seed, ignore_eos=True)


def ask(engine: Engine, slot: int, prompt: list[int], of: Params, **terms: int) -> list[object]:
    """A request comes from the tokenizer, with these terms."""
    key = hand(engine.board, slot, "queued", Role.TOKENIZER, engine.board.row(slot).epoch + 2)
    said = Terms("m", **terms)  # type: ignore[arg-type]
    return list(engine.tell(Handed(key, address(Role.FRONTEND), TRACE, said, of, prompt, [], 1 << 20)))


def known(limits: Limits, target_ms: float, blocks: int = 128) -> Engine:
    """An engine that believes what the limits say of its steps, whatever they take."""
    engine = Engine(limits, blocks, 4, policies=Policies(prefix_cache=False, itl_target_ms=target_ms))
    engine.core.batcher.pace.step_time.observe = lambda *seen: None  # type: ignore[method-assign]
    return engine


def long_chunks(engine: Engine, slot: int) -> list[int]:
    """How the prompt was cut."""
    return [row.count for plan in engine.plans for row in plan.rows if row.slot == slot and row.count > 1]


def order_of_starts(engine: Engine) -> list[int]:
    return [start.slot for plan in engine.plans for start in plan.starts]


@pytest.mark.parametrize("order", list(MOVES))
@pytest.mark.parametrize("policy", ["reserve", "optimistic", "predicted"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_fifty_long_requests_in_a_tiny_pool_all_finish(order: Order, policy: Policy, in_flight: int) -> None:
    limits = Limits(step_tokens_max=16, predictor_lengths_min=4)
    engine = Engine(limits, 14, 4, in_flight, Policies(admission=policy, order=order))
    said: dict[int, list[int]] = {}
    gave_way: dict[int, int] = {}
    for slot in range(50):
        ask(engine, slot, PROMPT, params(20 + slot % 9, slot), priority=slot % 3)
    while True:
        for slot, seq in engine.core.sequences.items():
            said[slot], gave_way[slot] = seq.output, seq.preemptions
        if not engine.step():
            break
    assert all(said[slot] == truth(PROMPT, params(seed=slot), 20 + slot % 9) for slot in range(50))
    assert set(engine.flushed()) == set(range(50))
    assert max(gave_way.values()) <= limits.preemptions_per_request_max
    assert policy != "reserve" or not any(gave_way.values())
    pool, admission = engine.core.batcher.pool, engine.core.batcher.seating.admission
    assert pool is not None and pool.available == pool.total
    assert admission is not None and not admission.ledger.busy and admission.queued_tokens == 0


def test_the_optimists_give_way_and_the_reserved_need_not() -> None:
    counts = {}
    for policy in ("reserve", "optimistic"):
        engine = Engine(blocks=12, policies=Policies(prefix_cache=False, admission=policy))  # type: ignore[arg-type]
        for slot in range(20):
            engine.submit(slot, PROMPT, params(30, slot))
        engine.run()
        counts[policy] = engine.core.batcher.preemptions
    assert counts["reserve"] == 0 < counts["optimistic"]


def test_a_full_queue_says_when_to_come_back_and_the_begun_are_not_sent_away() -> None:
    limits = Limits(running_requests_max=1, queue_tokens_max=40, retry_after_unknown_s=7)
    engine = Engine(limits)
    for slot in range(4):  # one runs, and three wait, with 12 tokens of work each
        assert only(engine.submit(slot, PROMPT, params()), Admitted)
    closed = only(engine.submit(4, PROMPT, params()), Closed)
    assert closed.failure is not None
    assert (closed.failure.status, closed.failure.code, closed.failure.retry_after_s) == (429, "queue_full", 7)
    assert only(engine.submit(5, PROMPT, params(), tuple(truth(PROMPT, params(), 2))), Admitted)
    engine.run()
    assert sorted(engine.flushed()) == [0, 1, 2, 3, 5]
    assert only(engine.submit(6, PROMPT, params()), Admitted), "there is room again"


def test_the_more_urgent_overtake_those_that_wait() -> None:
    engine = Engine(Limits(running_requests_max=1), policies=Policies(order="priority"))
    for slot, priority in enumerate((0, 0, 0, 5, -5)):
        ask(engine, slot, PROMPT, params(2, slot), priority=priority)
    engine.run()
    assert order_of_starts(engine) == [0, 4, 1, 2, 3]


def test_the_shortest_go_first_where_that_is_the_order() -> None:
    engine = Engine(Limits(running_requests_max=1), policies=Policies(order="shortest"))
    for slot, length in enumerate((3, 9, 6, 2)):
        ask(engine, slot, PROMPT, params(length, slot))
    engine.run()
    assert order_of_starts(engine) == [0, 3, 2, 1]


def test_what_the_cache_holds_goes_first_where_that_is_the_order() -> None:
    engine = Engine(Limits(running_requests_max=1), policies=Policies(order="prefix"))
    beginning = list(range(2, 14))
    ask(engine, 0, beginning, params(2))
    engine.run()
    for slot, prompt in ((1, PROMPT), (2, PROMPT[::-1]), (3, [*beginning, 9])):
        ask(engine, slot, prompt, params(2, slot))
    engine.run()
    assert order_of_starts(engine) == [0, 1, 3, 2]


@pytest.mark.parametrize("terms", [{"deadline_ns": 3 * MS}, {"queue_until_ns": 3 * MS}])
def test_nothing_is_begun_too_late(terms: dict[str, int]) -> None:
    engine = Engine(Limits(running_requests_max=1))
    engine.submit(0, PROMPT, params(4))
    ask(engine, 1, PROMPT, params(4), **terms)
    engine.run()
    assert engine.now_ns > 3 * MS
    assert order_of_starts(engine) == [0]
    assert engine.core.sequences[1].held.state == "queued", "whoever keeps the time ends it"


def test_time_in_the_queue_is_over_once_a_step_has_begun() -> None:
    engine = Engine()
    ask(engine, 0, PROMPT, params(12), queue_until_ns=3 * MS)
    engine.step()
    engine.board.set_live(Role.WORKER, 0, 2, 0)
    engine.waiting.clear()
    engine.tell(Life(Role.WORKER, 0, 2))
    engine.start_worker(2, 64)
    engine.run()
    assert engine.flushed()[0].reason == "length"


def test_a_prompt_is_cut_to_the_target_while_others_decode() -> None:
    limits = Limits(step_prior_s=0.010, token_prior_s=0.001, context_prior_s=1e-9, step_tokens_max=256)
    chunks = {}
    for target_ms in (0.0, 50.0):
        engine = known(limits, target_ms)
        engine.submit(0, PROMPT, params(40))
        engine.step()
        engine.submit(1, list(range(2, 22)) * 8, params(2, 2))
        engine.run()
        chunks[target_ms] = long_chunks(engine, 1)
        assert sum(chunks[target_ms]) == 160
    assert chunks[0.0] == [160]
    assert chunks[50.0][0] == 38, "10 ms a step, 1 ms a token, one of which decodes, and a little for context"


def test_a_target_that_cannot_be_met_starves_no_prompt() -> None:
    limits = Limits(step_prior_s=0.100, token_prior_s=0.001, context_prior_s=1e-9, prefill_slowdown=2.0)
    engine = known(limits, 1.0)
    engine.submit(0, PROMPT, params(40))
    engine.step()
    engine.submit(1, list(range(2, 22)) * 8, params(2, 2))
    engine.run()
    chunks = long_chunks(engine, 1)
    assert chunks[0] == 100, "a step with a prompt may take twice what its decodes take"
    assert sum(chunks) == 160


@pytest.mark.parametrize(
    ("decoding", "waiting", "tokens"), [(1, 1, 50), (1, 2, 201), (1, 3, 302), (2, 2, 50), (2, 4, 203), (3, 3, 128)]
)
def test_a_target_is_not_kept_where_more_wait_than_decode(decoding: int, waiting: int, tokens: int) -> None:
    limits = Limits(step_prior_s=0.100, token_prior_s=0.001, context_prior_s=1e-9, step_tokens_max=1024)
    rules = {"prefill_slowdown": 1.5, "prefill_slowdown_max": 4.0, "prefill_decodes_max": 2}
    engine = known(msgspec.structs.replace(limits, **rules), 1.0, 1024)
    for slot in range(decoding):
        engine.submit(slot, PROMPT, params(40, slot))
    while sum(row.count == 1 for row in engine.plans[-1].rows) < decoding:
        engine.step()
    for slot in range(decoding, decoding + waiting):
        engine.submit(slot, [20 + slot, *range(2, 22)] * 20, params(2, slot))
    engine.step()
    found = sum(row.count for row in engine.plans[-1].rows if row.slot >= decoding)
    assert found == tokens, "1.5 times what the decodes take, more where more wait for each of two, up to 4 times"


def test_a_lost_worker_s_requests_come_back_before_anybody_new() -> None:
    engine = Engine(blocks=8, policies=Policies(prefix_cache=False, admission="reserve"))
    for slot in range(3):
        engine.submit(slot, PROMPT, params(12, slot))
    engine.step()
    engine.board.set_live(Role.WORKER, 0, 2, 0)
    engine.waiting.clear()
    engine.tell(Life(Role.WORKER, 0, 2))
    seating = engine.core.batcher.seating
    assert [seq.slot for seq in seating.line] == [0, 1, 2]
    engine.start_worker(2, 4)
    assert [row.slot for row in engine.plans[-1].rows] == [0]
    engine.run()
    assert [frame.key.slot for frame in engine.sent if isinstance(frame, Flush)] == [0, 1, 2]


def test_the_story_begins_with_the_ledger() -> None:
    engine = Engine()
    engine.submit(0, PROMPT, params(12))
    story = engine.core.story()
    assert "growth of the admitted" in story and "slot 0:" in story
    assert engine.board.gauges()["ledger_growth"] >= 1


def test_lengths_that_were_seen_bound_what_is_promised() -> None:
    engine = Engine(Limits(predictor_lengths_min=4), policies=Policies(prefix_cache=False))
    endless = msgspec.structs.replace(params(), max_tokens=100)
    engine.submit(0, PROMPT, endless)
    assert engine.board.gauges()["ledger_growth"] == 26 - 1
    admission, first = engine.core.batcher.seating.admission, engine.core.sequences[0].ask
    assert admission is not None and first is not None
    for _ in range(8):
        admission.predictor.observe(first.key, len(PROMPT), 12)
    assert frames(engine.submit(1, PROMPT, endless), Admitted)
    ask_of = engine.core.sequences[1].ask
    assert ask_of is not None and admission.promise_tokens(ask_of) == len(PROMPT) + 12
