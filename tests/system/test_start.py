"""How a server starts and how it waits: the phases of its processes, what they weigh, and that they sleep."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import psutil
import pytest

from baton.ops.bench.server import cpu_seconds
from tests.system.server import Server

NAMES = {"frontend-0", "tokenizer-0", "scheduler-0", "worker-0", "detokenizer-0"}
IDLE_S, IDLE_SHARE_MAX = 5.0, 0.05  # of one processor; a quiet machine shows a tenth of that


async def test_the_log_and_ready_say_where_the_time_of_the_start_went() -> None:
    async with Server("--worker", "scripted", "--log-level", "info") as server:
        async with server.session.get(server.url + "/ready") as answer:
            said = await answer.json()
        events = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    started = {event["name"]: event for event in events if event["event"] == "process_started"}
    assert set(said["start_ms"]) == set(started) == NAMES
    for name, phases in said["start_ms"].items():
        assert list(phases) == ["starting", "importing", "loading", "ready"], name
        assert sum(phases.values()) - phases["ready"] == pytest.approx(phases["ready"], abs=0.2), "no time is missing"
        assert started[name].items() >= phases.items() and started[name]["began_ms"] >= 0
    assert [event["computing"] for event in events if event["event"] == "kernels"] == ["scripted"]
    (whole,) = (event for event in events if event["event"] == "server_started")
    last = max(event["began_ms"] + event["ready"] for event in started.values())
    assert whole["before_spawning_ms"] + last <= whole["ms"] + 20, "the processes were started within that time"
    first = min(event["began_ms"] + event["ready"] for event in started.values())
    assert all(event["began_ms"] < first for event in started.values()), "all are started before one is ready"


async def test_what_works_beside_the_steps_gives_way_to_what_makes_them() -> None:
    own = psutil.Process().nice()
    async with Server("--worker", "scripted", "--niceness", "7") as server:
        for name, place in server.places().items():
            nice = own if name in ("scheduler", "worker") else min(19, own + 7)
            assert psutil.Process(place.pid).nice() == nice, name
            group = Path(f"/proc/{place.pid}/autogroup")
            if group.exists():
                async with asyncio.timeout(10):  # the kernel may have asked it to try again
                    while group.read_text().split()[-1] != str(nice):
                        await asyncio.sleep(0.05)
        answer = await server.complete(prompt=[1, 2, 3], max_tokens=4)
        assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.alone
@pytest.mark.parametrize("worker", ["scripted", "model"])
async def test_an_idle_server_sleeps(worker: str) -> None:
    async with Server("--worker", worker) as server:
        await server.complete(prompt=[1, 2, 3], max_tokens=4)
        pids = [server.process.pid, *(place.pid for place in server.places().values())]
        before = sum(map(cpu_seconds, pids))
        await asyncio.sleep(IDLE_S)  # this is the measurement, not a wait for something
        spent = sum(map(cpu_seconds, pids)) - before
        assert spent < IDLE_SHARE_MAX * IDLE_S, f"{100 * spent / IDLE_S:.1f} % of a processor"
