"""What befalls the processes: level two's named faults, how often each comes in a world, and when."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec

from baton.engine.limits import Limits
from baton.ipc.frames import Role
from baton.ipc.memory_link import Place
from tests.sim.script import MS, RIVALS, Shape

#: fault -> how likely one is to be it
FAULTS = {
    "kill": 4,  # SIGKILL between two callbacks
    "kill while speaking": 4,  # SIGKILL after one of the next frames it sends
    "stop": 1,  # SIGSTOP: the kernel tells
    "hang": 1,  # it works no more, and nobody tells
    "slow": 4,  # it does nothing for a while
    "damage": 1,  # a byte of the ring it writes next is turned over
    "out of memory": 2,  # there is none for the worker's next step
    "full ring": 3,  # the detokenizer reads nothing until no more tokens fit
}
SPAN_NS = 120 * MS
#: how a process of level one is struck, in words
STRIKES = {
    "now": "kill between events",
    "effects": "kill between effects",
    "writes": "kill between writes to the board",
    "memory": "out of memory",
}


@dataclass(frozen=True)
class Fault:
    """One trouble of one place, at a time counted from when the server is up."""

    name: str
    at_ns: int
    place: Place
    for_ns: int
    after_frames: int


def make_faults(rng: random.Random, places: list[Place], shape: Shape) -> list[Fault]:
    """The troubles of a world; some have none, and troubles come together.

    Where a request is poisoned no worker dies of anything else that nobody did to it: others would look guilty.
    """
    faults: list[Fault] = []
    for _ in range(rng.choice((0, 1, 1, 2, 3, 5, 9))):
        at_ns = rng.randrange(SPAN_NS)
        faults.append(_fault(rng, at_ns, rng.choice(places)))
        if rng.random() < 0.3:
            faults.append(_fault(rng, at_ns + rng.randrange(20 * MS), rng.choice(places)))
    innocent = [fault for fault in faults if fault.name not in ("hang", "damage", "out of memory")]
    return innocent if shape.poison else faults


def _fault(rng: random.Random, at_ns: int, place: Place) -> Fault:
    (name,) = rng.choices(list(FAULTS), list(FAULTS.values()))
    if name == "full ring":
        return Fault(name, at_ns, (Role.DETOKENIZER, 0), rng.randrange(50, 200) * MS, 0)
    if name == "out of memory":
        place = (Role.WORKER, 0)
    return Fault(name, at_ns, place, rng.randrange(rng.choice((2, 20, 80)) * MS), rng.randrange(1, 8))


def places_of(shape: Shape) -> list[Place]:
    """Every place of a world, in the order in which they are started."""
    tokenizers = [(Role.TOKENIZER, index) for index in range(shape.tokenizers)]
    first = [(Role.WORKER, 0), *tokenizers, (Role.DETOKENIZER, 0), (Role.SCHEDULER, 0)]
    return [*first, *((Role.FRONTEND, index) for index in range(shape.frontends))]


def limits_of(rng: random.Random, shape: Shape, faults: list[Fault]) -> Limits:
    """The bounds of a world's processes: tight, so that they are met within a second."""
    full = any(fault.name == "full ring" for fault in faults)
    narrow = shape.token_ring_bytes <= 1024 or (full and shape.tokens_per_row_max == 1)
    token_ring_bytes = 2048 if narrow else shape.token_ring_bytes
    return msgspec.structs.replace(
        shape.limits,
        mailbox_tokens_max=1024 if full else shape.limits.mailbox_tokens_max,
        inbox_frames_max=rng.choice((2, 8, 4096)),
        inbox_batch_frames_max=rng.choice((1, 64)),
        token_ring_bytes=token_ring_bytes,
        step_tokens_max=min(8, shape.limits.step_tokens_max) if narrow else shape.limits.step_tokens_max,
        top_logprobs_max=RIVALS if shape.tokens_per_row_max == 1 and not narrow else 0,
        prompt_logprobs_max=0 if narrow or shape.tokens_per_row_max > 1 else RIVALS,
        plan_ring_bytes=shape.plan_ring_bytes,
        watch_interval_s=0.05,
        ping_interval_s=0.1,
        hung_s_max=0.3,
        tell_s_max=0.01,
        restart_backoff_s=0.002,
        restart_window_s=0.2,
        restarts_max=rng.choice((1, 1000, 1000, 1000)),
        drain_s_max=rng.choice((0.02, 3.0)),
        stop_s_max=0.5,
        starting_s_max=5.0,
        loading_s_max=5.0,
        warming_s_max=5.0,
    )
