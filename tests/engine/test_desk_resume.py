"""The desk: who lost the connection comes back for the rest, once; nobody works for nobody meanwhile."""

from __future__ import annotations

import pytest

from baton.engine.effects import (
    Answered,
    Attach,
    Gone,
    Look,
    Named,
    Seen,
    Taken,
)
from baton.ipc.frames import (
    Cancel,
    Credit,
)
from tests.engine.desks import KEYS, LIMITS, House, count


@pytest.mark.parametrize("back", [0, 1])
def test_who_comes_back_gets_the_rest_once(house: House, back: int) -> None:
    house.open(0, 1, resumable=True)
    slot = house.slot(0)
    house.runs(slot)
    house.say(slot, 0, 7, 8)
    request_id = house.named(0, 1).request_id
    assert count(house.tell(0, Gone(1, "disconnected", False)), Cancel) == 0
    house.say(slot, 2, 9)
    house.tell(back, Attach(5, request_id, 1))
    assert house.named(back, 5) == Named(5, request_id, b"memo", 1, "t7 ")
    house.say(slot, 3, 10)
    house.close(slot, 4)
    assert house.ids(back, 5) == [8, 9, 10]
    house.tell(back, Attach(6, request_id, 9))
    assert (house.ids(back, 6) if (back, 6) in house.heard else [], house.end(back, 6).tail) == ([], "!")


def test_nobody_is_worked_for_past_the_credit_and_nobody_is_called_slow(house: House) -> None:
    house.open(0, 1, resumable=True)
    slot = house.slot(0)
    house.runs(slot)
    house.say(slot, 0, 1, 2)
    house.tell(0, Taken(1, 2))
    assert [frame.position for frame in house.frames if isinstance(frame, Credit)] == [6]
    house.tell(0, Gone(1, "disconnected", False))
    house.say(slot, 2, 3, 4, 5, 6)
    house.sweep(LIMITS.resume_s_max - 1)
    assert count(house.frames, Credit) == 1 and count(house.frames, Cancel) == 0
    house.tell(0, Attach(2, house.named(0, 1).request_id, 2))
    house.tell(0, Taken(2, 6))
    assert [frame.position for frame in house.frames if isinstance(frame, Credit)] == [6, 10]


def test_who_does_not_come_back_in_time_has_cancelled(house: House) -> None:
    house.open(0, 1, resumable=True)
    house.runs(house.slot(0))
    request_id = house.named(0, 1).request_id
    house.tell(0, Gone(1, "disconnected", False))
    house.sweep(LIMITS.resume_s_max + 1)
    assert count(house.frames, Cancel) == 1
    house.tell(0, Attach(2, request_id, 0))
    failure = house.end(0, 2).failure
    assert failure is not None and failure.code == "response_not_found"
    house.close(house.slot(0), 0, "cancelled")
    assert [account.reason for account in house.accounts] == ["disconnected"]


def test_who_says_goodbye_is_not_waited_for(house: House) -> None:
    house.open(0, 1, resumable=True)
    house.runs(house.slot(0))
    assert count(house.tell(0, Gone(1, "cancelled", False)), Cancel) == 1


@pytest.mark.parametrize("wants_end", [True, False])
def test_who_may_still_come_back_is_not_cancelled_by_another(house: House, wants_end: bool) -> None:
    house.open(0, 1, KEYS[0], resumable=True)
    house.open(0, 2, KEYS[0], resumable=True)
    slot, request_id = house.slot(0), house.named(0, 1).request_id
    house.runs(slot)
    house.say(slot, 0, 7)
    house.tell(0, Gone(1, "disconnected", False))
    house.tell(0, Gone(2, "cancelled", wants_end))
    if wants_end:
        assert house.end(0, 2).reason == "cancelled"
        house.tell(0, Answered(2))
    assert count(house.frames, Cancel) == 0
    house.tell(0, Attach(3, request_id, 1))
    house.say(slot, 1, 8)
    house.close(slot, 2)
    assert (house.ids(0, 3), house.end(0, 3).reason) == ([8], "length")


def test_an_end_that_came_while_nobody_listened_waits_and_its_row_is_free(house: House) -> None:
    house.open(0, 1, resumable=True)
    slot = house.slot(0)
    house.runs(slot)
    house.tell(0, Gone(1, "disconnected", False))
    house.say(slot, 0, 7)
    house.close(slot, 1)
    assert house.board.row(slot).role == 0 and len(house.accounts) == 1
    house.tell(0, Attach(2, house.named(0, 1).request_id, 0))
    assert house.ids(0, 2) == [7] and house.end(0, 2).reason == "length"
    house.tell(0, Answered(2))
    house.sweep(LIMITS.resume_s_max + 1)
    assert not house.desks[0].answers.by_id


def test_a_place_that_the_answer_has_not_reached_is_refused(house: House) -> None:
    house.open(0, 1, resumable=True)
    house.tell(0, Attach(2, house.named(0, 1).request_id, 3))
    failure = house.end(0, 2).failure
    assert failure is not None and (failure.status, failure.param) == (400, "starting_after")


def test_an_answer_is_seen_while_it_runs_and_after(house: House) -> None:
    house.open(0, 1, resumable=True)
    slot, request_id = house.slot(0), house.named(0, 1).request_id
    house.runs(slot)
    house.say(slot, 0, 7, 8)
    for index in (0, 1):
        house.tell(index, Look(5, request_id))
        assert house.heard[index, 5] == [Seen(5, request_id, b"memo", True, "t7 t8 ", None)]
    house.close(slot, 2)
    house.tell(1, Answered(5))
    house.tell(1, Look(6, request_id))
    (seen,) = house.heard[1, 6]
    assert isinstance(seen, Seen) and seen.text == "t7 t8 !" and seen.finish is not None
    house.tell(1, Answered(6))
    assert not house.desks[1].relays


@pytest.mark.parametrize("request_id", [bytes(16), b"\x01" * 16, b"\xff" * 16])
def test_an_id_nobody_knows_is_not_found(house: House, request_id: bytes) -> None:
    for door, event in ((1, Attach(1, request_id, 0)), (2, Look(2, request_id))):
        house.tell(0, event)
        failure = house.end(0, door).failure
        assert failure is not None and failure.status == 404
        house.tell(0, Answered(door))
    assert not house.desks[0].relays
