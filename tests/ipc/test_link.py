"""Which frames a link hands on, and what it does with all others."""

from __future__ import annotations

import random
from typing import get_args

import msgspec
import pytest

from baton.ipc.frames import (
    PROTOCOL_VERSION,
    Address,
    AnyFrame,
    Cancel,
    Credit,
    Envelope,
    Key,
    Life,
    Ping,
    Recall,
    Role,
    Submit,
    Text,
    WorkerHello,
)
from baton.ipc.link import ROUTES, LinkGap, Post
from tests.ipc.places import LIMITS, address, make_board
from tests.sim.forger import changed, filled, forged

CREDIT = Credit(0, 1, 1, 5)


class Ear:
    """A post with what it reported."""

    def __init__(self, role: Role) -> None:
        self.reported: list[str] = []
        self.post = Post(address(role), LIMITS, make_board(), lambda event, detail: self.reported.append(event))

    def hears(self, data: bytes) -> AnyFrame | None:
        return self.post.open(data)


def speaker(role: Role, incarnation: int = 1) -> Post:
    return Post(address(role, incarnation), LIMITS, make_board(), lambda event, detail: None)


def enveloped(frame: AnyFrame, sender: Address, number: int = 1, version: int = PROTOCOL_VERSION) -> bytes:
    return msgspec.msgpack.encode(Envelope(version, sender, number, frame))


def test_every_frame_has_a_route() -> None:
    assert set(ROUTES) == set(get_args(AnyFrame))


def test_a_frame_arrives_as_it_was_sent() -> None:
    ear = Ear(Role.SCHEDULER)
    assert ear.hears(speaker(Role.FRONTEND).seal(Role.SCHEDULER, 0, CREDIT)) == CREDIT


@pytest.mark.parametrize("receiver", Role)
@pytest.mark.parametrize("sender", Role)
def test_only_who_may_say_it_is_heard_by_who_takes_it(sender: Role, receiver: Role) -> None:
    rng = random.Random(1)
    for number, (kind, (senders, receivers)) in enumerate(ROUTES.items(), start=1):
        ear = Ear(receiver)
        frame = fitting(filled(rng, kind))
        heard = ear.hears(enveloped(frame, address(sender), number))
        allowed = sender in senders and receiver in receivers
        assert (heard is not None) == allowed
        assert ear.reported == ([] if allowed else ["unexpected_frame"])


def fitting(frame: AnyFrame) -> AnyFrame:
    """The same frame about row 0 and frontend 0."""
    changes: dict[str, object] = {}
    if hasattr(frame, "key"):
        changes["key"] = Key(0, 1, 1)
    if hasattr(frame, "slot"):
        changes["slot"] = 0
    if hasattr(frame, "home"):
        changes["home"] = 0 if isinstance(frame, Cancel | Recall) else address(Role.FRONTEND)
    if hasattr(frame, "group"):
        changes["rank"], changes["group"] = 0, (1,)
    return msgspec.structs.replace(frame, **changes)


def test_what_cannot_be_read_is_dropped_and_the_link_goes_on() -> None:
    ear, says = Ear(Role.SCHEDULER), speaker(Role.FRONTEND)
    whole = says.seal(Role.SCHEDULER, 0, CREDIT)
    bad = {
        "malformed_frame": [b"", b"\xff" * 9, whole[:-1], whole + b"\x00"],
        "foreign_frame": [enveloped(CREDIT, address(Role.FRONTEND), version=9)],
        "oversized_frame": [bytes(LIMITS.frame_bytes_max + 1)],
    }
    for event, datas in bad.items():
        for data in datas:
            assert ear.hears(data) is None
            assert ear.reported.pop() == event
        assert ear.post.counts[f"{event}s"] == len(datas)
    assert ear.hears(whole) == CREDIT


def test_a_row_or_a_frontend_that_there_is_not_is_nobodys() -> None:
    home = address(Role.FRONTEND)
    ear = Ear(Role.TOKENIZER)
    frames: list[AnyFrame] = [
        Cancel(0, 1, 1),
        Recall(Key(8, 1, 1), 0, bytes(25)),
        fitting(filled(random.Random(2), Submit)),
    ]
    frames[2] = msgspec.structs.replace(frames[2], home=address(Role.FRONTEND, index=1))
    for number, frame in enumerate(frames, start=1):
        assert ear.hears(enveloped(frame, home, number)) is None
    assert ear.reported == ["astray_frame"] * 3


