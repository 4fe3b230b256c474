"""Damage in a real ring is seen, given up, told of, and read past."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.engine.batch import Sampling
from baton.engine.effects import Plan, Row, Start, StepDone, TokenRecord
from baton.engine.scores import PromptRecord, pack, pack_entry, unpack
from baton.ipc.records import PlanReader, PlanWriter, StepReader, StepWriter, decode_step, encode_step
from baton.ipc.ring import CURSORS, HEADER_BYTES, WRITTEN, Ring, RingDamaged, RingReader, RingWriter

BYTES = 4096
RIVALS = pack([(42, -0.5), (7, -2.5)])
DONE = StepDone(1, 7, [TokenRecord(2, 1, 3, 0, 42, 0, -0.5, RIVALS), TokenRecord(3, 1, 3, 4, 43, 1, -1.5)])
PLAN = Plan((1,), 7, [4], [Start(2, 1, 3, [5, 6], 2, Sampling(0.0, 1.0, 0, 1, (1,)))], [Row(2, 0, 2, [9], True)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    Ring.create(tmp_path / "ring", BYTES, 1).close()
    return tmp_path / "ring"


@pytest.fixture
def ring(path: Path) -> Iterator[Ring]:
    opened = Ring.open(path)
    yield opened
    opened.close()


def turn_over(path: Path, at: int, bit: int = 0) -> None:
    """Damage a byte of the file, as a process gone wild would."""
    with path.open("rb+") as file:
        file.seek(HEADER_BYTES + at)
        byte = file.read(1)[0]
        file.seek(HEADER_BYTES + at)
        file.write(bytes([byte ^ 1 << bit]))


def test_a_byte_turned_over_anywhere_in_a_frame_is_seen_and_the_next_frame_is_read(path: Path, ring: Ring) -> None:
    told: list[RingDamaged] = []
    reader, writer = StepReader(RingReader(ring, 0), 8, told.append), StepWriter(RingWriter(ring))
    writer.write(DONE)
    frame_bytes = ring.words[WRITTEN]
    assert reader.read() == [DONE]
    padding = (-(len(encode_step(DONE)) + 16)) % 8
    for offset in range(frame_bytes - padding):
        begins = ring.words[WRITTEN] % ring.capacity
        writer.write(DONE)
        if (
            ring.words[WRITTEN] % ring.capacity != (begins + frame_bytes) % ring.capacity
        ):  # it went around the ring's end
            begins = 0
        turn_over(path, begins + offset, offset % 8)
        assert reader.read() == [] and len(told) == offset + 1
        writer.write(DONE)
        assert reader.read() == [DONE]


def test_records_about_rows_that_are_not_there_are_damage(ring: Ring) -> None:
    told: list[RingDamaged] = []
    reader, writer = StepReader(RingReader(ring, 0), 3, told.append), StepWriter(RingWriter(ring))
    writer.write(DONE)
    assert reader.read() == [] and "slot 3" in str(told[0])


@pytest.mark.parametrize("word", [0, 1 << 63, 12345])
def test_cursors_that_make_no_sense_are_damage(ring: Ring, word: int) -> None:
    told: list[RingDamaged] = []
    reader, writer = StepReader(RingReader(ring, 0), 8, told.append), StepWriter(RingWriter(ring))
    writer.write(DONE)
    reader.read()
    ring.words[WRITTEN] = word
    assert reader.read() == [] and told
    assert ring.words[CURSORS] == ring.words[WRITTEN]


def noise(kind: str, rng: random.Random) -> bytes:
    whole = bytearray(rng.randbytes(rng.randrange(200)))
    if kind == "nested":
        whole = bytearray(b"\x91" * rng.randrange(1, 1500))
    return bytes(whole)


Maker = Callable[[RingReader, Callable[[RingDamaged], None]], StepReader | PlanReader]


@pytest.mark.parametrize("kind", ["random", "nested"])
@pytest.mark.parametrize(
    "make",
    [lambda reader, damaged: StepReader(reader, 8, damaged), PlanReader],
    ids=["steps", "plans"],
)
def test_frames_of_noise_are_damage_and_what_is_written_later_is_read(ring: Ring, make: Maker, kind: str) -> None:
    told: list[RingDamaged] = []
    reader = make(RingReader(ring, 0), told.append)
    rng, writer = random.Random(3), RingWriter(ring)
    for number in range(1, 300):
        assert writer.write(noise(kind, rng))
        assert reader.read() == [] and len(told) == number
    if isinstance(reader, StepReader):
        StepWriter(writer).write(DONE)
        assert reader.read() == [DONE]
    else:
        PlanWriter(writer).write(PLAN)
        assert reader.read() == [PLAN]


def test_rivals_travel_with_their_token() -> None:
    three = StepDone(1, 7, [*DONE.records, TokenRecord(4, 1, 3, 5, 44, 0, -1.0, pack([(44, -1.0)]))])
    assert decode_step(encode_step(three)) == three
    assert unpack(three.records[0].tops) == [(42, -0.5), (7, -2.5)]


EXTRAS_AT = 32 + 28 * len(DONE.records)


@pytest.mark.parametrize(
    "extras",
    [
        struct.pack("=II", 2, 8) + bytes(8),  # of a record that is not there
        struct.pack("=II", 0, 4) + bytes(4),  # half a pair
        struct.pack("=II", 0, 0),  # of nothing
        struct.pack("=II", 0, 16) + bytes(8),  # longer than the frame
        struct.pack("=II", 0, 0xFFFFFFF8) + bytes(8),
        struct.pack("=II", 1, 8) + bytes(8) + struct.pack("=II", 0, 8) + bytes(8),  # out of order
        struct.pack("=II", 0, 8) + bytes(8) + struct.pack("=II", 0, 8) + bytes(8),  # twice
        struct.pack("=II", 0, 8) + bytes(8) + b"abc",  # cut off
    ],
)
def test_extras_that_do_not_fit_are_damage(extras: bytes) -> None:
    frame = bytearray(encode_step(DONE)[:EXTRAS_AT] + extras)
    struct.pack_into("=I", frame, 20, len(extras))
    with pytest.raises(RingDamaged):
        decode_step(bytes(frame))
    struct.pack_into("=I", frame, 20, len(extras) + 1)
    with pytest.raises(RingDamaged, match="cannot hold"):
        decode_step(bytes(frame))


def noisy(seed: int, whole: bytes) -> list[StepDone]:
    """What is read of a frame with noise behind its header, cut off half the time; most of it is damage."""
    rng, found = random.Random(seed), []
    for _ in range(5000):
        frame = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            frame[rng.randrange(16, len(frame))] = rng.randrange(256)
        with contextlib.suppress(RingDamaged):
            found.append(decode_step(bytes(frame[: rng.choice((len(frame), rng.randrange(len(frame))))])))
    assert len(found) < 4000
    return found


def test_noise_behind_the_records_never_gets_through_as_something_else() -> None:
    for found in noisy(5, encode_step(DONE)):
        assert len(found.records) <= 2 and all(len(record.tops) % 8 == 0 for record in found.records)


SCORED = PromptRecord(5, 1, 3, 4, 2, pack_entry(3, [(42, -0.5), (7, -0.25)]) * 2)


def test_what_is_told_of_prompts_travels_with_the_step() -> None:
    done = StepDone(1, 8, DONE.records, [SCORED, PromptRecord(6, 2, 9, 1, 1, pack_entry(1, [(1, -1.0)]))])
    assert decode_step(encode_step(done)) == done
    assert decode_step(encode_step(StepDone(1, 9, [], [SCORED]))).prompts == [SCORED]


@pytest.mark.parametrize(
    "prompt",
    [
        struct.pack("=IIIIII", 1, 1, 1, 1, 1, 12) + bytes(8),  # longer than the frame
        struct.pack("=IIIIII", 1, 1, 1, 1, 0x20000000, 12) + bytes(12),
        struct.pack("=IIIIII", 1, 1, 1, 1, 0, 12),  # no entries
        struct.pack("=IIIIII", 1, 1, 1, 0, 1, 12) + bytes(12),  # of the first token, that has none
        struct.pack("=IIIIII", 1, 1, 1, 1, 1, 4) + bytes(4),  # an entry without a pair
        struct.pack("=IIIIII", 1, 1, 1, 1, 1, 15) + bytes(15),  # half a pair
        struct.pack("=IIIIII", 1, 1, 1, 1, 1, 12) + bytes(13),  # more than the frame should have
        struct.pack("=IIII", 1, 1, 1, 1),  # cut off
    ],
)
def test_prompts_that_do_not_fit_are_damage(prompt: bytes) -> None:
    frame = bytearray(encode_step(StepDone(1, 7, [])) + prompt)
    struct.pack_into("=II", frame, 24, 1, len(prompt))
    with pytest.raises(RingDamaged):
        decode_step(bytes(frame))
    struct.pack_into("=II", frame, 24, 2, len(prompt))
    with pytest.raises(RingDamaged):
        decode_step(bytes(frame))


def test_a_prompt_of_a_row_that_the_board_does_not_have_is_damage(ring: Ring) -> None:
    told: list[RingDamaged] = []
    reader = StepReader(RingReader(ring, 0), 5, told.append)
    StepWriter(RingWriter(ring)).write(StepDone(1, 7, [], [SCORED]))
    assert reader.read() == [] and "slot 5" in str(told[0])


def test_noise_in_the_prompts_of_a_step_is_damage_or_a_step() -> None:
    for found in noisy(6, encode_step(StepDone(1, 7, DONE.records, [SCORED, SCORED]))):
        assert all(len(prompt.entries) % prompt.count == 0 for prompt in found.prompts)
