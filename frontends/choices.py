"""Several choices of one request, as its door sees them: whichever has something to say comes next.

Each choice is a stream of its own. Knows no shapes and no sockets.
"""

from __future__ import annotations

import asyncio
from collections import deque

from baton.engine.effects import Finish
from baton.frontends.stream import Delta, Stream


class Choices:
    """Iterate over it for (index, delta) and, once for each choice, (index, finish). Used by one task."""

    def __init__(self, streams: list[Stream]) -> None:
        self.streams = streams
        self._queue: deque[int] = deque()
        self._queued: set[int] = set()
        self._ended: set[int] = set()
        self._changed = asyncio.Event()
        for index, stream in enumerate(streams):
            stream.notify = lambda index=index: self._enqueue(index)
            self._enqueue(index)

    @property
    def finishes(self) -> list[Finish]:
        """The ends of all choices, once they are there."""
        return [stream.final for stream in self.streams if stream.final is not None]

    async def begin(self) -> None:
        """Wait until every choice was admitted; raises ``Refused`` where one was not."""
        for stream in self.streams:
            await stream.begin()

    def __aiter__(self) -> Choices:
        return self

    async def __anext__(self) -> tuple[int, Delta | Finish]:
        while len(self._ended) < len(self.streams):
            while self._queue:
                index = self._queue.popleft()
                self._queued.discard(index)
                stream = self.streams[index]
                delta = stream.take()
                if delta is not None:
                    if stream.final is not None:
                        self._enqueue(index)
                    return index, delta
                if stream.final is not None and index not in self._ended:
                    self._ended.add(index)
                    return index, stream.final
            self._changed.clear()
            if len(self._ended) < len(self.streams):
                await self._changed.wait()
        raise StopAsyncIteration

    def _enqueue(self, index: int) -> None:
        if index not in self._queued:
            self._queued.add(index)
            self._queue.append(index)
            self._changed.set()
