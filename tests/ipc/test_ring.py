"""Rings: in order, whole, never overwritten; damage is seen; a writer may be killed at any moment."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.effects import Plan, Row, StepDone, TokenRecord
from baton.ipc.records import PlanReader, PlanWriter, StepReader, StepWriter
from baton.ipc.ring import CURSORS, HEADER_BYTES, WRITTEN, Ring, RingDamaged, RingReader, RingWriter
from tests.ipc.victim import victim

#: a writer of its own process: frames that say their number, for ever
ENDLESS_WRITER = """
import sys
from pathlib import Path
from baton.ipc.ring import Ring, RingWriter
writer = RingWriter(Ring.open(Path(sys.argv[1])))
number = int(sys.argv[2])
while True:
    if writer.write(number.to_bytes(8, "little") * (1 + number % 50)):
        if number == int(sys.argv[2]):
            sys.stdout.write("ready\\n")
            sys.stdout.flush()
        number += 1
"""


def make(capacity: int, readers: int = 1) -> tuple[Ring, RingWriter, list[RingReader]]:
    ring = Ring.format(bytearray(HEADER_BYTES + capacity), readers)
    return ring, RingWriter(ring), [RingReader(ring, number) for number in range(readers)]


@given(st.integers(64, 400), st.lists(st.one_of(st.binary(max_size=30), st.sampled_from([0, 1])), max_size=80))
def test_two_readers_get_every_frame_in_order_or_the_writer_hears_no(capacity: int, actions: list[bytes | int]) -> None:
    ring, writer, readers = make(capacity, 2)
    owed: list[deque[bytes]] = [deque(), deque()]
    for action in actions:
        if isinstance(action, int):
            assert readers[action].read() == list(owed[action])
            owed[action].clear()
        elif 2 * (16 + (len(action) + 7) // 8 * 8) <= ring.capacity and writer.write(action):
            for queue in owed:
                queue.append(action)
    for reader, queue in zip(readers, owed, strict=True):
        assert reader.read() == list(queue)
        assert ring.lag(reader.reader) == 0


@given(st.integers(8, 400), st.integers(0, 400))
def test_an_empty_ring_takes_a_frame_wherever_its_cursor_stands_or_refuses_it_for_ever(start: int, size: int) -> None:
    ring, writer, (reader,) = make(400)
    ring.words[WRITTEN] = ring.words[CURSORS] = start // 8 * 8
    if 2 * (16 + (size + 7) // 8 * 8) <= ring.capacity:
        assert writer.write(bytes(size))
        assert reader.read() == [bytes(size)]
    else:
        with pytest.raises(ValueError, match="can never fit"):
            writer.write(bytes(size))


def test_a_full_ring_says_so_and_takes_more_once_its_slowest_reader_has_read() -> None:
    _, writer, (fast, slow) = make(128, 2)
    while writer.write(b"12345678"):
        fast.read()
    assert not writer.room(8)
    assert len(slow.read()) == 5
    assert writer.write(b"12345678")


def test_cursors_outlive_both_ends() -> None:
    ring, writer, (reader,) = make(256)
    writer.write(b"one")
    assert reader.read() == [b"one"]
    RingWriter(ring).write(b"two")
    assert RingReader(ring, 0).read() == [b"two"]


@settings(max_examples=300)
@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6), st.data())
def test_a_changed_byte_is_damage_or_harmless_never_garbage(frames: list[bytes], data: st.DataObject) -> None:
    ring, writer, (reader,) = make(1024)
    skipped = data.draw(st.integers(0, 12))
    for _ in range(skipped):  # so that the frames lie across the ring's end as well
        writer.write(bytes(60))
        reader.read()
    for frame in frames:
        assert writer.write(frame)
    place = data.draw(st.one_of(st.integers(0, ring.capacity - 1), st.integers(-8, -1)))
    change = data.draw(st.integers(1, 255))
    if place < 0:
        before = ring.words[WRITTEN]
        ring.words[WRITTEN] = before ^ change << 8 * (-place - 1)
    else:
        ring.data[place] ^= change
    came: list[bytes] = []
    try:
        came = reader.read()
        reader.read()
    except RingDamaged:
        pass
    assert came == frames[: len(came)]


def test_a_writer_killed_in_the_middle_leaves_whole_frames_and_a_successor_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    reader = RingReader(Ring.create(path, 16384, 1), 0)
    expected, rng = 0, random.Random(1)
    for _ in range(4):
        with victim(ENDLESS_WRITER, path, expected):
            until = expected + rng.randrange(500, 3000)
            while expected < until:
                expected = follow(reader, expected)
        expected = follow(reader, expected)
    assert reader.read() == []


def follow(reader: RingReader, expected: int) -> int:
    """Read what is there; each frame must be the next and whole."""
    for frame in reader.read():
        assert frame == expected.to_bytes(8, "little") * (1 + expected % 50)
        expected += 1
    return expected


def test_a_ring_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="not a ring"):
        Ring(bytearray(1024))


def test_readers_are_bounded() -> None:
    with pytest.raises(ValueError, match="readers"):
        Ring.format(bytearray(1024), 0)


words = st.integers(0, 2**32 - 1)
records = st.builds(TokenRecord, words, words, words, words, words, words, st.floats(width=32, allow_nan=False))


@given(st.integers(0, 2**63), st.integers(0, 2**63), st.lists(records, max_size=8))
def test_steps_come_out_as_they_went_in(incarnation: int, step: int, tokens: list[TokenRecord]) -> None:
    _, writer, (reader,) = make(2048)
    done = StepDone(incarnation, step, tokens)
    assert StepWriter(writer).write(done)
    assert StepReader(reader).read() == [done]


def test_plans_come_out_as_they_went_in() -> None:
    _, writer, (reader,) = make(2048)
    plan = Plan((3,), 7, [1], [], [Row(2, 0, 3, [4, 5], True)])
    assert PlanWriter(writer).write(plan)
    assert PlanReader(reader).read() == [plan]


@pytest.mark.parametrize("frame", [b"", b"short", bytes(24) + b"x", (9).to_bytes(20, "big") + bytes(9)])
def test_a_frame_that_is_no_step_or_no_plan_is_damage(frame: bytes) -> None:
    for read in (StepReader, PlanReader):
        _, writer, (reader,) = make(2048)
        writer.write(frame)
        with pytest.raises(RingDamaged):
            read(reader).read()
