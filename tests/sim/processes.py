"""The processes of level one and the links between them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from baton.ipc.frames import Role

Place = tuple[Role, int]


class Killed(BaseException):
    """SIGKILL in the middle of an event."""


@dataclass(eq=False)
class Process:
    """A live process. ``doomed`` says how the next event ends it: between board writes, or between effects."""

    place: Place
    incarnation: int
    core: Any  # one of the four cores
    doomed: str = ""
    timers: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class Link:
    """Frames from one process to one place, in order. ``due`` have arrived while nobody was there."""

    receiver: Place
    slowness: int
    last_ns: int = 0
    due: int = 0
    frames: deque[bytes] = field(default_factory=deque)
