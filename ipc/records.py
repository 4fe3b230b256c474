"""What stands in the rings: sampled tokens as fixed-size records, step plans as one msgspec struct each.

Log-probabilities of a token's rivals, and those of a prompt's tokens, stand behind a step's records, in the same frame:
what is committed is whole.

A reader that finds damage gives up what the ring holds and says so to ``damaged``; what follows from it (the death of
the ring's writer) is decided elsewhere.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import starmap
from typing import NoReturn

import msgspec

from baton.engine.effects import Plan, StepDone, TokenRecord
from baton.engine.scores import PAIR_BYTES, RANK_BYTES, PromptRecord, entry_bytes
from baton.ipc.ring import RingDamaged, RingReader, RingWriter, fits

_STEP = struct.Struct("=QQIIII")  # incarnation, step, records, bytes of extras, prompts, bytes of prompts
_TOKEN = struct.Struct("=IIIIIIf")  # slot, generation, run, position, token, flags, log-probability
_EXTRA = struct.Struct("=II")  # index of its record, bytes of pairs that follow
_PROMPT = struct.Struct("=IIIIII")  # slot, generation, run, start, entries that follow, bytes of an entry
_plan_encoder = msgspec.msgpack.Encoder()
_plan_decoder = msgspec.msgpack.Decoder(Plan)


def encode_step(done: StepDone) -> bytes:
    """One step's records as one frame: a header, 28 bytes a token, then what there is to say beyond that."""
    extras = [
        part
        for index, record in enumerate(done.records)
        if record.tops
        for part in (_EXTRA.pack(index, len(record.tops)), record.tops)
    ]
    prompts = [part for prompt in done.prompts for part in (_prompt_head(prompt), prompt.entries)]
    buffer = bytearray(_STEP.size + _TOKEN.size * len(done.records))
    sizes = (len(done.records), sum(map(len, extras)), len(done.prompts), sum(map(len, prompts)))
    _STEP.pack_into(buffer, 0, done.incarnation, done.step, *sizes)
    at = _STEP.size
    for r in done.records:
        _TOKEN.pack_into(buffer, at, r.slot, r.generation, r.run, r.position, r.token, r.flags, r.logprob)
        at += _TOKEN.size
    return b"".join((buffer, *extras, *prompts))


def _prompt_head(prompt: PromptRecord) -> bytes:
    count, size = prompt.count, len(prompt.entries) // prompt.count
    return _PROMPT.pack(prompt.slot, prompt.generation, prompt.run, prompt.start, count, size)


def decode_step(frame: bytes) -> StepDone:
    """The reverse; a frame of the wrong shape is a damaged ring."""
    if len(frame) < _STEP.size:
        raise RingDamaged(f"a step frame of {len(frame)} bytes")
    incarnation, step, count, extras, prompts, behind_them = _STEP.unpack_from(frame)
    behind = _STEP.size + count * _TOKEN.size
    if len(frame) != behind + extras + behind_them:
        what = f"{count} tokens and {extras} and {behind_them} bytes of extras"
        raise RingDamaged(f"a step frame of {len(frame)} bytes cannot hold {what}")
    records = list(starmap(TokenRecord, _TOKEN.iter_unpack(memoryview(frame)[_STEP.size : behind])))
    if extras:
        for index, tops in _extras(frame[: behind + extras], behind, count):
            records[index] = msgspec.structs.replace(records[index], tops=tops)
    told = list(_prompts(frame, behind + extras, prompts)) if prompts or behind_them else []
    return StepDone(incarnation, step, records, told)


def _extras(frame: bytes, at: int, count: int) -> Iterator[tuple[int, bytes]]:
    """What stands behind the records, with the index of the record it belongs to; each at most once, in order."""
    last = -1
    while at < len(frame):
        if len(frame) - at < _EXTRA.size:
            raise RingDamaged("the extras of a step frame end in the middle")
        index, size = _EXTRA.unpack_from(frame, at)
        at += _EXTRA.size
        if not last < index < count or not size or size % PAIR_BYTES or size > len(frame) - at:
            raise RingDamaged(f"extras of {size} bytes for record {index} of {count} do not fit their frame")
        yield index, frame[at : at + size]
        at, last = at + size, index


