"""One request as its door sees it: what came and was not fetched yet, merged; what was taken; and its end.

Every ``Open`` or ``Attach`` is followed by exactly one of ``Answered`` and ``Gone(wants_end=False)``, as a stream is a
context manager: leaving it unanswered, for whatever reason, is going away. It decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING

from baton.engine.effects import Answered, Begin, Deliver, Finish, Gone, Named, Taken
from baton.frontends.errors import INTERNAL, Refused, failure_of, in_words_of
from baton.frontends.keeping import Memo, read_memo
from baton.frontends.validate import GenerateRequest
from baton.ipc.frames import Scored

if TYPE_CHECKING:
    from baton.frontends.reception import Reception


class Delta:
    """Output that the door has not seen yet. One text (and, if asked for, one log-probability with its ``scores``) a
    token; the last
    delta of a stream may carry more text than its tokens: what was held back for a stop string that never came.

    ``position`` counts the output tokens up to and with this delta.
    """

    __slots__ = ("logprobs", "position", "scores", "tail", "texts", "token_ids")

    def __init__(
        self, token_ids: list[int], texts: list[str], logprobs: list[float], position: int, scores: list[Scored]
    ) -> None:
        self.token_ids = token_ids
        self.texts = texts
        self.logprobs = logprobs
        self.scores = scores
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

    def __init__(
        self, reception: Reception, door: int, request: GenerateRequest | None, request_id: bytes, kept: bool
    ) -> None:
        self.id = request_id
        self.memo: Memo | None = None
        self.start = 0
        self.text_before = ""
        self.scores_before: tuple[list[float], list[Scored]] = ([], [])
        self.created = int(time.time())
        self.prompt_ids: list[int] = []
        self.final: Finish | None = None
        self.closed = False
        self.door = door
        self.hang_up: Callable[[], None] | None = None
        self._reception = reception
        self._request = request
        self._kept = kept
        self._named = not kept
        self._began = False
        self._delta: Delta | None = None
        self._owned = False
        self._position = 0
        self._fetched = 0
        self._taken = 0
        self._reported = 0
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[Delta], bool] | None = None
        self._behind = False
        self.others: list[Stream] = []  # the streams of the request's other choices, which end with this one
        self.notify: Callable[[], None] | None = None

    # -------------------------------------------------------------------------------- for the door

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.gone()

    @property
    def request(self) -> GenerateRequest:
        """What was asked for; of one that was attached to, it is known once that is named, and has no prompt."""
        assert self._request is not None
        return self._request

    async def named(self) -> None:
        """Wait until it is known which answer this is: of one that is kept, ``id`` and ``created`` may be those of an
        earlier request, and its output begins at token ``start``. Raises ``Refused`` where there is none.
        """
        while not self._named and self.final is None:
            await self._wait()
        if not self._named:
            assert self.final is not None
            raise Refused(failure_of(self.final) or INTERNAL)

    async def begin(self) -> None:
        """Wait until the request was admitted; raises ``Refused`` where it was not."""
        while not self._began and self.final is None:
            await self._wait()
        if not self._began:
            assert self.final is not None
            failure = failure_of(self.final)
            if failure is not None:
                raise Refused(failure)

    @property
    def began(self) -> bool:
        """Whether the request was admitted, as far as it is known here."""
        return self._began

    async def ended_before(self, after: int) -> Finish | None:
        """The end of a named answer that has fewer than ``after`` tokens; None where it may still go on.

        Only one that is over lets a listener in beyond its last token, so its end comes without more output.
        """
        while self.start < after and self.final is None:
            await self._wait()
        return self.final

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        while (delta := self.take()) is None:
            if self.final is not None:
                raise StopAsyncIteration
            await self._wait()
        return delta

    def take(self) -> Delta | None:
        """What came and was not fetched yet, without waiting."""
        delta = self._delta
        if delta is not None:
            self._delta, self._fetched = None, delta.position
        return delta

    async def pump(self, write: Callable[[Delta], bool]) -> bool:
        """Hand each delta to ``write`` at the end of the turn of the loop in which it came; no task is woken for that.

        True once the stream has ended, False as soon as ``write`` says that the client is behind: what comes then is
        merged, as before any call.
        """
        while True:
            delta = self.take()
            if delta is not None:
                if not write(delta):
                    return False
            elif self.final is not None:
                return True
            else:
                self._sink, self._behind = write, False
                try:
                    await self._wait()
                finally:
                    self._sink = None
                if self._behind:
                    return False

    async def flow(self, write: Callable[[Delta], bool], drain: Callable[[], Awaitable[None]]) -> None:
        """``pump`` to the end, for a client whose socket says what it takes: all that was written, once it drained."""

        def written(delta: Delta) -> bool:
            keeps_up = write(delta)
            if keeps_up:
                self.took(delta.position)
            return keeps_up

        while not await self.pump(written):
            await drain()
            self.took(self._fetched)

    def flush(self) -> None:
        """The turn is over: write what came in it. The reader is woken by the end, or where the client is behind."""
        sink, waiter = self._sink, self._waiter
        if sink is None or waiter is None or waiter.done():
            return
        delta = self.take()
        try:
            self._behind = delta is not None and not sink(delta)
        except Exception as error:
            waiter.set_exception(error)
            return
        if self._behind or self.final is not None:
            waiter.set_result(None)

    def split(self) -> list[Stream]:
        """The streams of all choices, each with an end of its own from now on."""
        streams, self.others = [self, *self.others], []
        return streams

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
        """The client has its whole answer; choices that have not ended by now are not wanted any more."""
        several = bool(self.others)
        for each in self.split():
            if several and each.final is None:
                each.gone()
            elif not each.closed:
                each._close()
                each._reception.feed(Answered(each.door))

    def gone(self, for_good: bool = False) -> None:
        """The client went away; nothing happens where it has its answer. ``for_good`` says that it said goodbye, so
        that nobody waits for it.
        """
        for other in self.others:
            other.gone(for_good)
        if not self.closed:
            self._close()
            reason = "cancelled" if for_good and self._kept else "disconnected"
            self._reception.feed(Gone(self.door, reason, wants_end=False))

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

    def perform(self, effect: Named | Begin | Deliver | Finish) -> None:
        """Take in one effect and wake the reader. Never feeds an event: the core is still at work."""
        if isinstance(effect, Deliver):
            self._add(effect)
        elif isinstance(effect, Begin):
            self._began = True
            self.prompt_ids = effect.prompt_ids
        elif isinstance(effect, Named):
            self._name(effect)
        else:
            self._end(effect)
        if self.notify is not None:
            self.notify()
        waiter = self._waiter
        if self._sink is not None:
            self._reception.flush_soon(self)
        elif waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _name(self, effect: Named) -> None:
        self._named = True
        self.id, self.start, self.text_before = effect.request_id, effect.position, effect.text
        self.scores_before = (effect.logprobs, effect.scores)
        self._position = self._fetched = self._taken = self._reported = effect.position
        self.memo = memo = read_memo(effect.memo)
        self.created = memo.created
        if self._request is None:
            self._request = memo.request

    def _add(self, effect: Deliver) -> None:
        self._position += len(effect.token_ids)
        delta = self._delta
        if delta is None:
            self._delta = Delta(effect.token_ids, effect.texts, effect.logprobs, self._position, effect.scores)
            self._owned = False
            return
        if not self._owned:  # the first merge copies: the lists are the effect's
            delta.token_ids = list(delta.token_ids)
            delta.texts = list(delta.texts)
            delta.logprobs = list(delta.logprobs)
            delta.scores = list(delta.scores)
            self._owned = True
        delta.token_ids += effect.token_ids
        delta.texts += effect.texts
        delta.logprobs += effect.logprobs
        delta.scores += effect.scores
        delta.position = self._position

    def _end(self, finish: Finish) -> None:
        self.final = finish if self._request is None else in_words_of(finish, self._request.names)
        if finish.tail:
            if self._delta is None:
                self._delta = Delta([], [], [], self._position, [])
            self._delta.tail = finish.tail
        if finish.reason == "slow_consumer" and self.hang_up is not None:
            self.hang_up()
