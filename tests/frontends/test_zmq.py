"""The ZeroMQ door and the SDK over real sockets: answers, cancels, deaths on either side, slow readers, keys."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from baton.engine.effects import Gone, Open
from baton.engine.limits import Limits
from baton.frontends.client import AsyncClient, Client, Delta, NotConnected, RequestFailed, RequestTimeout
from baton.frontends.client.keys import generate
from baton.frontends.doors import StartError
from baton.ipc.frames import Failure
from tests.frontends.conftest import House, opened
from tests.frontends.double import admit, admit_and_say, play

pytestmark = pytest.mark.sdk

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_chat_streams_and_has_its_result(house: House) -> None:
    house.engine.on_submit = play("Hel", "lo", tail="!")
    async with AsyncClient(house.places["zmq"]) as client:
        async with client.stream(
            messages=HI, logprobs=True, return_token_ids=True, traceparent=PARENT, typo=1
        ) as stream:
            texts = [delta.text async for delta in stream]
        assert "".join(texts) == stream.text == "Hello!"
        assert stream.token_ids == [10, 11] and stream.logprobs == [-0.5, -0.5]
        assert stream.finish_reason == "stop" and stream.prompt_token_ids == [5, 6, 7]
        assert stream.usage is not None and stream.usage.total_tokens == 5
        assert stream.ignored_parameters == ("typo",)
        await house.engine.empty()
        opened = next(event for event in house.engine.events if isinstance(event, Open))
        assert opened.parent is not None and opened.trace[:16].hex() == "0af7651916cd43dd8448eb211c80319c"
        assert stream.request_id == opened.request_id.hex()


async def test_texts_and_ids_are_completed(house: House) -> None:
    house.engine.on_submit = play("a", reason="length")
    async with AsyncClient(house.places["zmq"]) as client:
        assert await client.connect() == "model-1"
        done = await client.complete([1, 2, 3], max_tokens=1)
        assert (done.text, done.finish_reason, done.usage.prompt_tokens) == ("a", "length", 3)
        assert (await client.complete("once upon")).text == "a"
        assert (await client.chat(HI)).text == "a"
    await house.engine.empty()


async def test_a_stream_may_be_iterated_without_entering_it(house: House) -> None:
    house.engine.on_submit = play("a", "b")
    async with AsyncClient(house.places["zmq"]) as client:
        stream = client.stream(messages=HI)
        assert "".join([delta.text async for delta in stream]) == "ab"
        await stream.aclose()
    await house.engine.empty()


async def test_refusals_are_those_of_http(house: House) -> None:
    async with AsyncClient(house.places["zmq"]) as client:
        with pytest.raises(RequestFailed) as refused:
            await client.chat(HI, temperature=3)
        assert (refused.value.status, refused.value.param) == (400, "temperature")
        with pytest.raises(RequestFailed) as refused:
            await client.chat(HI, model="other")
        assert (refused.value.status, refused.value.code) == (404, "model_not_found")
        with pytest.raises(RequestFailed) as refused:
            await client.complete("x" * (5 << 20))
        assert refused.value.status == 413
        task = asyncio.create_task(client.complete("long"))
        job = await house.engine.job()
        job.refuse(Failure(400, "invalid_request_error", "too long", "prompt", "context_length_exceeded"))
        with pytest.raises(RequestFailed, match="too long") as refused:
            await task
        assert refused.value.retry_after_s is None
        task = asyncio.create_task(client.complete("later"))
        job = await house.engine.job()
        job.refuse(Failure(429, "rate_limit_error", "9000 tokens wait", None, "queue_full", 17))
        with pytest.raises(RequestFailed) as refused:
            await task
        assert (refused.value.status, refused.value.retry_after_s) == (429, 17)
    await house.engine.empty()


async def test_an_error_in_the_middle_comes_after_the_text(house: House) -> None:
    house.engine.on_submit = admit
    async with AsyncClient(house.places["zmq"]) as client, client.stream(messages=HI) as stream:
        pass_on = asyncio.create_task(_collect(stream))
        job = await house.engine.job()
        job.say("half").finish("error", failure=Failure(500, "server_error", "it broke"))
        texts, error = await pass_on
        assert texts == ["half"] and isinstance(error, RequestFailed) and error.status == 500


async def _collect(stream: Any) -> tuple[list[str], Exception | None]:
    texts: list[str] = []
    try:
        async for delta in stream:
            texts.append(delta.text)
    except RequestFailed as error:
        return texts, error
    return texts, None


@pytest.mark.parametrize("when", ["before_begin", "in_the_middle"])
async def test_leaving_early_cancels(house: House, when: str) -> None:
    async with AsyncClient(house.places["zmq"]) as client:
        if when == "in_the_middle":
            house.engine.on_submit = admit_and_say
            async with client.stream(messages=HI) as stream:
                async for _ in stream:
                    break
        else:
            task = asyncio.create_task(client.chat(HI))
            await house.engine.job()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        job = house.engine.jobs[0]
        await asyncio.wait_for(job.cancelled.wait(), 5)
        await house.engine.empty()
        house.engine.on_submit = play("next")
        assert (await client.chat(HI)).text == "next"


async def test_a_timeout_cancels(house: House) -> None:
    async with AsyncClient(house.places["zmq"]) as client:
        with pytest.raises(RequestTimeout):
            await client.chat(HI, timeout_s=0.05)
        await asyncio.wait_for((await house.engine.job()).cancelled.wait(), 5)
    await house.engine.empty()


async def test_closing_the_client_cancels_everything(house: House) -> None:
    client = AsyncClient(house.places["zmq"])
    tasks = [asyncio.create_task(client.chat(HI)) for _ in range(3)]
    jobs = [await house.engine.job() for _ in tasks]
    await client.close()
    for task in tasks:
        with pytest.raises(NotConnected):
            await task
    for job in jobs:
        await asyncio.wait_for(job.cancelled.wait(), 5)
    await house.engine.empty()


KILLED = """
import asyncio, sys
from baton.frontends.client import AsyncClient

