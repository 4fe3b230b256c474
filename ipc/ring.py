"""Rings: one writer, a few readers, in shared memory; how tokens and step plans travel.

A frame is a header (its own absolute offset, length, checksum) and a payload; the write cursor is stored last, so a
frame is there whole or not at all. Cursors only grow and live in the file, so a restarted process goes on where its
predecessor stood. A frame whose header or checksum is wrong was torn or overwritten: ``RingDamaged``. A ring never
overwrites what a reader has not read; it says it is full.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from pathlib import Path

MAGIC = 0x474E4952_01  # "RING", layout 1
HEADER_BYTES = 512
CAPACITY, WRITTEN, READERS, CURSORS = 1, 2, 3, 8  # words of the header
READERS_MAX = (HEADER_BYTES // 8) - CURSORS
_FRAME = struct.Struct("=QII")
_WRAP = 0xFFFFFFFF


class RingDamaged(Exception):
    """A torn or overwritten frame: the writer is not to be trusted any more."""


class Ring:
    """The buffer both ends share. Invariant: no reader's cursor is past ``written`` or more than a lap behind it."""

    def __init__(self, buffer: mmap.mmap | bytearray) -> None:
        self.words = memoryview(buffer)[:HEADER_BYTES].cast("Q")
        self.data = memoryview(buffer)[HEADER_BYTES:]
        self._map = buffer
        if self.words[0] != MAGIC:
            raise ValueError("not a ring of this version")
        self.capacity = self.words[CAPACITY]
        self.readers = self.words[READERS]

    @classmethod
    def format(cls, buffer: mmap.mmap | bytearray, readers: int) -> Ring:
        """Make an empty ring in a zeroed buffer; its capacity is what is left of the buffer, in whole words."""
        if not 0 < readers <= READERS_MAX:
            raise ValueError(f"a ring has 1 to {READERS_MAX} readers, not {readers}")
        words = memoryview(buffer)[:HEADER_BYTES].cast("Q")
        words[CAPACITY], words[READERS] = (len(buffer) - HEADER_BYTES) // 8 * 8, readers
        words[0] = MAGIC
        words.release()
        return cls(buffer)

    @classmethod
    def create(cls, path: Path, capacity_bytes: int, readers: int) -> Ring:
        """Make the file and an empty ring in it."""
        with path.open("xb+") as file:
            file.truncate(HEADER_BYTES + capacity_bytes)
            return cls.format(mmap.mmap(file.fileno(), 0), readers)

    @classmethod
    def open(cls, path: Path) -> Ring:
        """Map an existing ring."""
        with path.open("rb+") as file:
            return cls(mmap.mmap(file.fileno(), 0))

    def lag(self, reader: int) -> int:
        """Bytes a reader is behind."""
        return self.words[WRITTEN] - self.words[CURSORS + reader]

    def close(self) -> None:
        """Unmap."""
        self.words.release()
        self.data.release()
        if isinstance(self._map, mmap.mmap):
            self._map.close()


class RingWriter:
    """The one writing end."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring

    def room(self, size: int) -> bool:
        """Whether a payload of ``size`` bytes would fit now, wherever the ring's end falls."""
        ring = self.ring
        slowest = min(ring.words[CURSORS : CURSORS + ring.readers])
        free = ring.capacity - (ring.words[WRITTEN] - slowest)
        at = ring.words[WRITTEN] % ring.capacity
        need = _padded(_FRAME.size + size)
        skipped = ring.capacity - at if at + need > ring.capacity else 0
        return need + skipped <= free

    def write(self, payload: bytes) -> bool:
        """Append one frame and commit it; False if the slowest reader has left no room."""
        ring = self.ring
        need = _padded(_FRAME.size + len(payload))
        if not fits(ring.capacity, len(payload)):
            raise ValueError(f"a frame of {len(payload)} bytes can never fit a ring of {ring.capacity}")
        if not self.room(len(payload)):
            return False
        written = ring.words[WRITTEN]
        at = written % ring.capacity
        if at + need > ring.capacity:
            if ring.capacity - at >= _FRAME.size:
                _FRAME.pack_into(ring.data, at, written, _WRAP, 0)
            written += ring.capacity - at
            at = 0
        _FRAME.pack_into(ring.data, at, written, len(payload), zlib.crc32(payload))
        ring.data[at + _FRAME.size : at + _FRAME.size + len(payload)] = payload
        ring.words[WRITTEN] = written + need
        return True


class RingReader:
    """One reading end; its cursor lives in the ring."""

    def __init__(self, ring: Ring, reader: int) -> None:
        assert 0 <= reader < ring.readers
        self.ring = ring
        self.reader = reader

    def read(self) -> list[bytes]:
        """Every frame committed since the last call; they are copies and the room is free again."""
        ring, frames = self.ring, list[bytes]()
        cursor, written = ring.words[CURSORS + self.reader], ring.words[WRITTEN]
        if written - cursor > ring.capacity or written < cursor:
            raise RingDamaged(f"cursor {cursor} does not fit what was written, {written}")
        while cursor < written:
            at = cursor % ring.capacity
            if ring.capacity - at < _FRAME.size:
                cursor += ring.capacity - at
                continue
            offset, length, checksum = _FRAME.unpack_from(ring.data, at)
            if offset != cursor:
                raise RingDamaged(f"the frame at {cursor} says it is at {offset}")
            if length == _WRAP:
                cursor += ring.capacity - at
                continue
            end = at + _FRAME.size + length
            if end > ring.capacity:
                raise RingDamaged(f"the frame at {cursor} is longer than the ring")
            payload = bytes(ring.data[at + _FRAME.size : end])
            if zlib.crc32(payload) != checksum:
                raise RingDamaged(f"the frame at {cursor} does not match its checksum")
            frames.append(payload)
            cursor += _padded(_FRAME.size + length)
        ring.words[CURSORS + self.reader] = cursor
        return frames

    def skip(self) -> None:
        """Give up everything committed so far; the way on after damage."""
        self.ring.words[CURSORS + self.reader] = self.ring.words[WRITTEN]


def fits(capacity: int, size: int) -> bool:
    """Whether a payload of ``size`` bytes can ever be written: it and what is skipped at the ring's end together."""
    return 2 * _padded(_FRAME.size + size) <= capacity


def _padded(size: int) -> int:
    return (size + 7) // 8 * 8
