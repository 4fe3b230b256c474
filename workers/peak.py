"""The most memory that a piece of work takes at once, as the kernel counts it for this process. Linux alone."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(slots=True)
class Peak:
    """``bytes`` is known once the work is over."""

    bytes: int = 0


@contextlib.contextmanager
def resident_peak() -> Iterator[Peak]:
    """How far resident memory rises above where it was, at its highest, while this lasts; in bytes.

    What the C library keeps of freed memory is given back first, so that using it again counts; it cannot give back
    all of it in a process that has worked before, so this is for one that has just started. Where the kernel does
    not let the high-water mark be reset, that of the process's whole life stands in for it: too much, never too little.
    """
    ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        CLEAR_REFS.write_text("5")  # the high-water mark falls to what is resident now
    peak, before = Peak(), _status_bytes("VmRSS")
    yield peak
    peak.bytes = max(_status_bytes("VmHWM") - before, 0)


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found, f"the kernel tells no {field}"
    return int(found[1]) * 1024
