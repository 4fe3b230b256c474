"""Doorbells: one eventfd a reader, made by the supervisor and inherited, so that it survives restarts of both ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


def make() -> int:
    """A new doorbell. Every process that is to ring or hear it inherits the descriptor."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def ring(fd: int) -> None:
    """Wake the reader; ringing again before it woke costs nothing."""
    try:  # not contextlib's: this runs several times a step
        os.eventfd_write(fd, 1)
    except BlockingIOError:
        return  # the counter is full: the reader is awake as it will ever be


def hear(loop: asyncio.AbstractEventLoop, fd: int, answer: Callable[[], None]) -> Callable[[], None]:
    """Call ``answer`` on the loop whenever the bell was rung, until what this returns is called.

    What is in the ring already counts as a ring.
    """

    def heard() -> None:
        try:
            os.eventfd_read(fd)
        except BlockingIOError:
            return  # somebody answered meanwhile
        answer()

    loop.add_reader(fd, heard)
    first = loop.call_soon(answer)

    def stop() -> None:
        loop.remove_reader(fd)
        first.cancel()

    return stop
