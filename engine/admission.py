"""Who is let in, who waits, who is told to come back: promises that the ledger can keep.

Three policies say how much of the KV cache a request is promised when it takes its seat:

- ``reserve``: its prompt and its ``max_tokens``; whoever is seated never has to give way for want of blocks
- ``optimistic``: what it has now, while a share of the pool stays free; others give way when it runs out
- ``predicted``: its prompt and the bound on its output; past the bound the bound is asked for anew

Whatever the policy, a request that was made to give way as often as ``limits.preemptions_per_request_max`` is seated
only with all that it may need, and is never a victim again: so everybody finishes. It tells no request anything itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import ceil, exp
from typing import Literal

from baton.engine.ledger import Ledger
from baton.engine.limits import Limits
from baton.engine.predictor import Key, LengthPredictor
from baton.ipc.frames import Failure

Policy = Literal["reserve", "optimistic", "predicted"]

_NS = 1_000_000_000


@dataclass(slots=True)
class Ask:
    """What a request asks for: ``prompt_tokens``, at most ``max_tokens`` of output, ``output_tokens`` of it there."""

    slot: int
    prompt_tokens: int
    max_tokens: int
    key: Key = ("", "", "")
    output_tokens: int = 0
    preemptions: int = 0

    @property
    def tokens(self) -> int:
        """Prompt and output so far."""
        return self.prompt_tokens + self.output_tokens

    @property
    def tokens_max(self) -> int:
        """All it may ever have."""
        return self.prompt_tokens + self.max_tokens


class Drain:
    """How fast work leaves: tokens of ended requests a second, weighted exponentially over ``limits.drain_window_s``.

    Only time in which there was work counts, so that a quiet hour does not look like a slow one.
    """

    def __init__(self, limits: Limits) -> None:
        self.window_s = limits.drain_window_s
        self._tokens = 0.0
        self._seconds = 0.0
        self._last_ns: int | None = None
        self._busy = False

    def advance(self, now_ns: int, busy: bool) -> None:
        """Time has come to ``now_ns``; from here on there is work, or none."""
        if self._busy and self._last_ns is not None and now_ns > self._last_ns:
            elapsed_s = (now_ns - self._last_ns) / _NS
            fade = exp(-elapsed_s / self.window_s)
            self._tokens *= fade
            self._seconds = self._seconds * fade + self.window_s * (1 - fade)
        self._last_ns, self._busy = now_ns, busy

    def finished(self, tokens: int) -> None:
        """A request has left, and ``tokens`` of work with it."""
        self._tokens += tokens

    @property
    def tokens_per_s(self) -> float | None:
        """The rate; None before there was a second of work."""
        return self._tokens / self._seconds if self._seconds >= 1.0 else None


class Admission:
    """Invariant: ``queued_tokens`` is the work of those that wait and were never seated, at most
    ``limits.queue_tokens_max`` unless one request alone is more.
    """

    def __init__(self, policy: Policy, ledger: Ledger, predictor: LengthPredictor, limits: Limits) -> None:
        self.policy = policy
        self.ledger = ledger
        self.predictor = predictor
        self.limits = limits
        self.drain = Drain(limits)
        self.queued_tokens = 0
        self._queued: dict[int, int] = {}

    def arrive(self, ask: Ask, now_ns: int, begun: bool = False) -> Failure | None:
        """Into the queue; or why not: 400 for what can never fit, 429 with a time where the queue is full.

        Whoever has ``begun``, admitted by an owner that died, is not told to come back another time.
        """
        failure = self.never(ask)
        if failure is None and not begun:
            failure = self._full(ask)
        if failure is None:
            self._queued[ask.slot] = work = self.work_tokens(ask)
            self.queued_tokens += work
            self._tick(now_ns)
        return failure

    def never(self, ask: Ask) -> Failure | None:
        """Why the request could not be served even alone (400), or None."""
        ledger, pool = self.ledger, self.ledger.pool
        if ledger.ever_fits(ask.tokens_max):
            return None
        capacity = pool.total * pool.block_tokens
        message = f"the request may need {ask.tokens_max} tokens of KV cache, this server has {capacity} in all"
        param = "max_tokens" if ledger.ever_fits(ask.prompt_tokens + 1) else "prompt"
        return Failure(400, "invalid_request_error", message, param, "kv_cache_exceeded")

    def seat(self, ask: Ask, now_ns: int, table_blocks: int = 0) -> bool:
        """Promise a waiting request its place, where that can be kept now; True: it is out of the queue and seated.

        ``table_blocks`` of its blocks it holds already (a prefix found in the cache, less a block to be copied).
        """
        tokens = self.promise_tokens(ask)
        if not self.could_seat(ask, table_blocks):
            return False
        self.ledger.seat(ask.slot, tokens, table_blocks)
        self._unqueue(ask.slot)
        self._tick(now_ns)
        return True

    def could_seat(self, ask: Ask, table_blocks: int = 0, leaving: Collection[int] = (), freed_blocks: int = 0) -> bool:
        """Whether a promise could be kept, if the seated slots ``leaving`` were gone and ``freed_blocks`` free."""
        tokens = self.promise_tokens(ask)
        return self.ledger.fits(ask.slot, tokens, table_blocks, self._margin_blocks(), leaving, freed_blocks)

    def hold(self, ask: Ask, table_blocks: int) -> None:
        """A seated request's table has grown to ``table_blocks``; past its promise it is promised anew."""
        if ask.tokens > self.ledger.promised_tokens(ask.slot):
            self.ledger.promise(ask.slot, self.promise_tokens(ask))
        self.ledger.hold(ask.slot, table_blocks)

    def leave(self, ask: Ask, now_ns: int, soon: bool = True, swapped_blocks: int = 0) -> None:
        """A seated request gives way; ``soon`` is False for one whose client must act before it can go on."""
        resume_tokens = min(ask.tokens + 1, ask.tokens_max) if soon else 0
        self.ledger.leave(ask.slot, resume_tokens, swapped_blocks)
        self._tick(now_ns)

    def ended(self, ask: Ask, now_ns: int, finished: bool = True) -> None:
        """The request is over, wherever it was. ``finished`` is False for one that was cut off: nothing is learned."""
        self._tick(now_ns)
        if finished:
            self.predictor.observe(ask.key, ask.prompt_tokens, ask.output_tokens)
        if ask.slot not in self._queued:
            self.drain.finished(ask.tokens)
        self._unqueue(ask.slot)
        self.ledger.drop(ask.slot)
        self._tick(now_ns)

    def begin_anew(self, ledger: Ledger, returning: Iterable[Ask]) -> None:
        """The worker was lost and another is there, with the memory of ``ledger``; ``returning`` had been seated.

        Whoever waited waits on; what was learned of lengths and of the rate is kept.
        """
        self.ledger = ledger
        for ask in returning:
            ledger.expect(ask.slot, min(ask.tokens + 1, ask.tokens_max))

    def promise_tokens(self, ask: Ask) -> int:
        """Tokens in all that the request is promised, by the policy; at least what it has and one more, if it may."""
        least = min(ask.tokens + 1, ask.tokens_max)
        if self.policy == "reserve" or ask.preemptions >= self.limits.preemptions_per_request_max:
            return ask.tokens_max
        if self.policy == "optimistic":
            return least
        return max(least, ask.prompt_tokens + self._bound(ask))

    def work_tokens(self, ask: Ask) -> int:
        """Tokens the request is expected to need still: what is to be computed and what is to be made."""
        return ask.prompt_tokens + max(1, self._bound(ask))

    def retry_after_s(self, excess_tokens: int) -> int:
        """Seconds until ``excess_tokens`` of work have left, by the rate at which work leaves; within the limits."""
        rate = self.drain.tokens_per_s
        if rate is None:
            return self.limits.retry_after_unknown_s
        longest_s = self.limits.retry_after_s_max
        if rate * longest_s <= excess_tokens:
            return longest_s
        return max(1, ceil(excess_tokens / rate))

    def _bound(self, ask: Ask) -> int:
        """The bound on the whole output; ``max_tokens`` where there is too little history for one."""
        bound = self.predictor.bound(ask.key, ask.prompt_tokens, ask.max_tokens, min(ask.output_tokens, ask.max_tokens))
        return ask.max_tokens if bound is None else bound

    def _margin_blocks(self) -> int:
        if self.policy != "optimistic":
            return 0
        return int(self.ledger.pool.total * self.limits.kv_watermark_share)

    def _full(self, ask: Ask) -> Failure | None:
        work, most = self.work_tokens(ask), self.limits.queue_tokens_max
        excess = self.queued_tokens + work - most
        if not self._queued or excess <= 0:
            return None
        message = f"{self.queued_tokens} tokens of work wait already, this request needs {work} more, {most} may wait"
        wait_s = self.retry_after_s(excess)
        return Failure(429, "rate_limit_error", message, None, "queue_full", wait_s)

    def _unqueue(self, slot: int) -> None:
        self.queued_tokens -= self._queued.pop(slot, 0)

    def _tick(self, now_ns: int) -> None:
        self.drain.advance(now_ns, bool(self._queued) or self.ledger.busy)
