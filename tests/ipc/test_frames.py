"""The vocabulary: every frame survives the wire, and nothing on the wire kills the reader."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.ipc import frames
from baton.ipc.frames import PROTOCOL_VERSION, Address, AnyFrame, Envelope, Frame, Role

integers = st.integers(-(2**63), 2**64 - 1)
decoder = msgspec.msgpack.Decoder(Envelope)
json = st.recursive(
    st.none() | st.booleans() | integers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def strategy(kind: msgspec.inspect.Type) -> st.SearchStrategy[typing.Any]:
    """Values of a type, as msgspec itself describes it."""
    inspect = msgspec.inspect
    match kind:
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            low = -(2**63) if kind.ge is None and kind.gt is None else kind.ge if kind.gt is None else kind.gt + 1
            return st.integers(low, 2**64 - 1 if kind.lt is None else kind.lt - 1)
        case inspect.FloatType():
            return st.floats(allow_nan=False)
        case inspect.StrType():
            return st.text(max_size=8)
        case inspect.BytesType():
            return st.binary(min_size=kind.min_length or 0, max_size=kind.max_length or 25)
        case inspect.EnumType():
            return st.sampled_from(list(kind.cls))
        case inspect.AnyType():
            return json
        case inspect.ListType():
            return st.lists(strategy(kind.item_type), min_size=kind.min_length or 0, max_size=3)
        case inspect.VarTupleType():
            return st.lists(strategy(kind.item_type), max_size=3).map(tuple)
        case inspect.TupleType():
            return st.tuples(*map(strategy, kind.item_types))
        case inspect.DictType():
            return st.dictionaries(strategy(kind.key_type), strategy(kind.value_type), max_size=2)
        case inspect.UnionType():
            return st.one_of([strategy(member) for member in kind.types])
        case inspect.StructType():
            return st.builds(kind.cls, *[strategy(field.type) for field in kind.fields])
    raise AssertionError(f"no values for {kind}")


KINDS = typing.get_args(AnyFrame)
addresses = strategy(msgspec.inspect.type_info(Address))


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_every_frame_survives_the_wire(kind: type[Frame]) -> None:
    @settings(max_examples=25)
    @given(strategy(msgspec.inspect.type_info(kind)), addresses, st.integers(1, 2**63))
    def check(frame: AnyFrame, sender: Address, number: int) -> None:
        envelope = Envelope(PROTOCOL_VERSION, sender, number, frame)
        came = decoder.decode(msgspec.msgpack.encode(envelope))
        assert came == envelope
        assert type(came.frame) is kind

    check()


def test_the_vocabulary_is_whole() -> None:
    named = {value for value in vars(frames).values() if isinstance(value, type) and issubclass(value, Frame)}
    assert named - {Frame} == set(KINDS)


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_and_nothing_else(data: bytes) -> None:
    refused(data)


@settings(max_examples=500)
@given(st.sampled_from(KINDS).flatmap(lambda kind: strategy(msgspec.inspect.type_info(kind))), addresses, st.data())
def test_a_changed_frame_is_refused_or_a_frame(frame: AnyFrame, sender: Address, data: st.DataObject) -> None:
    wire = bytearray(msgspec.msgpack.encode(Envelope(PROTOCOL_VERSION, sender, 1, frame)))
    wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    refused(bytes(wire))


def test_nesting_without_end_is_refused() -> None:
    assert refused(b"\x91" * 100_000)


def refused(data: bytes) -> bool:
    """Whether the decoder refuses the bytes, in one of the two ways that a link expects."""
    try:
        decoder.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return True
    return False


def test_an_address_is_written_for_people() -> None:
    assert str(Address(Role.WORKER, "m", 0, 2, 5)) == "worker-2#5"
