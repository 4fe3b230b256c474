"""The orders: who comes first, who waits longest, and that aging bounds it."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.limits import Limits
from baton.engine.order import MOVES, Order, WaitingLine, place

LIMITS = Limits(order_delay_s_max=30.0)
NS = 1_000_000_000
ORDERS: list[Order] = list(MOVES)


@dataclass(eq=False)
class One:
    """A waiting request."""

    slot: int
    arrived_ns: int = 0
    priority: int = 0
    work_tokens: int = 0
    prefix_tokens: int = 0
    deadline_ns: int = 0
    resumed: bool = False


def served(order: Order, ones: list[One], aging: bool = True) -> list[int]:
    line: WaitingLine[One] = WaitingLine(order, LIMITS, aging)
    for one in ones:
        line.add(one)
    return [one.slot for one in line]


def test_each_order_prefers_what_it_says() -> None:
    ones = [
        One(0, 0, priority=1, work_tokens=500, prefix_tokens=0, deadline_ns=9 * NS),
        One(1, NS, priority=0, work_tokens=900, prefix_tokens=100, deadline_ns=5 * NS),
        One(2, 2 * NS, priority=-1, work_tokens=10, prefix_tokens=600),
    ]
    assert served("arrival", ones) == [0, 1, 2]
    assert served("priority", ones) == [2, 1, 0]
    assert served("shortest", ones) == [2, 0, 1]
    assert served("prefix", ones) == [2, 1, 0]
    assert served("deadline", ones) == [1, 0, 2]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("aging", [True, False])
def test_what_gave_way_is_before_all_others(order: Order, aging: bool) -> None:
    ones = [One(0, 0, -9, 1, 999, 1), One(1, 5 * NS, resumed=True), One(2, 4 * NS, resumed=True)]
    assert served(order, ones, aging) == [2, 1, 0]


def worst_wait_s(order: Order, aging: bool) -> tuple[float, float]:
    """One seat, a second of service each, as much coming as can be served. The wait of the worst-placed request, which
    came first into a full queue, and of the worst of all. Three hundred are served.
    """
    line: WaitingLine[One] = WaitingLine(order, LIMITS, aging)
    worst = One(0, 5 * NS, priority=9, work_tokens=100_000, prefix_tokens=0)
    for slot in range(1, 6):
        line.add(One(slot, 0, work_tokens=10, prefix_tokens=500, deadline_ns=20 * NS))
    line.add(worst)
    waits: dict[int, float] = {}
    for second in range(300):
        now_ns = (6 + second) * NS
        line.add(One(10 + second, now_ns, work_tokens=10, prefix_tokens=500, deadline_ns=now_ns + 10 * NS))
        first = line.first()
        assert first is not None
        line.remove(first)
        waits[first.slot] = (now_ns - first.arrived_ns) / NS
    return waits.get(0, float("inf")), max(waits.values())


@pytest.mark.parametrize(
    ("order", "worst_s"),
    [("arrival", 6.0), ("priority", 20.0), ("shortest", 35.0), ("prefix", 15.0), ("deadline", 25.0)],
)
def test_the_worst_placed_waits_no_longer_than_the_bound(order: Order, worst_s: float) -> None:
    own, most = worst_wait_s(order, aging=True)
    assert own == worst_s
    bound_s = LIMITS.order_delay_s_max + 5 + 1  # the five before it, and what comes for as long as it can be overtaken
    assert most <= bound_s
    if order != "arrival":
        assert worst_wait_s(order, aging=False)[0] == float("inf"), "without aging it would starve"


ones_ = st.builds(
    One,
    slot=st.just(0),
    arrived_ns=st.integers(0, 1000 * NS),
    priority=st.integers(-(1 << 31), 1 << 31),
    work_tokens=st.integers(0, 1 << 24),
    prefix_tokens=st.integers(0, 1 << 24),
    deadline_ns=st.integers(0, 1 << 62),
)


@given(st.sampled_from(ORDERS), ones_, ones_)
def test_nobody_is_overtaken_by_what_comes_too_long_after(order: Order, early: One, late: One) -> None:
    late.slot = 1
    late.arrived_ns = early.arrived_ns + int(LIMITS.order_delay_s_max * NS) + 1 + late.arrived_ns
    assert place(early, order, LIMITS) < place(late, order, LIMITS)


@given(st.sampled_from(ORDERS), st.lists(ones_, max_size=30), st.randoms(use_true_random=False))
def test_the_line_is_sorted_whatever_comes_and_goes(order: Order, ones: list[One], rng: Random) -> None:
    line: WaitingLine[One] = WaitingLine(order, LIMITS)
    heap: list[tuple[tuple[int, int, int, int], int]] = []
    for slot, one in enumerate(ones):
        one = One(slot, one.arrived_ns, one.priority, one.work_tokens, one.prefix_tokens, one.deadline_ns)
        line.add(one)
        if rng.random() < 0.3:
            assert one in line
            line.remove(one)
            assert one not in line
        else:
            heappush(heap, (place(one, order, LIMITS), slot))
    assert len(line) == len(heap)
    assert [one.slot for one in line] == [heappop(heap)[1] for _ in range(len(heap))]


def test_whoever_changes_is_placed_anew() -> None:
    line: WaitingLine[One] = WaitingLine("prefix", LIMITS)
    ones = [One(0), One(1, 1)]
    for one in ones:
        line.add(one)
    line.remove(ones[1])
    ones[1].prefix_tokens = 100
    line.add(ones[1])
    assert line.first() is ones[1]
    ones[0].prefix_tokens = 200
    line.moved(ones[0])
    assert line.first() is ones[0] and len(line) == 2


def test_ten_thousand_may_wait() -> None:
    rng = Random(1)
    line: WaitingLine[One] = WaitingLine("shortest", LIMITS)
    ones = [One(slot, rng.randrange(NS), work_tokens=rng.randrange(5000)) for slot in range(10_000)]
    for one in ones:
        line.add(one)
    places = [place(one, "shortest", LIMITS) for one in line]
    assert places == sorted(places)
    rng.shuffle(ones)
    for one in ones:
        line.remove(one)
    assert len(line) == 0 and line.first() is None
