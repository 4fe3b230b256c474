"""The desk: repeats of a key share one request, those who come back get the rest once, here and across frontends."""

from __future__ import annotations

import msgspec
import pytest

from baton.engine.answers import home_of
from baton.engine.effects import (
    Answered,
    Attach,
    Finish,
    Gone,
    Named,
    Send,
    Taken,
)
from baton.ipc.frames import (
    Address,
    Cancel,
    Halt,
    Life,
    Piece,
    Relay,
    Role,
    Serving,
    Submit,
    Text,
)
from tests.engine.desks import BODY, FRONTENDS, KEYS, LIMITS, SECOND, House, count

# ------------------------------------------------------------------------------------------------ repeated keys


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("second", [0, 1])
@pytest.mark.parametrize("home", [0, 1])
def test_a_repeated_key_is_one_request_wherever_its_clients_are(
    house: House, home: int, first: int, second: int
) -> None:
    house.open(first, 1, KEYS[home])
    slot = house.slot(home)
    house.runs(slot)
    house.say(slot, 0, 7, 8)
    house.open(second, 2, KEYS[home])
    house.say(slot, 2, 9)
    house.close(slot, 3)
    house.open(first, 3, KEYS[home])
    assert count(house.frames, Submit) == 1
    for index, door in ((first, 1), (second, 2), (first, 3)):
        assert house.ids(index, door) == [7, 8, 9]
        assert (house.end(index, door).tail, house.end(index, door).completion_tokens) == ("!", 3)
        assert house.named(index, door) == Named(door, house.named(first, 1).request_id, b"memo", 0, "")
        assert house.named(first, 1).request_id[0] == home
        house.tell(index, Answered(door))
    assert [account.completion_tokens for account in house.accounts] == [3]
    assert not any(desk.heard or desk.relays for desk in house.desks)


def test_the_same_key_with_another_body_is_a_conflict_that_names_the_field(house: House) -> None:
    house.open(0, 1, KEYS[0])
    house.open(0, 2, KEYS[0], {**BODY, "prompt": b"another", "seed": b"s"})
    failure = house.end(0, 2).failure
    assert failure is not None
    assert (failure.status, failure.code, failure.param) == (409, "idempotency_conflict", "idempotency_key")
    assert "prompt, seed differs" in failure.message
    assert not house.ended(0, 1)


def test_the_request_goes_on_until_the_last_of_its_clients_is_gone(house: House) -> None:
    house.open(0, 1, KEYS[0])
    house.open(1, 2, KEYS[0])
    house.runs(house.slot(0))
    assert count(house.tell(0, Gone(1, "disconnected", False)), Cancel) == 0
    house.say(house.slot(0), 0, 7)
    assert house.ids(1, 2) == [7]
    assert count(house.tell(1, Gone(2, "disconnected", False)), Cancel) == 1
    house.open(0, 3, KEYS[0])
    assert count(house.frames, Submit) == 2, "a key whose request was cancelled begins anew"


def test_one_clients_cancel_ends_it_for_that_client_and_the_last_ones_for_all(house: House) -> None:
    house.open(0, 1, KEYS[0])
    house.open(0, 2, KEYS[0])
    house.runs(house.slot(0))
    house.say(house.slot(0), 0, 7)
    assert count(house.tell(0, Gone(1, "cancelled", True)), Cancel) == 0
    assert (house.end(0, 1).reason, house.end(0, 1).completion_tokens) == ("cancelled", 1)
    house.tell(0, Answered(1))
    assert count(house.tell(0, Gone(2, "cancelled", True)), Cancel) == 1
    house.close(house.slot(0), 1, "cancelled")
    assert house.end(0, 2).reason == "cancelled"


@pytest.mark.parametrize("reason", ["error", "refused", "cancelled"])
def test_what_was_no_answer_is_not_given_again(house: House, reason: str) -> None:
    house.open(0, 1, KEYS[0])
    house.close(house.slot(0), 0, reason)
    house.tell(0, Answered(1))
    house.open(0, 2, KEYS[0])
    assert count(house.frames, Submit) == 2


