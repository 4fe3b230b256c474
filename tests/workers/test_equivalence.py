"""However a request is served, it says the same: in chunks, from the cache, one step ahead, in company.

The scheduler's core, the worker's core and the real model in one process, in float32; against each request alone.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from baton.engine.limits import Limits
from baton.engine.policies import Policies
from baton.engine.worker import WorkerCore
from baton.ipc.frames import Address, KVLayout, Params, Role, WorkerHello
from baton.workers.runner import Runner
from tests.engine.rig import Engine

BLOCKS = 24
STEM = [504, 3575, 314, 260, 1002, 338, 253, 2195, 284, 411, 30, 657, 1217, 582, 253, 1098, 282, 338, 1121, 355]


@pytest.fixture(scope="module")
def exact(model_path: Path) -> Runner:
    return Runner(model_path, dtype="float32", weights="bfloat16", blocks=BLOCKS, threads=1)


class Real(Engine):
    """An engine whose runner is the real model."""

    def __init__(self, runner: Runner, limits: Limits, in_flight: int, prefix_cache: bool) -> None:
        self.model = runner
        super().__init__(limits, BLOCKS, 16, in_flight, Policies(prefix_cache=prefix_cache))

    def start_worker(self, incarnation: int, blocks: int) -> list[object]:  # type: ignore[override]
        """The model fills the worker's place."""
        self.runner = self.model  # type: ignore[assignment]
        self.worker = WorkerCore(0, (incarnation,), 16)
        self.board.set_live(Role.WORKER, 0, incarnation, 0)
        layout = KVLayout(16, blocks, 1, 1, 1, 1, "float32")
        me = Address(Role.WORKER, "m", 0, 0, incarnation)
        return self.tell(WorkerHello(me, 0, (incarnation,), layout, "w", 49152, 4096))  # type: ignore[return-value]


def serve(engine: Real, asked: list[tuple[list[int], Params]]) -> list[list[int]]:
    """What each request says; they come one a step."""
    said = []
    for slot, (prompt, params) in enumerate(asked):
        engine.submit(slot, prompt, params)
        said.append(engine.core.sequences[slot].output)
        engine.step()
    engine.run()
    assert len(engine.flushed()) == len(asked)
    return said


def workload(seed: int) -> list[tuple[list[int], Params]]:
    """Prompts that share beginnings, greedy and sampled."""
    rng = random.Random(seed)
    asked = []
    for number in range(4):
        prompt = (STEM * 4)[: rng.choice((32, 48, 64))] + [
            rng.randrange(1000, 2000) for _ in range(rng.choice((0, 3, 9)))
        ]
        temperature = rng.choice((0.0, 0.8))
        asked.append(
            (prompt, Params(max_tokens=rng.randrange(4, 24), temperature=temperature, seed=number, ignore_eos=True))
        )
    return asked


def test_a_request_says_the_same_however_it_is_served(exact: Runner) -> None:
    asked = workload(0)
    alone = [serve(Real(exact, Limits(), 1, False), [one])[0] for one in asked]
    for budget, in_flight, prefix_cache in ((512, 2, True), (11, 2, True), (17, 1, False)):
        engine = Real(exact, Limits(step_tokens_max=budget), in_flight, prefix_cache)
        assert serve(engine, asked) == alone, (budget, in_flight, prefix_cache)
        pool = engine.core.batcher.pool
        assert pool is not None and bool(pool.counts.hits) == prefix_cache
