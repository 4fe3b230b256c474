"""The seam between doors and core: trace contexts, merging, reports of what was taken, exactly one end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from baton.engine.effects import Answered, Begin, Deliver, Finish, Gone, Open, Taken
from baton.engine.limits import Limits
from baton.frontends import traceparent
from baton.frontends.errors import Refused
from baton.frontends.reception import Reception
from baton.frontends.stream import Delta, Stream
from baton.frontends.validate import GenerateRequest
from baton.ipc.frames import Failure, Params, Prompt
from tests.frontends.double import CARD

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
REQUEST = GenerateRequest("chat", "model-1", Params(), Prompt(text="x"))


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        GOOD[:-1],
        GOOD + "0",
        GOOD + "-extra",
        GOOD.upper(),
        " " + GOOD,
        "ff" + GOOD[2:],
        "0" * 2 + "-" + "0" * 32 + GOOD[35:],
        GOOD[:36] + "0" * 16 + "-01",
        GOOD.replace("-", "_"),
        GOOD.replace("a", "g"),
    ],
)
def test_a_bad_traceparent_is_none(header: str | None) -> None:
    assert traceparent.parse(header) is None


def test_a_good_traceparent_is_read() -> None:
    context = traceparent.parse(GOOD)
    assert context is not None and context.hex() == GOOD[3:35] + GOOD[36:52] + "01"
    assert traceparent.parse("01" + GOOD[2:] + "-more") == context
    unsampled = traceparent.parse(GOOD[:-2] + "fe")
    assert unsampled is not None and unsampled[24] == 0
    assert traceparent.of_headers([GOOD]) == context and traceparent.of_headers([GOOD, GOOD]) is None


def test_roots_are_sampled_by_ratio_unless_the_parent_decides() -> None:
    parent = traceparent.parse(GOOD)
    assert parent is not None
    assert traceparent.root(parent, 0.0)[24] == 1 and traceparent.root(parent[:24] + b"\0", 1.0)[24] == 0
    assert {traceparent.root(None, 0.0)[24] for _ in range(50)} == {0}
    assert {traceparent.root(None, 1.0)[24] for _ in range(50)} == {1}
    assert len({traceparent.root(None, 1.0)[:24] for _ in range(50)}) == 50


class Desk:
    """A reception whose core only listens."""

    def __init__(self, limits: Limits) -> None:
        self.events: list[object] = []
        self.reception = Reception(self.events.append, lambda: 7, CARD, limits)

    def open(self) -> Stream:
        return self.reception.open(REQUEST, None, 5, {"baton.door": "test"})

    def of(self, kind: type) -> list[object]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk(Limits(mailbox_tokens_max=8, stalled_s_max=0.4))
    yield desk
    left = [event for event in desk.events if isinstance(event, Gone) and not event.wants_end]
    assert len(desk.of(Open)) == len(left) + len(desk.of(Answered))
    assert not desk.reception.streams
    desk.reception.close()


async def test_what_is_not_fetched_is_merged_and_the_effects_lists_are_left_alone(desk: Desk) -> None:
    with desk.open() as stream:
        effects = [Deliver(stream.door, [number], [f"{number}"], [-1.0]) for number in range(3)]
        for effect in effects:
            desk.reception.perform(effect)
        desk.reception.perform(Finish(stream.door, "stop", None, "tail", 3, 1, None))
        delta = await anext(stream)
        assert (delta.token_ids, delta.text, delta.position) == ([0, 1, 2], "012tail", 3)
        assert [effect.token_ids for effect in effects] == [[0], [1], [2]]
        assert [delta async for delta in stream] == []
        stream.answered()
        stream.gone()


async def test_what_was_taken_is_reported_by_quarters_or_by_the_timer(desk: Desk) -> None:
    with desk.open() as stream:
        desk.reception.perform(Deliver(stream.door, [1, 2, 3], ["a", "b", "c"], []))
        stream.took(1)
        assert not desk.of(Taken)
        stream.took(2)
        assert desk.of(Taken) == [Taken(stream.door, 2)]
        stream.took(3)
        async with asyncio.timeout(5):
            while len(desk.of(Taken)) < 2:
                await asyncio.sleep(0.01)
        assert desk.of(Taken)[1] == Taken(stream.door, 3)


async def test_a_refusal_is_raised_where_the_beginning_is_awaited(desk: Desk) -> None:
    with desk.open() as stream:
        desk.reception.perform(Finish(stream.door, "refused", None, "", 0, 0, Failure(429, "x", "full")))
        with pytest.raises(Refused, match="full"):
            await stream.begin()
        stream.answered()
    with desk.open() as stream:
        desk.reception.perform(Finish(stream.door, "timeout", None, "", 0, 0, None))
        with pytest.raises(Refused, match="time limit"):
            await stream.begin()


async def test_leaving_by_an_exception_is_going_away_once(desk: Desk) -> None:
    with suppress(ValueError), desk.open() as stream:
        desk.reception.perform(Begin(stream.door, [1]))
        await stream.begin()
        stream.cancel()
        raise ValueError
    stream.gone()
    stream.cancel()
    stream.took(100)
    desk.reception.perform(Deliver(stream.door, [1], ["a"], []))
    wants = [event.wants_end for event in desk.events if isinstance(event, Gone)]
    assert wants == [True, False] and not desk.of(Taken)


async def test_a_pumped_stream_writes_once_a_turn_and_wakes_nobody_before_the_end(desk: Desk) -> None:
    written: list[tuple[list[int], int]] = []

    def write(delta: Delta) -> bool:
        written.append((delta.token_ids, delta.position))
        return True

    with desk.open() as stream:
        desk.reception.perform(Deliver(stream.door, [0], ["a"], []))
        pumping = asyncio.create_task(stream.pump(write))
        await asyncio.sleep(0)
        assert written == [([0], 1)], "what was there already goes first"
        for number in (1, 2):  # two frames in one turn
            desk.reception.perform(Deliver(stream.door, [number], ["a"], []))
        assert len(written) == 1
        await asyncio.sleep(0)
        assert written[1:] == [([1, 2], 3)] and not pumping.done()
        desk.reception.perform(Deliver(stream.door, [3], ["a"], []))
        desk.reception.perform(Finish(stream.door, "stop", None, "tail", 4, 1, None))
        assert await pumping and written[2:] == [([3], 4)]
        stream.answered()


async def test_a_client_that_is_behind_is_waited_for_and_what_comes_meanwhile_is_merged(desk: Desk) -> None:
    written: list[list[int]] = []
    room = asyncio.Event()

    def write(delta: Delta) -> bool:
        written.append(delta.token_ids)
        return room.is_set()

    async def drain() -> None:
        await room.wait()

    with desk.open() as stream:
        flowing = asyncio.create_task(stream.flow(write, drain))
        await asyncio.sleep(0)
        for number in range(5):
            desk.reception.perform(Deliver(stream.door, [number], ["a"], []))
            await asyncio.sleep(0)
        assert written == [[0]] and not desk.of(Taken), "nothing counts as taken before it has drained"
        room.set()
        desk.reception.perform(Finish(stream.door, "stop", None, "", 5, 1, None))
        await flowing
        assert written == [[0], [1, 2, 3, 4]]
        assert desk.of(Taken)[-1] == Taken(stream.door, 5)
        stream.answered()


async def test_a_write_that_fails_ends_the_pump_of_its_own_stream_alone(desk: Desk) -> None:
    def gone(delta: Delta) -> bool:
        raise ConnectionResetError

    written: list[int] = []

    def write(delta: Delta) -> bool:
        written.extend(delta.token_ids)
        return True

    with desk.open() as broken, desk.open() as sound:
        pumps = [asyncio.create_task(broken.pump(gone)), asyncio.create_task(sound.pump(write))]
        await asyncio.sleep(0)
        for stream in (broken, sound):
            desk.reception.perform(Deliver(stream.door, [7], ["a"], []))
        with pytest.raises(ConnectionResetError):
            await pumps[0]
        desk.reception.perform(Deliver(broken.door, [8], ["a"], []))
        desk.reception.perform(Finish(sound.door, "stop", None, "", 1, 1, None))
        assert await pumps[1] and written == [7]
        sound.answered()


async def test_an_idle_reception_is_seen(desk: Desk) -> None:
    await desk.reception.idle()
    with desk.open():
        waiting = asyncio.create_task(desk.reception.idle())
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 5)
