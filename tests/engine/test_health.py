"""The supervisor's decisions: births, deaths, back-off, the watch, damage, draining and the end."""

from __future__ import annotations

from typing import Any

from baton.engine.effects import Died, Dump, Effect, Inquire, Kill, Opened, Over, Send, Spawn, StopAsked, Tick, Wake
from baton.engine.health import HealthCore
from baton.engine.limits import Limits
from baton.engine.watch import STOPPED, Place
from baton.ipc.board import PlaceView
from baton.ipc.frames import Address, Damaged, Drained, Halt, Life, Ping, Ready, Role, Serving, StartFailed

S = 10**9
PLACES = [(Role.WORKER, 0), (Role.DETOKENIZER, 0), (Role.FRONTEND, 0), (Role.FRONTEND, 1)]
LIMITS = Limits(restarts_max=3, restart_window_s=60, restart_backoff_s=0.1, drain_s_max=20)


class Rig:
    """A core with a life table that remembers, and what it did last."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.now = 0
        self.table: dict[tuple[int, int], int] = {}
        self.seen: list[tuple[Place, str]] = []
        me = Address(Role.SUPERVISOR, "m", 0, 0, 1)
        self.core = HealthCore(me, self, PLACES, lambda: self.seen, limits)
        self.out: list[Effect] = self.core.start(0)

    def set_live(self, role: int, index: int, incarnation: int, since_ns: int) -> None:
        self.table[(role, index)] = incarnation

    def feed(self, event: object, now_ns: int | None = None) -> list[Effect]:
        self.now = self.now if now_ns is None else now_ns
        self.out = self.core.handle(event, self.now)
        return self.out

    def ready(self, role: Role, index: int = 0, incarnation: int = 1) -> list[Effect]:
        return self.feed(Ready(Address(role, "m", 0, index, incarnation), {"weights": "w"}))

    def all_ready(self) -> Rig:
        for place in PLACES:
            self.ready(*place)
        return self

    def die(self, role: Role, incarnation: int, now_ns: int | None = None, fault: bool = False) -> list[Effect]:
        return self.feed(Died(role, 0, incarnation, "signal SIGKILL", fault), now_ns)

    def frames(self, kind: type) -> list[Any]:
        return [effect.frame for effect in self.out if isinstance(effect, Send) and isinstance(effect.frame, kind)]

    def of(self, kind: type) -> list[Any]:
        return [effect for effect in self.out if isinstance(effect, kind)]

    def wakes(self) -> dict[str, int]:
        return {wake.name: wake.at_ns for wake in self.of(Wake)}


def test_everyone_is_told_of_a_life_before_it_begins() -> None:
    rig = Rig()
    assert rig.of(Spawn) == [Spawn(*place, 1) for place in PLACES[:-1]]
    first = rig.out.index(rig.of(Spawn)[0])
    told = rig.out[:first]
    assert [effect.frame for effect in told if isinstance(effect, Send)] == [Life(Role.WORKER, 0, 1)] * len(PLACES)
    assert rig.table == dict.fromkeys(PLACES[:-1], 1)


def test_other_frontends_follow_once_the_first_is_up_and_only_once() -> None:
    rig = Rig()
    rig.ready(Role.FRONTEND)
    assert rig.of(Spawn) == [Spawn(Role.FRONTEND, 1, 1)]
    rig.ready(Role.FRONTEND)
    assert rig.of(Spawn) == []


def test_it_opens_once_all_are_ready() -> None:
    rig = Rig()
    for place in PLACES[:-1]:
        rig.ready(*place)
        assert not rig.of(Opened) and not rig.frames(Serving)[0].ready
    rig.ready(*PLACES[-1])
    assert rig.of(Opened) and rig.frames(Serving) == [Serving(True, False, "w")] * 2


def test_a_ready_of_somebody_else_counts_for_nothing() -> None:
    rig = Rig()
    assert rig.ready(Role.WORKER, incarnation=2) == []
    assert rig.feed(StartFailed(Address(Role.WORKER, "m", 0, 0, 7), "no")) == []
    assert rig.core.phase == "starting"


def test_a_start_that_fails_is_the_end_with_its_reason() -> None:
    rig = Rig()
    rig.feed(StartFailed(Address(Role.WORKER, "m", 0, 0, 1), "no such model"))
    assert rig.frames(Halt) == [Halt("no such model")] * len(PLACES)
    for place in PLACES[:-1]:
        assert not rig.of(Over)
        rig.feed(Died(*place, 1, "status 0", True))
    assert rig.of(Over) == [Over("no such model")]


def test_a_death_while_starting_is_the_end() -> None:
    rig = Rig()
    rig.die(Role.WORKER, 1)
    assert rig.core.failure == "worker-0 died while starting (signal SIGKILL)"


def stuck(rig: Rig, incarnation: int, now_s: int) -> list[Effect]:
    """The worker's start hangs in a phase until it is dumped and killed."""
    view = PlaceView(Role.WORKER, 0, incarnation, 7, (now_s - 200) * S, 0, "loading", 0)
    rig.seen = [(view, "S")]
    rig.feed(Tick("watch"), now_s * S)
    assert rig.of(Inquire) == [Inquire(Role.WORKER, 0)]
    rig.feed(Tick("execute 4 0"))
    why = "it has been loading for 200.0 s (limits.loading_s_max is 120)"
    assert rig.out == [Dump(Role.WORKER, 0, why), Kill(Role.WORKER, 0)]
    return rig.die(Role.WORKER, incarnation, now_s * S)


