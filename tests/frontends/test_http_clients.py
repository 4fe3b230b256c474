"""The HTTP door and its clients: those that leave, in every phase; those that read slowly; those that wait."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.engine.effects import Gone
from baton.engine.limits import Limits
from tests.frontends.conftest import House, opened
from tests.frontends.double import admit, admit_and_say, play
from tests.frontends.talk import CHAT, PATHS, TEXT, raw

# ------------------------------------------------------------------------------------------------ clients that leave


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["tokenizing", "prefilling", "decoding"])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_client_that_leaves_cancels(house: House, stream: bool, phase: str, how: str) -> None:
    body = {**CHAT, "stream": stream}
    async with raw(house, "/v1/chat/completions", body) as (reader, writer):
        job = await house.engine.job()
        if phase != "tokenizing":
            job.admit()
        if phase == "decoding":
            job.say("a", "b")
        if stream and phase == "prefilling":
            await reader.readuntil(b"\r\n\r\n")
        if stream and phase == "decoding":
            await reader.readuntil(b'"ab"')
        if how == "reset":
            writer.transport.abort()
    await asyncio.wait_for(job.cancelled.wait(), 5)
    await house.engine.empty()
    assert house.engine.accounts[0].reason == "disconnected"


async def test_a_client_that_leaves_after_the_end_is_no_cancel(house: House) -> None:
    house.engine.on_submit = play("a")
    async with raw(house, "/v1/chat/completions", {**CHAT, "stream": True}) as (reader, _):
        await reader.readuntil(b"[DONE]")
    await house.engine.empty()
    assert not [event for event in house.engine.events if isinstance(event, Gone)]
    assert house.engine.accounts[0].reason == "stop"


async def test_twenty_clients_that_leave_are_gone_at_once(house: House) -> None:
    house.engine.on_submit = admit_and_say
    writers = []
    for _ in range(20):
        connection = raw(house, "/v1/chat/completions", {**CHAT, "stream": True})
        reader, writer = await connection.__aenter__()
        await reader.readuntil(b'"x"')
        writers.append(writer)
    for writer in writers:
        writer.transport.abort()
    async with asyncio.timeout(1):
        await house.engine.empty()


async def test_a_chunk_costs_the_same_however_long_the_answer_is(house: House) -> None:
    house.engine.on_submit = admit
    body = {**CHAT, "stream": True, "logprobs": True, "return_token_ids": True}
    async with raw(house, "/v1/chat/completions", body) as (reader, _):
        job = await house.engine.job()
        sizes = []
        for _ in range(500):
            job.say("x", ids=[7])
            sizes.append(len(await reader.readuntil(b"[7]}")))
        job.finish()
    assert max(sizes[1:]) <= min(sizes[1:]) + 64
    await house.engine.empty()


# ------------------------------------------------------------------------------------------------ slow readers


async def test_a_slow_reader_gets_merged_deltas_and_holds_up_nobody(tmp_path: Path) -> None:
    limits = Limits(socket_send_bytes_max=1 << 16, mailbox_tokens_max=64)
    async with opened(tmp_path, limits) as house:
        house.engine.on_submit = admit
        async with raw(house, "/v1/completions", {**TEXT, "stream": True, "max_tokens": 1000}) as (reader, writer):
            job = await house.engine.job()
            writer.transport.pause_reading()
            door = next(iter(house.engine.reception.streams.values()))
            count = 0
            while job.sent < job.granted and count < 1000:
                job.say("x" * 200_000)
                count += 1
                await asyncio.sleep(0)
            assert count < 1000, "credit must run out"
            assert 0 < door._position - door._taken <= 64

            house.engine.on_submit = play("quick")
            async with house.post("/v1/chat/completions", CHAT) as response:
                assert (await response.json())["choices"][0]["message"]["content"] == "quick"

            job.credit.clear()
            writer.transport.resume_reading()
            drained = asyncio.create_task(_read_all(reader))
            await asyncio.wait_for(job.credit.wait(), 5)
            job.finish()
            body = await asyncio.wait_for(drained, 5)
            assert body.count(b"x") >= count * 200_000 and b"[DONE]" in body
            assert body.count(b'"text"') < count
        await house.engine.empty()


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    """To the end of a chunked body, or of the connection."""
    out = bytearray()
    while not out.endswith(b"\r\n0\r\n\r\n") and (piece := await reader.read(1 << 16)):
        out += piece
    return bytes(out)


async def test_a_reader_that_never_reads_is_cut_off(tmp_path: Path) -> None:
    limits = Limits(socket_send_bytes_max=4096, stalled_s_max=0.2, sweep_interval_s=0.02)
    async with opened(tmp_path, limits) as house:
        house.engine.on_submit = admit
        async with raw(house, "/v1/completions", {**TEXT, "stream": True}) as (_, writer):
            job = await house.engine.job()
            writer.transport.pause_reading()
            for _ in range(100):
                job.say("x" * 100_000)
                await asyncio.sleep(0)
            await house.engine.empty()
            assert house.engine.accounts[0].reason == "slow_consumer"


async def test_a_slow_model_does_not_make_a_slow_reader(tmp_path: Path) -> None:
    async with opened(tmp_path, Limits(stalled_s_max=0.1, sweep_interval_s=0.01)) as house:
        house.engine.on_submit = admit
        async with raw(house, "/v1/completions", {**TEXT, "stream": True}) as (reader, _):
            job = await house.engine.job()
            for number in range(4):
                job.say(f"t{number}")
                await reader.readuntil(f"t{number}".encode())
                stream = next(iter(house.engine.core.doors.values()))
                await house.engine.until(lambda taken=stream: taken.taken == len(taken.delivered))  # type: ignore[misc]
            job.finish()
            await reader.readuntil(b"[DONE]")
        await house.engine.empty()
        assert house.engine.accounts[0].reason == "stop"


async def test_an_answer_that_nobody_takes_is_given_up(tmp_path: Path) -> None:
    limits = Limits(socket_send_bytes_max=4096, answer_s_max=0.2)
    async with opened(tmp_path, limits) as house:
        house.engine.on_submit = play("x" * 8_000_000)
        async with raw(house, "/v1/chat/completions", CHAT) as (_, writer):
            writer.transport.pause_reading()
            await house.engine.empty()


async def test_silence_is_broken_by_comments(tmp_path: Path) -> None:
    async with opened(tmp_path, Limits(keepalive_s=0.05)) as house:
        house.engine.on_submit = admit
        for path, body in PATHS:
            async with raw(house, path, {**body, "stream": True}) as (reader, _):
                job = await house.engine.job()
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
                assert head.startswith(b"HTTP/1.1 200")
                await asyncio.wait_for(reader.readuntil(b": keep-alive\n\n"), 5)
                job.say("x")
                await reader.readuntil(b'"x"')
                await asyncio.wait_for(reader.readuntil(b": keep-alive\n\n"), 5)
                job.finish()
                await reader.readuntil(b"[DONE]")
