"""What the tests of the cores share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.desks import House


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    for desk in house.desks:
        doors = [set(desk.front.doors), set(desk.relays), {visitor[2] for visitor in desk.heard}]
        assert not doors[0] & doors[1]
        assert all(answer.finish is None for answer in desk.answers.running.values())