@pytest.mark.parametrize(
    ("frame", "sender", "receiver"),
    [
        (Recall(Key(-1, 1, 1), 0, bytes(25)), Role.FRONTEND, Role.SCHEDULER),
        (Recall(Key(0, 1, 1), 0, bytes(3)), Role.FRONTEND, Role.SCHEDULER),
        (Life(Role.WORKER, 16, 1), Role.SUPERVISOR, Role.SCHEDULER),
        (Cancel(0, 1, -1), Role.FRONTEND, Role.SCHEDULER),
    ],
)
def test_numbers_that_cannot_be_are_malformed(frame: AnyFrame, sender: Role, receiver: Role) -> None:
    ear = Ear(receiver)
    assert ear.hears(enveloped(frame, address(sender))) is None
    assert ear.reported == ["malformed_frame"]


def test_a_gap_between_two_living_processes_is_an_error() -> None:
    ear, says = Ear(Role.SCHEDULER), speaker(Role.FRONTEND)
    first, _, third = (says.seal(Role.SCHEDULER, 0, CREDIT) for _ in range(3))
    ear.hears(first)
    with pytest.raises(LinkGap):
        ear.hears(third)
    with pytest.raises(LinkGap):
        ear.hears(first)


def test_a_frame_that_could_not_be_read_explains_one_missing_number() -> None:
    ear, says = Ear(Role.SCHEDULER), speaker(Role.FRONTEND)
    first, second, third, _, fifth = (says.seal(Role.SCHEDULER, 0, CREDIT) for _ in range(5))
    assert ear.hears(first) == CREDIT
    assert ear.hears(second[:-1]) is None
    assert ear.hears(third) == CREDIT
    with pytest.raises(LinkGap):
        ear.hears(fifth)


def test_frames_of_the_dead_are_handed_on_in_any_order_and_a_new_life_counts_anew() -> None:
    ear = Ear(Role.SCHEDULER)
    old, new = speaker(Role.FRONTEND), speaker(Role.FRONTEND, incarnation=2)
    late = [old.seal(Role.SCHEDULER, 0, CREDIT) for _ in range(3)]
    assert ear.hears(new.seal(Role.SCHEDULER, 0, CREDIT)) == CREDIT
    assert ear.hears(late[2]) == CREDIT and ear.hears(late[0]) == CREDIT
    assert ear.post.counts["frames_of_the_dead"] == 2


def play_noise(frames: int) -> None:
    rng = random.Random(frames)
    ears = [Ear(role) for role in Role]
    says = {role: speaker(Role.FRONTEND if role != Role.FRONTEND else Role.DETOKENIZER) for role in Role}
    taken, stock = 0, [forged(rng) for _ in range(min(frames, 20_000))]
    for number in range(frames):
        ear, data = ears[number % len(ears)], stock[rng.randrange(len(stock))]
        taken += ear.hears(data if number % 2 else changed(rng, data)) is not None
        ear.reported.clear()
        if number % 1000 == 0 and ear.post.me.role == Role.SCHEDULER:
            assert ear.hears(says[Role.SCHEDULER].seal(Role.SCHEDULER, 0, CREDIT)) == CREDIT
    for ear in ears:
        dropped = sum(count for event, count in ear.post.counts.items() if event != "frames_of_the_dead")
        assert dropped > frames / len(ears) / 2
    assert taken > 0


def test_no_noise_stops_a_link() -> None:
    play_noise(5_000)


@pytest.mark.full
def test_a_million_frames_of_noise_do_not_stop_a_link() -> None:
    play_noise(1_000_000)


def test_kinds_that_are_spoken_of_elsewhere() -> None:
    """The frames named in the rules take the ways the rules say."""
    assert ROUTES[Submit] == ((Role.FRONTEND,), (Role.TOKENIZER,))
    assert ROUTES[Text] == ((Role.DETOKENIZER,), (Role.FRONTEND,))
    assert ROUTES[WorkerHello] == ((Role.WORKER,), (Role.SCHEDULER,))
    assert ROUTES[Ping][0] == (Role.SUPERVISOR,)
