"""The worker process of one device: plans in, tokens out, in the order of the plan ring.

Every rank reads every plan; rank 0 alone writes the token ring. What is computed is a runner's: the real model, or the
scripted one that replays a function of the seed. It decides nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from baton.engine.batch import Sampled, StepRow
from baton.engine.effects import Effect, Plan, Send, StepDone
from baton.engine.worker import WorkerCore
from baton.ipc.frames import Halt, KVLayout, Life, Role, WorkerHello
from baton.ipc.records import ring_holds
from baton.workers.config import Card, Settings, size_bytes, swap_bytes
from baton.workers.exhausted import out_of_memory, say_so
from baton.workers.fake import ScriptedRunner
from baton.workers.process import Process, StartError

SCRIPTED_BLOCK_TOKENS = 16
#: before any step was timed: slow enough that no machine's first long step is taken for a hang
TOKEN_NS_GUESS = 10e6
SCRIPTED_BLOCKS = 16384
SCRIPTED_BLOCK_BYTES = 8 * SCRIPTED_BLOCK_TOKENS  # of a list, a reference a token
SCRIPTED_WEIGHTS = "scripted"
AHEAD_MAX = 2  # steps begun and not collected, on a device that works by itself


class StepRunner(Protocol):
    """What a runner is to this process: rows in, one ``Sampled`` out for each row that asks for it, in order.

    A step yields up to ``tokens_per_row_max`` tokens for a row that samples. The figures are of memory, in bytes, and
    of blocks it has on the host.
    """

    @property
    def tokens_per_row_max(self) -> int: ...
    @property
    def weights_bytes(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def host_blocks(self) -> int: ...
    @property
    def swap_bytes_per_s(self) -> int: ...
    @property
    def kernels(self) -> str: ...  # what computes, in words for the log
    def move(self, moves: Sequence[tuple[int, int, int]]) -> None: ...
    def step(self, rows: Sequence[StepRow]) -> list[Sampled]: ...


@runtime_checkable
class DeviceRunner(Protocol):
    """A runner whose device works by itself: ``launch`` begins a step, ``collect`` waits for it.

    A step may be launched before the one before it was collected; a token that is ``UNKNOWN`` in it is the one that the
    earlier step samples for that slot. Without ``asynchronous`` the two are not used.
    """

    asynchronous: bool

    def launch(self, rows: Sequence[StepRow]) -> Any: ...  # a handle, the runner's own
    def collect(self, handle: Any) -> list[Sampled]: ...


class Greeter:
    """The core of this process: it greets every scheduler that comes up, so that a new one knows its workers.

    When another rank is replaced it joins the new group and greets again: only then is it known to be idle and empty.
    """

    def __init__(self, hello: WorkerHello, core: WorkerCore, group: Callable[[], tuple[int, ...]]) -> None:
        """``group`` reads the incarnations of all ranks from the life table."""
        self.hello = hello
        self.core = core
        self.group = group

    def start(self, now_ns: int) -> list[Effect]:
        """Greet the scheduler of the moment."""
        self.core.join(self.group())
        return [Send(Role.SCHEDULER, 0, msgspec.structs.replace(self.hello, group=self.core.group))]

    def handle(self, event: object, now_ns: int) -> list[Effect]:
        """Greet again when another scheduler or another rank takes its place."""
        match event:
            case Life(role=Role.SCHEDULER | Role.WORKER):
                return self.start(now_ns)
            case Life() | Halt():
                return []
            case _:
                raise AssertionError(f"no such event for a worker: {event!r}")

    def story(self) -> str:
        """A worker holds no request; what it computes is in the scheduler's story."""
        return f"{self.hello}\n"


@dataclass(slots=True)
class Begun:
    """A step that was begun: on a device that works by itself ``handle`` is what to collect."""

    plan: Plan
    rows: list[StepRow]
    tokens: int
    since_ns: int
    handle: Any  # the runner's own


