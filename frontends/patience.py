"""How long a connection may take to ask: between aiohttp's protocol and its socket, one clock for each connection.

aiohttp waits for ever for the rest of a header. Here a request's header has a bound from its first byte (from the start
of the connection for the first one), and so has the silence after an answer. A body has its bound where it is read. It
knows nothing of requests but when one is being answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from aiohttp import web

from baton.engine.limits import Limits
from baton.frontends.errors import error_body
from baton.ipc.frames import Failure

_BODY = error_body(Failure(408, "timeout_error", "the request's header did not arrive in time", None, "timeout"))
_LATE = (
    b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


class Patience:
    """The connections of one door. Invariant: each is being answered, or has a timer running."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._connections: dict[object, _Connection] = {}

    def around(self, server: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """A protocol factory whose connections are timed."""
        return lambda: _Connection(server(), self)

    @contextmanager
    def answering(self, request: web.Request) -> Iterator[None]:
        """While a request is answered its connection is not hurried."""
        connection = self._connections.get(request.protocol)
        if connection is not None:
            connection.rest()
        try:
            yield
        finally:
            if connection is not None:
                connection.wait(self.limits.idle_s_max)

    def known(self, inner: asyncio.Protocol, connection: _Connection) -> None:
        """A connection begins."""
        self._connections[inner] = connection

    def forget(self, inner: asyncio.Protocol) -> None:
        """A connection is over."""
        del self._connections[inner]


class _Connection(asyncio.Protocol):
    """One connection: everything goes on to aiohttp's protocol, ``inner``."""

    def __init__(self, inner: asyncio.Protocol, patience: Patience) -> None:
        self._inner = inner
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._answering = False
        self._asking = False  # something of the next request has come
        self.pause_writing = inner.pause_writing  # type: ignore[method-assign]
        self.resume_writing = inner.resume_writing  # type: ignore[method-assign]
        self.eof_received = inner.eof_received  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The first header is waited for."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        self._patience.known(self._inner, self)
        self.wait(self._patience.limits.header_s_max)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self.rest()
        self._answering = True
        self._patience.forget(self._inner)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """The first byte of a request, not each, begins the time that its header has."""
        if not self._answering and not self._asking:
            self._asking = True
            self._start(self._patience.limits.header_s_max)
        self._inner.data_received(data)

    def rest(self) -> None:
        """A request is there, and answered from now on."""
        self._answering, self._asking = True, False
        if self._timer is not None:
            self._timer.cancel()

    def wait(self, seconds: float) -> None:
        """Nobody is answered: the next request may take so long to begin."""
        if self._transport is not None and not self._transport.is_closing():
            self._answering = False
            self._start(seconds)

    def _start(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._late)

    def _late(self) -> None:
        """Half a request is answered, nothing is not; the connection ends either way."""
        assert self._transport is not None
        if self._asking:
            self._transport.write(_LATE)
        self._transport.close()
