"""A worker that dies unexplained: what ran is tried alone, the cause is given up, and nobody else pays for it."""

from __future__ import annotations

from baton.engine.effects import Effect
from baton.engine.limits import Limits
from baton.ipc.frames import Life, Params, Role
from tests.engine.rig import Engine

PROMPT = [5, 6, 7, 8]


def dies(engine: Engine, fault: bool) -> list[Effect]:
    """The worker dies in the middle of its step; its successor comes up."""
    engine.waiting.clear()
    incarnation = engine.board.live(Role.WORKER, 0) + 1
    engine.board.set_live(Role.WORKER, 0, incarnation, 0)
    out = engine.tell(Life(Role.WORKER, 0, incarnation, fault))
    return out + engine.start_worker(incarnation, 64)


def planned(engine: Engine) -> list[int]:
    """The slots of the step in flight."""
    assert engine.plan is not None
    return [row.slot for row in engine.plan.rows]


def test_after_an_unexplained_death_each_runs_alone_until_it_gains_a_token() -> None:
    engine = Engine()
    for slot in range(3):
        engine.submit(slot, PROMPT, Params(max_tokens=6, seed=slot, ignore_eos=True))
    engine.step()
    assert planned(engine) == [0, 1, 2]
    dies(engine, fault=True)
    for slot in range(3):
        assert planned(engine) == [slot]
        engine.step()
    assert planned(engine) == [0, 1, 2]
    engine.run()
    assert {slot: flush.length for slot, flush in engine.flushed().items()} == {0: 6, 1: 6, 2: 6}


def test_a_death_that_somebody_did_makes_nobody_a_suspect() -> None:
    engine = Engine()
    for slot in range(2):
        engine.submit(slot, PROMPT, Params(max_tokens=6, seed=slot, ignore_eos=True))
    engine.step()
    dies(engine, fault=False)
    assert planned(engine) == [0, 1]


def test_the_request_that_kills_its_worker_is_given_up_and_all_others_finish() -> None:
    engine = Engine(Limits(lone_deaths_max=2))
    for slot in range(4):
        engine.submit(slot, PROMPT, Params(max_tokens=4, seed=slot, ignore_eos=True))
    deaths = 0
    while engine.plan is not None:
        if 2 in planned(engine):
            deaths += 1
            dies(engine, fault=True)
        else:
            engine.step()
    ends = {slot: (flush.reason, flush.length) for slot, flush in engine.flushed().items()}
    assert ends == {0: ("length", 4), 1: ("length", 4), 2: ("error", 0), 3: ("length", 4)}
    failure = engine.flushed()[2].failure
    assert failure is not None
    assert failure.code == "poisoned"
    assert deaths <= 4
