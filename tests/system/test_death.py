"""Whatever dies behind the doors, a client gets exactly its tokens."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from baton.engine.states import STATE_NAMES
from tests.system.server import Server

SCRIPTED = ("--worker", "scripted")
SLOW = {"BATON_SCRIPTED_STEP_MS": "4", "BATON_LIMITS__RESTARTS_MAX": "50"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    state = str(tmp_path_factory.mktemp("state"))
    async with Server(*SCRIPTED, environment={**SLOW, "XDG_STATE_HOME": state}) as running:
        yield running


def dumps(server: Server) -> set[Path]:
    """What was written of those that hung."""
    return set(Path(server.environment["XDG_STATE_HOME"]).glob("baton/dumps/*"))


def ids(chunks: list[dict[str, Any]]) -> list[int]:
    """The token ids of a streamed answer."""
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids") or ()]


def text(chunks: list[dict[str, Any]]) -> str:
    """The text of a streamed answer."""
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("role", ["worker", "tokenizer", "scheduler", "detokenizer"])
@pytest.mark.asyncio(loop_scope="module")
async def test_streams_go_on_when_a_process_is_killed(server: Server, role: str) -> None:
    ask = {"prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True, "return_token_ids": True}
    whole = [await server.complete(seed=seed, **ask) for seed in range(6)]
    tenth = asyncio.Event()

    async def follow(seed: int) -> list[dict[str, Any]]:
        chunks = []
        async for chunk in server.stream(seed=seed, **ask):
            chunks.append(chunk)
            if len(chunks) == 10:
                tenth.set()
        return chunks

    tasks = [asyncio.create_task(follow(seed)) for seed in range(6)]
    await tenth.wait()
    incarnation = server.places()[role].incarnation
    server.kill(role)
    late = asyncio.create_task(server.complete(seed=0, **ask))  # comes while the process is down
    answers = await asyncio.gather(*tasks)
    for answer, reference in zip(answers, whole, strict=True):
        assert ids(answer) == reference["choices"][0]["token_ids"]
        assert text(answer) == reference["choices"][0]["text"]
        assert answer[-1]["choices"][0]["finish_reason"] == "length"
    assert (await late)["choices"][0]["token_ids"] == whole[0]["choices"][0]["token_ids"]
    await server.until_ready()
    assert server.places()[role].incarnation == incarnation + 1
    await server.idle(1.0)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_frontend_takes_its_clients_with_it_and_no_one_else(server: Server) -> None:
    events = server.stream(prompt=[5, 6, 7], max_tokens=4000, ignore_eos=True)
    await anext(events)
    server.kill("frontend")
    with pytest.raises(aiohttp.ClientError):
        [event async for event in events]
    async with asyncio.timeout(20):
        while True:
            try:
                await server.until_ready(5)
                break
            except OSError:
                await asyncio.sleep(0.02)
    await server.idle(2.0)
    answer = await server.complete(prompt=[5, 6, 7], max_tokens=5, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 5


async def test_when_restarts_are_used_up_clients_hear_of_it_and_the_status_is_not_zero() -> None:
    environment = {"BATON_SCRIPTED_STEP_MS": "20", "BATON_LIMITS__RESTARTS_MAX": "1"}
    async with Server(*SCRIPTED, environment=environment) as server:
        events = server.stream(prompt=[5, 6, 7], max_tokens=4000, ignore_eos=True)
        await anext(events)
        server.kill("worker", signal.SIGKILL)
        async with asyncio.timeout(20):
            while server.places()["worker"].incarnation < 2 or not server.places()["worker"].pid:
                await asyncio.sleep(0.01)
        server.kill("worker", signal.SIGKILL)
        rest = [event async for event in events]
        assert rest[-1]["error"]["code"] == "engine_stopped"
        assert "worker-0 died 2 times" in rest[-1]["error"]["message"]
        assert await server.wait(10) != 0
        assert "worker-0 died 2 times" in server.log()


@pytest.mark.parametrize("role", ["worker", "tokenizer", "scheduler", "detokenizer"])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_stopped_process_is_dumped_replaced_and_its_streams_go_on(server: Server, role: str) -> None:
    ask = {"prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True, "seed": 3, "return_token_ids": True}
    whole = await server.complete(**ask)
    earlier, incarnation, chunks = dumps(server), server.places()[role].incarnation, []
    async for chunk in server.stream(**ask):
        chunks.append(chunk)
        if len(chunks) == 10:
            server.kill(role, signal.SIGSTOP)
    assert ids(chunks) == whole["choices"][0]["token_ids"]
    async with asyncio.timeout(10):
        while server.places()[role].incarnation == incarnation:
            await asyncio.sleep(0.02)
    (dump,) = dumps(server) - earlier
    report = dump.read_text()
    assert f"{role}-0: it is stopped" in report
    assert "== frontend-0 stacks" in report and "child.py" in report
    assert "== frontend-0 holds\nslot" in report
    await server.until_ready()


async def test_a_termination_ends_a_server_with_a_stopped_process() -> None:
    async with Server(*SCRIPTED, environment={"BATON_LIMITS__WATCH_INTERVAL_S": "60"}) as server:
        server.kill("scheduler", signal.SIGSTOP)
        assert await server.stop() == 0


async def test_a_request_over_which_the_worker_crashes_twice_alone_is_refused_and_the_next_is_served() -> None:
    environment = {"BATON_SCRIPTED_STEP_MS": "1500", "BATON_LIMITS__RESTARTS_MAX": "50"}
    async with Server(*SCRIPTED, environment=environment) as server:
        poison = asyncio.create_task(ask_raw(server))
        for incarnation in (1, 2):
            async with asyncio.timeout(20):
                while True:
                    place = server.places()["worker"]
                    rows = server.board_rows()
                    states = [STATE_NAMES[view.row.state] for view in rows]
                    if place.ready and place.incarnation == incarnation and states == ["prefilling"]:
                        break
                    await asyncio.sleep(0.02)
            server.kill("worker", signal.SIGSEGV)
        status, answer = await poison
        assert status == 500 and answer["error"]["code"] == "poisoned"
        await server.until_ready()
        assert (await server.complete(prompt=[5], max_tokens=1))["usage"]["completion_tokens"] == 1


async def ask_raw(server: Server) -> tuple[int, dict[str, Any]]:
    """The status and body of one request, whatever they are."""
    body = {"model": "smollm2-135m", "prompt": [5, 6, 7], "max_tokens": 5, "ignore_eos": True}
    async with server.session.post(f"{server.url}/v1/completions", json=body) as response:
        return response.status, await response.json()
