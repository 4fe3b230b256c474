"""The order of things: rounds of servers, one alive at a time, each warmed up and given every workload in turn."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from baton.ops.bench import loop
from baton.ops.bench.compare.measured import Comparison, Described, Measured, Start, token_times
from baton.ops.bench.compare.play import capacity, play
from baton.ops.bench.compare.process import Started, started, version
from baton.ops.bench.compare.requests import CAPACITY, Part
from baton.ops.bench.compare.servers import Server
from baton.ops.bench.compare.usage import Meter
from baton.ops.bench.report import report
from baton.ops.bench.server import ServerFailed

Say = Callable[[str], None]
#: its connections end before a process does
DYING_S_MAX = 1.0


def machine() -> dict[str, str]:
    """What the figures are of."""
    model = "unknown"
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": model,
        "cores": str(os.cpu_count()),
        "memory": f"{pages * page / 2**30:.0f} GiB",
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def compare(
    found: Comparison, servers: Sequence[Server], parts: Sequence[Part], logs: Path, keep: Callable[[], None], say: Say
) -> None:
    """A B C, A B C, … as often as there are rounds; ``keep`` is called whenever there is more to keep.

    ``ServerFailed`` where a server does not start or refuses its warm-up; what was measured before stays in ``found``.
    """
    for server in servers:
        # As filled, but for the port.
        found.servers.append(Described(server.name, version(server), server.command, server.environment))
    for number in range(1, found.rounds + 1):
        for server in servers:
            say(f"round {number}: {server.name} starts")
            with started(server, logs / f"{server.name}-{number}.log") as one:
                found.starts.append(Start(server.name, number, one.start_s))
                visit(found, one, parts, number, keep, say)


def visit(
    found: Comparison, one: Started, parts: Sequence[Part], number: int, keep: Callable[[], None], say: Say
) -> None:
    """Every workload at one server."""
    name, own_capacity = one.server.name, None
    for part in parts:
        workload, rate = part.workload, None
        if workload.load:
            if not own_capacity:
                raise ServerFailed(f"{name}: no request of {CAPACITY!r} succeeded, so there is no load to speak of")
            rate = workload.load * own_capacity
        elif workload.rate:
            rate = workload.rate
        meter = Meter(one.process.pid, one.server.engine)
        meter.start()
        began, cpu = time.perf_counter(), time.process_time()
        outcomes = loop.run(play(one.server, one.where, part, rate, found.timeout_s))
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        usage = meter.stop()
        wrong = next((outcome for outcome in outcomes if outcome.error is not None), None)
        if one.gone(DYING_S_MAX if wrong is not None else 0.0):
            raise ServerFailed(f"{name}: died during {workload.name!r}, with status {one.process.returncode}")
        if not usage.engine:
            raise ServerFailed(f"{name}: no process of it matches engine = {one.server.engine!r}")
        if not workload.counted:
            if wrong is not None:
                raise ServerFailed(f"{name}: a request of {workload.name!r} failed: {wrong.error}: {wrong.detail}")
            continue
        if workload.name == CAPACITY:
            own_capacity = capacity(outcomes)
        summary = report(
            outcomes,
            seconds,
            f"http://{one.where.host}:{one.where.port}",
            one.server.served,
            workload.concurrency,
            found.objectives,
            cpu / seconds,
        )
        found.measured.append(
            Measured(
                server=name,
                round=number,
                workload=workload.name,
                rate=rate,
                load=workload.load or None,
                capacity=own_capacity,
                report=summary,
                token_ms=token_times(outcomes),
                usage=usage,
            )
        )
        keep()
        say(f"round {number}: {name}: {workload.name}: {summary.succeeded} of {summary.requests} in {seconds:.1f} s")
