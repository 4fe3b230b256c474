"""The SDK: talk to a Baton server from Python, with msgspec, pyzmq and the standard library alone.

    async with AsyncClient() as client:
        async with client.stream(messages=[{"role": "user", "content": "Hello"}]) as stream:
            async for delta in stream:
                print(delta.text, end="")

``Client`` is the same without asyncio.
"""

from __future__ import annotations

from baton.frontends.client.aio import AsyncClient
from baton.frontends.client.errors import BatonError, NotConnected, RequestFailed, RequestTimeout
from baton.frontends.client.stream import AsyncStream, Choice, Completion, Delta, Usage
from baton.frontends.client.sync import Client, Stream
from baton.frontends.client.wire import Candidate, PromptScored, Scored

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "BatonError",
    "Candidate",
    "Choice",
    "Client",
    "Completion",
    "Delta",
    "NotConnected",
    "PromptScored",
    "RequestFailed",
    "RequestTimeout",
    "Scored",
    "Stream",
    "Usage",
]
