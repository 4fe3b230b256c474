"""Clients that ask slowly or not to the end: each loses its connection in bounded time, and nobody else notices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from baton.engine.limits import Limits
from tests.frontends.conftest import House, opened

LIMITS = Limits(header_s_max=0.3, body_s_max=0.3, idle_s_max=0.6)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
UPGRADE = b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"


@pytest.fixture
async def hurried(tmp_path: Path) -> AsyncIterator[House]:
    async with opened(tmp_path, LIMITS) as house:
        yield house


async def connect(house: House) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    where = urlsplit(house.url)
    return await asyncio.open_connection(where.hostname, where.port)


async def said(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """All that the server says until it closes the connection."""
    async with asyncio.timeout(5):
        everything = await reader.read()
    writer.close()
    return everything


@pytest.mark.parametrize("half", [b"P", HEAD, UPGRADE, b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: aaa"])
async def test_half_a_header_is_answered_with_408_and_the_connection_closed(hurried: House, half: bytes) -> None:
    reader, writer = await connect(hurried)
    writer.write(half)
    answer = await said(reader, writer)
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b'"code":"timeout"' in answer


async def test_one_byte_at_a_time_buys_no_time(hurried: House) -> None:
    reader, writer = await connect(hurried)
    over = asyncio.create_task(said(reader, writer))
    began = time.monotonic()
    for byte in HEAD * 100:
        if over.done():
            break
        writer.write(bytes([byte]))
        await asyncio.wait({over}, timeout=0.02)
    assert over.done()
    assert over.result().startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - began < 2


async def test_half_a_body_is_answered_with_408(hurried: House) -> None:
    reader, writer = await connect(hurried)
    writer.write(HEAD + b'Content-Length: 100\r\n\r\n{"model": ')
    answer = await said(reader, writer)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"the body did not arrive in time" in answer


async def test_a_connection_that_says_nothing_is_closed_without_a_word(hurried: House) -> None:
    assert await said(*await connect(hurried)) == b""


async def test_silence_between_requests_has_a_bound_and_half_a_second_request_too(hurried: House) -> None:
    for rest in (b"", b"GET /heal"):
        reader, writer = await connect(hurried)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        first = await reader.readuntil(b'{"status":"ok"}')
        assert first.startswith(b"HTTP/1.1 200 ")
        writer.write(rest)
        last = await said(reader, writer)
        assert last.startswith(b"HTTP/1.1 408 ") == bool(rest)


async def test_an_answer_takes_as_long_as_it_takes_and_the_connection_serves_again(hurried: House) -> None:
    reader, writer = await connect(hurried)
    for _ in range(3):
        body = b'{"model": "model-1", "prompt": "hi", "max_tokens": 2}'
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        job = await hurried.engine.job()
        await asyncio.sleep(LIMITS.idle_s_max * 1.5)  # longer than any bound of asking: only answering lasts so long
        job.admit().say("a").finish()
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r")[0]))
    writer.close()


async def test_a_quiet_websocket_is_not_hurried(hurried: House) -> None:
    async with hurried.client.ws_connect(hurried.places["websocket"]) as socket:
        with pytest.raises(TimeoutError):
            await socket.receive(timeout=LIMITS.idle_s_max * 1.5)
        await socket.send_str("{}")
        assert (await socket.receive(timeout=2)).type == aiohttp.WSMsgType.TEXT
