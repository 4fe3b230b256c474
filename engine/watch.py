"""The watch: which child does not work though it has work. Hung is not alive, and slow is not hung.

A process that is quiet is given work (a ``Ping``). One whose pulse then stands still for longer than the bound, or
than many times what it said its work would take, is hung; a stopped one is hung at once; one that starts has a bound
for each phase of its start. Pure: it is told what is seen and says what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from baton.engine.limits import Limits
from baton.ipc.frames import Role

STOPPED = "it is stopped"


class Place(Protocol):
    """A place as the life table shows it (``ipc.board`` says what the words mean)."""

    @property
    def role(self) -> Role: ...
    @property
    def index(self) -> int: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def since_ns(self) -> int: ...
    @property
    def pulse(self) -> int: ...
    @property
    def phase(self) -> str: ...
    @property
    def ready(self) -> bool: ...
    @property
    def expected_ns(self) -> int: ...


@dataclass(slots=True)
class Seen:
    """What the watch remembers of one incarnation; times in ns of the monotonic clock."""

    incarnation: int
    pulse: int
    moved_ns: int
    phase: str
    phase_ns: int
    pinged_ns: int = 0


class Watch:
    """Invariant: a process is called hung only while it has work that it was seen not doing."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._seen: dict[tuple[int, int], Seen] = {}

    def look(self, place: Place, process_state: str, now_ns: int) -> tuple[bool, str | None]:
        """One look at a living process: whether to ping it, and why it is hung if it is.

        ``process_state`` is the kernel's letter (R, S, D, T, ...).
        """
        limits, key = self.limits, (place.role, place.index)
        seen = self._seen.get(key)
        if seen is None or seen.incarnation != place.incarnation:
            seen = self._seen[key] = Seen(place.incarnation, place.pulse, now_ns, place.phase, place.since_ns)
        if process_state in "Tt":
            return False, STOPPED
        if not place.ready:
            return False, self._late(place, seen, now_ns)
        if place.pulse != seen.pulse:
            seen.pulse, seen.moved_ns, seen.pinged_ns = place.pulse, now_ns, 0
            return False, None
        if not seen.pinged_ns:
            if now_ns - seen.moved_ns < limits.ping_interval_s * 1e9:
                return False, None
            seen.pinged_ns = now_ns
            return True, None
        still_s = (now_ns - seen.pinged_ns) / 1e9
        allowed_s = max(limits.hung_s_max, limits.hung_steps_max * place.expected_ns / 1e9)
        return False, f"it has not moved for {still_s:.1f} s" if still_s > allowed_s else None

    def _late(self, place: Place, seen: Seen, now_ns: int) -> str | None:
        """Whether a process is in one phase of its start for too long."""
        if seen.phase != place.phase:
            seen.phase, seen.phase_ns = place.phase, now_ns
        bound = "starting_s_max" if place.phase == "importing" else f"{place.phase}_s_max"
        spent_s, allowed_s = (now_ns - seen.phase_ns) / 1e9, float(getattr(self.limits, bound))
        if spent_s <= allowed_s:
            return None
        return f"it has been {place.phase} for {spent_s:.1f} s (limits.{bound} is {allowed_s:g})"