async def one(client):
    async with client.stream(messages=[{"role": "user", "content": "hi"}]) as stream:
        async for delta in stream:
            pass

async def main():
    client = AsyncClient(sys.argv[1])
    await asyncio.gather(*[one(client) for _ in range(20)])

asyncio.run(main())
"""


@pytest.mark.parametrize("decoding", [True, False])
async def test_a_killed_client_is_noticed_within_a_second(house: House, decoding: bool) -> None:
    command = [sys.executable, "-c", KILLED, house.places["zmq"]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(*command, env=environment)
    jobs = [await house.engine.job() for _ in range(20)]
    for job in jobs:
        job.admit()
        if decoding:
            job.say("x")
    process.send_signal(signal.SIGKILL)
    started = time.monotonic()
    await house.engine.empty()
    took_s = time.monotonic() - started
    await process.wait()
    assert took_s < 1.0
    assert all(job.cancelled.is_set() for job in jobs)


async def test_a_server_that_stops_fails_its_clients_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as house:
        client = AsyncClient(house.places["zmq"])
        task = asyncio.create_task(client.chat(HI))
        await house.engine.job()
        await house.doors.stop(0)
        with pytest.raises(NotConnected, match="shutting down"):
            await asyncio.wait_for(task, 5)
        with pytest.raises(NotConnected):
            await client.chat(HI)
    await client.close()


async def test_nobody_there_is_said_at_once(tmp_path: Path) -> None:
    client = AsyncClient(f"ipc://{tmp_path}/nothing.sock", connect_timeout_s=0.5)
    with pytest.raises(NotConnected):
        await client.connect()
    with pytest.raises(NotConnected, match="no address"):
        await AsyncClient("nonsense").connect()


async def test_a_slow_reader_is_seen_and_does_not_hold_up_others(tmp_path: Path) -> None:
    async with opened(tmp_path, Limits(mailbox_tokens_max=8, client_ping_s=0.02)) as house:
        house.engine.on_submit = admit
        async with AsyncClient(house.places["zmq"]) as client, client.stream(messages=HI) as slow:
            job = await house.engine.job()
            job.say(*"abcdefgh")
            house.engine.on_submit = play("quick")
            assert (await client.chat(HI)).text == "quick"
            stream = next(iter(house.engine.core.doors.values()))
            assert stream.taken == 0 and job.granted == 8
            first = await anext(slow)
            assert first.text == "abcdefgh"
            await asyncio.wait_for(job.credit.wait(), 5)
            assert job.granted == 16
            job.finish()
            assert [delta async for delta in slow] == []
        await house.engine.empty()


async def test_a_reader_that_never_reads_is_cancelled(tmp_path: Path) -> None:
    async with opened(tmp_path, Limits(stalled_s_max=0.2, sweep_interval_s=0.02)) as house:
        house.engine.on_submit = admit
        async with AsyncClient(house.places["zmq"]) as client, client.stream(messages=HI) as stream:
            (await house.engine.job()).say("a", "b")
            await house.engine.until(lambda: bool(house.engine.accounts))
            assert house.engine.accounts[0].reason == "slow_consumer"
            assert (await anext(stream)).text == "ab"
            with pytest.raises(RequestFailed, match="too slowly"):
                await anext(stream)


async def test_many_streams_of_a_client_are_kept_apart(house: House) -> None:
    def script(job: Any) -> None:
        name = job.submit.prompt.text
        play(name, "-", name)(job)

    house.engine.on_submit = script
    async with AsyncClient(house.places["zmq"]) as client:
        done = await asyncio.gather(*[client.complete(f"p{number}") for number in range(50)])
    assert [one.text for one in done] == [f"p{number}-p{number}" for number in range(50)]
    await house.engine.empty()


async def test_streams_of_a_client_are_limited(tmp_path: Path) -> None:
    limits = Limits(streams_per_connection_max=1)
    async with opened(tmp_path, limits) as house, AsyncClient(house.places["zmq"]) as client:
        task = asyncio.create_task(client.chat(HI))
        job = await house.engine.job()
        with pytest.raises(RequestFailed) as refused:
            await client.chat(HI)
        assert (refused.value.status, refused.value.code) == (429, "too_many_streams")
        job.admit().finish()
        await task


async def test_a_silent_client_is_dropped(tmp_path: Path) -> None:
    limits = Limits(client_silence_s_max=0.5, client_ping_s=0.02)
    async with opened(tmp_path, limits) as house, AsyncClient(house.places["zmq"]) as client:
        task = asyncio.create_task(client.chat(HI))
        job = await house.engine.job()
        assert client._connection is not None
        client._connection._report = lambda: None  # type: ignore[method-assign]
        with pytest.raises(NotConnected, match="too long"):
            await task
        await asyncio.wait_for(job.cancelled.wait(), 5)


async def test_a_server_that_hangs_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.frontends.client.connection._SILENCE_S_MIN", 0.1)
    async with opened(tmp_path, Limits(client_ping_s=0.01)) as house:
        async with AsyncClient(house.places["zmq"]) as client:
            task = asyncio.create_task(client.chat(HI))
            await house.engine.job()
            monkeypatch.setattr("baton.frontends.zmq_gateway._Client.ping", lambda client: None)
            with pytest.raises(NotConnected, match="nothing was heard"):
                await asyncio.wait_for(task, 5)
        await house.engine.empty()


def test_a_client_left_open_does_not_keep_its_process(tmp_path: Path) -> None:
    code = "from baton.frontends.client import Client, NotConnected\nclient = Client('ipc:///nowhere/door.sock')\n"
    code += "try:\n    client.connect()\nexcept NotConnected as error:\n    print(error)\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True, timeout=10
    )
    assert "ipc:///nowhere/door.sock" in done.stdout and not done.stderr


async def test_nonsense_ends_the_connection_only(house: House) -> None:
    import zmq
    import zmq.asyncio

    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(house.places["zmq"])
    for message in (b"", b"\x02abc", b"\x01" + b"\x91" * 5000, b"\x01\x93\xa5Hello"):
        await socket.send(message)
        reply = await asyncio.wait_for(socket.recv(), 5)
        assert b"Goodbye" in reply
    socket.close(linger=0)
    context.term()
    house.engine.on_submit = play("a")
    async with AsyncClient(house.places["zmq"]) as client:
        assert (await client.chat(HI)).text == "a"


async def test_tcp_needs_keys_on_both_sides(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="CURVE keys"):
        async with opened(tmp_path, zmq="tcp://127.0.0.1:*"):
            pass
    server, client_file = generate(tmp_path / "keys")
    assert server.stat().st_mode & 0o777 == 0o600
    async with opened(tmp_path, zmq="tcp://127.0.0.1:*", zmq_curve_keys=str(server)) as house:
        house.engine.on_submit = play("secret")
        async with AsyncClient(house.places["zmq"], curve_keys=client_file) as client:
            assert (await client.chat(HI)).text == "secret"
        with pytest.raises(NotConnected, match="needs curve_keys"):
            await AsyncClient(house.places["zmq"]).connect()
        _, stranger = generate(tmp_path / "others")
        wrong = AsyncClient(house.places["zmq"], curve_keys=stranger, connect_timeout_s=2)
        with pytest.raises(NotConnected):
            await wrong.connect()
        await house.engine.empty()


async def test_the_blocking_client_does_the_same(house: House) -> None:
    house.engine.on_submit = play("a", "b")

    def use() -> tuple[str, list[Delta], str | None]:
        with Client(house.places["zmq"]) as client:
            done = client.chat(HI)
            with pytest.raises(RequestFailed):
                client.complete("x", top_p=7)
            with client.stream(prompt="x") as stream:
                deltas = list(stream)
            with client.stream(prompt="x"):
                pass
            return done.text, deltas, stream.finish_reason

    text, deltas, reason = await asyncio.to_thread(use)
    assert text == "".join(delta.text for delta in deltas) == "ab" and reason == "stop"
    await house.engine.empty()
    assert not [event for event in house.engine.events if isinstance(event, Gone)][2:]


async def test_a_blocking_stream_that_nobody_can_read_on_ends_its_request(house: House) -> None:
    """Also where it was left without a ``with`` block, and while its client stays open."""
    house.engine.on_submit = admit_and_say

    def use() -> Client:
        client = Client(house.places["zmq"])
        for _ in client.stream(prompt="x"):
            break
        gc.collect()
        return client

    client = await asyncio.to_thread(use)
    async with asyncio.timeout(5):
        await house.engine.empty()
    await asyncio.to_thread(client.close)


def test_the_sdk_imports_neither_torch_nor_aiohttp() -> None:
    code = "import baton.frontends.client, sys; print([m for m in ('torch', 'aiohttp', 'openai') if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[]"
