"""An event loop on a virtual clock: when nothing is ready, time jumps to the next timer. For simulation and tests.

Several simulated processes share one loop. Each is a *compartment*: every callback, timer and task that is begun in
one belongs to it, so that a whole process can be frozen, thawed or killed between two of its callbacks, as by the
kernel. A killed one leaves its coroutines where they stood; nothing of it runs any more, not even a ``finally``.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import selectors
from collections.abc import Callable, Coroutine, Generator, Mapping
from typing import Any, TypeVar, TypeVarTuple

_current: contextvars.ContextVar[Compartment | None] = contextvars.ContextVar("compartment", default=None)
ResultT = TypeVar("ResultT")
Ts = TypeVarTuple("Ts")
_PRUNE_TIMERS = 64  # so many known timers are looked through for cancelled ones


class Asleep(Exception):
    """Nothing is ready and nothing is scheduled: what is waited for will never come."""


class Killed(BaseException):
    """Unwinds the one callback in which a simulated process killed itself."""


class Compartment:
    """What belongs to one simulated process. Invariant: none of it runs while ``frozen``, or ever again once ``dead``.

    ``failed`` is called with an exception that one of its callbacks raised.
    """

    def __init__(self, name: str, failed: Callable[[Exception], None]) -> None:
        self.name = name
        self.failed = failed
        self.dead = False
        self.frozen = False
        self.tasks: set[asyncio.Task[Any]] = set()
        self.timers: set[asyncio.TimerHandle] = set()
        self._held: list[tuple[Callable[..., object], tuple[Any, ...], contextvars.Context]] = []
        self._context = contextvars.copy_context()
        self._context.run(_current.set, self)

    def run(self, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Call a function as if from within."""
        return self._context.copy().run(function, *arguments)

    def kill(self) -> None:
        """Nothing of it runs any more."""
        self.dead = True
        self._held.clear()

    def freeze(self) -> None:
        """Nothing of it runs until it is thawed."""
        self.frozen = True

    def thaw(self) -> None:
        """What would have run meanwhile runs now, in its order."""
        self.frozen = False
        loop, held = asyncio.get_running_loop(), self._held
        self._held = []
        for callback, arguments, context in held:
            loop.call_soon(callback, *arguments, context=context)

    def left(self) -> list[str]:
        """Tasks that are not done and timers that are not cancelled, for a check at its end."""
        tasks = [repr(task) for task in self.tasks if not task.done()]
        return tasks + [repr(timer) for timer in self.timers if not timer.cancelled()]

    def enter(self, callback: Callable[..., object], arguments: tuple[Any, ...], context: contextvars.Context) -> None:
        """Run one callback now, or keep it while frozen."""
        if self.dead:
            return
        if self.frozen:
            self._held.append((callback, arguments, context))
            return
        try:
            try:
                callback(*arguments)
            except Exception as error:
                self.failed(error)
        except Killed:
            self.kill()


class VirtualLoop(asyncio.SelectorEventLoop):
    """Invariant: time never runs backwards and never by itself; between two callbacks it stands still."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns
        self._standing: set[asyncio.Task[Any]] = set()  # held, so that no coroutine of a dead process is collected
        super().__init__(_Jumper(self))

    def now_ns(self) -> int:
        """The virtual time in ns; what a simulated process takes for the machine's clock."""
        return self._now_ns

    def time(self) -> float:
        """The same in seconds."""
        return self._now_ns / 1e9

    def jump(self, timeout_s: float) -> None:
        """Move on to the next timer."""
        self._now_ns += math.ceil(timeout_s * 1e9)

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """As any loop's, within the compartment of ``context``."""
        context = context if context is not None else contextvars.copy_context()
        compartment = context.get(_current)
        if compartment is None:
            return super().call_soon(callback, *args, context=context)
        return super().call_soon(compartment.enter, callback, args, context, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """As any loop's, within the compartment of ``context``."""
        context = context if context is not None else contextvars.copy_context()
        compartment = context.get(_current)
        if compartment is None:
            return super().call_at(when, callback, *args, context=context)
        timers = compartment.timers

        def ring() -> None:
            timers.discard(timer)
            compartment.enter(callback, args, context)

        timer = super().call_at(when, ring, context=context)
        timers.add(timer)
        if len(timers) > _PRUNE_TIMERS:
            timers.difference_update([old for old in timers if old.cancelled()])
        return timer

    def create_task(
        self,
        coro: Generator[Any, None, ResultT] | Coroutine[Any, Any, ResultT],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[ResultT]:
        """As any loop's, within the compartment of ``context``."""
        task = super().create_task(coro, name=name, context=context)
        compartment = _current.get() if context is None else context.get(_current)
        if compartment is not None:
            for tasks in (compartment.tasks, self._standing):
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        return task

    def bury(self) -> None:
        """At the end of a simulation: end every coroutine that still stands somewhere, and hear nothing of it."""
        self.set_exception_handler(lambda loop, context: None)
        for task in asyncio.all_tasks(self):
            coroutine = task.get_coro()
            assert coroutine is not None
            with contextlib.suppress(Exception, Killed):  # it ends in the ruins of a process; nothing it says counts
                coroutine.close()
        self.close()


class _Jumper(selectors.BaseSelector):
    """A selector that never sees a file become ready: to wait is to move the clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, 0, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Asleep("nothing is ready and nothing is scheduled")
        if timeout > 0:
            self._loop.jump(timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys
