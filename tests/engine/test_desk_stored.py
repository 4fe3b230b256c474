"""The desk: an answer that was to be stored is there for who asks later, for a while, once it is whole."""

from __future__ import annotations

import pytest

from baton.engine.effects import Answered, Attach, Gone, Look, Seen
from baton.ipc.frames import Cancel
from tests.engine.desks import LIMITS, House, count


def seen(house: House, index: int, door: int) -> Seen | None:
    """What a look found."""
    return next((one for one in house.heard[index, door] if isinstance(one, Seen)), None)


def stored(house: House, reason: str = "length") -> bytes:
    """An answer of two tokens that its client has; its id."""
    house.open(0, 1, stored=True)
    slot = house.slot(0)
    house.runs(slot)
    house.say(slot, 0, 7, 8)
    house.close(slot, 2, reason)
    house.tell(0, Answered(1))
    return house.named(0, 1).request_id


@pytest.mark.parametrize("reason", ["length", "stop"])
@pytest.mark.parametrize("index", [0, 1])
def test_it_is_seen_and_followed_for_a_while(house: House, reason: str, index: int) -> None:
    request_id = stored(house, reason)
    house.sweep(LIMITS.idempotency_s_max - 1)
    house.tell(index, Look(5, request_id))
    found = seen(house, index, 5)
    assert found is not None and (found.text, found.finish is not None) == ("t7 t8 !", True)
    house.tell(index, Answered(5))
    house.tell(index, Attach(6, request_id, 1))
    assert house.ids(index, 6) == [8] and house.end(index, 6).reason == reason
    house.tell(index, Answered(6))
    house.sweep(LIMITS.idempotency_s_max + 1)
    house.tell(index, Look(7, request_id))
    assert seen(house, index, 7) is None and house.end(index, 7).reason == "refused"


@pytest.mark.parametrize("reason", ["error", "cancelled"])
def test_what_ended_badly_is_not_kept(house: House, reason: str) -> None:
    request_id = stored(house, reason)
    house.tell(0, Look(5, request_id))
    assert seen(house, 0, 5) is None and house.end(0, 5).reason == "refused"


def test_it_waits_for_nobody_while_it_runs(house: House) -> None:
    house.open(0, 1, stored=True)
    slot = house.slot(0)
    house.runs(slot)
    house.say(slot, 0, 7)
    assert count(house.tell(0, Gone(1, "disconnected", False)), Cancel) == 1
    assert not house.desks[0].answers.by_id


def test_the_oldest_give_way(house: House) -> None:
    request_id = stored(house)
    answers = house.desks[0].answers
    assert answers.bytes > 0
    answers.bytes += LIMITS.idempotency_bytes_max
    house.open(0, 9, stored=True)
    (slot,) = (stream.slot for stream in house.desks[0].front.streams.values())
    house.runs(slot)
    house.close(slot, 0)
    house.tell(0, Look(5, request_id))
    assert house.end(0, 5).reason == "refused"
