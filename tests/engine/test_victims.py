"""Who gives way: the right ones, never in vain, never too often; and everybody finishes in the smallest pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.admission import Admission, Ask, Policy
from baton.engine.ledger import Ledger, Memory
from baton.engine.limits import Limits
from baton.engine.order import MOVES, Order, WaitingLine
from baton.engine.predictor import LengthPredictor
from baton.engine.steptime import StepTime, Transfer
from baton.engine.victims import Verdict, cheaper_way, choose, protected, seniority
from tests.engine.pools import Counts

LIMITS = Limits()
OFTEN = LIMITS.preemptions_per_request_max


@dataclass(eq=False)
class One:
    """A running request, as a choice sees it."""

    slot: int
    arrived_ns: int = 0
    priority: int = 0
    preemptions: int = 0
    own_blocks: int = 4
    paused: bool = False


def slots(verdict: Verdict[One]) -> list[int]:
    return [one.slot for one in verdict.victims]


def test_the_youngest_of_the_lowest_class_goes_first() -> None:
    old, young, urgent, lowly = One(0, 1), One(1, 9), One(2, 20, priority=-1), One(3, 2, priority=1)
    ones = [old, young, urgent, lowly]
    assert slots(choose(old, ones, 4, 0, LIMITS)) == [3]
    assert slots(choose(old, ones, 5, 0, LIMITS)) == [3, 1]
    assert slots(choose(urgent, ones, 12, 0, LIMITS)) == [3, 1, 0]


def test_nobody_takes_from_its_seniors_and_nobody_goes_in_vain() -> None:
    old, young = One(0, 1), One(1, 9)
    assert choose(young, [old, young], 1, 0, LIMITS) == Verdict(yields=True)
    assert choose(old, [old, young], 5, 0, LIMITS) == Verdict(yields=True)


def test_those_that_wait_for_their_clients_go_before_all_others() -> None:
    asking, paused, younger = One(0, 5), One(1, 1, priority=-3, paused=True), One(2, 9)
    assert slots(choose(asking, [paused, asking, younger], 4, 0, LIMITS)) == [1]
    assert slots(choose(asking, [paused, asking, younger], 8, 0, LIMITS)) == [1, 2]


def test_blocks_that_are_coming_back_count_first() -> None:
    old, young = One(0, 1), One(1, 9)
    assert choose(old, [young], 4, 4, LIMITS) == Verdict()
    assert slots(choose(old, [young], 4, 3, LIMITS)) == [1]


def test_shared_blocks_free_nothing() -> None:
    old, sharing, young = One(0, 1), One(1, 9, own_blocks=0), One(2, 5, own_blocks=2)
    assert slots(choose(old, [sharing, young], 2, 0, LIMITS)) == [2]


def test_the_protected_never_give_way_and_take_from_their_seniors() -> None:
    safe, old = One(0, 9, preemptions=OFTEN), One(1, 1)
    assert choose(One(2, 0), [safe], 1, 0, LIMITS).yields
    assert slots(choose(safe, [old], 1, 0, LIMITS)) == [1]


def test_protection_is_not_for_those_that_wait_for_their_clients() -> None:
    slow = One(3, 9, preemptions=OFTEN, paused=True)
    assert slots(choose(One(4, 10), [slow], 1, 0, LIMITS)) == [3]


ones_ = st.builds(
    One,
    slot=st.just(0),
    arrived_ns=st.integers(0, 20),
    priority=st.integers(-2, 2),
    preemptions=st.integers(0, OFTEN),
    own_blocks=st.integers(0, 8),
    paused=st.booleans(),
)


@given(ones_, st.lists(ones_, max_size=12), st.integers(0, 30), st.integers(0, 10))
def test_a_verdict_keeps_the_rules(asking: One, others: list[One], missing: int, coming: int) -> None:
    for slot, one in enumerate(others, 1):
        one.slot = slot
    verdict = choose(asking, [asking, *others], missing, coming, LIMITS)
    victims = verdict.victims
    assert asking not in victims
    for one in victims:
        assert one.paused or not protected(one, LIMITS)
        assert one.paused or protected(asking, LIMITS) or seniority(one) > seniority(asking)
    freed = sum(one.own_blocks for one in victims) + coming
    assert verdict.yields or freed >= missing
    if victims:
        assert not verdict.yields and freed - victims[-1].own_blocks < missing
    if verdict.yields:
        assert not victims and missing > coming


def test_the_cheaper_way_back_is_taken() -> None:
    model, fast, slow = StepTime(LIMITS), Transfer(1 << 20, LIMITS), Transfer(1 << 20, LIMITS)
    fast.observe(100, 100 * (1 << 20) / 50e9)
    slow.observe(100, 100 * (1 << 20) / 1e6)
    assert cheaper_way(1600, 100, 100, 512, model, fast) == "swap"
    assert cheaper_way(1600, 100, 100, 512, model, slow) == "recompute"
    assert cheaper_way(1600, 100, 99, 512, model, fast) == "recompute"  # no room
    assert cheaper_way(1600, 100, 100, 512, model, None) == "recompute"
    assert cheaper_way(0, 0, 100, 512, model, fast) == "recompute"


# ---------------------------------------------------------------------------------------------- everybody finishes


@dataclass(eq=False)
class Job:
    """A request of the toy batcher: it ends after ``length`` output tokens."""

    ask: Ask
    length: int
    arrived_ns: int
    priority: int
    deadline_ns: int = 0
    prefix_tokens: int = 0
    blocks: int = 0
    resumed: bool = False
    paused: bool = False
    work_tokens: int = 0

    @property
    def slot(self) -> int:
        return self.ask.slot

    @property
    def preemptions(self) -> int:
        return self.ask.preemptions

    @property
    def own_blocks(self) -> int:
        return self.blocks


@dataclass
class Toy:
    """A batcher of counts: every running request makes one token a step. Blocks of a victim whose step was in flight
    come back a step later.
    """

    desk: Admission
    line: WaitingLine[Job]
    limits: Limits
    running: list[Job] = field(default_factory=list)
    leaving: int = 0
    preempted: int = 0
    done: int = 0

    def step(self, now_ns: int) -> None:
        pool = self.desk.ledger.pool
        assert isinstance(pool, Counts)
        coming, self.leaving = self.leaving, 0
        for job in sorted(self.running, key=seniority):
            if job not in self.running:
                continue
            missing = self.desk.ledger.blocks_for(job.ask.tokens + 1) - job.blocks
            short = missing - pool.available
            if short > 0:
                verdict = choose(job, self.running, short, coming + self.leaving, self.limits)
                assert not (verdict.yields and protected(job, self.limits)), "a protected request had to give way"
                for victim in [job] if verdict.yields else verdict.victims:
                    self._preempt(victim, now_ns)
                continue  # it sits this step out
            pool.held += missing
            job.blocks += missing
            job.ask.output_tokens += 1
            self.desk.hold(job.ask, job.blocks)
            if job.ask.output_tokens == job.length:
                self.running.remove(job)
                pool.held -= job.blocks
                self.desk.ended(job.ask, now_ns)
                self.done += 1
        pool.held -= coming
        while (first := self.line.first()) is not None:
            blocks = self.desk.ledger.blocks_for(first.ask.tokens)
            if blocks > pool.available or not self.desk.seat(first.ask, now_ns):
                break
            self.line.remove(first)
            pool.held += blocks
            first.blocks = blocks
            self.desk.hold(first.ask, blocks)
            self.running.append(first)

    def _preempt(self, victim: Job, now_ns: int) -> None:
        self.running.remove(victim)
        self.leaving += victim.blocks
        victim.blocks = 0
        victim.ask.preemptions += 1
        self.preempted += 1
        victim.resumed = True
        self.desk.leave(victim.ask, now_ns)
        self.line.add(victim)


def play(policy: Policy, order: Order, total: int, seed: int, jobs: int = 50, limits: Limits = LIMITS) -> Toy:
    """All arrive within a few steps, each may fill the pool, and every one must finish."""
    rng = Random(seed)
    predictor = LengthPredictor(limits)
    for _ in range(50):  # a past that was shorter than what comes now
        predictor.observe(("", "", ""), 20, 8)
    desk = Admission(policy, Ledger(Counts(total, 4), Memory(), limits), predictor, limits)
    toy = Toy(desk, WaitingLine(order, limits), limits)
    for slot in range(jobs):
        prompt = rng.randint(1, 2 * total)
        most = rng.randint(1, 4 * total - prompt)
        job = Job(Ask(slot, prompt, most), rng.randint(1, most), slot, rng.randint(-2, 2), rng.choice([0, 10**9]))
        job.work_tokens, job.prefix_tokens = desk.work_tokens(job.ask), rng.randint(0, prompt)
        assert desk.arrive(job.ask, 0) is None
        toy.line.add(job)
    steps = 0
    while toy.done < jobs:
        toy.step(steps)
        steps += 1
        assert steps <= 20_000, f"{toy.done} of {jobs} finished"
        assert all(job.ask.preemptions <= limits.preemptions_per_request_max for job in [*toy.running, *toy.line])
        assert toy.desk.ledger.held_blocks == sum(job.blocks for job in toy.running) + toy.leaving
    assert len(toy.line) == 0 and not toy.running and not desk.ledger.busy and desk.queued_tokens == 0
    return toy


@pytest.mark.parametrize("policy", ["reserve", "optimistic", "predicted"])
@pytest.mark.parametrize("order", list(MOVES))
@pytest.mark.parametrize("total", [3, 16, 40])
def test_everybody_finishes_in_a_tiny_pool(policy: Policy, order: Order, total: int) -> None:
    preempted = sum(play(policy, order, total, seed).preempted for seed in range(3))
    assert (preempted == 0) if policy == "reserve" else (preempted > 0 or total == 3)


@given(
    st.sampled_from(["reserve", "optimistic", "predicted"]),
    st.sampled_from(list(MOVES)),
    st.integers(1, 24),
    st.integers(0, 1 << 30),
    st.integers(1, 3),
)
def test_everybody_finishes_whatever_the_pool(policy: Policy, order: Order, total: int, seed: int, often: int) -> None:
    play(policy, order, total, seed, jobs=8, limits=Limits(preemptions_per_request_max=often))


def test_two_big_ones_do_not_push_each_other_out_for_ever() -> None:
    desk = Admission("optimistic", Ledger(Counts(20, 4), Memory(), LIMITS), LengthPredictor(LIMITS), LIMITS)
    toy = Toy(desk, WaitingLine("arrival", LIMITS), LIMITS)
    for slot in (0, 1):
        job = Job(Ask(slot, 4, 76), 76, slot, 0)
        assert desk.arrive(job.ask, 0) is None
        toy.line.add(job)
    for step in range(400):
        toy.step(step)
    assert toy.done == 2 and 0 < toy.preempted <= 2 * OFTEN
