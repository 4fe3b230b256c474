"""A very small WebSocket client (RFC 6455) on a bare asyncio protocol, for load: text out, text in, whole frames only.

It checks what it relies on and nothing more; it is no general client.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Callable
from typing import cast

from baton.ops.http import Target

TEXT, CLOSE, PING, PONG = 0x1, 0x8, 0x9, 0xA
FINAL, MASKED = 0x80, 0x80


class WebSocket(asyncio.Protocol):
    """One connection. Invariant: once it is open, ``on_end`` is called exactly once, with the reason."""

    def __init__(
        self, where: Target, path: str, on_text: Callable[[bytes], None], on_end: Callable[[str], None]
    ) -> None:
        self.closed = False
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_end = on_end
        self._where = where
        self._path = path
        self._on_text = on_text
        self._buffer = b""
        self._upgraded = False
        self._transport: asyncio.Transport | None = None

    async def open(self) -> None:
        """Connect and upgrade; OSError where that fails."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, self._where.host, self._where.port)
        await self._opened

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the upgrade."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        head = (
            f"GET {self._where.prefix}{self._path} HTTP/1.1",
            f"Host: {self._where.host}:{self._where.port}",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}",
        )
        self._transport.write("\r\n".join([*head, "", ""]).encode())

    def data_received(self, data: bytes) -> None:
        """Read the answer to the upgrade, then frames."""
        self._buffer += data
        if not self._upgraded:
            head, found, rest = self._buffer.partition(b"\r\n\r\n")
            if not found:
                return
            if head.split(b" ", 2)[1] != b"101":
                self._end(f"no upgrade: {head.partition(bytes([13]))[0].decode(errors='replace')}")
                return
            self._upgraded, self._buffer = True, rest
            self._opened.set_result(None)
        self._frames()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing comes any more."""
        self._end(str(exc) if exc is not None else "closed")

    def send(self, text: bytes, opcode: int = TEXT) -> None:
        """Send a frame. Clients must mask; a key of zeros leaves the text as it is, which costs nothing."""
        assert self._transport is not None
        length = len(text)
        if length < 126:
            head = bytes([FINAL | opcode, MASKED | length])
        elif length < 1 << 16:
            head = bytes([FINAL | opcode, MASKED | 126]) + length.to_bytes(2, "big")
        else:
            head = bytes([FINAL | opcode, MASKED | 127]) + length.to_bytes(8, "big")
        self._transport.write(head + bytes(4) + text)

    def close(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _frames(self) -> None:
        buffer, at = self._buffer, 0
        while len(buffer) >= at + 2:
            first, length, begin = buffer[at], buffer[at + 1], at + 2
            if length in (126, 127):
                width = 2 if length == 126 else 8
                if len(buffer) < begin + width:
                    break
                length, begin = int.from_bytes(buffer[begin : begin + width], "big"), begin + width
            if len(buffer) < begin + length:
                break
            at = begin + length
            self._frame(first, buffer[begin:at])
        self._buffer = buffer[at:]

    def _frame(self, first: int, payload: bytes) -> None:
        opcode = first & 0x0F
        if opcode == TEXT and first & FINAL:
            self._on_text(payload)
        elif opcode == PING:
            self.send(payload, PONG)
        elif opcode == CLOSE:
            self._end(f"closed by the server: {payload[2:].decode(errors='replace')}")
            self.close()
        elif opcode != PONG:
            self._end(f"unexpected frame {first:#x}")
            self.close()

    def _end(self, why: str) -> None:
        if self.closed:
            return
        self.closed = True
        if not self._opened.done():
            self._opened.set_exception(ConnectionError(why))
        else:
            self._on_end(why)
