"""Rare paths made common, by the simulator alone: ``buggify(site)`` asks whether to take the rarer of two right ways.

Both ways must keep every promise; the rare one is merely slower. In production nothing is armed and the answer is no.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: every place that asks, with what it does when told yes
SITES = {
    "small step": "the batcher takes a budget of one token",
    "no room": "the batcher takes nobody in though there is room, while others run",
    "crowded out": "the batcher preempts the youngest though there are blocks, while others run",
    "lease again": "the scheduler repeats a lease",
    "alone": "the detokenizer sends each piece in a frame of its own",
    "small credit": "a frontend grants one token at a time",
    "late sweep": "a frontend sweeps late",
    "ping": "the supervisor pings who is not quiet",
}

Chance = Callable[[str], bool]


def _never(site: str) -> bool:
    return False


_armed: list[Chance] = [_never]


def buggify(site: str) -> bool:
    """Whether the simulator wants the rare way here."""
    return _armed[-1](site)


@contextmanager
def armed(chance: Chance) -> Iterator[None]:
    """While this lasts, ``chance`` answers."""
    _armed.append(chance)
    try:
        yield
    finally:
        _armed.remove(chance)