def test_a_start_that_hangs_in_a_phase_is_dumped_killed_and_tried_again_also_while_the_server_starts() -> None:
    rig = Rig()
    stuck(rig, 1, 200)
    assert rig.of(Spawn) == [Spawn(Role.WORKER, 0, 2)]
    assert rig.core.phase == "starting"
    rig.ready(Role.WORKER, incarnation=2)
    for place in PLACES[1:]:
        rig.ready(*place)
    assert rig.core.phase == "serving"


def test_a_start_that_hangs_again_and_again_is_the_end_and_names_the_phase_however_long_each_took() -> None:
    rig = Rig()
    for number in range(1, 5):
        stuck(rig, number, number * 300)
        assert bool(rig.of(Spawn)) == (number < 4)
    why = "it has been loading for 200.0 s (limits.loading_s_max is 120)"
    assert rig.core.failure == f"worker-0 failed to start 4 times, the last time: {why}"


def test_false_starts_are_forgotten_once_it_is_ready() -> None:
    rig = Rig().all_ready()
    rig.die(Role.WORKER, 1, 1 * S)
    for number in range(2, 12, 2):
        rig.die(Role.WORKER, number, number * 100 * S)
        rig.ready(Role.WORKER, incarnation=number + 1)
        rig.die(Role.WORKER, number + 1, (number + 1) * 100 * S)
        assert rig.of(Spawn) == [Spawn(Role.WORKER, 0, number + 2)]


