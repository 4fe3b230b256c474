"""Two hundred clients that never read cost the others no answer and the server no memory, and then they are let go."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import psutil
import pytest

from baton.engine.states import STATE_NUMBERS
from tests.system.server import Server
from tests.system.test_frontends import counted

pytestmark = pytest.mark.alone

STALLED, READING, TOKENS = 200, 8, 200
GROWTH_BYTES_MAX = 48 << 20
ENVIRONMENT = {
    "BATON_SCRIPTED_STEP_MS": "1",
    "BATON_LIMITS__SOCKET_SEND_BYTES_MAX": "4096",
    "BATON_LIMITS__MAILBOX_TOKENS_MAX": "32",
    "BATON_LIMITS__STALLED_S_MAX": "12",
    "BATON_KV_BLOCKS": "20000",
    "BATON_ADMISSION": "optimistic",  # so that all have their seats at once
}


@asynccontextmanager
async def stalled(url: str, count: int) -> AsyncIterator[None]:
    """So many clients that ask for a long stream and read nothing of it."""
    loop, address = asyncio.get_running_loop(), urlsplit(url)
    body = {"model": "smollm2-135m", "prompt": [5], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    data = json.dumps({**body, "return_token_ids": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    sockets = []
    try:
        for _ in range(count):
            client = socket.socket()
            sockets.append(client)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.setblocking(False)
            await loop.sock_connect(client, (address.hostname, address.port))
            await loop.sock_sendall(client, head + data)
        yield
    finally:
        for client in sockets:
            client.close()


def sizes(server: Server) -> dict[str, int]:
    """What each process has in memory."""
    return {name: psutil.Process(place.pid).memory_info().rss for name, place in server.places().items()}


async def read(server: Server, seed: int) -> int:
    """A whole stream; its tokens."""
    tokens = 0
    ask = {"prompt": [7], "max_tokens": TOKENS, "ignore_eos": True, "seed": seed, "return_token_ids": True}
    async for chunk in server.stream(**ask):
        tokens += sum(len(choice.get("token_ids") or ()) for choice in chunk["choices"])
    return tokens


async def test_two_hundred_stalled_readers_are_paused_then_let_go_and_hold_up_nobody() -> None:
    async with Server("--worker", "scripted", environment=ENVIRONMENT) as server:
        await asyncio.gather(*(read(server, seed) for seed in range(READING)))
        before, paused, board = sizes(server), set[bytes](), server.board()
        async with stalled(server.url, STALLED):
            async with asyncio.timeout(40):
                while len(paused) < STALLED:
                    paused |= {view.request_id for view in board.rows() if view.row.state == STATE_NUMBERS["paused"]}
                    await asyncio.sleep(0.02)
            answers = [read(server, seed) for seed in range(READING)]
            assert await asyncio.gather(*answers) == [TOKENS] * READING
            grown = {name: size - before[name] for name, size in sizes(server).items()}
            assert max(grown.values()) < GROWTH_BYTES_MAX, grown
            async with asyncio.timeout(30):
                while (await counted(server.url)).get('baton_requests_total{reason="slow_consumer"}') != STALLED:
                    await asyncio.sleep(0.1)
            await server.idle(1)
        board.close()
