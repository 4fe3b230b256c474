"""Starting, draining, stopping, and everything that can be wrong at the start."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.system.server import Server

SCRIPTED = ("--worker", "scripted")
SLOW = {"BATON_SCRIPTED_STEP_MS": "20"}


async def failed_start(*flags: str, environment: dict[str, str] | None = None) -> tuple[int, list[str]]:
    """The exit status and standard error of a server that cannot start; leaving it checks that nothing is left."""
    server = await Server(*flags, environment=environment).launch()
    status = await server.wait()
    lines = server.log().splitlines()
    await server.__aexit__()
    return status, lines


async def until_draining(server: Server) -> None:
    """Wait until the server says that it lets nobody in any more."""
    async with asyncio.timeout(5):
        while True:
            async with server.session.get(f"{server.url}/ready") as response:
                if response.status == 503:
                    assert (await response.json())["state"] == "draining"
                    return


async def test_two_servers_on_one_host_do_not_touch_each_other() -> None:
    base = Path(tempfile.mkdtemp(prefix="baton-", dir="/dev/shm"))
    async with Server(*SCRIPTED, base=base) as one:
        first = await one.complete(prompt=[5, 6, 7], max_tokens=8, seed=1)
        two = await Server(*SCRIPTED, base=base).launch()
        await two.wait_ready()
        assert two.url != one.url
        assert await two.complete(prompt=[5, 6, 7], max_tokens=8, seed=1)
        assert await two.stop() == 0
        await two.session.close()
        again = await one.complete(prompt=[5, 6, 7], max_tokens=8, seed=1)
        assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    base.rmdir()


async def test_a_termination_lets_streams_finish_and_refuses_new_work() -> None:
    async with Server(*SCRIPTED, environment=SLOW) as server:
        events = server.stream(prompt=[5, 6, 7], max_tokens=50, ignore_eos=True)
        chunks = [await anext(events)]
        server.process.send_signal(signal.SIGTERM)
        await until_draining(server)
        body = {"model": "smollm2-135m", "prompt": [1]}
        async with server.session.post(f"{server.url}/v1/completions", json=body) as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "shutting_down"
        chunks += [chunk async for chunk in events]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert await server.wait() == 0


async def test_a_second_termination_ends_at_once() -> None:
    async with Server(*SCRIPTED, environment=SLOW) as server:
        events = server.stream(prompt=[5, 6, 7], max_tokens=4000, ignore_eos=True)
        await anext(events)
        server.process.send_signal(signal.SIGTERM)
        await until_draining(server)  # two signals at once may come as one
        server.process.send_signal(signal.SIGTERM)
        rest = [event async for event in events]
        assert rest[-1]["error"]["code"] == "engine_stopped"
        assert await server.wait(10) == 0


async def test_killing_the_supervisor_leaves_nothing() -> None:
    base = Path(tempfile.mkdtemp(prefix="baton-", dir="/dev/shm"))
    server = await Server(*SCRIPTED, base=base).launch()
    await server.wait_ready()
    children = [psutil.Process(place.pid) for place in server.places().values()]
    assert len(children) == 5
    server.process.kill()
    await server.wait()
    gone, alive = await asyncio.to_thread(psutil.wait_procs, children, 5)
    assert len(gone) == 5 and not alive
    assert len(list(base.iterdir())) == 1
    async with Server(*SCRIPTED, base=base):
        assert len(list(base.iterdir())) == 1  # the next start swept what the dead one left
    base.rmdir()
    await server.session.close()


async def test_a_device_that_is_not_there_is_one_line() -> None:
    status, lines = await failed_start("--device", "cuda", environment={"CUDA_VISIBLE_DEVICES": ""})
    assert status != 0
    assert lines[-1].startswith("baton: ") and "cuda" in lines[-1] and "--device" in lines[-1], lines
    assert not any("Traceback" in line for line in lines)


async def test_a_taken_port_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, lines = await failed_start(*SCRIPTED, "--port", str(port))
    assert status != 0
    assert lines[-1].startswith("baton: ") and str(port) in lines[-1] and "taken" in lines[-1]
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model", "/nowhere/model.gguf"), "/nowhere/model.gguf"),
        (("--kv-memory", "100TiB"), "memory"),
        (("--kv-memory", "1KiB"), "block"),
        (("--model", os.devnull), os.devnull),
        (("--host", "256.1.1.1"), "256.1.1.1"),
        (("--zmq", "tcp://127.0.0.1:0"), "CURVE"),
    ],
)
async def test_a_start_that_cannot_succeed_is_one_line_and_leaves_nothing(flags: tuple[str, ...], said: str) -> None:
    status, lines = await failed_start(*flags)
    assert status != 0
    assert said.lower() in lines[-1].lower() and lines[-1].startswith("baton: "), lines
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, 1 << 20, 50 << 20])
async def test_a_truncated_model_is_one_line_that_names_the_file(keep: int, model_path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    with model_path.open("rb") as whole:
        broken.write_bytes(whole.read(keep))
    status, lines = await failed_start("--model", str(broken))
    assert status != 0
    assert lines[-1].startswith("baton: ") and "broken.gguf" in lines[-1], lines
    assert not any("Traceback" in line for line in lines)