class StepLoop:
    """Runs plans one after the other. The next plan mostly lies in the ring when a step is over.

    Invariant: steps are committed in the order of their plans. Only a device that works by itself is given a step
    before the one before it was collected.
    """

    def __init__(
        self,
        process: Process,
        runner: StepRunner,
        core: WorkerCore,
        step_s: float,
        group: Callable[[], tuple[int, ...]],
    ) -> None:
        self.process = process
        self.runner = runner
        self.device = runner if isinstance(runner, DeviceRunner) and runner.asynchronous else None
        self.core = core
        self.step_s = step_s
        self.group = group
        self.plans = process.plans(core.mistrust)
        self.write = process.step_writer() if process.me.index == 0 else None
        self.token_ns = TOKEN_NS_GUESS  # how long a token takes, on average of late: what the watch is told to expect
        self._todo: deque[Plan] = deque()
        self._begun: deque[Begun] = deque()
        self._trying: tuple[int, list[StepRow]] = (0, [])  # what the runner was last asked for
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    def plans_came(self) -> None:
        """The doorbell was rung: run what is there, unless that is being done already."""
        if self._stopped:
            return
        self._todo.extend(self.plans.read())
        if self._todo and self._task is None:
            self._task = self.process.loop.create_task(self._run())

    async def stop(self) -> None:
        """Give up the step at hand; none is begun after it, though a bell may still ring."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            while self._todo or self._begun:
                while self._todo and self._may_begin(self._todo[0]):
                    self._begin(self._todo.popleft())
                if self._begun:
                    await self._finish(self._begun.popleft())
                    self._todo.extend(self.plans.read())  # without waiting for the bell
                    await asyncio.sleep(0)  # whoever else has something to do here
        except Exception as error:
            if out_of_memory(error):
                say_so(self.process.log, *self._trying)
            self.process.fatal(error)
        finally:
            self._task = None

    def _may_begin(self, plan: Plan) -> bool:
        """Whether the step may set out now; with nothing under way it always may."""
        if not self._begun:
            return True
        return self.device is not None and len(self._begun) < AHEAD_MAX and self.core.can_run_ahead(plan)

    def _begin(self, plan: Plan) -> None:
        rows = self.core.apply(plan)
        if rows is None:
            return
        if plan.moves:
            self.runner.move(plan.moves)
        tokens, now_ns = sum(len(row.tokens) for row in rows), self.process.now_ns()
        self.process.board.expect(*self.process.me.place, int(tokens * self.token_ns))
        self._trying = plan.step, rows
        handle = self.device.launch(rows) if self.device is not None and rows else None
        self._begun.append(Begun(plan, rows, tokens, now_ns, handle))

    async def _finish(self, begun: Begun) -> None:
        rows, sampled = begun.rows, list[Sampled]()
        if rows:
            self._trying = begun.plan.step, rows
            if self.step_s:
                await asyncio.sleep(self.step_s)
            sampled = self.runner.step(rows) if self.device is None else self.device.collect(begun.handle)
            spent_ns = self.process.now_ns() - begun.since_ns
            self.token_ns += (spent_ns / begun.tokens - self.token_ns) / 8
        if self.group() == begun.plan.incarnations:  # else a rank was replaced meanwhile: the step is rolled back
            await self._commit(self.core.commit(begun.plan, rows, sampled))
        self.process.board.beat(*self.process.me.place)

    async def _commit(self, done: StepDone) -> None:
        if self.write is None:
            return
        while not self.write(done):  # noqa: ASYNC110 - the slowest reader is behind and does not ring back
            await asyncio.sleep(self.process.limits.ring_full_wait_s)
        for reader in (Role.SCHEDULER, Role.DETOKENIZER):
            self.process.surroundings.ring_bell(reader, 0, "tokens")


#: what makes a runner: it, its cache's layout, and the digest of its weights
RunnerMaker = Callable[[Settings, Card, Callable[[str], None]], tuple[StepRunner, KVLayout, str]]


def make_runner(settings: Settings, card: Card, phase: Callable[[str], None]) -> tuple[StepRunner, KVLayout, str]:
    """The runner the settings ask for; everything that can be wrong with model or memory is a ``StartError``.

    ``phase`` is told when the weights are there and the first steps are tried.
    """
    if settings.worker == "scripted":
        layout = KVLayout(
            SCRIPTED_BLOCK_TOKENS, settings.kv_blocks or SCRIPTED_BLOCKS, SCRIPTED_BLOCK_BYTES, 0, 0, 0, "none"
        )
        hosts = swap_bytes(settings) // layout.block_bytes
        seed = settings.scripted_faulty_seed
        faulty = {} if seed is None else {seed: 1}
        sizes = (card.vocab, layout.blocks, layout.block_tokens)
        scripted = ScriptedRunner(*sizes, faulty=faulty, host_blocks=hosts)
        return scripted, layout, SCRIPTED_WEIGHTS
    from baton.workers.cache import MemoryBudgetError
    from baton.workers.model.gguf import ModelFileError
    from baton.workers.model.loaded import KernelsUnavailable
    from baton.workers.runner import Runner, has_device

    if not has_device(settings.device):
        raise StartError(f"there is no {settings.device} device here that torch can use; see --device")

    kv_bytes = size_bytes(settings.kv_memory) if settings.kv_memory is not None else None
    try:
        runner = Runner(
            Path(card.path),
            dtype=settings.dtype,
            weights=settings.weights,
            kernels=settings.kernels,
            blocks=settings.kv_blocks,
            kv_bytes=kv_bytes,
            swap_bytes=swap_bytes(settings),
            verify_swaps=settings.log_level == "debug",
            threads=settings.threads,
            device=settings.device,
            vocab=card.vocab,
        )
        phase("warming")
        limits = settings.limits
        runner.measure(settings.max_step_tokens or limits.step_tokens_max, limits.running_requests_max)
        runner.warm_up()
        runner.time_swaps()
    except (ModelFileError, KernelsUnavailable, MemoryBudgetError) as error:
        raise StartError(str(error)) from error
    made = runner.layout
    layout = KVLayout(
        made.block_size, made.blocks, made.bytes_per_block, made.layers, made.kv_heads, made.head_dim, settings.dtype
    )
    return runner, layout, runner.weights_digest


async def run(process: Process, make: RunnerMaker = make_runner) -> None:
    """Serve until halted."""
    settings, card, me = process.settings, process.card, process.me
    process.phase("loading")
    runner, layout, digest = make(settings, card, process.phase)
    process.log.info("kernels", computing=runner.kernels)
    ranks, of_a_row, limits = process.plan_readers(), runner.tokens_per_row_max, process.limits
    rows, tokens = limits.running_requests_max, settings.max_step_tokens or limits.step_tokens_max
    most = (rows * of_a_row, limits.top_logprobs_max, tokens, limits.prompt_logprobs_max)
    if not ring_holds(limits.token_ring_bytes, *most):
        what = f"a step of {rows} rows with {of_a_row} tokens each and {tokens} tokens of prompts"
        raise StartError(f"limits.token_ring_bytes: too small for {what}, with their log-probabilities")

    def group() -> tuple[int, ...]:
        return tuple(process.board.live(Role.WORKER, rank) for rank in range(ranks))

    hello = WorkerHello(
        *(me, me.index, group(), layout, digest, card.vocab, card.context_tokens_max, of_a_row),
        weights_bytes=runner.weights_bytes,
        workspace_bytes=runner.workspace_bytes,
        host_blocks=runner.host_blocks,
        swap_bytes_per_s=runner.swap_bytes_per_s,
    )
    core = WorkerCore(me.index, hello.group, layout.block_tokens)
    step_s = settings.scripted_step_ms / 1000 if settings.worker == "scripted" else 0.0
    loop = StepLoop(process, runner, core, step_s, group)
    process.hear("plans", loop.plans_came)
    process.run_core(Greeter(hello, core, group), {})
    process.ready({"weights": digest, "kv_blocks": str(layout.blocks), "kv_block_bytes": str(layout.block_bytes)})
    await process.halted.wait()
    await loop.stop()
