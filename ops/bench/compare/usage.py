"""What a server uses: CPU time by process over a window, and memory while it lasts. Linux only, for its procfs.

It reads other processes from outside, from a thread that sleeps; nothing is asked of the server.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from time import monotonic, process_time

import msgspec
import psutil

from baton.ops.bench.compare.process import family

#: reading a process's pages makes its kernel structures busy for some milliseconds, so not often
LOOK_EVERY_S = 5.0
NAME_CHARS_MAX = 60


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds in a window, of the process that computes the model and of all others; the most memory seen.

    Memory is the sum of proportional set sizes (shared pages count once), or of resident sets where those cannot be
    read. ``engine`` is the process taken for the model's; ``processes`` has the CPU seconds of each. ``others_share``
    is the part of all cores that neither the server nor this program took: other programs, and what the host took.
    """

    engine: str
    engine_cpu_s: float
    outside_cpu_s: float
    memory_bytes_max: int
    others_share: float
    processes: dict[str, float]


class Meter:
    """Watches the processes under ``pid`` from ``start`` to ``stop``. One that ends between two looks counts as of the
    last; one that begins counts whole."""

    def __init__(self, pid: int, engine: str) -> None:
        self._pid = pid
        self._engine = re.compile(engine) if engine else None
        self._before: dict[int, float] = {}
        self._after: dict[int, float] = {}
        self._names: dict[int, str] = {}
        self._memory_bytes_max = 0
        self._began = self._busy = self._own = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Begin the window."""
        self._look()
        self._before = dict(self._after)
        self._began, self._busy, self._own = monotonic(), busy_s(), process_time()
        self._thread.start()

    def stop(self) -> Usage:
        """End the window."""
        self._over.set()
        self._thread.join()
        self._look()
        others = busy_s() - self._busy - (process_time() - self._own)
        whole = (monotonic() - self._began) * (psutil.cpu_count() or 1)
        self._weigh()
        spent = {pid: after - self._before.get(pid, 0.0) for pid, after in self._after.items()}
        engine = self._found(spent)
        inside = sum(spent[pid] for pid in engine)
        return Usage(
            engine=", ".join(self._named(pid) for pid in engine),
            engine_cpu_s=round(inside, 3),
            outside_cpu_s=round(sum(spent.values()) - inside, 3),
            memory_bytes_max=self._memory_bytes_max,
            others_share=round(min(1.0, max(0.0, (others - sum(spent.values())) / whole)), 4),
            processes={f"{pid} {self._named(pid)}": round(spent[pid], 3) for pid in sorted(spent)},
        )

    def _watch(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            self._look()
            self._weigh()

    def _look(self) -> None:
        for one in family(self._pid):
            try:
                times = one.cpu_times()
                # A process that is replaced by another program (exec) has another name afterwards.
                self._names[one.pid] = " ".join(one.cmdline()) or one.name()
                self._after[one.pid] = times.user + times.system
            except psutil.Error:
                continue

    def _weigh(self) -> None:
        weight = sum(memory_bytes(one) for one in family(self._pid))
        self._memory_bytes_max = max(self._memory_bytes_max, weight)

    def _found(self, spent: dict[int, float]) -> list[int]:
        """The processes that compute the model."""
        if self._engine is not None:
            return [pid for pid in spent if self._engine.search(self._names[pid])]
        return [max(spent, key=lambda pid: spent[pid])] if spent else []

    def _named(self, pid: int) -> str:
        """The command without the folder of its program: where that lies is the machine's affair."""
        program, *arguments = self._names[pid].split(" ", 1)
        name = " ".join([program.rpartition("/")[2], *arguments])
        half = NAME_CHARS_MAX // 2
        return name if len(name) <= NAME_CHARS_MAX else f"{name[:half]} … {name[-half:]}"


def busy_s() -> float:
    """CPU seconds of all cores so far in which they were not idle; time a virtual machine was not given counts."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def memory_bytes(one: psutil.Process) -> int:
    """A process's share of memory: its PSS, else its RSS; 0 if it is gone."""
    try:
        for line in Path(f"/proc/{one.pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return int(one.memory_info().rss)
    except psutil.Error:
        return 0
