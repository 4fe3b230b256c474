"""An engine double for the doors' tests: the real frontend core, and a script in the place of everything behind it.

A test gets each submitted request as a ``Job`` and says what the engine does with it: admit, say, finish, refuse.
``play`` does all of that by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from baton.engine.desk import DeskCore
from baton.engine.effects import Account, Begin, Deliver, Effect, Finish, Gone, Named, Seen, Send, Span, Wake
from baton.engine.limits import Limits
from baton.engine.ownership import BoardRow, Held, Ownership
from baton.frontends.reception import Reception
from baton.ipc.frames import (
    Address,
    Admitted,
    Cancel,
    Candidate,
    Closed,
    Credit,
    Failure,
    Key,
    Piece,
    Role,
    Scored,
    Submit,
    Text,
)
from baton.workers.config import Card

CARD = Card(
    name="model-1",
    path="",
    vocab=1000,
    vocab_padded=1024,
    context_tokens_max=4096,
    end_ids=(2,),
    weights_digest="w",
    tokenizer_digest="t",
    template_digest="c",
    created=1_700_000_000,
)

FRONTEND = Address(Role.FRONTEND, "model-1", 0, 0, 1)
TOKENIZER = Address(Role.TOKENIZER, "model-1", 0, 0, 1)
SCHEDULER = Address(Role.SCHEDULER, "model-1", 0, 0, 1)


class MemoryBoard:
    """The board in plain memory; every process is in its first incarnation."""

    def __init__(self, slots: int) -> None:
        self.rows = [BoardRow() for _ in range(slots)]
        self.ids = [(b"", b"")] * slots
        self.words = [-1] * slots

    def row(self, slot: int) -> BoardRow:
        return self.rows[slot]

    def write(self, slot: int, row: BoardRow) -> None:
        self.rows[slot] = row

    def count(self, slot: int, prompt_tokens: int, sampled: int) -> None:
        pass

    def cancelled(self, slot: int, generation: int) -> bool:
        return self.words[slot] == generation

    def live(self, role: int, index: int) -> int:
        return int(index == 0)  # one process a role

    def claim(self, slot: int, request_id: bytes, trace: bytes) -> None:
        self.ids[slot] = (request_id, trace)

    def identity(self, slot: int) -> tuple[bytes, bytes]:
        return self.ids[slot]

    def set_cancel(self, slot: int, generation: int) -> None:
        self.words[slot] = generation

    def set_delivered(self, slot: int, tokens: int) -> None:
        pass


class Job:
    """One submitted request, in the hands of the script."""

    def __init__(self, engine: Engine, submit: Submit) -> None:
        self.engine = engine
        self.submit = submit
        self.slot, self.generation = submit.key.slot, submit.key.generation
        self.cancelled = asyncio.Event()
        self.granted = engine.limits.mailbox_tokens_max
        self.credit = asyncio.Event()
        self.sent = 0
        self.logprob = -0.5
        self.ended = False
        self._run = 0
        self._held = engine.tokenizer.take(submit.key, submit.trace)
        assert self._held is not None

    def admit(self, prompt_ids: Sequence[int] = (5, 6, 7)) -> Job:
        """Tokenised and admitted."""
        engine, held, out = self.engine, self._held, list[Effect]()
        assert held is not None
        ids = list(self.submit.prompt.token_ids or prompt_ids)
        key = engine.tokenizer.give(held, Role.SCHEDULER, 0, "queued", engine.now_ns(), out)
        self._held = engine.scheduler.take(key, self.submit.trace)
        assert self._held is not None
        engine.scheduler.move(self._held, "prefilling", engine.now_ns(), out)
        self._run = key.epoch
        engine.feed(Admitted(self.slot, self.generation, self._run, ids))
        return self

    @property
    def run(self) -> int:
        """What names its tokens, once it is admitted."""
        return self._run

    def say(self, *texts: str, ids: Sequence[int] | None = None) -> Job:
        """One token a text, all in one piece. Token ids count up from 10."""
        token_ids = list(ids) if ids is not None else [10 + self.sent + number for number in range(len(texts))]
        params = self.submit.params
        logprobs = [self.logprob] * len(texts) if params.logprobs else []
        scores = [self._scored(text.encode(), params.top_logprobs) for text in texts] if params.logprobs else []
        what = (token_ids, list(texts), logprobs, scores)
        piece = Piece(self.slot, self.generation, self._run, self.sent, *what)
        self.sent += len(texts)
        self.engine.feed(Text([piece]))
        return self

    def _scored(self, piece: bytes, top: int) -> Scored:
        """The token itself, then half characters."""
        rivals = [Candidate(100 + rank, -0.5 - rank, piece if not rank else b"\xf0\x9f") for rank in range(top)]
        return Scored(piece, rivals)

    def finish(
        self,
        reason: str = "stop",
        stop_reason: str | int | None = None,
        tail: str = "",
        failure: Failure | None = None,
        cached_tokens: int = 0,
    ) -> None:
        """The end, from whoever holds it."""
        engine, held = self.engine, self._held
        assert held is not None
        self.ended = True
        hands: Ownership = engine.scheduler if self._run else engine.tokenizer
        key = hands.give(held, Role.FRONTEND, 0, "closed", engine.now_ns(), [])
        end = (self.sent, reason, stop_reason, tail, failure)
        engine.feed(Closed(key, self.submit.trace, *end, cached_tokens=cached_tokens))

    def refuse(self, failure: Failure) -> None:
        """The tokenizer's process says no."""
        self.finish("error", failure=failure)


