"""The HTTP door: OpenAI's endpoints, health, readiness and metrics, in one aiohttp application.

It reads a request, has it validated, opens a stream and writes what comes out of it. It decides nothing about the
request's life. A client that disconnects at any moment cancels its handler, and leaving the handler's ``with`` tells
the core.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from baton.engine.stream import together
from baton.frontends import origin, traceparent
from baton.frontends.choices import Choices
from baton.frontends.errors import INTERNAL, Refused, error_body, failure_of
from baton.frontends.exchange import Exchange, error_response, json_response
from baton.frontends.keeping import keep
from baton.frontends.metrics import CONTENT_TYPE, Metrics
from baton.frontends.openai import Chat, Chunks, Completion, collect, collect_choices
from baton.frontends.patience import Patience
from baton.frontends.reception import Reception
from baton.frontends.response_routes import ResponseRoutes
from baton.frontends.sse import EventStream
from baton.frontends.status import Sources
from baton.frontends.stream import Delta, Stream
from baton.frontends.validate import GenerateRequest, Validator
from baton.ipc.frames import Failure
from baton.workers.config import Settings

log = logging.getLogger("baton.http")

#: how often silent streams are looked for, as a part of the silence allowed
_KEEPALIVE_CHECKS = 4

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
        self.patience = Patience(self.limits)
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
        self.app.add_routes(ResponseRoutes(self).routes())

    # -------------------------------------------------------------------------------- generating

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, self.validator.chat, Chat(), "chat.completions")

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, self.validator.completion, Completion(), "completions")

    async def _generate(
        self,
        request: web.Request,
        parse: Callable[[bytes], GenerateRequest],
        kind: Chat | Completion,
        endpoint: str,
    ) -> web.StreamResponse:
        exchange = Exchange(request, self.limits)
        with await self.open(exchange, parse, endpoint) as stream:
            try:
                await stream.begin()
                headers = exchange.headers(stream)
                choices = Choices([stream, *stream.others]) if stream.others else None
                if choices is not None:
                    await choices.begin()
                if stream.request.stream and choices is not None:
                    return await self._stream_choices(exchange, choices, kind, headers)
                if stream.request.stream:
                    return await self._stream(exchange, stream, Chunks(stream, kind), headers)
                body = await (collect(stream, kind) if choices is None else collect_choices(choices, kind))
                response = web.Response(body=body, content_type="application/json", headers=headers)
            except Refused as refused:
                response = error_response(refused.failure, exchange.headers(stream))
            await exchange.send(response)
            stream.answered()
            return response

    async def open(self, exchange: Exchange, parse: Callable[[bytes], GenerateRequest], endpoint: str) -> Stream:
        """Read, validate and open a request; raises ``Refused``."""
        received_ns = self.reception.now_ns()
        key, body = exchange.key(), await exchange.body()
        parsed = parse(body)
        if parsed.ignored:
            self.metrics.ignored("http", len(parsed.ignored))
        request = exchange.request
        if request.transport is None:
            raise ConnectionResetError("the client left before it was read")
        return self.reception.open(
            parsed,
            traceparent.of_headers(request.headers.getall("traceparent", [])),
            received_ns,
            exchange.attributes(),
            hang_up=request.transport.abort,
            keep=keep(parsed, endpoint, body, key, int(time.time())),
        )

    async def _stream(
        self, exchange: Exchange, stream: Stream, chunks: Chunks, headers: dict[str, str]
    ) -> web.StreamResponse:
        async with self.events(exchange, headers) as events:
            await events.open(chunks.first())
            await stream.flow(lambda delta: events.write(chunks.delta(delta)), events.drain)
            finish = stream.final
            assert finish is not None
            failure = failure_of(finish)
            last = chunks.end(finish) if failure is None else b"data: " + error_body(failure) + b"\n\n"
            async with exchange.patience():
                await events.end(last)
            stream.answered()
        return events.response

    async def _stream_choices(
        self, exchange: Exchange, choices: Choices, kind: Chat | Completion, headers: dict[str, str]
    ) -> web.StreamResponse:
        """The events of several choices, told apart by their index; the first that fails ends them all."""
        streams = choices.streams
        chunks = [Chunks(stream, type(kind)(), index) for index, stream in enumerate(streams)]
        failure = None
        async with self.events(exchange, headers) as events:
            await events.open(b"".join(each.first() for each in chunks))
            async for index, said in choices:
                if isinstance(said, Delta):
                    data = chunks[index].delta(said)
                    if data:
                        await events.send(data)
                    streams[index].took(said.position)
                elif (failure := failure_of(said)) is not None:
                    break
                else:
                    await events.send(chunks[index].last(said))
            closing = chunks[0].closing(together(choices.finishes)) if failure is None else b""
            async with exchange.patience():
                await events.end(closing or b"data: " + error_body(failure or INTERNAL) + b"\n\n")
            if failure is None:
                streams[0].answered()
        return events.response

    @asynccontextmanager
    async def events(self, exchange: Exchange, headers: dict[str, str]) -> AsyncIterator[EventStream]:
        """A streamed response that is kept alive; half an answer never looks like a whole one."""
        events = EventStream(exchange.request, headers, self.limits.socket_send_bytes_max)
        self.streams.add(events)
        try:
            yield events
        except Exception:
            exchange.hang_up()
            raise
        finally:
            self.streams.discard(events)

    # -------------------------------------------------------------------------------- everything else

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Times the connection; every refusal in OpenAI's shape."""
        with self.patience.answering(request):
            return await self._answer(request, handler)

    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """The answer, or the refusal; an error of ours is logged and told without details."""
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
        except ConnectionError:  # the client is gone: nobody is there to be answered, and nothing is wrong here
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError from None
        except Exception:
            log.exception("a handler failed", extra={"path": request.path})
            failure = INTERNAL
        self.metrics.refused("http", failure.status)
        return error_response(failure, Exchange(request, self.limits).headers(None))

    def _card(self) -> dict[str, str | int]:
        """The model; its length is what one request can have here: all of its context, or of a smaller KV cache."""
        card, kv_tokens = self.reception.card, self.sources.gauges().kv_tokens_total
        return {
            "id": card.name,
            "object": "model",
            "created": card.created,
            "owned_by": "baton",
            "max_model_len": min(card.context_tokens_max, kv_tokens or card.context_tokens_max),
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
