"""What a door says of a server that is not ready yet."""

from __future__ import annotations

from baton.frontends.process import status
from baton.ipc.board import PlaceView
from baton.ipc.frames import Role, Serving


def place(role: Role, phase: str) -> PlaceView:
    return PlaceView(role, 0, 1, 1, 0, 0, phase, 0)


def test_a_start_is_told_in_phases_with_a_percentage() -> None:
    said = status(None, [place(Role.WORKER, "loading"), place(Role.SCHEDULER, "ready")])
    assert (said.ready, said.state) == (False, "starting")
    assert said.detail == {"percent": 66, "worker-0": "loading", "scheduler-0": "ready"}


def test_a_lost_process_is_recovery_and_a_drain_is_no_start() -> None:
    places = [place(Role.WORKER, "starting"), place(Role.SCHEDULER, "ready")]
    said = status(Serving(False, False, ""), places)
    assert (said.ready, said.state, said.detail["worker-0"]) == (False, "recovering", "starting")
    assert status(Serving(True, True, ""), places).state == "draining"
    assert status(Serving(True, False, ""), places).ready
