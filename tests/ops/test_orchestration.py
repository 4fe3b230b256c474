"""The measurement of the orchestration, as far as it needs no server: its arithmetic and its table."""

from __future__ import annotations

import io
import os
import time

import pytest
from rich.console import Console

from baton.ops.bench import orchestration
from baton.ops.bench.doors import Count, Events, Load
from baton.ops.bench.orchestration import DoorReport, OrchestrationReport, measure, table
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
    assert "all but the worker" in text and "scripted worker, 0 ms a step" in text


def test_the_sum_is_of_everything_but_the_worker() -> None:
    cpu = {"frontend-0": 4.0, "frontend-1": 1.0, "scheduler-0": 2.0, "worker-0": 100.0, "worker-1": 90.0}
    counts = {"seconds": 1.0, "requests": 1, "failed": 0, "error": "", "tokens": 1, "tokens_per_s": 1.0}
    door = DoorReport(door="zmq", tokens_per_delta=1.0, cpu_us_per_token=cpu, client_cpu_us_per_token=1.0, **counts)  # type: ignore[arg-type]
    assert door.around_us_per_token == 7.0
    model = OrchestrationReport(model="tiny", streams=1, output_tokens=1, step_ms=None, doors=[door])
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(table(model))
    assert "1 streams of 1 tokens, tiny" in console.export_text()


@pytest.mark.parametrize("cut", [1, 7, 4096])
async def test_a_stream_is_counted_without_being_read(cut: int) -> None:
    delta = b'data: {"choices":[{"index":0,"text":" a","logprobs":null,"finish_reason":null}]}\n\n'
    end = b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n'
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":40}}\n\n'
    said = b"HTTP/1.1 200 OK\r\n\r\n" + 39 * delta + end + usage + b"data: [DONE]\n\n"
    events = Events(b"")
    for at in range(0, len(said), cut):
        events.data_received(said[at : at + cut])
    assert events.tokens == 40
    assert events.deltas == (39 if cut == 4096 else 0), "what is cut in two is not counted"
    events.connection_lost(None)
    await events.done


async def test_an_answer_that_broke_off_has_no_count_and_shows_its_beginning() -> None:
    events = Events(b"")
    events.data_received(b"HTTP/1.1 429 Too Many Requests\r\n\r\n{}")
    assert events.tokens is None and events.head.startswith(b"HTTP/1.1 429")
