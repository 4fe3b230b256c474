"""One streamed completion, timed: what came when, how it ended, and whether the server's numbers agree with it.

A stream is a success only if it said why it finished: an end without a finish reason, an error event, a chunk that
cannot be read and a time-out are failures, whatever the HTTP status was.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from time import perf_counter

import msgspec

from baton.ops.completions import DONE, Chunk, Lines, Usage
from baton.ops.http import Exchange, Target

DETAIL_BYTES_MAX = 300


class Outcome(msgspec.Struct):
    """What became of one request. Times are of ``perf_counter``, in seconds; ``error`` is a kind, None for success.

    ``detail`` is what the server said of the error; ``gaps_s`` are the times between one delta and the next, ``sizes``
    the tokens of the delta behind each gap (0 where the server does not tell ids); ``doubt`` says how the server's own
    count contradicts the stream.
    """

    started: float
    ended: float = 0.0
    first: float = 0.0
    last: float = 0.0
    gaps_s: array[float] = msgspec.field(default_factory=lambda: array("d"))
    deltas: int = 0
    tokens: int = 0
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None
    detail: str = ""
    doubt: str | None = None
    sizes: array[int] = msgspec.field(default_factory=lambda: array("I"))

    @property
    def ttft_s(self) -> float:
        """From the request to the first output."""
        return self.first - self.started

    @property
    def e2e_s(self) -> float:
        """From the request to the end of the stream."""
        return self.ended - self.started

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for a single token."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None


class EventStream:
    """Server-sent events out of a body in pieces, straight into an ``Outcome``; ``stop`` is called at a failure.

    A delta is a choice with text or token ids; with ``silent`` also one without, for a token may be part of a character
    whose text is held back. Even then a bare finish reason is none, unless it is all that ever came.
    """

    def __init__(self, outcome: Outcome, silent: bool = False) -> None:
        self.outcome = outcome
        self._silent = silent
        self.finished = asyncio.Event()
        self.opening = b""
        self.stop: Callable[[], None] | None = None
        self._lines = Lines()
        self._decoder = msgspec.json.Decoder(Chunk)

    def feed(self, piece: bytes) -> None:
        """Take a piece of the body; lines may be cut anywhere."""
        now = perf_counter()
        if len(self.opening) < DETAIL_BYTES_MAX:
            self.opening += piece[:DETAIL_BYTES_MAX]
        for data in self._lines.feed(piece):
            if not self.finished.is_set():
                self._event(data, now)

    def _event(self, data: bytes, now: float) -> None:
        outcome = self.outcome
        if data == DONE:
            outcome.ended = now
            self.finished.set()
            return
        try:
            chunk = self._decoder.decode(data)
        except msgspec.DecodeError:
            self._fail("malformed chunk", data, now)
            return
        if (failure := chunk.failure()) is not None:
            self._fail("error event", failure, now)
            return
        if chunk.usage is not None:
            outcome.usage = chunk.usage
        for choice in chunk.choices:
            bare_end = choice.finish_reason is not None and outcome.deltas > 0
            if choice.carries_output() or (self._silent and not bare_end):
                if outcome.deltas:
                    outcome.gaps_s.append(now - outcome.last)
                    outcome.sizes.append(len(choice.token_ids or ()))
                else:
                    outcome.first = now
                outcome.last = now
                outcome.deltas += 1
            if choice.finish_reason is not None:
                outcome.finish_reason = choice.finish_reason
        outcome.ended = now

    def _fail(self, kind: str, detail: bytes, now: float) -> None:
        self.outcome.error = kind
        self.outcome.detail = shown(detail)
        self.outcome.ended = now
        self.finished.set()
        if self.stop is not None:
            self.stop()


def shown(data: bytes) -> str:
    """The beginning of what a server said, on one line."""
    return " ".join(data[:DETAIL_BYTES_MAX].decode(errors="replace").split())


async def ask(
    where: Target, body: bytes, timeout_s: float, tokens_expected: int | None, silent: bool = False
) -> Outcome:
    """Send one streaming request and follow it to its end, at most ``timeout_s``; never raises for what a server does.

    ``tokens_expected`` is set where the answer's length was prescribed; ``silent`` is as in ``EventStream``.
    """
    outcome = Outcome(perf_counter())
    events = EventStream(outcome, silent)
    loop = asyncio.get_running_loop()
    exchange: Exchange | None = None
    try:
        async with asyncio.timeout(timeout_s):
            request = where.request("POST", "/v1/completions", body)
            _, exchange = await loop.create_connection(
                lambda: Exchange(request, events.feed), where.host, where.port, ssl=where.tls or None
            )
            events.stop = exchange.finish
            await exchange.done
    except TimeoutError:
        if not events.finished.is_set():
            outcome.error = "timeout"
    except ConnectionRefusedError:
        outcome.error = "connection refused"
    except OSError as error:
        outcome.error, outcome.detail = "connection failed", str(error)
    finally:
        if exchange is not None:
            exchange.close()
    if exchange is not None and outcome.error is None:
        outcome.error = _verdict(exchange, outcome)
        outcome.detail = shown(events.opening) if outcome.error is not None else ""
    outcome.ended = outcome.ended or perf_counter()
    outcome.tokens = outcome.usage.completion_tokens if outcome.usage is not None else outcome.deltas
    if outcome.error is None:
        outcome.doubt = _doubt(outcome, tokens_expected)
    return outcome


def _verdict(exchange: Exchange, outcome: Outcome) -> str | None:
    if exchange.malformed:
        return "malformed response"
    if exchange.status != 200:
        return f"http {exchange.status}" if exchange.status else "closed before any response"
    if outcome.finish_reason is None:
        return "ended without a finish reason"
    if outcome.finish_reason in ("error", "cancelled"):
        return f"finished as {outcome.finish_reason}"
    return None


def _doubt(outcome: Outcome, tokens_expected: int | None) -> str | None:
    """Where the numbers of a successful stream do not fit together."""
    if outcome.usage is None:
        return "no usage"
    if outcome.tokens < outcome.deltas:
        return "usage counts fewer tokens than deltas came"
    if tokens_expected is not None and outcome.tokens != tokens_expected:
        return "usage differs from the tokens asked for"
    return None
