"""Frames that nobody should have sent: noise, torn and foreign ones, and valid ones that fit no state and no role."""

from __future__ import annotations

import functools
import random
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from baton.ipc import frames
from baton.ipc.frames import PROTOCOL_VERSION, Address, AnyFrame, Envelope, Halt, Role, Serving, Tell

_encoder = msgspec.msgpack.Encoder()
KINDS: tuple[type, ...] = get_args(AnyFrame)
#: the supervisor is believed: a frame in its name and its number is its frame
BELIEVED = (Halt, Serving, Tell)
#: no row of a test has such a generation, no process such an incarnation
NUMBERS = (-1, 5000, 7777, 1 << 31, (1 << 32) - 1, 1 << 40)


def forged(rng: random.Random) -> bytes:
    """Anything."""
    match rng.randrange(8):
        case 0:
            return rng.randbytes(rng.choice((0, 1, 7, 60, 3000)))
        case 1:
            data = sealed(rng)
            return data[: rng.randrange(len(data))]
        case 2:
            return changed(rng, sealed(rng))
        case 3:
            return sealed(rng, version=rng.choice((0, 2, 99)))
        case 4:
            return sealed(rng) + rng.randbytes(rng.randrange(1, 9))
        case 5:
            return b"\x91" * rng.randrange(1, 5000)  # nested deeper than anybody reads
        case _:
            return sealed(rng)


def changed(rng: random.Random, data: bytes) -> bytes:
    """The same with one bit turned over; nothing where that made a frame to be believed of it."""
    if not data:
        return data
    torn = bytearray(data)
    torn[rng.randrange(len(torn))] ^= 1 << rng.randrange(8)
    return bytes(torn) if not _believed(bytes(torn)) else b""


def sealed(rng: random.Random, version: int = PROTOCOL_VERSION) -> bytes:
    """A valid frame of a random kind, in the name of a process that is long dead."""
    kind = rng.choice([kind for kind in KINDS if kind not in BELIEVED])
    sender = Address(rng.choice(list(Role)), "m", 0, rng.randrange(2), -1)
    return _encoder.encode(Envelope(version, sender, rng.randrange(9), filled(rng, kind)))


def filled(rng: random.Random, kind: Any) -> Any:
    """A value of a type, with numbers that fit nothing."""
    origin = get_origin(kind)
    if origin is Annotated:
        if kind is frames.Slot:
            return rng.choice((0, 1, 2, 9999))
        if kind is frames.Index:
            return rng.choice((0, 1, 15))
        if kind is frames.Trace:
            return rng.randbytes(25)
        return [rng.randrange(9)] if get_origin(get_args(kind)[0]) is list else rng.randrange(1, 9)
    if origin is Union or isinstance(kind, type(int | str)):
        return filled(rng, rng.choice(get_args(kind)))
    if origin is tuple and get_args(kind)[-1] is not Ellipsis:
        return tuple(filled(rng, each) for each in get_args(kind))
    if origin in (list, tuple):
        values = [filled(rng, get_args(kind)[0]) for _ in range(rng.randrange(3))]
        return values if origin is list else tuple(values)
    if origin is dict:
        return {"role": "user"}
    if kind is Role:
        return rng.choice(list(Role))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = _hints(kind)
        return kind(**{name: filled(rng, hints[name]) for name in kind.__struct_fields__})
    simple = {int: rng.choice(NUMBERS), float: rng.random(), str: "x", bytes: b"y", bool: rng.random() < 0.5}
    return simple.get(kind)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _believed(data: bytes) -> bool:
    """Whether a flipped bit made a frame of the supervisor's of it, or one of somebody who may live."""
    try:
        envelope = msgspec.msgpack.decode(data, type=Envelope)
    except (msgspec.DecodeError, ValueError):
        return False
    return isinstance(envelope.frame, BELIEVED) or envelope.sender.incarnation >= 0
