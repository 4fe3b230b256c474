"""What a door says of its server: whether it is ready, and how long a request may be."""

from __future__ import annotations

import pytest

from baton.frontends.process import status
from baton.frontends.status import Gauges
from baton.ipc.board import PlaceView
from baton.ipc.frames import Role, Serving
from tests.frontends.conftest import House


def place(role: Role, phase: str) -> PlaceView:
    return PlaceView(role, 0, 1, 1, 0, 0, phase, 0)


def test_a_start_is_told_in_phases_with_a_percentage() -> None:
    said = status(None, [place(Role.WORKER, "loading"), place(Role.SCHEDULER, "ready")])
    assert (said.ready, said.state) == (False, "starting")
    assert said.detail == {"percent": 75, "worker-0": "loading", "scheduler-0": "ready"}


def test_a_lost_process_is_recovery_and_a_drain_is_no_start() -> None:
    places = [place(Role.WORKER, "starting"), place(Role.SCHEDULER, "ready")]
    said = status(Serving(False, False, ""), places)
    assert (said.ready, said.state, said.detail["worker-0"]) == (False, "recovering", "starting")
    assert status(Serving(True, True, ""), places).state == "draining"
    assert status(Serving(True, False, ""), places).ready


@pytest.mark.parametrize(("kv_tokens", "length"), [(0, 4096), (512, 512), (1 << 20, 4096)])
async def test_a_models_length_is_what_one_request_can_have_here(house: House, kv_tokens: int, length: int) -> None:
    """None is known to a scheduler that has no worker yet; then it is the model's own."""
    house.gauges = Gauges(kv_tokens_total=kv_tokens)
    async with house.client.get(house.url + "/v1/models") as response:
        (model,) = (await response.json())["data"]
    assert model["max_model_len"] == length
