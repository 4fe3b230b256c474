"""The measurement of the orchestration, as far as it needs no server: its arithmetic and its table."""

from __future__ import annotations

import io
import os
import time

import pytest
from rich.console import Console

from baton.ops.bench import orchestration
from baton.ops.bench.doors import Count, Load
from baton.ops.bench.orchestration import OrchestrationReport, measure, table
from baton.ops.bench.server import Running, cpu_seconds


def test_cpu_time_is_read_from_procfs() -> None:
    before = cpu_seconds(os.getpid())
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    assert 0.03 <= cpu_seconds(os.getpid()) - before < 5.0


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> list[Load]:
    """A door behind which nothing is; it remembers its loads."""
    loads: list[Load] = []

    async def door(running: Running, load: Load) -> Count:
        loads.append(load)
        return Count(requests=2, failed=1, tokens=512, deltas=128, error="one was refused")

    monkeypatch.setattr(orchestration, "DOORS", {"http": door})
    return loads


def test_a_door_is_warmed_up_and_then_measured(doors: list[Load]) -> None:
    running = Running("tiny", "http://h", "ipc://x", {"scheduler-0": os.getpid()})
    found = measure(running, "http", Load(64, 256, 16, 3.0))
    assert [(load.streams, load.output_tokens) for load in doors] == [(64, 16), (64, 256)]
    assert (found.requests, found.failed, found.tokens, found.tokens_per_delta) == (2, 1, 512, 4.0)
    assert set(found.cpu_us_per_token) == {"scheduler-0"}


def test_the_table_has_a_row_for_each_door_and_process(doors: list[Load]) -> None:
    running = Running("tiny", "http://h", "ipc://x", {"scheduler-0": os.getpid()})
    door = measure(running, "http", Load(64, 256, 16, 3.0))
    found = OrchestrationReport(model="tiny", streams=64, output_tokens=256, step_ms=0.0, doors=[door])
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(table(found))
    text = console.export_text()
    assert "64 streams of 256 tokens" in text and "scheduler-0" in text
    assert "http: one was refused" in text