class Engine:
    """The core, its reception, and the jobs it submitted. ``feed`` stands for the shell."""

    def __init__(self, limits: Limits | None = None, card: Card = CARD, slots: int = 256) -> None:
        self.limits = limits or Limits()
        self.board = MemoryBoard(slots)
        self.desk = DeskCore(FRONTEND, self.board, range(slots), self.limits)
        self.core = self.desk.front
        self.tokenizer = Ownership(self.board, TOKENIZER)
        self.scheduler = Ownership(self.board, SCHEDULER)
        self.reception = Reception(self.feed, self.now_ns, card, self.limits)
        self.jobs: list[Job] = []
        self.accounts: list[Account] = []
        self.spans: list[Span] = []
        self.events: list[object] = []
        self.on_submit: Callable[[Job], None] | None = None
        self.observe: Callable[[Account], None] = lambda account: None
        self._submitted: asyncio.Queue[Job] = asyncio.Queue()
        self._busy = False
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        for effect in self.desk.start(self.now_ns()):
            self._perform(effect)

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def feed(self, event: object) -> None:
        assert not self._busy, "the core is not re-entrant"
        self.events.append(event)
        self._busy = True
        try:
            for effect in self.desk.handle(event, self.now_ns()):
                self._perform(effect)
        finally:
            self._busy = False
        self._changed.set()

    def _perform(self, effect: Effect) -> None:
        loop = self.reception.loop
        match effect:
            case Named() | Begin() | Deliver() | Finish() | Seen():
                self.reception.perform(effect)
            case Account():
                self.accounts.append(effect)
                self.observe(effect)
            case Span():
                self.spans.append(effect)
            case Wake():
                delay_s = max(0.0, (effect.at_ns - self.now_ns()) / 1e9)
                self._timer = loop.call_later(delay_s, self.feed, _tick(effect.name))
            case Send(frame=Submit() as frame):
                loop.call_soon(self._submit, frame)
            case Send(frame=Cancel() as frame):
                loop.call_soon(self._cancel, frame)
            case Send(frame=Credit() as frame):
                job = self._job(frame.slot, frame.generation)
                job.granted = frame.position
                job.credit.set()
            case _:
                raise AssertionError(f"unexpected effect {effect!r}")

    def _submit(self, frame: Submit) -> None:
        job = Job(self, frame)
        self.jobs.append(job)
        if self.on_submit is not None:
            self.on_submit(job)
        self._submitted.put_nowait(job)

    def _cancel(self, frame: Cancel) -> None:
        job = self._job(frame.slot, frame.generation)
        job.cancelled.set()
        if not job.ended:
            job.finish("cancelled")

    def _job(self, slot: int, generation: int) -> Job:
        return next(job for job in self.jobs if (job.slot, job.generation) == (slot, generation))

    async def job(self) -> Job:
        """The next submitted request."""
        return await asyncio.wait_for(self._submitted.get(), 5)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something the core was told makes it true."""
        async with asyncio.timeout(5):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def empty(self) -> None:
        """Wait until the core has forgotten every request."""
        await self.until(lambda: not self.core.streams)
        assert not self.reception.streams
        self.check()

    def check(self) -> None:
        """Every Open and Attach had exactly one Answered or one Gone that wants no end."""
        from baton.engine.effects import Answered, Attach, Look, Open

        opened = [event.door for event in self.events if isinstance(event, Open | Attach | Look)]
        opened += [door for event in self.events if isinstance(event, Open) for door in event.siblings]
        closed = [event.door for event in self.events if isinstance(event, Answered)]
        closed += [event.door for event in self.events if isinstance(event, Gone) and not event.wants_end]
        assert sorted(opened) == sorted(closed)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.reception.close()


def _tick(name: str) -> object:
    from baton.engine.effects import Tick

    return Tick(name)


def admit(job: Job) -> None:
    """A script that only admits."""
    job.admit()


def admit_and_say(job: Job) -> None:
    """A script that says "x" and goes on thinking."""
    job.admit().say("x")


def play(*texts: str, reason: str = "stop", tail: str = "") -> Callable[[Job], None]:
    """A script that answers every request with these texts, one step each."""

    def script(job: Job) -> None:
        loop = job.engine.reception.loop

        def step(number: int) -> None:
            if job.ended:
                return
            if number < len(texts):
                job.say(texts[number])
                loop.call_soon(step, number + 1)
            else:
                job.finish(reason, tail=tail)

        def begin() -> None:
            if not job.ended:
                job.admit()
                loop.call_soon(step, 0)

        loop.call_soon(begin)

    return script


__all__ = ["CARD", "Engine", "Held", "Job", "Key", "MemoryBoard", "admit", "admit_and_say", "play"]