def test_a_full_house_refuses_and_a_repeat_later_runs(house: House) -> None:
    for door in (1, 2):
        house.open(0, door)
    house.open(0, 3, KEYS[0])
    failure = house.end(0, 3).failure
    assert failure is not None and failure.status == 429
    house.tell(0, Answered(3))
    house.close(house.slot(0), 0)
    house.tell(0, Answered(1))
    house.open(0, 4, KEYS[0])
    assert count(house.frames, Submit) == 3


def answered(house: House, door: int, key: str, tokens: int) -> None:
    """A whole request at frontend 0, that is kept."""
    house.open(0, door, key)
    slot = house.desks[0].front.doors[house.desks[0]._doors].slot
    house.runs(slot)
    for number in range(tokens):
        house.say(slot, number, number)
        house.tell(0, Taken(door, number + 1))
    house.close(slot, tokens)
    house.tell(0, Answered(door))


def test_an_ended_answer_is_kept_for_a_while(house: House) -> None:
    answered(house, 1, KEYS[0], 2)
    house.sweep(LIMITS.idempotency_s_max - 1)
    house.open(0, 2, KEYS[0])
    assert house.ids(0, 2) == [0, 1] and house.end(0, 2).reason == "length"
    house.tell(0, Answered(2))
    house.sweep(LIMITS.idempotency_s_max + 1)
    assert not house.desks[0].answers.by_id and house.desks[0].answers.bytes == 0
    house.open(0, 3, KEYS[0])
    assert count(house.frames, Submit) == 2


def test_the_oldest_answers_give_way_and_one_that_is_too_large_is_not_kept() -> None:
    house = House(msgspec.structs.replace(LIMITS, idempotency_bytes_max=8000))
    keys = [key for key in (f"k{number}" for number in range(40)) if home_of("", key, FRONTENDS) == 0]
    for door, key in enumerate(keys[:5], start=1):
        answered(house, door, key, 1)
    answers = house.desks[0].answers
    assert [answer.keep.key for answer in answers.ended.values()] == keys[2:5]
    assert answers.bytes == sum(answer.bytes for answer in answers.ended.values()) <= 8000
    answered(house, 9, keys[5], 100)
    assert not answers.ended and answers.bytes == 0 and not answers.by_id and not answers.by_key


# ------------------------------------------------------------------------------------------------ several listeners


def test_a_late_listener_reads_at_its_own_pace_and_is_sent_no_more_than_its_window(house: House) -> None:
    house.open(0, 1, KEYS[0])
    slot = house.slot(0)
    house.runs(slot)
    for number in range(10):
        house.say(slot, number, number)
        house.tell(0, Taken(1, number + 1))
    house.open(0, 2, KEYS[0])
    assert house.ids(0, 2) == [0, 1, 2, 3]
    house.close(slot, 10)
    assert house.ended(0, 1) and not house.ended(0, 2)
    for position in (4, 8, 10):
        house.tell(0, Taken(2, position))
    assert house.ids(0, 2) == list(range(10)) and house.end(0, 2).reason == "length"


def test_one_that_stops_reading_is_told_so_and_holds_up_nobody(house: House) -> None:
    house.open(0, 1, KEYS[0])
    house.open(0, 2, KEYS[0])
    slot = house.slot(0)
    house.runs(slot)
    for number in range(8):
        house.say(slot, number, number)
        house.tell(0, Taken(1, number + 1))
    assert len(house.ids(0, 2)) == LIMITS.mailbox_tokens_max
    house.now_ns += int(LIMITS.stalled_s_max * SECOND) + 1
    house.tell(0, Taken(1, 8))
    house.sweep(0)
    assert house.end(0, 2).reason == "slow_consumer"
    house.close(slot, 8)
    assert house.ids(0, 1) == list(range(8)) and house.end(0, 1).reason == "length"


