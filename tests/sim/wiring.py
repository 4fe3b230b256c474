"""Defects of the wiring, one a rule: each is put into a shell, a link or a clock and must be caught by level two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton.engine.health import HealthCore
from baton.ipc.frames import Life, Role
from baton.ipc.memory_link import MemoryLinks
from baton.ipc.records import StepReader
from baton.ipc.ring import RingDamaged
from baton.ipc.shell import Shell
from baton.workers.gpu import StepLoop
from baton.workers.memory import MemoryMachine
from baton.workers.process import Process

Patch = pytest.MonkeyPatch


def a_bell_is_not_rung(patch: Patch) -> None:
    """The detokenizer is not told of tokens."""
    ring_bell = MemoryMachine.ring_bell

    def deaf(self: Any, bell: Any) -> None:
        if bell[0] != Role.DETOKENIZER:
            ring_bell(self, bell)

    patch.setattr(MemoryMachine, "ring_bell", deaf)


def early_frames_are_dropped(patch: Patch) -> None:
    """What comes before the core is lost."""
    deliver = Process._deliver

    def hasty(self: Any, frame: Any) -> None:
        deliver(self, frame)
        self._early.clear()

    patch.setattr(Process, "_deliver", hasty)


def a_halt_is_not_heard(patch: Patch) -> None:
    """A process goes on after a halt."""
    init = Process.__init__

    def stubborn(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self.halted.set = lambda: None

    patch.setattr(Process, "__init__", stubborn)


def timers_outlive_their_process(patch: Patch) -> None:
    """A closing process leaves its timers."""
    patch.setattr(Shell, "stop", lambda self: None)


def plans_are_run_at_the_same_time(patch: Patch) -> None:
    """Every bell starts a loop over the plans."""
    came = StepLoop.plans_came

    def eager(self: Any) -> None:
        self._task = None
        came(self)

    patch.setattr(StepLoop, "plans_came", eager)


def a_full_ring_loses_tokens(patch: Patch) -> None:
    """A worker that finds the ring full goes on without its records."""

    async def careless(self: Any, done: Any) -> None:
        self.write(done)
        for role in (Role.SCHEDULER, Role.DETOKENIZER):
            self.process.surroundings.ring_bell(role, 0, "tokens")

    patch.setattr(StepLoop, "_commit", careless)


def nobody_is_told_of_a_life(patch: Patch) -> None:
    """The supervisor fills a place and says nothing."""
    broadcast = HealthCore._broadcast

    def silent(self: Any, frame: Any, out: Any) -> None:
        if not isinstance(frame, Life):
            broadcast(self, frame, out)

    patch.setattr(HealthCore, "_broadcast", silent)


def the_hung_are_left_alone(patch: Patch) -> None:
    """The supervisor does not look."""
    patch.setattr(HealthCore, "_condemn", lambda *arguments: None)


def a_full_inbox_loses_frames(patch: Patch) -> None:
    """What finds the inbox full is dropped."""
    patch.setattr(MemoryLinks, "room", property(lambda self: 1))
    take = MemoryLinks.take

    def lossy(self: Any, data: bytes) -> None:
        if len(self._inbox) < self.limits.inbox_frames_max:
            take(self, data)

    patch.setattr(MemoryLinks, "take", lossy)


def damage_is_passed_over(patch: Patch) -> None:
    """A reader that finds damage skips it and tells nobody."""

    def quiet(self: Any) -> Any:
        try:
            return [self._decode(frame) for frame in self._reader.read()]
        except RingDamaged:
            self._reader.skip()
            return []

    patch.setattr(StepReader, "read", quiet)


def a_ping_is_not_seen(patch: Patch) -> None:
    """Reading a ping does not move the pulse on."""
    deliver = Process._deliver

    def numb(self: Any, frame: Any) -> None:
        beat, self.board.beat = self.board.beat, lambda role, index: None
        deliver(self, frame)
        self.board.beat = beat

    patch.setattr(Process, "_deliver", numb)


def a_step_outlives_its_worker(patch: Patch) -> None:
    """A halted worker does not wait for the step it gave up."""

    async def stop(self: Any) -> None:
        if self._task is not None:
            self._task.cancel()

    patch.setattr(StepLoop, "stop", stop)


#: every mutant; each must be caught within ``SEEDS``
WIRING: list[Callable[[Patch], None]] = [
    a_bell_is_not_rung,
    early_frames_are_dropped,
    a_halt_is_not_heard,
    timers_outlive_their_process,
    plans_are_run_at_the_same_time,
    a_full_ring_loses_tokens,
    nobody_is_told_of_a_life,
    the_hung_are_left_alone,
    a_full_inbox_loses_frames,
    damage_is_passed_over,
    a_ping_is_not_seen,
    a_step_outlives_its_worker,
]
SEEDS = range(200)
