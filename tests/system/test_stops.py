"""The end of a server, whenever it comes: while it starts, recovers or streams to nobody, or by a kill of all of it."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from pathlib import Path

import psutil
import pytest

from baton.ipc.rundir import live_instances
from tests.system.server import Server
from tests.system.test_lifecycle import SCRIPTED, SLOW, until_draining
from tests.system.test_phases import hanging
from tests.system.test_slow_readers import stalled

LONG = {"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True}


async def until_phase(server: Server, phase: str) -> None:
    """Wait until the worker of a server that starts is in this phase."""
    async with asyncio.timeout(30):
        while not list(server.base.glob("[!.]*/worker-0.json")):  # the board is made before that
            await asyncio.sleep(0.02)
        while server.places()["worker"].phase != phase:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("phase", ["loading", "warming"])
async def test_a_signal_while_it_starts_ends_it_in_good_order(tmp_path: Path, phase: str, number: int) -> None:
    server = await hanging(tmp_path, 1, phase).launch()
    try:
        await until_phase(server, phase)
        children = psutil.Process(server.process.pid).children()
        assert children
        server.process.send_signal(number)
        assert await server.wait(15) == 0
        assert not [child for child in children if child.is_running()]
        assert "Traceback" not in server.log()
    finally:
        await server.__aexit__()


async def test_a_burst_of_signals_is_one_hurried_end() -> None:
    async with Server(*SCRIPTED, environment=SLOW) as server:
        events = server.stream(**LONG)
        await anext(events)
        for number in (signal.SIGTERM, signal.SIGINT) * 5:
            server.process.send_signal(number)
            await asyncio.sleep(0)
        rest = [event async for event in events]
        assert rest[-1]["error"]["code"] == "engine_stopped"
        assert await server.wait(10) == 0


async def test_a_drain_that_runs_out_of_time_tells_who_was_not_done_and_is_no_failure() -> None:
    async with Server(*SCRIPTED, environment={**SLOW, "BATON_LIMITS__DRAIN_S_MAX": "1"}) as server:
        events = server.stream(**LONG)
        await anext(events)
        async with stalled(server.url, 3):
            async with asyncio.timeout(10):
                while len(server.board_rows()) < 4:
                    await asyncio.sleep(0.02)
            server.process.send_signal(signal.SIGTERM)
            rest = [event async for event in events]
            assert rest[-1]["error"]["code"] == "engine_stopped"
            assert await server.wait(15) == 0


@pytest.mark.parametrize("role", ["worker", "tokenizer", "scheduler", "detokenizer"])
async def test_what_dies_during_a_drain_is_replaced_and_the_drain_goes_on(role: str) -> None:
    async with Server(*SCRIPTED, environment={"BATON_SCRIPTED_STEP_MS": "10"}) as server:
        events = server.stream(prompt=[5, 6, 7], max_tokens=200, ignore_eos=True)
        chunks = [await anext(events)]
        server.process.send_signal(signal.SIGTERM)
        await until_draining(server)
        server.kill(role)
        chunks += [chunk async for chunk in events]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert await server.wait() == 0


async def test_servers_killed_as_a_whole_again_and_again_leave_one_directory_and_the_next_start_none() -> None:
    base = Path(tempfile.mkdtemp(prefix="baton-", dir="/dev/shm"))
    for _ in range(2):
        server = await Server(*SCRIPTED, base=base).launch()
        await server.wait_ready()
        family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
        assert len(family) == 6
        for process in family:
            os.kill(process.pid, signal.SIGKILL)
        await server.wait(10)
        _, alive = await asyncio.to_thread(psutil.wait_procs, family[1:], 5)
        assert not alive
        assert len(list(base.iterdir())) == 1
        await server.session.close()
        server.stderr.close()
    async with Server(*SCRIPTED, base=base) as server:
        assert live_instances(base) == list(base.iterdir())
    assert not list(base.iterdir())
    base.rmdir()
