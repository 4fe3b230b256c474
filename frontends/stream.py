"""Where the doors meet the core: a door opens a request and gets a ``Stream``; the core's effects come out of it.

``Reception`` numbers the doors' requests, hands their events to the core and the core's effects to their streams. It
decides nothing. Every ``Open`` is followed by exactly one of ``Answered`` and ``Gone(wants_end=False)``, because a
stream is a context manager: leaving it unanswered, for whatever reason, is going away.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from types import TracebackType

from baton.engine.effects import Answered, Begin, Deliver, Finish, Gone, Open, Taken
from baton.engine.limits import Limits
from baton.frontends import traceparent
from baton.frontends.errors import Refused, failure_of
from baton.frontends.validate import GenerateRequest
from baton.ipc.frames import Terms
from baton.workers.config import Card


class Delta:
    """Output that the door has not seen yet. One text (and, if asked for, one log-probability) a token; the last
    delta of a stream may carry more text than its tokens: what was held back for a stop string that never came.

    ``position`` counts the output tokens up to and with this delta.
    """

    __slots__ = ("logprobs", "position", "tail", "texts", "token_ids")

    def __init__(self, token_ids: list[int], texts: list[str], logprobs: list[float], position: int) -> None:
        self.token_ids = token_ids
        self.texts = texts
        self.logprobs = logprobs
        self.position = position
        self.tail = ""

    @property
    def text(self) -> str:
        """All of the text."""
        texts = self.texts
        return (texts[0] if len(texts) == 1 else "".join(texts)) + self.tail


class Stream:
    """One request, as its door sees it. Used by one task; ``perform`` of the reception fills it.

    Invariant: at most one delta waits here; while the door is behind, what comes is merged into it. How much that can
    become is bounded by the credit that ``took`` extends.
    """

    def __init__(self, reception: Reception, door: int, request: GenerateRequest, request_id: bytes) -> None:
        self.request = request
        self.id = request_id
        self.created = int(time.time())
        self.prompt_ids: list[int] = []
        self.final: Finish | None = None
        self.closed = False
        self.door = door
        self.hang_up: Callable[[], None] | None = None
        self._reception = reception
        self._began = False
        self._delta: Delta | None = None
        self._owned = False
        self._position = 0
        self._taken = 0
        self._reported = 0
        self._waiter: asyncio.Future[None] | None = None

    # -------------------------------------------------------------------------------- for the door

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.gone()

    async def begin(self) -> None:
        """Wait until the request was admitted; raises ``Refused`` where it was not."""
        while not self._began and self.final is None:
            await self._wait()
        if not self._began:
            assert self.final is not None
            failure = failure_of(self.final)
            if failure is not None:
                raise Refused(failure)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        while self._delta is None:
            if self.final is not None:
                raise StopAsyncIteration
            await self._wait()
        delta = self._delta
        self._delta = None
        return delta

    def took(self, position: int) -> None:
        """The client's socket took everything up to ``position``. The core hears of it once a quarter of the window
        is used, and, where less is outstanding, from the reception's timer.
        """
        self._taken = position
        if position - self._reported >= self._reception.report_tokens:
            self.report()

    def report(self) -> None:
        """Tell the core what was taken and not yet reported."""
        if self._taken > self._reported and not self.closed:
            self._reported = self._taken
            self._reception.feed(Taken(self.door, self._taken))

    def cancel(self) -> None:
        """Ask for an early end; it comes like any other, with reason "cancelled"."""
        if not self.closed and self.final is None:
            self._reception.feed(Gone(self.door, "cancelled", wants_end=True))

    def answered(self) -> None:
        """The client has its whole answer."""
        if not self.closed:
            self._close()
            self._reception.feed(Answered(self.door))

    def gone(self) -> None:
        """The client went away; nothing happens where it has its answer."""
        if not self.closed:
            self._close()
            self._reception.feed(Gone(self.door, "disconnected", wants_end=False))

    def _close(self) -> None:
        self.closed = True
        self._reception.forget(self)

    async def _wait(self) -> None:
        assert self._waiter is None, "a stream has one reader"
        self._waiter = self._reception.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # -------------------------------------------------------------------------------- for the reception

    def perform(self, effect: Begin | Deliver | Finish) -> None:
        """Take in one effect and wake the reader. Never feeds an event: the core is still at work."""
        if isinstance(effect, Deliver):
            self._add(effect)
        elif isinstance(effect, Begin):
            self._began = True
            self.prompt_ids = effect.prompt_ids
        else:
            self._end(effect)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _add(self, effect: Deliver) -> None:
        self._position += len(effect.token_ids)
        delta = self._delta
        if delta is None:
            self._delta = Delta(effect.token_ids, effect.texts, effect.logprobs, self._position)
            self._owned = False
            return
        if not self._owned:  # the first merge copies: the lists are the effect's
            delta.token_ids = list(delta.token_ids)
            delta.texts = list(delta.texts)
            delta.logprobs = list(delta.logprobs)
            self._owned = True
        delta.token_ids += effect.token_ids
        delta.texts += effect.texts
        delta.logprobs += effect.logprobs
        delta.position = self._position

    def _end(self, finish: Finish) -> None:
        self.final = finish
        if finish.tail:
            if self._delta is None:
                self._delta = Delta([], [], [], self._position)
            self._delta.tail = finish.tail
        if finish.reason == "slow_consumer" and self.hang_up is not None:
            self.hang_up()


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
    ) -> None:
        self.feed = feed
        self.now_ns = now_ns
        self.card = card
        self.limits = limits
        self.trace_sample_ratio = trace_sample_ratio
        self.loop = asyncio.get_running_loop()
        self.report_tokens = max(1, limits.mailbox_tokens_max // 4)
        self.streams: dict[int, Stream] = {}
        self._doors = 0
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
    ) -> Stream:
        """Open a request. ``parent`` is the client's trace context; ``attributes`` tell the trace of the door;
        ``hang_up`` cuts the connection of a client that does not read even its end.
        """
        self._doors += 1
        stream = Stream(self, self._doors, request, request_id or new_id())
        stream.hang_up = hang_up
        self.streams[stream.door] = stream
        self._idle.clear()
        if self._reporter is None:
            self._report_later()
        trace = traceparent.root(parent, self.trace_sample_ratio)
        card = self.card
        terms = Terms(
            model=request.model,
            deadline_ns=received_ns + int(self.limits.request_s_max * 1e9),
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
            )
        )
        return stream

    def perform(self, effect: Begin | Deliver | Finish) -> None:
        """Carry out an effect of the core; those for a door that has closed since are dropped."""
        stream = self.streams.get(effect.door)
        if stream is not None:
            stream.perform(effect)

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
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    return attributes


def new_id() -> bytes:
    """A request id: 16 random bytes. Clients' own ids are labels only."""
    return secrets.token_bytes(16)
