"""The one clock: CLOCK_MONOTONIC in nanoseconds, the same in all processes of one machine."""

from __future__ import annotations

import time

now_ns = time.monotonic_ns


def epoch_offset_ns() -> int:
    """What to add to ``now_ns()`` for nanoseconds since 1970; taken once by the supervisor for all."""
    return time.time_ns() - time.monotonic_ns()
