"""One answer as it comes: what the application iterates over, and what it has at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType

from baton.frontends.client import wire
from baton.frontends.client.connection import Connection
from baton.frontends.client.errors import BatonError, NotConnected, RequestFailed, RequestTimeout, SaidGoodbye

#: between two attempts to come back
_AGAIN_S = 0.05


@dataclass(slots=True)
class Delta:
    """New output: its text, and its tokens. ``logprobs`` has one entry a token where they were asked for, and
    ``scores`` each token's own bytes with the likeliest tokens in its place. ``index`` says
    which of ``n`` choices grew.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    scores: list[wire.Scored] = field(default_factory=list)
    index: int = 0


@dataclass(slots=True)
class Choice:
    """One of the ``n`` answers to a request, as far as it has come; the fields are those of ``Completion``."""

    index: int
    texts: list[str] = field(default_factory=list, repr=False)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    scores: list[wire.Scored] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self.texts)

    def add(self, delta: Delta) -> None:
        """More output."""
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.scores += delta.scores


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, as the server's account has them; ``cached_tokens`` of the prompt's were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Both."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. Where ``n`` were asked for, ``choices`` are all of them; the other fields are the first one's.

    With ``prompt_logprobs`` there are ``prompt_scores`` of each of the prompt's tokens but the first.
    """

    request_id: str
    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    stop_reason: str | int | None
    usage: Usage
    prompt_token_ids: list[int] = field(default_factory=list)
    ignored_parameters: tuple[str, ...] = ()
    scores: list[wire.Scored] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    prompt_scores: list[wire.PromptScored] = field(default_factory=list)


class AsyncStream:
    """An answer in the making: ``async with`` it, iterate over its deltas, read its attributes.

    Leaving the block before the end cancels the request on the server. Deltas that come while the application is busy
    are merged into one. A ``resumable`` one goes on over a new connection where the old one broke.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        request: Callable[[str], tuple[str, bytes]],
        traceparent: str | None,
        timeout_s: float | None,
        idempotency_key: str | None = None,
        resumable: bool = False,
        choices: int = 1,
    ) -> None:
        self.request_id = ""
        self.prompt_token_ids: list[int] = []
        self.prompt_scores: list[wire.PromptScored] = []
        self.ignored_parameters: tuple[str, ...] = ()
        self.choices = [Choice(index) for index in range(choices)]
        self.usage: Usage | None = None
        self._connect = connect
        self._request = request
        self._traceparent = traceparent
        self._timeout_s = timeout_s
        self._idempotency_key = idempotency_key
        self._resumable = resumable
        self._resume_s = 0.0
        self._broke_s: float | None = None
        self._deadline_s: float | None = None
        self._connection: Connection | None = None
        self._tag = 0
        self._deltas: dict[int, Delta] = {}
        self._positions = [0] * choices
        self._open = choices
        self._began = False
        self._over = False
        self._error: BatonError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def text(self) -> str:
        """All text so far, of the first choice like the rest."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        """All token ids so far."""
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> list[float]:
        """One log-probability a token so far, where they were asked for."""
        return self.choices[0].logprobs

    @property
    def scores(self) -> list[wire.Scored]:
        """With each log-probability the token's bytes and the likeliest tokens in its place."""
        return self.choices[0].scores

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended; None while it has not."""
        return self.choices[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or token id that ended it, if one did."""
        return self.choices[0].stop_reason

    async def __aenter__(self) -> AsyncStream:
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """No more is wanted; cancels the request where it has not ended."""
        self.abandon()

    def abandon(self) -> None:
        """The same, without waiting: there is nothing to wait for."""
        if self._connection is not None and not self._over:
            for index in range(len(self.choices)):
                self._connection.cancel(self._tag + index)
        self._over = True

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Delta:
        await self._start()
        while not self._deltas:
            if self._over:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            if self._broke_s is not None:
                await self._come_back(self._broke_s)
            else:
                await self._wait()
        index = next(iter(self._deltas))
        delta = self._deltas.pop(index)
        if self._connection is not None:
            self._connection.took(self._tag + index, self._positions[index])
        self.choices[index].add(delta)
        return delta

    async def result(self) -> Completion:
        """Read to the end; the whole answer."""
        async for _ in self:
            pass
        if self.finish_reason is None or self.usage is None:
            raise BatonError("the stream was closed before its end")
        return Completion(
            request_id=self.request_id,
            text=self.text,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            usage=self.usage,
            prompt_token_ids=self.prompt_token_ids,
            ignored_parameters=self.ignored_parameters,
            scores=self.scores,
            choices=self.choices,
            prompt_scores=self.prompt_scores,
        )

    async def _start(self) -> None:
        """Connect, send, and wait until the request was admitted; raises what ``BatonError`` there is.

        A connection kept from an earlier request may end just as this one is sent; it is then sent once more.
        """
        await self._send()
        await self._admission()
        if isinstance(self._error, SaidGoodbye) and not self._began:
            goodbye, self._error, self._over, self._connection = self._error, None, False, None
            try:
                await self._send()
            except NotConnected:
                self._error, self._over = goodbye, True
            await self._admission()
        if self._error is not None and not self._began:
            raise self._error

    async def _send(self) -> None:
        if self._connection is not None or self._broke_s is not None or self._over:
            return
        if self._timeout_s is not None and self._deadline_s is None:
            self._deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.timeout_at(self._deadline_s):
                connection = await self._connect()
        except TimeoutError:
            raise self._too_late() from None
        assert connection.welcome is not None
        operation, body = self._request(connection.welcome.model)
        self._resume_s = connection.welcome.resume_s
        self._tag = connection.generate(
            self, operation, body, self._traceparent, self._idempotency_key, self._resumable, len(self.choices)
        )
        self._connection = connection

    async def _admission(self) -> None:
        while not self._began and not self._over:
            await self._wait()

    async def _come_back(self, broke_s: float) -> None:
        """Go on over a new connection: one attempt at least, and more for as long as the server waits for them."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(self._deadline_s):
                while True:
                    try:
                        connection = await self._connect()
                        self._tag = connection.resume(self, self.request_id, self._positions[0])
                        break
                    except NotConnected as error:
                        self._error = error
                        if loop.time() > broke_s + self._resume_s:
                            self._finish()
                            return
                        await asyncio.sleep(_AGAIN_S)
        except TimeoutError:
            self._over = True
            raise self._too_late() from None
        self._connection, self._broke_s, self._error = connection, None, None

    async def _wait(self) -> None:
        assert self._waiter is None, "a stream has one reader"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout_at(self._deadline_s):
                await self._waiter
        except TimeoutError:
            await self.aclose()
            raise self._too_late() from None
        except asyncio.CancelledError:
            await self.aclose()
            raise
        finally:
            self._waiter = None

    def _too_late(self) -> RequestTimeout:
        return RequestTimeout(f"no complete answer within {self._timeout_s:g} s")

    # -------------------------------------------------------------------------------- from the connection

    def began(self, began: wire.Began) -> None:
        """The request was admitted."""
        self._began = True
        self.request_id = began.request_id
        self.prompt_token_ids = began.prompt_ids
        self.ignored_parameters = began.ignored
        self._wake()

    def piece(self, piece: wire.Piece) -> None:
        """New output; merged where the last was not read yet."""
        index = piece.tag - self._tag
        self._positions[index] = piece.position
        text, delta = "".join(piece.texts) + piece.tail, self._deltas.get(index)
        if delta is None:
            self._deltas[index] = Delta(text, piece.token_ids, piece.logprobs, piece.scores, index)
        else:
            delta.text += text
            delta.token_ids += piece.token_ids
            delta.logprobs += piece.logprobs
            delta.scores += piece.scores
        self._wake()

    def ended(self, ended: wire.Ended) -> None:
        """The end of one choice: of the last one it is the end of all, and so is that of one that failed."""
        choice, used = self.choices[ended.tag - self._tag], self.usage or Usage(0, 0)
        choice.stop_reason = ended.stop_reason
        self.prompt_scores = ended.prompt_scores or self.prompt_scores
        cached = min(ended.cached_tokens, used.cached_tokens) if self.usage is not None else ended.cached_tokens
        output = used.completion_tokens + ended.completion_tokens
        self.usage = Usage(max(used.prompt_tokens, ended.prompt_tokens), output, cached)
        self._open -= 1
        if ended.problem is None:
            choice.finish_reason = ended.reason
        elif self._error is None:
            self._error = RequestFailed(ended.problem)
            self.abandon()
        if ended.problem is not None or not self._open:
            self._finish()

    def lost(self, error: BatonError, for_good: bool) -> None:
        """The connection is over; a resumable stream that has begun may go on over another."""
        self._error = error
        if self._resumable and self._began and not for_good:
            self._connection, self._broke_s = None, asyncio.get_running_loop().time()
            self._wake()
        else:
            self._finish()

    def _finish(self) -> None:
        self._over = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
