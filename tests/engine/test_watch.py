"""Hung is not alive, and slow is not hung."""

from __future__ import annotations

from baton.engine.limits import Limits
from baton.engine.watch import STOPPED, Watch
from baton.ipc.board import PlaceView
from baton.ipc.frames import Role

S = 10**9
LIMITS = Limits(
    ping_interval_s=1, hung_s_max=10, hung_steps_max=20, starting_s_max=20, loading_s_max=60, warming_s_max=30
)


def place(pulse: int, phase: str = "ready", expected_s: float = 0.0, incarnation: int = 1) -> PlaceView:
    return PlaceView(Role.WORKER, 0, incarnation, 1, 0, pulse, phase, int(expected_s * S))


def test_a_quiet_process_is_pinged_once_and_hung_only_if_it_does_not_read_the_ping() -> None:
    watch = Watch(LIMITS)
    assert watch.look(place(5), "S", 0) == (False, None)
    assert watch.look(place(5), "S", 2 * S) == (True, None)
    assert watch.look(place(5), "S", 3 * S) == (False, None)
    assert watch.look(place(6), "S", 4 * S) == (False, None)  # it read it
    assert watch.look(place(6), "S", 5 * S + 1) == (True, None)
    assert watch.look(place(6), "R", 15 * S) == (False, None)
    ping, why = watch.look(place(6), "R", 15 * S + 2)
    assert not ping and why is not None and "has not moved" in why


def test_a_process_that_works_is_never_pinged() -> None:
    watch = Watch(LIMITS)
    assert all(watch.look(place(pulse), "R", pulse * S) == (False, None) for pulse in range(100))


def test_a_long_step_that_was_announced_is_slow_not_hung() -> None:
    watch = Watch(LIMITS)
    watch.look(place(1, expected_s=2), "R", 0)
    assert watch.look(place(1, expected_s=2), "R", 2 * S) == (True, None)
    assert watch.look(place(1, expected_s=2), "R", 41 * S) == (False, None)
    assert watch.look(place(1, expected_s=2), "R", 43 * S)[1] is not None


def test_a_stopped_process_is_hung_at_once() -> None:
    assert Watch(LIMITS).look(place(1), "T", 0) == (False, STOPPED)
    assert Watch(LIMITS).look(place(1, phase="loading"), "T", 0) == (False, STOPPED)


def test_each_phase_of_a_start_has_a_bound_of_its_own_and_the_reason_names_it() -> None:
    watch = Watch(LIMITS)
    assert watch.look(place(0, phase="starting"), "R", 19 * S) == (False, None)
    assert watch.look(place(0, phase="loading"), "R", 20 * S) == (False, None)
    assert watch.look(place(0, phase="loading"), "R", 79 * S) == (False, None)
    assert watch.look(place(0, phase="warming"), "R", 81 * S) == (False, None)
    assert watch.look(place(0, phase="warming"), "R", 111 * S) == (False, None)
    why = watch.look(place(0, phase="warming"), "R", 112 * S)[1]
    assert why == "it has been warming for 31.0 s (limits.warming_s_max is 30)"


def test_a_phase_begins_with_the_process_if_it_was_never_seen_in_another() -> None:
    assert Watch(LIMITS).look(place(0, phase="starting"), "R", 21 * S)[1] is not None
    watch = Watch(LIMITS)
    watch.look(place(0, phase="starting"), "R", 1 * S)
    assert watch.look(place(0, phase="starting", incarnation=2), "R", 2 * S) == (False, None)


def test_another_incarnation_begins_anew() -> None:
    watch = Watch(LIMITS)
    watch.look(place(5), "S", 0)
    assert watch.look(place(5), "S", 2 * S) == (True, None)
    assert watch.look(place(5, incarnation=2), "S", 60 * S) == (False, None)
