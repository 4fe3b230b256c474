"""The one loop of every process: an event goes to the core, its effects are carried out, then the next event's turn.

The shell decides nothing. Timers, frames, rings and spans are the same everywhere; what only one role can do (encode a
prompt, write a plan, speak to a door) is given to it as ``perform``, one function for each kind of effect.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from baton.engine.effects import Effect, Note, Send, Span, Tick, Wake
from baton.ipc.frames import AnyFrame, Role


class Core(Protocol):
    """What every core is: a start, events in and effects out, and a story of what it holds, for dumps."""

    def start(self, now_ns: int) -> list[Effect]: ...
    def handle(self, event: object, now_ns: int) -> list[Effect]: ...
    def story(self) -> str: ...


class Sender(Protocol):
    """The speaking half of a process's links."""

    def send(self, role: Role, index: int, frame: AnyFrame) -> None: ...


class Shell:
    """Runs one core. Invariant: the effects of an event are carried out before the next event is handled.

    An exception while an event is handled is ours, and ``fatal``: half-done work must not be gone on with.
    """

    def __init__(
        self,
        core: Core,
        links: Sender,
        emit: Callable[[Span], None],
        note: Callable[[Note], None],
        beat: Callable[[], None],
        fatal: Callable[[BaseException], None],
        now_ns: Callable[[], int],
        perform: dict[type, Callable[[Any], None]],
    ) -> None:
        self.core = core
        self._now_ns = now_ns
        self._beat = beat
        self._fatal = fatal
        self._loop = asyncio.get_running_loop()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._events: deque[object] = deque()
        self._busy = False
        self._perform: dict[type, Callable[[Any], None]] = {
            Send: lambda effect: links.send(effect.role, effect.index, effect.frame),
            Wake: self._wake,
            Span: emit,
            Note: note,
            **perform,
        }

    def start(self) -> None:
        """Let the core begin."""
        self._busy = True
        self._carry_out(self.core.start(self._now_ns()))
        self._busy = False
        self._run()

    def feed(self, event: object) -> None:
        """Handle an event; one that comes up while another is being handled waits for its turn."""
        self._events.append(event)
        if not self._busy:
            self._run()

    def stop(self) -> None:
        """Cancel the timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _run(self) -> None:
        self._busy = True
        try:
            while self._events:
                event = self._events.popleft()
                self._carry_out(self.core.handle(event, self._now_ns()))
                self._beat()
        except Exception as error:
            self._fatal(error)
            raise
        finally:
            self._busy = False

    def _carry_out(self, effects: list[Effect]) -> None:
        perform = self._perform
        for effect in effects:
            perform[type(effect)](effect)

    def _wake(self, effect: Wake) -> None:
        old = self._timers.pop(effect.name, None)
        if old is not None:
            old.cancel()
        delay_s = max(0.0, (effect.at_ns - self._now_ns()) / 1e9)
        self._timers[effect.name] = self._loop.call_later(delay_s, self._tick, effect.name)

    def _tick(self, name: str) -> None:
        self._timers.pop(name, None)
        self.feed(Tick(name))
