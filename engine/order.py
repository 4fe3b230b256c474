"""In what order the waiting are served. Every order is one number a request: its virtual time of arrival.

A request's place is the time it came, moved by what the order thinks of it, and that move is bounded:

    place = arrived + move,   moves differ by limits.order_delay_s_max at most

That is aging without a clock: two requests age alike, so who is before whom never changes while they wait, and a place
is computed once. The bound on waiting follows: **nobody is overtaken by a request that came more than
``limits.order_delay_s_max`` after it**, so a request waits as long as first come first served would make it wait if
everything of that time had come before it. With ``aging=False`` moves are unbounded, and so is the wait.

What gave way (``resumed``) is before all others. Pure functions and one sorted list; they choose, they seat nobody.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Generic, Literal, Protocol, TypeVar

from baton.engine.limits import Limits

Order = Literal["arrival", "priority", "shortest", "prefix", "deadline"]

_NS = 1_000_000_000
#: a move without aging: further than any time is long
_FOREVER_NS = 1 << 70

#: (0 what gave way, 1 the rest; virtual arrival in ns; arrival in ns; slot)
Place = tuple[int, int, int, int]


class Waiting(Protocol):
    """What an order looks at. ``priority``: lower is more urgent. ``deadline_ns``: 0 is none."""

    @property
    def slot(self) -> int: ...
    @property
    def arrived_ns(self) -> int: ...
    @property
    def resumed(self) -> bool: ...
    @property
    def priority(self) -> int: ...
    @property
    def work_tokens(self) -> int: ...
    @property
    def prefix_tokens(self) -> int: ...
    @property
    def deadline_ns(self) -> int: ...


def by_arrival(one: Waiting, limits: Limits) -> int:
    """First come first served: no move."""
    return 0


def by_priority(one: Waiting, limits: Limits) -> int:
    """Priority classes: each is worth ``limits.order_class_s`` of waiting."""
    return int(one.priority * limits.order_class_s * _NS)


def by_work(one: Waiting, limits: Limits) -> int:
    """Shortest predicted work first: each token of it costs ``limits.order_token_s`` of waiting."""
    return int(one.work_tokens * limits.order_token_s * _NS)


def by_prefix(one: Waiting, limits: Limits) -> int:
    """Longest cached prefix first: each cached token is worth ``limits.order_token_s`` of waiting."""
    return -int(one.prefix_tokens * limits.order_token_s * _NS)


def by_deadline(one: Waiting, limits: Limits) -> int:
    """Earliest deadline first, as far as deadlines are within the bound on moves; without one, as if it lay beyond."""
    return one.deadline_ns - one.arrived_ns if one.deadline_ns else _FOREVER_NS


MOVES: dict[Order, Callable[[Waiting, Limits], int]] = {
    "arrival": by_arrival,
    "priority": by_priority,
    "shortest": by_work,
    "prefix": by_prefix,
    "deadline": by_deadline,
}

#: the orders whose moves go one way only, with the way: the whole bound is theirs, not half of it on each side
_ONE_WAY: dict[Order, int] = {"shortest": 1, "prefix": -1, "deadline": 1}


def place(one: Waiting, order: Order, limits: Limits, aging: bool = True) -> Place:
    """Where a waiting request stands; smaller is earlier. Fixed while it waits, unless what it is made of changes."""
    move = MOVES[order](one, limits)
    if aging:
        most = int(limits.order_delay_s_max * _NS)
        way = _ONE_WAY.get(order, 0)
        lowest, highest = (-most // 2, most // 2) if way == 0 else (min(0, way * most), max(0, way * most))
        move = max(lowest, min(highest, move))
    elif order != "deadline":  # there arrival + move is the deadline itself
        move *= _FOREVER_NS  # who is preferred comes first, whoever came when
    return (0 if one.resumed else 1, one.arrived_ns + move, one.arrived_ns, one.slot)


Item = TypeVar("Item", bound=Waiting)


class WaitingLine(Generic[Item]):
    """The waiting in their order. Adding and removing costs O(log n) comparisons, so 10^4 may wait.

    Invariant: every item is in the list once, at the place it was given when it was added or last moved.
    """

    def __init__(self, order: Order, limits: Limits, aging: bool = True) -> None:
        self.order: Order = order
        self.limits = limits
        self.aging = aging
        self._places: list[Place] = []
        self._items: dict[Place, Item] = {}
        self._place_of: dict[int, Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Item]:
        """First to last. Whoever changes the line while going through it goes through a copy."""
        return (self._items[one] for one in self._places)

    def __contains__(self, item: Item) -> bool:
        found = self._place_of.get(item.slot)
        return found is not None and self._items[found] is item

    def first(self) -> Item | None:
        """Whose turn it is."""
        return self._items[self._places[0]] if self._places else None

    def add(self, item: Item) -> None:
        """Into its place; a slot waits once."""
        assert item.slot not in self._place_of, f"slot {item.slot} waits already"
        where = place(item, self.order, self.limits, self.aging)
        insort(self._places, where)
        self._items[where] = item
        self._place_of[item.slot] = where

    def remove(self, item: Item) -> None:
        """Out of the line."""
        where = self._place_of.pop(item.slot)
        del self._items[where]
        del self._places[bisect_left(self._places, where)]

    def moved(self, item: Item) -> None:
        """What its place is made of has changed (its cached prefix, say)."""
        self.remove(item)
        self.add(item)
