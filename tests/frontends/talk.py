"""Talking HTTP to a door under test: bodies, event streams, and a bare connection for clients that misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.frontends.conftest import House

CHAT: dict[str, Any] = {"model": "model-1", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "model-1", "prompt": "hi"}
PATHS = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]


async def events(response: Any) -> list[Any]:
    """All data of a stream, parsed; the end mark as a string."""
    out: list[Any] = []
    async for line in response.content:
        if line.startswith(b"data: ["):
            out.append(line[6:].strip().decode())
        elif line.startswith(b"data: "):
            out.append(json.loads(line[6:]))
    return out


@asynccontextmanager
async def raw(
    house: House, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> AsyncIterator[tuple[Any, Any]]:
    """A bare connection with a request on it, for a client that misbehaves."""
    port = int(house.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
    data = json.dumps(body).encode()
    lines = {"Host": "localhost", "Content-Length": str(len(data)), **(headers or {})}
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    writer.write(head.encode() + b"\r\n" + data)
    try:
        yield reader, writer
    finally:
        writer.close()
