"""What befalls the processes of level two: named faults, how often each comes in a world, and when."""

from __future__ import annotations

import random
from dataclasses import dataclass

from baton.ipc.frames import Role
from baton.ipc.memory_link import Place
from tests.sim.script import MS, Shape

#: fault -> how likely one is to be it
FAULTS = {
    "kill": 4,  # SIGKILL between two callbacks
    "kill while speaking": 4,  # SIGKILL after one of the next frames it sends
    "stop": 1,  # SIGSTOP: the kernel tells
    "hang": 1,  # it works no more, and nobody tells
    "slow": 4,  # it does nothing for a while
}
SPAN_NS = 120 * MS


@dataclass(frozen=True)
class Fault:
    """One trouble of one place, at a time counted from when the server is up."""

    name: str
    at_ns: int
    place: Place
    for_ns: int
    after_frames: int


def make_faults(rng: random.Random, places: list[Place]) -> list[Fault]:
    """The troubles of a world; some have none, and troubles come together."""
    faults: list[Fault] = []
    for _ in range(rng.choice((0, 1, 1, 2, 3, 5, 9))):
        at_ns = rng.randrange(SPAN_NS)
        faults.append(_fault(rng, at_ns, rng.choice(places)))
        if rng.random() < 0.3:
            faults.append(_fault(rng, at_ns + rng.randrange(20 * MS), rng.choice(places)))
    return faults


def _fault(rng: random.Random, at_ns: int, place: Place) -> Fault:
    (name,) = rng.choices(list(FAULTS), list(FAULTS.values()))
    return Fault(name, at_ns, place, rng.randrange(rng.choice((2, 20, 80)) * MS), rng.randrange(1, 8))


def places_of(shape: Shape) -> list[Place]:
    """Every place of a world, in the order in which they are started."""
    first = [(Role.WORKER, 0), (Role.TOKENIZER, 0), (Role.DETOKENIZER, 0), (Role.SCHEDULER, 0)]
    return [*first, *((Role.FRONTEND, index) for index in range(shape.frontends))]
