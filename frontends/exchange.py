"""One HTTP request while it is served: its body within bounds, its labels, its answer's headers, the last write."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError

from baton.engine.limits import Limits
from baton.frontends.errors import Refused, bad_request, error_body, retry_after_s
from baton.frontends.keeping import checked_key
from baton.frontends.stream import Stream
from baton.ipc.frames import Failure

KEY_HEADER = "Idempotency-Key"

_UNPRINTABLE = re.compile(r"[^\x21-\x7e]")


class Exchange:
    """A request and what every handler does with one."""

    def __init__(self, request: web.Request, limits: Limits) -> None:
        self.request = request
        self.limits = limits

    async def body(self) -> bytes:
        """The whole body; raises ``Refused`` where it is too large or too slow."""
        request, most = self.request, self.limits.body_bytes_max
        too_large = Refused(
            Failure(413, "invalid_request_error", f"the body is larger than {most} bytes", None, "body_too_large")
        )
        if (request.content_length or 0) > most:
            raise too_large
        try:
            async with asyncio.timeout(self.limits.body_s_max):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise too_large from None
        except (web.RequestPayloadError, web.HTTPBadRequest, ContentEncodingError):
            raise bad_request("the body is not encoded as its headers say", None) from None
        except TimeoutError:
            slow = Failure(408, "timeout_error", "the body did not arrive in time", None, "timeout")
            raise Refused(slow) from None

    @asynccontextmanager
    async def patience(self) -> AsyncIterator[None]:
        """Bounds the last write: a client that does not take its answer in time loses its connection."""
        try:
            async with asyncio.timeout(self.limits.answer_s_max):
                yield
        except TimeoutError:
            self.hang_up()
            raise ConnectionResetError("the client did not take its answer") from None

    def hang_up(self) -> None:
        """Cut the connection."""
        if self.request.transport is not None:
            self.request.transport.abort()

    def key(self) -> str:
        """The idempotency key, "" where there is none."""
        return checked_key(self.request.headers.get(KEY_HEADER), KEY_HEADER)

    def attributes(self) -> dict[str, str | int | float | bool]:
        """What the trace is told of the door."""
        attributes: dict[str, str | int | float | bool] = {
            "baton.door": "http",
            "http.request.method": self.request.method,
            "http.route": self.request.path,
        }
        label = self._label()
        if label:
            attributes["baton.client_request_id"] = label
        return attributes

    def _label(self) -> str:
        """The client's own request id: printable, bounded, and never an identity."""
        return _UNPRINTABLE.sub("", self.request.headers.get("X-Request-Id", "")[: self.limits.label_chars_max])

    def headers(self, stream: Stream | None) -> dict[str, str]:
        """The headers of the answer. Those of a kept request are known once it is named."""
        headers = {}
        label = self._label()
        if label:
            headers["X-Request-Id"] = label
        if stream is not None:
            headers["X-Baton-Request-Id"] = stream.id.hex()
            if stream.request.ignored:
                headers["X-Ignored-Params"] = ", ".join(stream.request.ignored)
        return headers

    async def send(self, response: web.Response) -> web.Response:
        """Write a whole response, within bounds."""
        async with self.patience():
            await response.prepare(self.request)
            await response.write_eof()
        return response


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A JSON body."""
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def error_response(failure: Failure, headers: dict[str, str]) -> web.Response:
    """A refusal in OpenAI's shape, with ``Retry-After`` where trying again makes sense."""
    wait_s = retry_after_s(failure)
    if wait_s is not None:
        headers = {**headers, "Retry-After": str(wait_s)}
    body = error_body(failure)
    return web.Response(body=body, status=failure.status, content_type="application/json", headers=headers)
