"""Where the doors meet the desk: a door opens a request, or attaches to an answer, and gets a ``Stream``.

``Reception`` numbers the doors' requests, hands their events to the core and the core's effects to their streams. It
decides nothing.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from baton.engine.answers import home_of
from baton.engine.effects import Answered, Attach, DoorEffect, Finish, Keep, Look, Open, Seen
from baton.engine.limits import Limits
from baton.frontends import traceparent
from baton.frontends.errors import INTERNAL, Refused, failure_of
from baton.frontends.stream import Stream
from baton.frontends.validate import GenerateRequest
from baton.ipc.frames import Terms
from baton.workers.config import Card

#: whose requests these are; there is one tenant
TENANT = ""


class Reception:
    """All open streams of a frontend, by door number.

    ``feed`` hands an event to the core, synchronously; effects may come back through ``perform`` before it returns.
    """

    def __init__(
        self,
        feed: Callable[[object], None],
        now_ns: Callable[[], int],
        card: Card,
        limits: Limits,
        trace_sample_ratio: float = 1.0,
        index: int = 0,
        frontends: int = 1,
    ) -> None:
        self.feed = feed
        self.now_ns = now_ns
        self.card = card
        self.limits = limits
        self.trace_sample_ratio = trace_sample_ratio
        self.loop = asyncio.get_running_loop()
        self.report_tokens = max(1, limits.mailbox_tokens_max // 4)
        self.index = index
        self.frontends = frontends
        self.streams: dict[int, Stream] = {}
        self._looks: dict[int, asyncio.Future[Seen]] = {}
        self._doors = 0
        self._turn: dict[Stream, None] = {}  # to be flushed at the end of this turn of the loop
        self._idle = asyncio.Event()
        self._idle.set()
        self._reporter: asyncio.TimerHandle | None = None

    def open(
        self,
        request: GenerateRequest,
        parent: bytes | None,
        received_ns: int,
        attributes: dict[str, str | int | float | bool],
        request_id: bytes | None = None,
        hang_up: Callable[[], None] | None = None,
        keep: Keep | None = None,
    ) -> Stream:
        """Open a request. ``parent`` is the client's trace context; ``attributes`` tell the trace of the door;
        ``hang_up`` cuts the connection of a client that does not read even its end. The stream is that of the first
        choice; there are ``best_of`` of them.
        """
        chosen = request_id or self.new_id(keep.key if keep is not None else "")
        stream, *others = (self._listen(request, chosen, hang_up, keep is not None) for _ in range(request.best_of))
        stream.others = others
        trace = traceparent.root(parent, self.trace_sample_ratio)
        card = self.card
        terms = Terms(
            model=request.model,
            tenant=TENANT,
            deadline_ns=received_ns + _ns(request.deadline_ms or self.limits.request_s_max * 1e3),
            queue_until_ns=received_ns + _ns(request.queue_ms_max) if request.queue_ms_max is not None else 0,
            priority=request.priority,
            weights_digest=card.weights_digest,
            tokenizer_digest=card.tokenizer_digest,
            template_digest=card.template_digest,
        )
        self.feed(
            Open(
                door=stream.door,
                request_id=stream.id,
                trace=trace,
                span_id=trace[16:24],
                parent=parent,
                terms=terms,
                params=request.params,
                prompt=request.prompt,
                received_ns=received_ns,
                attributes={**_attributes(request), **attributes},
                keep=keep,
                siblings=tuple(other.door for other in others),
            )
        )
        return stream

    def attach(self, request_id: bytes, after: int, hang_up: Callable[[], None] | None = None) -> Stream:
        """Listen to an answer that is kept, from output token ``after`` on."""
        stream = self._listen(None, request_id, hang_up, True)
        self.feed(Attach(stream.door, request_id, after))
        return stream

    async def look(self, request_id: bytes) -> Seen:
        """See an answer that is kept, as it is now; raises ``Refused`` where it is not."""
        self._doors += 1
        door = self._doors
        future: asyncio.Future[Seen] = self.loop.create_future()
        self._looks[door] = future
        try:
            self.feed(Look(door, request_id))
            return await future
        finally:
            del self._looks[door]
            self.feed(Answered(door))

    def new_id(self, key: str = "") -> bytes:
        """A request id: where its answer will be kept, and 15 random bytes. Clients' own ids are labels only."""
        home = home_of(TENANT, key, self.frontends) if key else self.index
        return bytes([home]) + secrets.token_bytes(15)

    def _listen(
        self, request: GenerateRequest | None, request_id: bytes, hang_up: Callable[[], None] | None, kept: bool
    ) -> Stream:
        self._doors += 1
        stream = Stream(self, self._doors, request, request_id, kept)
        stream.hang_up = hang_up
        self.streams[stream.door] = stream
        self._idle.clear()
        if self._reporter is None:
            self._report_later()
        return stream

    def perform(self, effect: DoorEffect) -> None:
        """Carry out an effect of the core; those for a door that has closed since are dropped."""
        stream = self.streams.get(effect.door)
        if stream is not None and not isinstance(effect, Seen):
            stream.perform(effect)
            return
        look = self._looks.get(effect.door)
        if look is not None and not look.done():
            if isinstance(effect, Seen):
                look.set_result(effect)
            elif isinstance(effect, Finish):
                look.set_exception(Refused(failure_of(effect) or INTERNAL))

    def flush_soon(self, stream: Stream) -> None:
        """Something came for a stream that is pumped: it is written once all is here that comes in this turn."""
        if not self._turn:
            self.loop.call_soon(self._flush)
        self._turn[stream] = None

    def _flush(self) -> None:
        turn, self._turn = self._turn, {}
        for stream in turn:
            stream.flush()

    def forget(self, stream: Stream) -> None:
        """The stream is closed and hears nothing any more."""
        del self.streams[stream.door]
        if not self.streams:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until no stream is open."""
        await self._idle.wait()

    def _report_later(self) -> None:
        self._reporter = self.loop.call_later(self.limits.stalled_s_max / 8, self._report)

    def _report(self) -> None:
        """Small amounts taken are reported late, but well before the core would call the client a slow one."""
        self._reporter = None
        for stream in list(self.streams.values()):
            stream.report()
        if self.streams:
            self._report_later()

    def close(self) -> None:
        """Stop the timer; for the end of the process."""
        if self._reporter is not None:
            self._reporter.cancel()
            self._reporter = None


def _ns(ms: float) -> int:
    return int(ms * 1e6)


def _attributes(request: GenerateRequest) -> dict[str, str | int | float | bool]:
    """What the root span says of the request, in the GenAI semantic conventions' names."""
    params = request.params
    attributes: dict[str, str | int | float | bool] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        **request.labels,
    }
    if params.top_k:
        attributes["gen_ai.request.top_k"] = params.top_k
    if request.priority:
        attributes["baton.priority"] = request.priority
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    return attributes
