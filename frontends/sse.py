"""Server-sent events over aiohttp: headers at once, one socket write an event, a comment while nothing is said.

Knows nothing of what the events mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import HttpVersion11, web
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
        self._chunked = False
        self._loop = asyncio.get_running_loop()
        self.written_s = self._loop.time()
        if request.version < HttpVersion11:  # the body ends with the connection, whatever the client would like
            self.response.force_close()
        if request.transport is not None:
            request.transport.set_write_buffer_limits(buffer_bytes_max)

    async def open(self, first: bytes) -> None:
        """Send the headers, and ``first`` with them where there is something to say already."""
        writer = await self.response.prepare(self._request)
        assert writer is not None
        self._writer = writer
        self._chunked = self.response.headers.get("Transfer-Encoding") == "chunked"  # else it is HTTP/1.0
        if first:
            await writer.write(first)
        else:
            writer.send_headers()

    def write(self, data: bytes) -> bool:
        """Write an event, if there is one; whether the client keeps up. Raises ConnectionResetError where it is gone.

        It goes to the transport at once, as the chunk that aiohttp's writer would make of it: that one is a coroutine.
        """
        if data:
            transport = self._request.transport
            if transport is None or transport.is_closing():
                raise ConnectionResetError("the client is gone")
            self.written_s = self._loop.time()
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return not self._request.protocol.writing_paused

    async def drain(self) -> None:
        """Wait until the client keeps up. Raises ConnectionResetError where it is gone."""
        assert self._writer is not None
        await self._writer.drain()

    async def send(self, data: bytes) -> None:
        """Write an event and wait while the client is too far behind. Raises ConnectionResetError where it is gone."""
        if not self.write(data):
            await self.drain()

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
