"""The processes of level two: each runs what ``workers.child`` runs, in a compartment of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from baton.engine.batch import Sampled, StepRow
from baton.engine.effects import Span
from baton.frontends import process as frontend
from baton.ipc.frames import KVLayout, Role
from baton.ipc.log import Log
from baton.ipc.memory_link import Place
from baton.ipc.virtual_clock import Compartment
from baton.workers import detokenizer, gpu, scheduler, tokenizer
from baton.workers.config import Card, Launch, Settings
from baton.workers.fake import ScriptedRunner
from baton.workers.memory import MemorySurroundings
from baton.workers.process import Process, live
from tests.sim.script import POISON, VOCAB, Shape
from tests.sim.visitors import Entrance

if TYPE_CHECKING:
    from tests.sim.host import Host

#: what a process says only when something is wrong with it, or with those who speak to it
WRONG = ("fatal", "task_failed")
DROPPED = ("malformed_frame", "foreign_frame", "oversized_frame", "unexpected_frame", "astray_frame")


class Member:
    """One incarnation of one place. ``stopped``: as by SIGSTOP, which the kernel would tell."""

    def __init__(self, host: Host, launch: Launch) -> None:
        self.host = host
        self.launch = launch
        self.me = launch.address
        self.compartment = Compartment(str(self.me), self._failed)
        self.entrance = Entrance(host)
        self.stopped = False
        self.starved = False  # its next step finds no memory
        self.speaks: int | None = None  # so many frames until it is killed
        self.process: Process | None = None

    @property
    def incarnation(self) -> int:
        """This process among those that filled the place."""
        return self.me.incarnation

    @property
    def place(self) -> Place:
        """What the oracles know it by."""
        return self.me.place

    @property
    def core(self) -> Any:
        """The core behind its shell; None before there is one."""
        shell = self.process.shell if self.process is not None else None
        return shell.core if shell is not None else None

    async def main(self) -> None:
        """What ``workers.child`` does, on this machine."""
        host = self.host
        log = Log(Recorder(host, self))
        surroundings = MemorySurroundings(host.machine, self.compartment, self.me, log, Spans(host))
        self.process = Process(self.launch, self.me, surroundings)
        if host.rng.random() < 0.3:  # it is long in loading, and hears frames meanwhile
            await asyncio.sleep(host.jitter(30))
        host.ended(self, await live(self.process, self._role()))

    def _role(self) -> Callable[[Process], Coroutine[None, None, None]]:
        match self.me.role:
            case Role.FRONTEND:
                return lambda process: frontend.run(process, self.entrance)
            case Role.TOKENIZER:
                return tokenizer.run
            case Role.SCHEDULER:
                return scheduler.run
            case Role.DETOKENIZER:
                return detokenizer.run
            case _:
                return lambda process: gpu.run(process, self._make_runner)

    def _make_runner(
        self, settings: Settings, card: Card, phase: Callable[[str], None]
    ) -> tuple[gpu.StepRunner, KVLayout, str]:
        """The script in place of a model."""
        phase("warming")
        shape = self.host.shape
        return Exhaustible(self, shape), KVLayout(shape.block_tokens, shape.blocks, 1, 1, 1, 1, "float32"), "w"

    def _failed(self, error: Exception) -> None:
        assert self.process is not None
        self.process.loop_failed(self.host.loop, {"exception": error, "message": "a callback failed"})


class Poisoned(Exception):
    """What a worker cannot compute, however often it is tried."""


#: how it is said that there is no memory: by Python, by torch on a device, by torch on the CPU
NO_MEMORY: tuple[tuple[type[Exception], str], ...] = (
    (MemoryError, ""),
    (RuntimeError, "CUDA out of memory. Tried to allocate 2.00 GiB."),
    (RuntimeError, "[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory"),
)


class Exhaustible:
    """A runner that has no memory for a step once its process is starved, and, if it can be ``poisoned``, fails at the
    second token of the requests that such a world has.
    """

    def __init__(self, member: Member, shape: Shape) -> None:
        sizes = (VOCAB, shape.blocks, shape.block_tokens, shape.mean_tokens)
        most = shape.tokens_per_row_max
        self._runner = runner = ScriptedRunner(
            *sizes, faulty=shape.faulty, tokens_per_row_max=most, host_blocks=shape.host_blocks
        )
        self.asynchronous = member.host.seed % 3 == 0 and not shape.poison
        self._member = member
        self._poisoned = shape.poison
        self.tokens_per_row_max = runner.tokens_per_row_max
        self.weights_bytes, self.workspace_bytes = runner.weights_bytes, runner.workspace_bytes
        self.host_blocks, self.swap_bytes_per_s = runner.host_blocks, runner.swap_bytes_per_s
        self.kernels = runner.kernels
        self.move = runner.move

    def step(self, rows: Sequence[StepRow]) -> list[Sampled]:
        """As the runner's, but for the starved and the poisoned."""
        if self._member.starved:
            kind, words = self._member.host.rng.choice(NO_MEMORY)
            raise kind(words)
        if self._poisoned and any(row.sampling.seed == POISON and row.position == 1 for row in rows):
            raise Poisoned
        return self._runner.step(rows)

    def launch(self, rows: Sequence[StepRow]) -> list[Sampled]:
        """Begin a step; what to ``collect``."""
        return self.step(rows)

    def collect(self, handle: list[Sampled]) -> list[Sampled]:
        """What a launched step sampled."""
        return handle


class Recorder:
    """The log of a process, read by the host."""

    def __init__(self, host: Host, member: Member) -> None:
        self._host = host
        self._member = member
        self._who = member.me

    def debug(self, event: str, **fields: Any) -> None:
        """Below what is worth a line."""

    def info(self, event: str, **fields: Any) -> None:
        """Below what is worth a line."""

    def warning(self, event: str, **fields: Any) -> None:
        """A line of the history; some are wrong in any history."""
        if self._host.over:
            return
        self._host.say(f"{self._who} logs {event}")
        self._host.said[f"{self._who.role.name.lower()} {event}"] += 1
        error = fields.get("exc_info")
        if isinstance(error, Poisoned) or (self._member.starved and isinstance(error, MemoryError | RuntimeError)):
            self._host.crashed(self._member)
        elif event in WRONG or (event in DROPPED and not self._host.forgeries):
            self._host.object(f"{self._who}: {event} {fields}")

    error = warning


class Spans:
    """Where a process's spans go: before the oracles."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def emit(self, span: Span) -> None:
        """One finished span."""
        self._host.judge(self._host.oracles.span, span)

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """Nothing is kept back."""
