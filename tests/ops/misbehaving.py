"""A small HTTP server that answers completions as the prompt's first id tells it to: well, or in some wrong way."""

from __future__ import annotations

import asyncio
import enum
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any


class How(enum.IntEnum):
    """What the server does."""

    GOOD = 0
    EARLY_END = 1
    ERROR_EVENT = 2
    HANG = 3
    MALFORMED = 4
    TOO_MANY = 5
    BROKEN = 6
    NO_USAGE = 7
    WRONG_USAGE = 8
    BAD_FRAMING = 9
    CLOSED = 10
    CUT = 11


TOKENS = 4


def event(document: object) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def token(text: str = "a", finish_reason: str | None = None) -> bytes:
    """A chunk of both endpoints at once."""
    said = {"text": text, "delta": {"content": text}}
    return event({"choices": [{"index": 0, **said, "finish_reason": finish_reason}]})


def usage(tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": tokens}})


def pieces(how: How) -> list[bytes]:
    """The body's parts, each sent as an HTTP chunk of its own."""
    tokens = [token() for _ in range(TOKENS)]
    end = [token("", "length")]
    done = [b"data: [DONE]\n\n"]
    match how:
        case How.EARLY_END | How.BAD_FRAMING | How.CUT:
            return tokens
        case How.ERROR_EVENT:
            return [*tokens[:2], event({"error": {"message": "the engine died", "type": "server_error"}})]
        case How.MALFORMED:
            return [*tokens[:1], b'data: {"choices": [{"te\n\n']
        case How.NO_USAGE:
            return [*tokens, *end, *done]
        case How.WRONG_USAGE:
            return [*tokens, *end, usage(1), *done]
        case _:
            whole = b"".join([b": keep-alive\n\n", *tokens, *end, usage(TOKENS), *done])
            return [whole[:30], whole[30:31], whole[31:100], whole[100:]]


def told(document: dict[str, Any]) -> How:
    """How to answer: the prompt's first id, or the name a chat's last message has."""
    if "messages" in document:
        return How[document["messages"][-1]["content"]]
    prompt = document["prompt"]
    return How(prompt[0]) if isinstance(prompt, list) else How.GOOD


async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: list[bytes]) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    if head.startswith(b"GET /v1/models"):
        body = json.dumps({"data": [{"id": "tiny"}]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return
    lengths = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    body = await reader.readexactly(lengths[0])
    seen.append(body)
    how = told(json.loads(body))
    if how == How.CLOSED:
        return
    if how in (How.TOO_MANY, How.BROKEN):
        status = {How.TOO_MANY: 429, How.BROKEN: 500}[how]
        said = b'{"error": {"message": "not now"}}'
        writer.write(b"HTTP/1.1 %d Oops\r\nContent-Length: %d\r\n\r\n" % (status, len(said)) + said)
        return
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    if how == How.HANG:
        writer.write(b"%x\r\n%b\r\n" % (len(token()), token()))
        await reader.read()
        return
    for piece in pieces(how):
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await writer.drain()
    if how == How.BAD_FRAMING:
        writer.write(b"zz\r\n")
    elif how != How.CUT:
        writer.write(b"0\r\n\r\n")


@asynccontextmanager
async def misbehaving_server() -> AsyncIterator[tuple[str, list[bytes]]]:
    """The server's URL, and the bodies it was sent so far."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await respond(reader, writer, seen)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen


@contextmanager
def server_beside() -> Iterator[tuple[str, list[bytes]]]:
    """The same on a thread and loop of its own, for tests of what brings its own loop."""
    loop = asyncio.new_event_loop()
    context = misbehaving_server()
    found = loop.run_until_complete(context.__aenter__())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield found
    finally:
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