def test_the_first_death_costs_no_wait_and_each_further_one_twice_the_wait_before() -> None:
    rig = Rig().all_ready()
    rig.die(Role.WORKER, 1, 1 * S, fault=True)
    assert rig.of(Spawn) == [Spawn(Role.WORKER, 0, 2)] and rig.frames(Life)[0].fault
    rig.die(Role.WORKER, 2, 2 * S)
    assert not rig.of(Spawn) and rig.wakes() == {"restart 4 0": 2 * S + S // 10}
    rig.feed(Tick("restart 4 0"))
    assert rig.of(Spawn) == [Spawn(Role.WORKER, 0, 3)] and not rig.frames(Life)[0].fault
    rig.die(Role.WORKER, 3, 3 * S)
    assert rig.wakes() == {"restart 4 0": 3 * S + S // 5}


def test_deaths_of_long_ago_are_forgotten() -> None:
    rig = Rig().all_ready()
    for number in range(1, 9):
        rig.die(Role.WORKER, number, number * 61 * S)
        assert rig.of(Spawn) == [Spawn(Role.WORKER, 0, number + 1)]
        rig.ready(Role.WORKER, incarnation=number + 1)


def test_restarts_used_up_are_the_end() -> None:
    rig = Rig().all_ready()
    for number in range(1, 5):
        rig.die(Role.WORKER, number, number * S)
        if 1 < number < 4:
            rig.feed(Tick("restart 4 0"))
    assert rig.core.failure == "worker-0 died 4 times in 60 s, the last time of signal SIGKILL"
    assert rig.core.phase == "stopping" and not rig.of(Spawn)


def seen(role: Role, pulse: int, state: str = "S", incarnation: int = 1) -> tuple[Place, str]:
    return PlaceView(role, 0, incarnation, 7, 0, pulse, "ready", 0), state


def test_a_stopped_process_is_inquired_about_then_killed_and_it_is_not_its_fault() -> None:
    rig = Rig().all_ready()
    rig.seen = [seen(Role.WORKER, 1, "T")]
    rig.feed(Tick("watch"), 1 * S)
    assert rig.of(Inquire) == [Inquire(Role.WORKER, 0)] and not rig.of(Kill) and "watch" in rig.wakes()
    rig.feed(Tick("watch"), 2 * S)
    assert not rig.of(Inquire)
    rig.feed(Tick("execute 4 0"))
    assert rig.out == [Dump(Role.WORKER, 0, STOPPED), Kill(Role.WORKER, 0)]
    rig.die(Role.WORKER, 1)
    assert not rig.frames(Life)[0].fault


def test_a_hung_process_is_pinged_first_and_it_is_its_fault() -> None:
    rig = Rig().all_ready()
    rig.seen = [seen(Role.WORKER, 1)]
    rig.feed(Tick("watch"), 0)
    rig.feed(Tick("watch"), 2 * S)
    assert rig.frames(Ping) == [Ping()]
    rig.feed(Tick("watch"), 20 * S)
    rig.feed(Tick("execute 4 0"))
    assert rig.of(Kill)
    rig.die(Role.WORKER, 1)
    assert rig.frames(Life)[0].fault


def test_who_died_before_the_execution_is_not_executed_again() -> None:
    rig = Rig().all_ready()
    rig.seen = [seen(Role.WORKER, 1, "T")]
    rig.feed(Tick("watch"))
    rig.die(Role.WORKER, 1)
    assert rig.feed(Tick("execute 4 0")) == []


def test_the_writer_of_a_damaged_ring_is_killed_and_a_detokenizer_that_lost_tokens_too() -> None:
    rig = Rig().all_ready()
    worker, detokenizer = Address(Role.WORKER, "m", 0, 0, 1), Address(Role.DETOKENIZER, "m", 0, 0, 1)
    rig.feed(Damaged(Address(Role.SCHEDULER, "m", 0, 0, 1), worker, "torn"))
    assert rig.of(Inquire) == [Inquire(Role.WORKER, 0)]
    rig.feed(Damaged(detokenizer, worker, "torn"))
    assert rig.of(Inquire) == [Inquire(Role.DETOKENIZER, 0)]


def test_damage_of_a_former_life_kills_nobody() -> None:
    rig = Rig().all_ready()
    rig.die(Role.WORKER, 1)
    rig.feed(Damaged(Address(Role.SCHEDULER, "m", 0, 0, 1), Address(Role.WORKER, "m", 0, 0, 1), "torn"))
    assert rig.out == []


def test_a_stop_drains_first_and_ends_when_every_frontend_has() -> None:
    rig = Rig().all_ready()
    rig.feed(StopAsked())
    assert rig.frames(Serving) == [Serving(True, True, "w")] * 2
    rig.feed(Drained(Address(Role.FRONTEND, "m", 0, 0, 1)))
    rig.feed(Drained(Address(Role.FRONTEND, "m", 0, 1, 9)))
    assert rig.core.phase == "draining"
    rig.feed(Drained(Address(Role.FRONTEND, "m", 0, 1, 1)))
    assert rig.frames(Halt) == [Halt("the server is shutting down")] * len(PLACES)
    for place in PLACES:
        rig.feed(Died(*place, 1, "status 0", True))
    assert rig.of(Over) == [Over(None)]


def test_a_drain_has_a_bound_and_a_second_stop_is_at_once() -> None:
    for event in (Tick("drained"), StopAsked()):
        rig = Rig().all_ready()
        rig.feed(StopAsked())
        rig.feed(event)
        assert rig.frames(Halt)


def test_who_does_not_halt_in_time_is_killed() -> None:
    rig = Rig().all_ready()
    rig.feed(StopAsked())
    rig.feed(StopAsked())
    rig.die(Role.WORKER, 1)
    rig.feed(Tick("stopped"))
    assert rig.out == [Kill(*place) for place in PLACES[1:]]


def test_nothing_is_started_once_it_ends() -> None:
    rig = Rig().all_ready()
    rig.die(Role.WORKER, 1)
    rig.die(Role.WORKER, 2)
    assert rig.wakes()
    rig.feed(StopAsked())
    rig.feed(StopAsked())
    assert rig.feed(Tick("restart 4 0")) == [] and rig.feed(Tick("watch")) == []
