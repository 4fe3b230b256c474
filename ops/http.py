"""A very small HTTP/1.1 client on a bare asyncio protocol: one request, one response, body handed on in pieces.

It exists because a load generator must not take the CPU it measures, and because the base install has no HTTP client.
It knows nothing of events; a response it cannot read ends the exchange as ``malformed``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import msgspec

HEAD_BYTES_MAX = 64 << 10


class Target(msgspec.Struct, frozen=True):
    """Where a server is. ``prefix`` stands before "/v1/..."."""

    host: str
    port: int
    tls: bool
    prefix: str
    api_key: str | None = None

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The request's bytes; the connection ends with the response."""
        head = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Connection: close",
            "Accept: text/event-stream, application/json",
        ]
        if self.api_key is not None:
            head.append(f"Authorization: Bearer {self.api_key}")
        if body:
            head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*head, "", ""]).encode() + body


def target(url: str, api_key: str | None = None) -> Target:
    """The server behind a base URL, which may end in "/v1"; ValueError where it is no http(s) URL."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"not an http(s) URL: {url}")
    tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Target(parts.hostname, parts.port or (443 if tls else 80), tls, prefix, api_key)


class Exchange(asyncio.Protocol):
    """One request and its response. Invariant: ``done`` is resolved exactly once, however the connection ends.

    ``whole`` says that the body arrived to its end as framed; ``malformed`` that the framing made no sense.
    """

    def __init__(self, request: bytes, on_body: Callable[[bytes], None]) -> None:
        self.status = 0
        self.whole = False
        self.malformed = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._on_body = on_body
        self._buffer = b""
        self._take: Callable[[bytes], None] = self._head
        self._left = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Read on where the last piece stopped."""
        try:
            self._take(data)
        except ValueError:
            self.malformed = True
            self.finish()

    def connection_lost(self, exc: Exception | None) -> None:
        """A body without a length ends here; any other is cut off."""
        if self._take == self._until_end and exc is None:
            self.whole = True
        self.finish()

    def close(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    def finish(self) -> None:
        """Wait for no more; the body may be incomplete."""
        if not self.done.done():
            self.done.set_result(None)

    def _head(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            if len(self._buffer) > HEAD_BYTES_MAX:
                raise ValueError("head too long")
            return
        start, *lines = head.split(b"\r\n")
        version, status = start.split(b" ", 2)[:2]
        if not version.startswith(b"HTTP/1."):
            raise ValueError("not HTTP/1")
        self.status = int(status)
        headers = dict[bytes, bytes]()
        for line in lines:
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip().lower()
        self._buffer = b""
        if headers.get(b"transfer-encoding") == b"chunked":
            self._take = self._chunked
        elif b"content-length" in headers:
            self._left = int(headers[b"content-length"])
            self._take = self._counted
        else:
            self._take = self._until_end
        self._take(rest)

    def _until_end(self, data: bytes) -> None:
        if data:
            self._on_body(data)

    def _counted(self, data: bytes) -> None:
        if data:
            self._on_body(data[: self._left])
        self._left -= len(data)
        if self._left <= 0:
            self.whole = True
            self.finish()

    def _chunked(self, data: bytes) -> None:
        """Chunk after chunk: a size in hex, that many bytes, an empty line; size 0 is the end."""
        data = self._buffer + data if self._buffer else data
        at = 0
        while (line_end := data.find(b"\r\n", at)) >= 0:
            size = int(data[at:line_end].partition(b";")[0], 16)
            if size == 0:
                self.whole = True
                self.finish()
                return
            begin, end = line_end + 2, line_end + 2 + size
            if len(data) < end + 2:
                break
            if data[end : end + 2] != b"\r\n":
                raise ValueError("chunk does not end where it says")
            self._on_body(data[begin:end])
            at = end + 2
        self._buffer = data[at:]


async def get_json(where: Target, path: str, timeout_s: float) -> object:
    """The JSON document at ``path``; OSError or ValueError where there is none."""
    body = bytearray()
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        try:
            _, exchange = await loop.create_connection(
                lambda: Exchange(where.request("GET", path), body.extend), where.host, where.port, ssl=where.tls or None
            )
        except OSError as error:
            raise OSError(f"{where.host}:{where.port}: {error}") from error
        try:
            await exchange.done
        finally:
            exchange.close()
    if exchange.status != 200 or not exchange.whole:
        raise ValueError(f"GET {path} gave status {exchange.status or 'none'}")
    return msgspec.json.decode(body)
