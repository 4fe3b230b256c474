"""The Responses API over HTTP: create one, streamed or whole; see one that is kept, or follow it from an event on.

What can be seen and followed is what asked for it: responses created as ``resumable`` or with an idempotency key.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from aiohttp import web

from baton.engine.desk import NOT_FOUND
from baton.frontends.errors import Refused, bad_request, failure_of
from baton.frontends.exchange import Exchange, error_response, json_response
from baton.frontends.keeping import RESPONSES, read_memo, response_request_id
from baton.frontends.responses import ResponseEvents, tokens_before
from baton.frontends.stream import Stream

if TYPE_CHECKING:
    from baton.frontends.http import HttpDoor

_NUMBER = re.compile(r"-?[0-9]{1,9}")
_TRUTH = {"true": True, "false": False, "1": True, "0": False}


class ResponseRoutes:
    """Three routes of the HTTP door."""

    def __init__(self, door: HttpDoor) -> None:
        self.door = door

    def routes(self) -> list[web.RouteDef]:
        """For the application; ``GET /v1/responses`` itself is the WebSocket door's."""
        return [web.post("/v1/responses", self._create), web.get("/v1/responses/{id}", self._get)]

    async def _create(self, request: web.Request) -> web.StreamResponse:
        exchange = Exchange(request, self.door.limits)
        with await self.door.open(exchange, self.door.validator.response, RESPONSES) as stream:
            try:
                await stream.begin()
                headers = exchange.headers(stream)
                if stream.request.stream:
                    return await self._follow(exchange, stream, _events(stream, -1), headers)
                response = json_response(await _whole(stream), headers=headers)
            except Refused as refused:
                response = error_response(refused.failure, exchange.headers(stream))
            await exchange.send(response)
            stream.answered()
            return response

    async def _get(self, request: web.Request) -> web.StreamResponse:
        exchange, request_id = Exchange(request, self.door.limits), response_request_id(request.match_info["id"])
        stream = _TRUTH.get(request.query.get("stream", "false"))
        after = request.query.get("starting_after", "-1")
        if stream is None:
            raise bad_request("stream must be true or false", "stream")
        if not _NUMBER.fullmatch(after) or int(after) < -1:
            raise bad_request("starting_after must be the number of an event", "starting_after")
        if not stream:
            return await self._show(exchange, request_id)
        hang_up = request.transport.abort if request.transport is not None else None
        with self.door.reception.attach(request_id, tokens_before(int(after)), hang_up) as attached:
            try:
                await attached.named()
                events = _events(attached, int(after))
                events.check(await attached.ended_before(tokens_before(int(after))), attached.began)
            except Refused:
                attached.answered()
                raise
            return await self._follow(exchange, attached, events, exchange.headers(attached))

    async def _show(self, exchange: Exchange, request_id: bytes) -> web.StreamResponse:
        async with asyncio.timeout(exchange.limits.answer_s_max):
            seen = await self.door.reception.look(request_id)
        memo = read_memo(seen.memo)
        if memo.endpoint != RESPONSES:
            raise Refused(NOT_FOUND)
        scores = (seen.logprobs, seen.scores) if memo.request.params.logprobs else ([], [])
        events = ResponseEvents(seen.request_id, memo.stream_id, memo.request, memo.created, scores=scores)
        events.speaking = seen.began
        return json_response(events.running(seen.text) if seen.finish is None else events.ended(seen.finish, seen.text))

    async def _follow(
        self, exchange: Exchange, stream: Stream, events: ResponseEvents, headers: dict[str, str]
    ) -> web.StreamResponse:
        """The rest of a response as server-sent events."""
        async with self.door.events(exchange, headers) as out:
            await out.open(_sse(events.begin(queued=False)))
            try:
                await stream.begin()
                data = _sse(events.admitted())
                if data:
                    await out.send(data)
                await stream.flow(lambda delta: out.write(_sse(events.delta(delta))), out.drain)
            except Refused:
                pass  # its terminal event tells why
            assert stream.final is not None
            async with exchange.patience():
                await out.end(_sse(events.finish(stream.final)))
            stream.answered()
        return out.response


def _events(stream: Stream, after: int) -> ResponseEvents:
    """The events of a stream that is named; a kept answer of another endpoint has none."""
    memo = stream.memo
    if memo is not None and memo.endpoint != RESPONSES:
        raise Refused(NOT_FOUND)
    stream_id = memo.stream_id if memo is not None else None
    request = stream.request if memo is None else memo.request
    before = (stream.text_before, stream.scores_before)
    return ResponseEvents(stream.id, stream_id, request, stream.created, after, stream.start, *before)


async def _whole(stream: Stream) -> dict[str, object]:
    """The response object of a stream that has begun; raises ``Refused`` where it ends without an answer."""
    events = _events(stream, -1)
    events.speaking = True
    async for delta in stream:
        events.delta(delta)
        stream.took(delta.position)
    assert stream.final is not None
    failure = failure_of(stream.final)
    if failure is not None:
        raise Refused(failure)
    return events.ended(stream.final, "".join(events.texts))


def _sse(events: list[bytes]) -> bytes:
    """Server-sent events, each under the name that it begins with."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (event[9 : event.index(b'"', 9)], event) for event in events)
