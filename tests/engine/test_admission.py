"""Admission: what is refused and with which numbers, what waits, and that promises under ``reserve`` are kept."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.admission import Admission, Ask, Drain, Policy
from baton.engine.ledger import Ledger, Memory
from baton.engine.limits import Limits
from baton.engine.predictor import LengthPredictor
from tests.engine.pools import Counts

LIMITS = Limits()
NS = 1_000_000_000
KEY = ("", "m", "s")


def admission(policy: Policy, total: int = 100, limits: Limits = LIMITS) -> Admission:
    return Admission(policy, Ledger(Counts(total), Memory(), limits), LengthPredictor(limits), limits)


def teach(desk: Admission, length: int) -> None:
    for _ in range(50):
        desk.predictor.observe(KEY, 100, length)


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    desk = admission("optimistic", total=10)
    failure = desk.arrive(Ask(1, 100, 61), 0)
    assert failure is not None and failure.status == 400 and failure.code == "kv_cache_exceeded"
    assert "161" in failure.message and "160" in failure.message and failure.param == "max_tokens"
    failure = desk.arrive(Ask(1, 160, 10), 0)
    assert failure is not None and failure.param == "prompt"
    assert desk.arrive(Ask(1, 100, 60), 0) is None and desk.queued_tokens == 160


def test_a_full_queue_says_when_there_will_be_room() -> None:
    desk = admission("reserve", limits=Limits(queue_tokens_max=1000))
    assert desk.arrive(Ask(1, 100, 700), 0) is None
    failure = desk.arrive(Ask(2, 100, 200), 0)
    assert failure is not None and (failure.status, failure.code) == (429, "queue_full")
    assert failure.retry_after_s == LIMITS.retry_after_unknown_s  # nothing is known of the rate yet
    assert "800" in failure.message and "300" in failure.message and "1000" in failure.message
    assert desk.queued_tokens == 800 and desk.arrive(Ask(3, 50, 50), 0) is None
    assert desk.seat(Ask(1, 100, 700), 0)
    assert desk.queued_tokens == 100
    desk.ended(Ask(1, 100, 700, output_tokens=100), 10 * NS)  # 200 tokens in ten seconds
    assert desk.arrive(Ask(4, 100, 800), 10 * NS) is None
    failure = desk.arrive(Ask(5, 100, 100), 10 * NS)
    assert failure is not None and failure.retry_after_s == 9  # 200 too many; the newest seconds weigh most


def test_one_alone_may_wait_however_large_it_is() -> None:
    desk = admission("reserve", limits=Limits(queue_tokens_max=100))
    assert desk.arrive(Ask(1, 100, 700), 0) is None
    assert desk.arrive(Ask(2, 1, 1), 0) is not None


def test_the_wait_is_bounded_when_nothing_leaves() -> None:
    desk = admission("reserve")
    desk.arrive(Ask(1, 10, 10), 0)
    desk.drain.advance(3600 * NS, True)
    assert desk.retry_after_s(10) == LIMITS.retry_after_s_max
    desk.drain.finished(10**9)
    assert desk.retry_after_s(10) == 1


@given(st.integers(0, 1 << 40), st.lists(st.tuples(st.integers(0, 100 * NS), st.integers(0, 1 << 30)), max_size=20))
def test_the_time_told_is_always_within_its_limits(excess: int, events: list[tuple[int, int]]) -> None:
    desk, now_ns = admission("reserve"), 0
    for wait_ns, tokens in events:
        now_ns += wait_ns
        desk.drain.advance(now_ns, True)
        desk.drain.finished(tokens)
        assert 1 <= desk.retry_after_s(excess) <= LIMITS.retry_after_s_max


def test_the_rate_is_of_busy_time_and_follows_what_happens() -> None:
    drain = Drain(LIMITS)
    assert drain.tokens_per_s is None
    for second in range(200):
        drain.advance(second * NS, True)
        drain.finished(500)
    assert drain.tokens_per_s == pytest.approx(500, rel=0.05)
    drain.advance(200 * NS, False)
    drain.advance(4000 * NS, True)
    assert drain.tokens_per_s == pytest.approx(500, rel=0.05)
    for second in range(4000, 4120):
        drain.advance(second * NS, True)
        drain.finished(50)
    assert drain.tokens_per_s == pytest.approx(50, rel=0.3)


def test_what_each_policy_promises() -> None:
    ask = Ask(1, 100, 800, KEY)
    for policy, promised in (("reserve", 900), ("optimistic", 101), ("predicted", 900)):
        assert admission(policy).promise_tokens(ask) == promised  # type: ignore[arg-type]
    desk = admission("predicted")
    teach(desk, 40)
    assert desk.promise_tokens(ask) == 140
    assert desk.promise_tokens(Ask(1, 100, 20, KEY)) == 120
    assert desk.promise_tokens(Ask(1, 100, 800, KEY, output_tokens=40)) == 180  # past all that was seen: twice
    often = LIMITS.preemptions_per_request_max
    for policy in ("optimistic", "predicted"):
        assert admission(policy).promise_tokens(Ask(1, 100, 800, KEY, 5, often)) == 900  # type: ignore[arg-type]


def test_past_its_bound_a_request_is_promised_anew() -> None:
    desk = admission("predicted")
    teach(desk, 40)
    ask = Ask(1, 100, 800, KEY)
    desk.arrive(ask, 0)
    assert desk.seat(ask, 0)
    assert desk.ledger.growth_blocks == 9
    ask.output_tokens = 44
    desk.hold(ask, 9)
    assert desk.ledger.growth_blocks == 0  # 144 tokens are the nine blocks it was promised
    ask.output_tokens = 45
    desk.hold(ask, 10)
    assert desk.ledger.growth_blocks == 12 - 10  # 190 in all


def test_optimists_keep_a_share_free_of_newcomers() -> None:
    desk = admission("optimistic", limits=Limits(kv_watermark_share=0.1, kv_headroom_share=0.001))
    assert desk.seat(Ask(1, 15, 100), 0)
    assert not desk.seat(Ask(2, 16 * 90, 10), 0)
    assert desk.seat(Ask(2, 16 * 89 - 1, 10), 0)


def test_the_ended_are_learned_from_unless_they_were_cut_off() -> None:
    desk = admission("reserve")
    for slot in range(60):
        desk.arrive(Ask(slot, 100, 500, KEY), 0)
        desk.ended(Ask(slot, 100, 500, KEY, output_tokens=3), slot * NS, finished=False)
    assert desk.predictor.bound(KEY, 100, 500) is None and desk.queued_tokens == 0
    teach(desk, 40)
    desk.ended(Ask(1, 100, 500, KEY, output_tokens=40), 0)
    assert desk.predictor.bound(KEY, 100, 500) == 40


def test_who_gives_way_counts_until_it_is_back() -> None:
    desk = admission("optimistic", total=10)
    ask = Ask(1, 60, 50)
    assert desk.seat(ask, 0)
    desk.leave(ask, 0, swapped_blocks=4)
    assert desk.ledger.resume_blocks == 4 and desk.ledger.swapped_blocks == 4
    assert desk.seat(ask, 0) and desk.ledger.resume_blocks == 0
    desk.leave(ask, 0, soon=False)
    assert desk.ledger.resume_blocks == 0


def test_after_a_worker_is_lost_those_it_served_come_back_first() -> None:
    desk = admission("optimistic", total=10)
    served, waiting = Ask(1, 95, 60, output_tokens=1), Ask(2, 60, 50)
    assert desk.seat(served, 0) and desk.arrive(waiting, 0) is None
    desk.begin_anew(Ledger(Counts(10), Memory(), LIMITS), [served])
    assert desk.ledger.resume_blocks == 7 and desk.queued_tokens == 110 and desk.ledger.busy
    other = Ask(3, 10, 10)
    assert desk.seat(other, 0)  # nothing was seated: one alone may begin
    assert not desk.seat(waiting, 0)  # but not a second one, for what it would take is for those that come back
    assert desk.seat(served, 0) and desk.ledger.resume_blocks == 0
    desk.ended(served, 0)
    assert desk.seat(waiting, 0) and desk.queued_tokens == 0


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), min_size=1, max_size=40),
    st.integers(0, 1 << 30),
)
def test_under_reserve_nobody_ever_has_to_give_way(total: int, shapes: list[tuple[int, int]], seed: int) -> None:
    rng, desk = Random(seed), admission("reserve", total)
    pool = desk.ledger.pool
    assert isinstance(pool, Counts)
    asks = [Ask(slot, prompt, most) for slot, (prompt, most) in enumerate(shapes)]
    waiting = [ask for ask in asks if desk.arrive(ask, 0) is None]
    assert all(desk.never(ask) for ask in asks if ask not in waiting)
    running: dict[int, tuple[Ask, int, int]] = {}  # ask, blocks of its table, when it will end
    for _ in range(40 * 200 + 1):
        while waiting and desk.seat(waiting[0], 0):
            ask = waiting.pop(0)
            blocks = desk.ledger.blocks_for(ask.tokens)
            pool.held += blocks
            desk.hold(ask, blocks)
            running[ask.slot] = (ask, blocks, rng.randint(1, ask.max_tokens))
        assert running or not waiting, "somebody waits and nobody runs"
        for slot, (ask, blocks, end) in list(running.items()):
            ask.output_tokens += 1
            grown = desk.ledger.blocks_for(ask.tokens)
            if grown > blocks:
                pool.held += 1
                assert pool.held <= pool.total, "a promise was not kept"
                desk.hold(ask, grown)
                running[slot] = (ask, grown, end)
            if ask.output_tokens == end:
                pool.held -= grown
                desk.ended(ask, 0)
                del running[slot]
        assert pool.held + desk.ledger.growth_blocks <= pool.total
        if not running and not waiting:
            break
    assert not running and not waiting and desk.queued_tokens == 0 and not desk.ledger.busy
