"""A ZeroMQ socket on an asyncio loop, without blocking and without a task: messages in by callback, out at once.

ZeroMQ's file descriptor only *changes* when something happened; so after every send, and after every batch of reads,
the socket's own events are asked for again.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable

import zmq

#: messages read in one turn of the loop; the rest waits for the next turn
_BATCH_MESSAGES_MAX = 64


class Sent(enum.Enum):
    """What became of a message."""

    OK = "ok"
    FULL = "full"
    GONE = "gone"


class Port:
    """One socket. Invariant: while it is open and not empty, a read is scheduled."""

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> None:
        self.socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._again: asyncio.Handle | None = None
        self._open = True
        self._loop.add_reader(self._descriptor, self.read)
        self._soon()

    def send(self, parts: list[bytes]) -> Sent:
        """Send without waiting. GONE: a router knows no such peer any more; FULL: try again later."""
        try:
            self.socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Sent.GONE
        finally:
            self._soon()
        return Sent.OK

    def _soon(self) -> None:
        if self._again is None and self._open:
            self._again = self._loop.call_soon(self.read)

    def read(self) -> None:
        """Hand over what has arrived."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        for _ in range(_BATCH_MESSAGES_MAX):
            if not self._open or not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            self._on_message(self.socket.recv_multipart(zmq.NOBLOCK))
        self._soon()

    def close(self, linger_s: float = 0.0) -> None:
        """Close; messages sent before may still leave for ``linger_s``."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._descriptor)
            if self._again is not None:
                self._again.cancel()
            self.socket.close(linger=int(linger_s * 1000))
