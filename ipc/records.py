"""What stands in the rings: sampled tokens as fixed-size records, step plans as one msgspec struct each."""

from __future__ import annotations

import struct

import msgspec

from baton.engine.effects import Plan, StepDone, TokenRecord
from baton.ipc.ring import RingDamaged, RingReader, RingWriter

_STEP = struct.Struct("=QQI4x")
_TOKEN = struct.Struct("=IIIIIIf")  # slot, generation, run, position, token, flags, log-probability
_plan_encoder = msgspec.msgpack.Encoder()
_plan_decoder = msgspec.msgpack.Decoder(Plan)


def encode_step(done: StepDone) -> bytes:
    """One step's records as one frame: a header and 28 bytes a token."""
    buffer = bytearray(_STEP.size + _TOKEN.size * len(done.records))
    _STEP.pack_into(buffer, 0, done.incarnation, done.step, len(done.records))
    at = _STEP.size
    for r in done.records:
        _TOKEN.pack_into(buffer, at, r.slot, r.generation, r.run, r.position, r.token, r.flags, r.logprob)
        at += _TOKEN.size
    return bytes(buffer)


def decode_step(frame: bytes) -> StepDone:
    """The reverse; a frame of the wrong shape is a damaged ring."""
    if len(frame) < _STEP.size:
        raise RingDamaged(f"a step frame of {len(frame)} bytes")
    incarnation, step, count = _STEP.unpack_from(frame)
    if len(frame) != _STEP.size + count * _TOKEN.size:
        raise RingDamaged(f"a step frame of {len(frame)} bytes cannot hold {count} tokens")
    records = [TokenRecord(*fields) for fields in _TOKEN.iter_unpack(memoryview(frame)[_STEP.size :])]
    return StepDone(incarnation, step, records)


class StepReader:
    """A reading end of the token ring, decoded."""

    def __init__(self, reader: RingReader) -> None:
        self._reader = reader

    def read(self) -> list[StepDone]:
        """Every step committed since the last call."""
        return [decode_step(frame) for frame in self._reader.read()]


class StepWriter:
    """The writing end of the token ring."""

    def __init__(self, writer: RingWriter) -> None:
        self._writer = writer

    def write(self, done: StepDone) -> bool:
        """Commit one step; False while the slowest reader leaves no room."""
        return self._writer.write(encode_step(done))


class PlanReader:
    """A rank's reading end of the plan ring, decoded."""

    def __init__(self, reader: RingReader) -> None:
        self._reader = reader

    def read(self) -> list[Plan]:
        """Every plan committed since the last call; one that does not decode is a damaged ring."""
        try:
            return [_plan_decoder.decode(frame) for frame in self._reader.read()]
        except msgspec.DecodeError as error:
            raise RingDamaged(f"a plan that does not decode: {error}") from None


class PlanWriter:
    """The scheduler's writing end of the plan ring."""

    def __init__(self, writer: RingWriter) -> None:
        self._writer = writer

    def write(self, plan: Plan) -> bool:
        """Commit one plan; False while the slowest rank leaves no room."""
        return self._writer.write(_plan_encoder.encode(plan))
