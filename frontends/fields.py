"""Reading a JSON object field by field: each value is checked where it is read, and every complaint names its field.

The object is split into raw values first and a value is decoded only when it is asked for, as the type it must have.
So unknown fields cost a scan and no objects, however large they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sized
from typing import TypeVar

import msgspec

from baton.frontends.errors import Refused, bad_request

T = TypeVar("T")
SizedT = TypeVar("SizedT", bound=Sized)

_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_PLACE = re.compile(r"(.*?)(?: - at `\$(.*)`)?", re.DOTALL)
_ODD = re.compile(r"[^A-Za-z0-9_.\[\]-]")

#: a larger object's unknown fields are not all named, only the first one
_NAMED_BYTES_MAX = 1 << 16
_NAMES_MAX = 16
_NAME_CHARS_MAX = 64
_ENTRY_BYTES_MAX = 64
#: a longer value is not one of those that change nothing
_NEUTRAL_BYTES_MAX = 256


class Shape:
    """The names an object may have. Built once for each kind of request."""

    def __init__(self, name: str, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        fields = [(field, msgspec.Raw, msgspec.Raw()) for field in sorted(self.names)]
        self.strict = msgspec.json.Decoder(msgspec.defstruct(name, fields, forbid_unknown_fields=True))
        self.lenient = msgspec.json.Decoder(msgspec.defstruct(name, fields))

    def read(self, body: bytes, whole: str | None = None) -> Fields:
        """Split ``body`` into its fields; ``whole`` is its own name where it is a field itself."""
        ignored: tuple[str, ...] = ()
        try:
            try:
                found = self.strict.decode(body)
            except msgspec.ValidationError as error:
                unknown = _UNKNOWN.fullmatch(str(error))
                if unknown is None:
                    raise
                found = self.lenient.decode(body)
                ignored = self._unknown(body, unknown[1])
        except msgspec.ValidationError:
            raise bad_request(f"{whole or 'the body'} must be a JSON object", whole) from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise _malformed(error, whole) from None
        raws = {name: raw for name in self.names if (raw := bytes(getattr(found, name))) not in (b"", b"null")}
        return Fields(raws, ignored)

    def _unknown(self, body: bytes, first: str) -> tuple[str, ...]:
        names = [first]
        if len(body) <= _NAMED_BYTES_MAX:
            names = [name for name in msgspec.json.decode(body, type=dict[str, msgspec.Raw]) if name not in self.names]
        return tuple(_ODD.sub("?", name[:_NAME_CHARS_MAX]) for name in names[:_NAMES_MAX])


class Fields:
    """The fields of one object that are there and not null, as raw JSON. ``ignored`` are names in no table."""

    def __init__(self, raws: dict[str, bytes], ignored: tuple[str, ...]) -> None:
        self.raws = raws
        self.ignored = ignored

    def __contains__(self, name: str) -> bool:
        return name in self.raws

    def decode(self, name: str, kind: type[T]) -> T:
        """The value of a field that is there, as ``kind``."""
        return decode(self.raws[name], kind, name)

    def boolean(self, name: str, default: bool = False) -> bool:
        """True or false."""
        return self.decode(name, bool) if name in self.raws else default

    def text(self, name: str, chars_max: int) -> str | None:
        """A string of at most ``chars_max`` characters."""
        if name not in self.raws:
            return None
        value = self.decode(name, str)
        if len(value) > chars_max:
            raise bad_request(f"{name} has {len(value)} characters, the limit is {chars_max}", name)
        return value

    def integer(self, name: str, low: int, high: int | None) -> int | None:
        """A whole number from ``low`` to ``high``."""
        if name not in self.raws:
            return None
        value = self.decode(name, int)
        if value < low or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"between {low} and {high}"
            raise bad_request(f"{name} must be {bounds}, got {_shown(value)}", name)
        return value

    def number(self, name: str, low: float, high: float, default: float, above: bool = False) -> float:
        """A number from ``low`` (or, with ``above``, just above it) to ``high``."""
        if name not in self.raws:
            return default
        value = self.decode(name, float)
        if not (low < value <= high if above else low <= value <= high):
            bounds = f"above {low} and at most {high}" if above else f"between {low} and {high}"
            raise bad_request(f"{name} must be {bounds}, got {_shown(value)}", name)
        return value

    def strings(self, name: str, most: int) -> list[str]:
        """A list of at most ``most`` strings."""
        return _counted(self.decode(name, list[str]), name, most)

    def integers(self, name: str, most: int) -> list[int]:
        """A list of at most ``most`` whole numbers."""
        return _counted(self.decode(name, list[int]), name, most)

    def numbers(self, name: str, most: int) -> dict[str, float]:
        """An object of at most ``most`` finite numbers; a larger one by far is not even read."""
        if len(self.raws[name]) > most * _ENTRY_BYTES_MAX:
            raise bad_request(f"{name} has more than {most} entries, or very long ones", name)
        return _counted(self.decode(name, dict[str, float]), name, most)

    def refuse_unknown(self, why: str) -> None:
        """Refuse by name whatever is in no table: where there is no header or event that could tell of it."""
        if self.ignored:
            raise bad_request(f"{self.ignored[0]} {why}", self.ignored[0], "unsupported_parameter")

    def refuse(self, table: dict[str, tuple[tuple[object, ...], str]]) -> None:
        """Refuse by name whatever the table names, unless its value changes nothing."""
        for name in sorted(self.raws.keys() & table.keys()):
            neutral, why = table[name]
            raw = self.raws[name]
            if len(raw) > _NEUTRAL_BYTES_MAX or not any(_same(decode(raw, object, name), one) for one in neutral):
                raise bad_request(f"{name} {why}", name, "unsupported_parameter")


def _counted(entries: SizedT, name: str, most: int) -> SizedT:
    if len(entries) > most:
        raise bad_request(f"{name} has {len(entries)} entries, the limit is {most}", name)
    return entries


def decode(raw: bytes, kind: type[T], name: str) -> T:
    """Decode one value as ``kind``; what is wrong with it is said with its place (``messages[1].role``)."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        found = _PLACE.fullmatch(str(error))
        assert found is not None
        place = name + (found[2] or "")
        raise bad_request(f"{place}: {found[1]}", place) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise _malformed(error, name) from None


def _malformed(error: Exception, name: str | None) -> Refused:
    if isinstance(error, RecursionError):
        return bad_request(f"{name or 'the body'} is nested too deeply", name)
    return bad_request(f"{name or 'the body'} is not valid JSON", name)


def _same(value: object, neutral: object) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _shown(value: float) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value) if abs(value) < 1 << 64 else "a larger number"
