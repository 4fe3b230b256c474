"""What a worker tells the watch to expect of its steps: a patient guess before the first, then what steps take."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from baton.engine.batch import sampling_of
from baton.engine.effects import Plan, Row, Start, StepDone
from baton.engine.limits import Limits
from baton.engine.watch import Watch
from baton.engine.worker import WorkerCore
from baton.ipc.board import PlaceView
from baton.ipc.frames import Address, Params, Role
from baton.workers.fake import ScriptedRunner
from baton.workers.gpu import TOKEN_NS_GUESS, StepLoop

ME = Address(Role.WORKER, "m", 0, 0, 1)
STEP_TOKENS, TOKEN_NS = 512, 3_000_000


class Around:
    """What a step loop needs of its process: a clock that steps move on, a board that keeps what is expected."""

    def __init__(self) -> None:
        self.me, self.board, self.loop = ME, self, asyncio.get_running_loop()
        self.ns = 0
        self.expected: list[int] = []
        self.waiting: deque[list[Plan]] = deque()
        self.done: list[StepDone] = []

    def now_ns(self) -> int:
        return self.ns

    def expect(self, role: Role, index: int, duration_ns: int) -> None:
        self.expected.append(duration_ns)

    def beat(self, role: Role, index: int) -> None:
        pass

    def plans(self, lost: Any) -> Around:
        return self

    def read(self) -> list[Plan]:
        return self.waiting.popleft() if self.waiting else []

    def step_writer(self) -> Any:
        return self.write

    def write(self, done: StepDone) -> bool:
        self.done.append(done)
        return True

    def fatal(self, error: BaseException) -> None:
        raise error


class Timed(ScriptedRunner):
    """Takes ``TOKEN_NS`` of the clock for each token."""

    around: Around

    def step(self, rows: Any) -> Any:
        self.around.ns += TOKEN_NS * sum(len(row.tokens) for row in rows)
        return super().step(rows)


async def test_the_first_step_is_given_time_by_guess_and_later_ones_by_what_steps_took() -> None:
    around = Around()
    runner = Timed(32, 64, 16, 1 << 30)
    runner.around = around
    loop = StepLoop(around, runner, WorkerCore(0, (1,), 16), 0.0, lambda: (1,))  # type: ignore[arg-type]
    prompt = [2 + number % 30 for number in range(STEP_TOKENS)]
    start = Start(0, 0, 1, prompt, STEP_TOKENS, sampling_of(Params(max_tokens=40, ignore_eos=True), (1,)))
    blocks = list(range(40))
    around.waiting.append([Plan((1,), 1, [], [start], [Row(0, 0, STEP_TOKENS, blocks, True)])])
    for step in range(2, 40):
        around.waiting.append([Plan((1,), step, [], [], [Row(0, STEP_TOKENS + step - 2, 1, [], True)])])
    async with asyncio.timeout(10):
        while len(around.done) < 39:
            loop.plans_came()
            await asyncio.sleep(0)
    assert around.expected[0] == int(STEP_TOKENS * TOKEN_NS_GUESS)
    assert all(later <= before for before, later in zip(around.expected[1:], around.expected[2:], strict=False))
    assert abs(around.expected[-1] - TOKEN_NS) < TOKEN_NS / 20
    if loop._task is not None:
        await loop.stop()


def test_a_first_step_that_takes_as_long_as_guessed_is_no_hang_however_impatient_the_watch() -> None:
    limits = Limits(hung_s_max=0.1, ping_interval_s=0.1)
    watch, expected = Watch(limits), int(STEP_TOKENS * TOKEN_NS_GUESS)
    for at_ns in range(0, expected, expected // 50):
        place = PlaceView(Role.WORKER, 0, 1, 7, 0, 0, "ready", expected)
        assert watch.look(place, "S", at_ns)[1] is None
