"""The worker process of one device: plans in, tokens out. One step at a time, in the order of the plan ring.

Every rank reads every plan; rank 0 alone writes the token ring. What is computed is a runner's: the real model, or the
scripted one that replays a function of the seed. It decides nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from baton.engine.batch import Sampled, StepRow
from baton.engine.effects import Effect, Plan, Send, StepDone
from baton.engine.worker import WorkerCore
from baton.ipc.frames import Halt, KVLayout, Life, Role, WorkerHello
from baton.ipc.records import ring_holds
from baton.workers.config import Card, Settings, size_bytes
from baton.workers.exhausted import out_of_memory, say_so
from baton.workers.fake import ScriptedRunner
from baton.workers.process import Process, StartError

SCRIPTED_BLOCK_TOKENS = 16
#: before any step was timed: slow enough that no machine's first long step is taken for a hang
TOKEN_NS_GUESS = 10e6
SCRIPTED_BLOCKS = 16384
SCRIPTED_WEIGHTS = "scripted"


class StepRunner(Protocol):
    """What a runner is to this process. A step yields up to ``tokens_per_row_max`` tokens for a row that samples.

    The figures are of memory, in bytes, and of blocks it has on the host.
    """

    @property
    def tokens_per_row_max(self) -> int: ...
    @property
    def weights_bytes(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def host_blocks(self) -> int: ...
    def step(self, rows: Sequence[StepRow]) -> list[Sampled]: ...


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


class StepLoop:
    """Runs plans one after the other. Invariant: a step's records are committed before the next plan is looked at."""

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
        self.core = core
        self.step_s = step_s
        self.group = group
        self.plans = process.plans()
        self.write = process.step_writer() if process.me.index == 0 else None
        self.token_ns = TOKEN_NS_GUESS  # how long a token takes, on average of late: what the watch is told to expect
        self._todo: deque[Plan] = deque()
        self._task: asyncio.Task[None] | None = None

    def plans_came(self) -> None:
        """The doorbell was rung: run what is there, unless it is being run already."""
        self._todo.extend(self.plans.read())
        if self._todo and self._task is None:
            self._task = self.process.loop.create_task(self._run())

    async def stop(self) -> None:
        """Give up the step at hand."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        plan, rows = None, None
        try:
            while self._todo:
                plan = self._todo.popleft()
                rows = self.core.apply(plan)
                if rows is None:
                    continue
                tokens = sum(len(row.tokens) for row in rows)
                self.process.board.expect(*self.process.me.place, int(tokens * self.token_ns))
                began_ns = self.process.now_ns()
                if self.step_s:
                    await asyncio.sleep(self.step_s)
                sampled = self.runner.step(rows)
                if self.group() != plan.incarnations:  # a rank was replaced meanwhile: the step is rolled back
                    continue
                done = self.core.commit(plan, rows, sampled)
                self.token_ns += (((self.process.now_ns() - began_ns) / tokens) - self.token_ns) / 8
                await self._commit(done)
                self.process.board.beat(*self.process.me.place)
        except Exception as error:
            if plan is not None and out_of_memory(error):
                say_so(self.process.log, plan.step, rows or [])
            self.process.fatal(error)
        finally:
            self._task = None

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
        layout = KVLayout(SCRIPTED_BLOCK_TOKENS, settings.kv_blocks or SCRIPTED_BLOCKS, 0, 0, 0, 0, "none")
        return ScriptedRunner(card.vocab, layout.blocks, layout.block_tokens), layout, SCRIPTED_WEIGHTS
    from baton.workers.cache import MemoryBudgetError
    from baton.workers.model.gguf import ModelFileError
    from baton.workers.runner import Runner, has_device

    if not has_device(settings.device):
        raise StartError(f"there is no {settings.device} device here that torch can use; see --device")

    kv_bytes = size_bytes(settings.kv_memory) if settings.kv_memory is not None else None
    try:
        runner = Runner(
            Path(card.path),
            dtype=settings.dtype,
            weights=settings.weights,
            blocks=settings.kv_blocks,
            kv_bytes=kv_bytes,
            threads=settings.threads,
            device=settings.device,
            vocab=card.vocab,
        )
        phase("warming")
        limits = settings.limits
        runner.measure(settings.max_step_tokens or limits.step_tokens_max, limits.running_requests_max)
        runner.warm_up()
    except (ModelFileError, MemoryBudgetError) as error:
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
    ranks, of_a_row, limits = process.plan_readers(), runner.tokens_per_row_max, process.limits
    if not ring_holds(limits.token_ring_bytes, limits.running_requests_max * of_a_row, limits.top_logprobs_max):
        rows = limits.running_requests_max
        raise StartError(f"limits.token_ring_bytes: too small for a step of {rows} rows with {of_a_row} tokens each")

    def group() -> tuple[int, ...]:
        return tuple(process.board.live(Role.WORKER, rank) for rank in range(ranks))

    hello = WorkerHello(
        *(me, me.index, group(), layout, digest, card.vocab, card.context_tokens_max, of_a_row),
        weights_bytes=runner.weights_bytes,
        workspace_bytes=runner.workspace_bytes,
        host_blocks=runner.host_blocks,
    )
    core = WorkerCore(me.index, hello.group, layout.block_tokens)
    step_s = settings.scripted_step_ms / 1000 if settings.worker == "scripted" else 0.0
    loop = StepLoop(process, runner, core, step_s, group)
    process.hear("plans", loop.plans_came)
    process.run_core(Greeter(hello, core, group), {})
    process.ready({"weights": digest, "kv_blocks": str(layout.blocks), "kv_block_bytes": str(layout.block_bytes)})
    await process.halted.wait()
    await loop.stop()
