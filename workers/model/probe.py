"""What this machine can do at most, measured with the C++ kernels' own probes. For benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

from baton.kernels.native import NativeUnavailable, Team, load
from baton.workers.model.huge import huge_bytes
from baton.workers.model.loaded import KernelsUnavailable
from baton.workers.model.paths import cache_directory

READ_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes read a second by all threads, and operations (a multiplication and an addition are two) a second of one."""

    read_bytes_per_s: float
    bf16_per_s: float
    int8_per_s: float


def peaks(threads: int) -> Peaks:
    """Measure; takes a second. Raises ``KernelsUnavailable``."""
    try:
        library = load(cache_directory("kernels"))
        team = Team(library, threads)
    except NativeUnavailable as error:
        raise KernelsUnavailable(f"the machine's peaks cannot be measured: {error}") from error
    data = huge_bytes(READ_BYTES)
    data.fill_(1)  # so that there are pages to read
    reads = library.baton_probe_reads(team.handle, data.data_ptr(), READ_BYTES)
    return Peaks(reads, library.baton_probe_sums(0), library.baton_probe_sums(1))
