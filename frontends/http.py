"""The HTTP door: OpenAI's endpoints, health, readiness and metrics, in one aiohttp application.

It reads a request, has it validated, opens a stream and writes what comes out of it. It decides nothing about the
request's life. A client that disconnects at any moment cancels its handler, and leaving the handler's ``with`` tells
the core.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web

from baton.frontends import origin, traceparent
from baton.frontends.errors import INTERNAL, Refused, error_body, failure_of, retry_after
from baton.frontends.metrics import CONTENT_TYPE, Metrics
from baton.frontends.openai import Chat, Chunks, Completion, collect
from baton.frontends.sse import EventStream
from baton.frontends.status import Sources
from baton.frontends.stream import Reception, Stream
from baton.frontends.validate import GenerateRequest, Validator
from baton.ipc.frames import Failure
from baton.workers.config import Settings

log = logging.getLogger("baton.http")

#: how often silent streams are looked for, as a part of the silence allowed
_KEEPALIVE_CHECKS = 4

_UNPRINTABLE = re.compile(r"[^\x21-\x7e]")
#: aiohttp's own refusals that a client can cause
_REASONS = {404: "not found", 405: "this method is not allowed here"}


class HttpDoor:
    """The application and what its handlers share."""

    def __init__(self, reception: Reception, settings: Settings, sources: Sources, metrics: Metrics) -> None:
        self.reception = reception
        self.limits = settings.limits
        self.origins = settings.origins
        self.sources = sources
        self.metrics = metrics
        self.validator = Validator(reception.card, self.limits)
        self.streams: set[EventStream] = set()
        self.connections: Callable[[], int] = lambda: 0
        self.app = web.Application(middlewares=[self._guard], client_max_size=self.limits.body_bytes_max)
        self.app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._model),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/metrics", self._metrics),
            ]
        )

    # -------------------------------------------------------------------------------- generating

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, self.validator.chat, Chat())

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, self.validator.completion, Completion())

    async def _generate(
        self, request: web.Request, parse: Callable[[bytes], GenerateRequest], kind: Chat | Completion
    ) -> web.StreamResponse:
        received_ns = self.reception.now_ns()
        parsed = parse(await self._body(request))
        if parsed.ignored:
            self.metrics.ignored("http", len(parsed.ignored))
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client left before it was read")
        stream = self.reception.open(
            parsed,
            traceparent.of_headers(request.headers.getall("traceparent", [])),
            received_ns,
            self._attributes(request),
            hang_up=transport.abort,
        )
        with stream:
            headers = self._headers(request, stream)
            try:
                await stream.begin()
                if parsed.stream:
                    return await self._stream(request, stream, Chunks(stream, kind), headers)
                body = await collect(stream, kind)
                response = web.Response(body=body, content_type="application/json", headers=headers)
            except Refused as refused:
                response = error_response(refused.failure, headers)
            async with self._patience(request):
                await response.prepare(request)
                await response.write_eof()
            stream.answered()
            return response

    async def _stream(
        self, request: web.Request, stream: Stream, chunks: Chunks, headers: dict[str, str]
    ) -> web.StreamResponse:
        events = EventStream(request, headers)
        self.streams.add(events)
        try:
            await events.open(chunks.first())
            async for delta in stream:
                data = chunks.delta(delta)
                if data:
                    await events.send(data)
                stream.took(delta.position)
            finish = stream.final
            assert finish is not None
            failure = failure_of(finish)
            last = chunks.end(finish) if failure is None else b"data: " + error_body(failure) + b"\n\n"
            async with self._patience(request):
                await events.end(last)
            stream.answered()
        except Exception:
            if request.transport is not None:  # half an answer must not look like a whole one
                request.transport.abort()
            raise
        finally:
            self.streams.discard(events)
        return events.response

    async def _body(self, request: web.Request) -> bytes:
        most = self.limits.body_bytes_max
        too_large = Refused(
            Failure(413, "invalid_request_error", f"the body is larger than {most} bytes", None, "body_too_large")
        )
        if (request.content_length or 0) > most:
            raise too_large
        try:
            async with asyncio.timeout(self.limits.answer_s_max):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise too_large from None
        except TimeoutError:
            slow = Failure(408, "timeout_error", "the body did not arrive in time", None, "timeout")
            raise Refused(slow) from None

    @asynccontextmanager
    async def _patience(self, request: web.Request) -> AsyncIterator[None]:
        """Bounds the last write: a client that does not take its answer in time loses its connection."""
        try:
            async with asyncio.timeout(self.limits.answer_s_max):
                yield
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client did not take its answer") from None

    def _attributes(self, request: web.Request) -> dict[str, str | int | float | bool]:
        attributes: dict[str, str | int | float | bool] = {
            "baton.door": "http",
            "http.request.method": request.method,
            "http.route": request.path,
        }
        label = self._label(request)
        if label:
            attributes["baton.client_request_id"] = label
        return attributes

    def _label(self, request: web.Request) -> str:
        """The client's own request id: printable, bounded, and never an identity."""
        return _UNPRINTABLE.sub("", request.headers.get("X-Request-Id", "")[: self.limits.label_chars_max])

    def _headers(self, request: web.Request, stream: Stream | None) -> dict[str, str]:
        headers = {}
        label = self._label(request)
        if label:
            headers["X-Request-Id"] = label
        if stream is not None:
            headers["X-Baton-Request-Id"] = stream.id.hex()
            if stream.request.ignored:
                headers["X-Ignored-Params"] = ", ".join(stream.request.ignored)
        return headers

    # -------------------------------------------------------------------------------- everything else

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Every refusal in OpenAI's shape; an error of ours is logged and told without details."""
        try:
            if self.connections() > self.limits.connections_max:
                busy = "too many connections are open; try again later"
                raise Refused(Failure(503, "server_error", busy, None, "overloaded"))
            if request.method != "GET" and not origin.allowed(
                request.headers.get("Origin"), request.host, self.origins
            ):
                foreign = "pages of this origin may not use this server"
                raise Refused(Failure(403, "invalid_request_error", foreign, None, "origin_not_allowed"))
            return await handler(request)
        except Refused as refused:
            failure = refused.failure
        except web.HTTPException as error:
            if error.status < 400:
                raise
            message = _REASONS.get(error.status, "the request cannot be read")
            failure = Failure(error.status, "invalid_request_error", message, None, None)
        except ConnectionError:
            raise
        except Exception:
            log.exception("a handler failed", extra={"path": request.path})
            failure = INTERNAL
        self.metrics.refused("http", failure.status)
        return error_response(failure, self._headers(request, None))

    def _card(self) -> dict[str, str | int]:
        card = self.reception.card
        return {
            "id": card.name,
            "object": "model",
            "created": card.created,
            "owned_by": "baton",
            "max_model_len": card.context_tokens_max,
        }

    async def _models(self, request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def _model(self, request: web.Request) -> web.Response:
        if request.match_info["name"] != self.reception.card.name:
            missing = Failure(404, "invalid_request_error", "no such model", "model", "model_not_found")
            raise Refused(missing)
        return json_response(self._card())

    async def _health(self, request: web.Request) -> web.Response:
        """The process lives and its loop turns."""
        return json_response({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        """Whether new requests are served."""
        status = self.sources.status()
        return json_response(status, 200 if status.ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.page(), headers={"Content-Type": CONTENT_TYPE})

    async def keep_alive(self) -> None:
        """Runs for as long as the door is open: silent streams get a comment."""
        silence_s = self.limits.keepalive_s
        while True:
            await asyncio.sleep(silence_s / _KEEPALIVE_CHECKS)
            for events in list(self.streams):
                try:
                    await events.keep_alive(silence_s)
                except ConnectionError:
                    self.streams.discard(events)  # its handler hears of it by being cancelled


def json_response(value: object, status: int = 200) -> web.Response:
    """A JSON body."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def error_response(failure: Failure, headers: dict[str, str]) -> web.Response:
    """A refusal in OpenAI's shape, with ``Retry-After`` where trying again makes sense."""
    wait = retry_after(failure)
    if wait is not None:
        headers = {**headers, "Retry-After": wait}
    body = error_body(failure)
    return web.Response(body=body, status=failure.status, content_type="application/json", headers=headers)
