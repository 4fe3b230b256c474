"""Steps launched before the ones before them were collected say what steps one after the other say."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path

import msgspec
import pytest

from baton.engine.batch import UNKNOWN, Sampling, StepRow
from baton.engine.effects import Doorbell, Plan
from baton.engine.limits import Limits
from baton.engine.policies import Policies
from baton.engine.worker import WorkerCore
from baton.ipc.frames import Address, KVLayout, Params, Role, WorkerHello
from baton.workers.model.torch_steps import Launched
from baton.workers.runner import Runner
from tests.engine.rig import Engine

BLOCKS = 24
STEM = [504, 3575, 314, 260, 1002, 338, 253, 2195, 284, 411, 30, 657, 1217, 582, 253, 1098, 282, 338, 1121, 355]
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, end_ids=())
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}


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


class Ahead(Real):
    """An engine whose device is given the next step before the last is collected, wherever the worker's core lets it.

    ``ahead`` counts the tokens that were computed before anybody but the device knew them.
    """

    def __init__(self, runner: Runner, limits: Limits) -> None:
        self.begun: deque[tuple[Plan, list[StepRow], Launched | None]] = deque()
        self.ahead = self.held_back = 0
        super().__init__(runner, limits, 2, True)

    def step(self) -> bool:
        """Launch what may be launched, collect one step, and tell the scheduler."""
        while self.waiting and (not self.begun or self.worker.can_run_ahead(self.waiting[0])):
            plan = self.waiting.popleft()
            rows = self.worker.apply(plan) or []
            self.model.move(plan.moves)
            self.ahead += sum(UNKNOWN in row.tokens for row in rows)
            self.begun.append((plan, rows, self.model.launch(rows) if rows else None))
        if not self.begun:
            return False
        self.held_back += len(self.waiting)
        plan, rows, launched = self.begun.popleft()
        self.tape.steps.append(
            self.worker.commit(plan, rows, self.model.collect(launched) if launched is not None else [])
        )
        self.tell(Doorbell())
        return True


def penalised(asked: list[tuple[list[int], Params]]) -> list[tuple[list[int], Params]]:
    """The same requests, every second one with penalties on what was said before."""
    return [
        (prompt, msgspec.structs.replace(params, **PENALTIES) if number % 2 else params)
        for number, (prompt, params) in enumerate(asked)
    ]


@pytest.mark.parametrize("budget", [512, 11])
def test_a_step_launched_before_the_last_was_collected_says_the_same(exact: Runner, budget: int) -> None:
    asked, limits = workload(1), Limits(step_tokens_max=budget)
    engine = Ahead(exact, limits)
    assert serve(engine, asked) == serve(Real(exact, limits, 1, True), asked)
    assert engine.ahead > 0


def test_a_choice_that_needs_what_was_said_before_is_made_once_it_is_known(exact: Runner) -> None:
    asked = penalised(workload(2))
    engine = Ahead(exact, Limits())
    assert serve(engine, asked) == serve(Real(exact, Limits(), 1, True), asked)
    assert engine.held_back > 0


def test_each_slot_has_its_own_last_token_whatever_its_number(exact: Runner) -> None:
    """Slots far apart, in another order the second time; each goes on with its own token."""
    prompts = {700: [504, 3575, 314], 2: [657, 1217], 31: [253, 1098, 282, 338]}
    tables = {slot: [number] for number, slot in enumerate(prompts)}
    known = {}
    for slot, prompt in prompts.items():
        (first,) = exact.step([StepRow(slot, prompt, 0, tables[slot], True, 0, GREEDY)])
        (second,) = exact.step([StepRow(slot, [first.token], len(prompt), tables[slot], True, 1, GREEDY)])
        known[slot] = (first.token, second.token)
    one = exact.launch([StepRow(slot, prompt, 0, tables[slot], True, 0, GREEDY) for slot, prompt in prompts.items()])
    order = sorted(prompts)
    rows = [StepRow(slot, [UNKNOWN], len(prompts[slot]), tables[slot], True, 1, GREEDY) for slot in order]
    two = exact.launch(rows)
    assert [said.token for said in exact.collect(one)] == [known[slot][0] for slot in prompts]
    assert [said.token for said in exact.collect(two)] == [known[slot][1] for slot in order]


def test_an_unknown_token_that_no_step_samples_is_our_own_fault(exact: Runner) -> None:
    row = StepRow(5, [UNKNOWN], 0, [0], True, 0, GREEDY)
    exact.collect(exact.launch([StepRow(5, [7], 0, [0], True, 0, GREEDY)]))
    with pytest.raises(AssertionError, match="unknown token"):
        exact.launch([row])


def test_a_device_works_by_itself_and_a_cpu_does_not(exact: Runner) -> None:
    assert not exact.asynchronous
