"""The small WebSocket client, against a server that is not ours."""

from __future__ import annotations

import asyncio

import pytest
from websockets.asyncio.server import ServerConnection, serve

from baton.ops.bench.websocket import WebSocket
from baton.ops.http import target


class Heard:
    """What a client was told."""

    def __init__(self) -> None:
        self.texts: asyncio.Queue[bytes] = asyncio.Queue()
        self.ends: list[str] = []
        self.ended = asyncio.Event()

    def end(self, why: str) -> None:
        self.ends.append(why)
        self.ended.set()


async def echo(connection: ServerConnection) -> None:
    """Send back whatever comes, with a ping between; "bye" closes."""
    async for message in connection:
        if message == "bye":
            await connection.close(1001, "gone")
            return
        await (await connection.ping())
        await connection.send(message)


@pytest.mark.parametrize("length", [0, 1, 125, 126, 65535, 65536, 200_000])
async def test_texts_of_any_length_come_back(length: int) -> None:
    heard, text = Heard(), b"x" * length
    async with serve(echo, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        socket = WebSocket(target(f"http://127.0.0.1:{port}"), "/", heard.texts.put_nowait, heard.end)
        await socket.open()
        socket.send(text)
        socket.send(text)
        assert await heard.texts.get() == text
        assert await heard.texts.get() == text
        socket.close()
        await heard.ended.wait()
    assert len(heard.ends) == 1 and socket.closed


async def test_a_close_by_the_server_is_told_once_with_its_reason() -> None:
    heard = Heard()
    async with serve(echo, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        socket = WebSocket(target(f"http://127.0.0.1:{port}"), "/", heard.texts.put_nowait, heard.end)
        await socket.open()
        socket.send(b"bye")
        await heard.ended.wait()
    assert heard.ends == ["closed by the server: gone"]


async def test_a_refused_upgrade_is_a_connection_error() -> None:
    heard = Heard()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        socket = WebSocket(target(f"http://127.0.0.1:{port}"), "/", heard.texts.put_nowait, heard.end)
        with pytest.raises(ConnectionError, match="404"):
            await socket.open()
    assert heard.ends == []
