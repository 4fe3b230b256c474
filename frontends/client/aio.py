"""The asyncio client: requests to a Baton server over ZeroMQ."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Any

from baton.frontends.client.arguments import check_numbers, check_options, encode_body
from baton.frontends.client.connection import Connection
from baton.frontends.client.discovery import find
from baton.frontends.client.errors import NotConnected
from baton.frontends.client.keys import read_client
from baton.frontends.client.stream import AsyncStream, Completion

#: more choices than any server makes
CHOICES_MAX = 1024

#: a list of OpenAI messages, JSON objects with a role and a content
Messages = list[dict[str, Any]]


class AsyncClient:
    """Connects on first use, and again after a connection broke. Belongs to one event loop.

    Parameters of a request are those of HTTP's ``/v1/chat/completions`` (with ``messages``) or ``/v1/completions``
    (with ``prompt``, a string or token ids), by the same names; the model may be left out. Who repeats a request with
    its ``idempotency_key`` gets its answer, of which there is one; a ``resumable`` one survives a broken connection.
    With ``n`` there are so many choices: an answer's ``choices``, a delta's ``index``.
    """

    def __init__(
        self, address: str | None = None, *, curve_keys: str | Path | None = None, connect_timeout_s: float = 5.0
    ) -> None:
        self._address = address
        self._keys = read_client(Path(curve_keys)) if curve_keys is not None else None
        self._connect_timeout_s = connect_timeout_s
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()

    async def __aenter__(self) -> AsyncClient:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> str:
        """Make sure there is a connection; returns the name of the model served. Raises ``NotConnected``."""
        connection = await self._connect()
        assert connection.welcome is not None
        return connection.welcome.model

    async def close(self) -> None:
        """Close the connection; open requests are cancelled."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def stream(
        self,
        *,
        messages: Messages | None = None,
        prompt: str | list[int] | None = None,
        traceparent: str | None = None,
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
        resumable: bool = False,
        **parameters: Any,  # JSON values, validated by the server
    ) -> AsyncStream:
        """An answer to iterate over; it starts with ``async with``, or with the first delta asked for."""
        if (messages is None) == (prompt is None):
            raise TypeError("give either messages or prompt")
        check_options(traceparent, timeout_s, idempotency_key, resumable)
        check_numbers(parameters)

        def request(model: str) -> tuple[str, bytes]:
            body = {"model": model, **parameters}
            if messages is not None:
                return "chat", encode_body({**body, "messages": messages})
            return "text_completion", encode_body({**body, "prompt": prompt})

        n = parameters.get("n")
        choices = n if isinstance(n, int) and 1 < n <= CHOICES_MAX else 1  # what is no number of them is refused
        return AsyncStream(self._connect, request, traceparent, timeout_s, idempotency_key, resumable, choices)

    async def chat(
        self,
        messages: Messages,
        *,
        traceparent: str | None = None,
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
        resumable: bool = False,
        **parameters: Any,  # JSON values, validated by the server
    ) -> Completion:
        """The whole answer to a chat."""
        options: dict[str, Any] = {
            "traceparent": traceparent,
            "timeout_s": timeout_s,
            "idempotency_key": idempotency_key,
        }
        async with self.stream(messages=messages, resumable=resumable, **options, **parameters) as stream:
            return await stream.result()

    async def complete(
        self,
        prompt: str | list[int],
        *,
        traceparent: str | None = None,
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
        resumable: bool = False,
        **parameters: Any,  # JSON values, validated by the server
    ) -> Completion:
        """The whole continuation of a text or of token ids."""
        options: dict[str, Any] = {
            "traceparent": traceparent,
            "timeout_s": timeout_s,
            "idempotency_key": idempotency_key,
        }
        async with self.stream(prompt=prompt, resumable=resumable, **options, **parameters) as stream:
            return await stream.result()

    async def _connect(self) -> Connection:
        async with self._connecting:
            if self._connection is None or self._connection.error is not None:
                address = find(self._address)
                if address.startswith("tcp://") and self._keys is None:
                    raise NotConnected(f"{address}: a TCP address needs curve_keys")
                connection = Connection(address, self._keys)
                try:
                    await connection.open(self._connect_timeout_s)
                except asyncio.CancelledError:
                    connection.close()
                    raise
                self._connection = connection
            return self._connection