def test_listeners_are_limited(house: House) -> None:
    for door in range(1, 5):
        house.open(0, door, KEYS[0])
    failure = house.end(0, 4).failure
    assert failure is not None and failure.status == 429
    assert len(house.desks[0].heard) == LIMITS.listeners_per_answer_max


# ------------------------------------------------------------------------------------------------ death, drain, halt


def test_a_home_that_dies_ends_what_was_relayed_and_its_late_words_are_not_heard(house: House) -> None:
    house.open(0, 1, KEYS[1])
    house.runs(house.slot(1))
    dead, house.desks[1] = house.desks[1], house.desk(1, 2)
    house.board.set_live(Role.FRONTEND, 1, 2, 0)
    house.tell(0, Life(Role.FRONTEND, 1, 2))
    failure = house.end(0, 1).failure
    assert failure is not None and (failure.status, failure.code) == (503, "interrupted")
    heard = len(house.heard[0, 1])
    generation = house.board.row(house.slot(1)).generation
    for effect in dead.handle(Text([Piece(house.slot(1), generation, 2, 0, [7], ["x"], [])]), house.now_ns):
        assert isinstance(effect, Send)
        house.tell(0, effect.frame)
    assert len(house.heard[0, 1]) == heard
    house.tell(0, Gone(1, "disconnected", False))
    house.open(0, 2, KEYS[1])
    assert house.named(0, 2).door == 2


def test_a_home_that_dies_behind_the_end_says_nothing_more(house: House) -> None:
    house.open(0, 1, KEYS[1])
    house.runs(house.slot(1))
    house.close(house.slot(1), 0)
    house.board.set_live(Role.FRONTEND, 1, 2, 0)
    house.tell(0, Life(Role.FRONTEND, 1, 2))
    assert house.end(0, 1).reason == "length" and not house.desks[0].relays


def test_a_frontend_that_dies_leaves_the_answers_it_listened_to_elsewhere(house: House) -> None:
    house.open(0, 1, KEYS[1])
    house.runs(house.slot(1))
    house.desks[0] = house.desk(0, 2)
    house.board.set_live(Role.FRONTEND, 0, 2, 0)
    assert count(house.tell(1, Life(Role.FRONTEND, 0, 2)), Cancel) == 1
    assert not house.desks[1].heard


def test_who_cancelled_before_it_began_hears_no_beginning(house: House) -> None:
    for door in (1, 2):
        house.open(0, door, KEYS[0])
    house.tell(0, Gone(1, "cancelled", True))
    house.runs(house.slot(0))
    assert [type(effect) for effect in house.heard[0, 1]] == [Named, Finish]


def test_what_was_said_for_another_incarnation_or_is_nonsense_is_dropped_and_counted(house: House) -> None:
    sender = Address(Role.FRONTEND, "m", 0, 1, 1)
    house.tell(0, Relay(sender, 7, 1, b""))
    house.tell(0, Relay(sender, 1, 2, b"nonsense"))
    house.tell(0, Relay(sender, 1, 2, b"nonsense"))
    counts = house.desks[0].counts
    assert [counts[f"{kind}_relays"] for kind in ("stale", "malformed", "repeated")] == [1, 1, 1]


def test_a_halt_ends_every_listener_and_every_relay(house: House) -> None:
    house.open(0, 1, KEYS[0])
    house.open(0, 2, KEYS[0])
    house.open(0, 3, KEYS[1])
    house.tell(0, Halt("over"))
    for door in (1, 2, 3):
        failure = house.end(0, door).failure
        assert failure is not None and (failure.status, failure.message) == (503, "over")


def test_a_closing_house_lets_a_client_come_back_but_opens_nothing(house: House) -> None:
    house.open(0, 1, resumable=True)
    house.runs(house.slot(0))
    house.tell(0, Gone(1, "disconnected", False))
    house.tell(0, Serving(True, True, "w"))
    house.tell(0, Attach(2, house.named(0, 1).request_id, 0))
    assert not house.ended(0, 2)
    house.open(0, 3, KEYS[0])
    failure = house.end(0, 3).failure
    assert failure is not None and failure.status == 503