def _prompts(frame: bytes, at: int, count: int) -> Iterator[PromptRecord]:
    """What stands behind those: ``count`` stretches of prompts, to the frame's end."""
    for _ in range(count):
        if len(frame) - at < _PROMPT.size:
            raise RingDamaged("the prompts of a step frame end in the middle")
        slot, generation, run, start, entries, size = _PROMPT.unpack_from(frame, at)
        at += _PROMPT.size
        whole = size > RANK_BYTES and (size - RANK_BYTES) % PAIR_BYTES == 0
        if not (whole and start and entries) or entries * size > len(frame) - at:
            raise RingDamaged(f"{entries} entries of {size} bytes from position {start} on do not fit their frame")
        yield PromptRecord(slot, generation, run, start, entries, frame[at : at + entries * size])
        at += entries * size
    if at < len(frame):
        raise RingDamaged(f"{len(frame) - at} bytes stand behind the prompts of a step frame")


def mistrust(error: RingDamaged) -> NoReturn:
    """What a reader does about damage where nobody else is there to deal with it."""
    raise error


def ring_holds(
    ring_bytes: int, tokens: int, top_logprobs: int = 0, prompt_tokens: int = 0, prompt_logprobs: int = 0
) -> bool:
    """Whether a token ring of this capacity can take a step of so many tokens, each with its likeliest rivals, and of
    ``prompt_tokens`` of its rows' prompts.
    """
    extras = _EXTRA.size + PAIR_BYTES * top_logprobs if top_logprobs else 0
    prompts = _PROMPT.size * min(tokens, prompt_tokens) + entry_bytes(prompt_logprobs) * prompt_tokens
    return fits(ring_bytes, _STEP.size + (_TOKEN.size + extras) * tokens + prompts)


class StepReader:
    """A reading end of the token ring, decoded. A record about a row that the board does not have is damage."""

    def __init__(
        self, reader: RingReader, rows: int = 1 << 32, damaged: Callable[[RingDamaged], None] = mistrust
    ) -> None:
        self._reader = reader
        self._rows = rows
        self._damaged = damaged

    def read(self) -> list[StepDone]:
        """Every step committed since the last call; none where the ring was damaged."""
        try:
            return [self._decode(frame) for frame in self._reader.read()]
        except RingDamaged as error:
            self._reader.skip()
            self._damaged(error)
            return []

    def _decode(self, frame: bytes) -> StepDone:
        done = decode_step(frame)
        slots = [record.slot for record in done.records] + [prompt.slot for prompt in done.prompts]
        highest = max(slots, default=0)
        if highest >= self._rows:
            raise RingDamaged(f"a record of slot {highest}, the board has {self._rows}")
        return done


class StepWriter:
    """The writing end of the token ring."""

    def __init__(self, writer: RingWriter) -> None:
        self._writer = writer

    def write(self, done: StepDone) -> bool:
        """Commit one step; False while the slowest reader leaves no room."""
        return self._writer.write(encode_step(done))


class PlanReader:
    """A rank's reading end of the plan ring, decoded."""

    def __init__(self, reader: RingReader, damaged: Callable[[RingDamaged], None] = mistrust) -> None:
        self._reader = reader
        self._damaged = damaged

    def read(self) -> list[Plan]:
        """Every plan committed since the last call; none where the ring was damaged."""
        try:
            return [self._decode(frame) for frame in self._reader.read()]
        except RingDamaged as error:
            self._reader.skip()
            self._damaged(error)
            return []

    def _decode(self, frame: bytes) -> Plan:
        try:
            return _plan_decoder.decode(frame)
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            raise RingDamaged(f"a plan that does not decode: {error}") from None


class PlanWriter:
    """The scheduler's writing end of the plan ring."""

    def __init__(self, writer: RingWriter) -> None:
        self._writer = writer

    def write(self, plan: Plan) -> bool:
        """Commit one plan; False while the slowest rank leaves no room."""
        return self._writer.write(_plan_encoder.encode(plan))
