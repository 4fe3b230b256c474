"""Server-sent events over aiohttp: headers at once, one socket write an event, a comment while nothing is said.

Knows nothing of what the events mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

KEEP_ALIVE = b": keep-alive\n\n"

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventStream:
    """One streamed response. Invariant: of what was sent the kernel has all but ``buffer_bytes_max`` and an event."""

    def __init__(self, request: web.Request, headers: Mapping[str, str], buffer_bytes_max: int) -> None:
        self.response = web.StreamResponse(headers={**_HEADERS, **headers})
        self._request = request
        self._writer: AbstractStreamWriter | None = None
        self._loop = asyncio.get_running_loop()
        self.written_s = self._loop.time()
        if request.transport is not None:
            request.transport.set_write_buffer_limits(buffer_bytes_max)

    async def open(self, first: bytes) -> None:
        """Send the headers, and ``first`` with them where there is something to say already."""
        writer = await self.response.prepare(self._request)
        assert writer is not None
        self._writer = writer
        if first:
            await self.send(first)
        else:
            writer.send_headers()

    async def send(self, data: bytes) -> None:
        """Write an event and wait while the client is too far behind. Raises ConnectionResetError where it is gone."""
        writer = self._writer
        assert writer is not None
        self.written_s = self._loop.time()
        await writer.write(data)
        if self._request.protocol.writing_paused:
            await writer.drain()

    async def end(self, data: bytes) -> None:
        """The last event; the body ends with it, in the same write."""
        await self.response.write_eof(data)

    async def keep_alive(self, silence_s: float) -> None:
        """Write a comment if nothing was written for that long; not on top of what the client has not read yet."""
        transport = self._request.transport
        if self._writer is None or transport is None or transport.get_write_buffer_size():
            return
        if self._loop.time() - self.written_s >= silence_s:
            await self.send(KEEP_ALIVE)
