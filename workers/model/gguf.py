"""Reading a GGUF file's header: the metadata and the table of tensors, every count checked against the file's
length.

It reads no tensor and imports neither torch nor numpy, so the tokenizer and detokenizer start quickly.
Whatever is wrong with a file, the answer is one ``ModelFileError``; no number in the file makes it allocate
more than the file itself holds. The format: ggml's docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeAlias

HEADER_BYTES_MAX = 256 << 20
ITEMS_MAX = 1 << 22  # of one array, of the metadata, of the tensor table
DIMENSIONS_MAX = 4
FAULT_CHARACTERS_MAX = 400

Value: TypeAlias = "int | float | bool | str | list[str] | array[int] | array[float]"

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_STRUCTS = {kind: struct.Struct("<" + code) for kind, code in _SCALARS.items()}


class ModelFileError(Exception):
    """A model file that cannot be used; one line that names the file and the fault."""

    def __init__(self, path: Path, fault: str) -> None:
        line = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in fault)
        super().__init__(f"{path}: {line[:FAULT_CHARACTERS_MAX]}")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as the header describes it; ``shape`` is row-major (slowest first), ``offset`` from the data's
    start.
    """

    shape: tuple[int, ...]
    kind: int  # ggml's number of the storage type
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the tensors' data. The getters raise ``ModelFileError`` for a missing or ill-typed
    value.
    """

    path: Path
    values: dict[str, Value]
    tensors: dict[str, TensorEntry]
    data_offset: int
    file_bytes: int

    def text(self, key: str, default: str | None = None) -> str:
        """A string value."""
        value = self._value(key, default)
        return value if isinstance(value, str) else self._ill(key, "a string")

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer value."""
        value = self._value(key, default)
        return value if isinstance(value, int) and not isinstance(value, bool) else self._ill(key, "an integer")

    def number(self, key: str, default: float | None = None) -> float:
        """A number, as a float."""
        value = self._value(key, default)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if number else self._ill(key, "a number")  # type: ignore[arg-type]

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self._value(key, default)
        return value if isinstance(value, bool) else self._ill(key, "true or false")

    def texts(self, key: str) -> list[str]:
        """An array of strings."""
        value = self._value(key, None)
        return value if isinstance(value, list) else self._ill(key, "an array of strings")

    def numbers(self, key: str) -> array[int] | array[float]:
        """An array of numbers."""
        value = self._value(key, None)
        return value if isinstance(value, array) else self._ill(key, "an array of numbers")

    def _value(self, key: str, default: Value | None) -> Value:
        value = self.values.get(key, default)
        if value is None:
            raise ModelFileError(self.path, f"metadata lacks {key}")
        return value

    def _ill(self, key: str, wanted: str) -> NoReturn:
        raise ModelFileError(self.path, f"metadata {key} is not {wanted}")


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file, or raise ``ModelFileError``."""
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            if file_bytes < 24:
                raise ModelFileError(path, f"not a GGUF file: {file_bytes} bytes")
            with mmap.mmap(file.fileno(), min(file_bytes, HEADER_BYTES_MAX), access=mmap.ACCESS_READ) as data:
                return _Cursor(path, data, file_bytes).header()
    except OSError as error:
        raise ModelFileError(path, (error.strerror or str(error)).lower()) from error


class _Cursor:
    """A place in the header that only moves forward and never past the end."""

    def __init__(self, path: Path, data: mmap.mmap, file_bytes: int) -> None:
        self.path, self.data, self.end, self.file_bytes = path, data, len(data), file_bytes
        self.at = 0

    def fail(self, fault: str) -> NoReturn:
        raise ModelFileError(self.path, fault)

    def header(self) -> Header:
        magic, version = self.take(4), self.u32()
        if magic != b"GGUF":
            self.fail("not a GGUF file: wrong magic")
        if version not in (2, 3):
            self.fail(f"GGUF version {version:#x} is not supported (2 and 3 little-endian are)")
        tensor_count, value_count = self.count("tensors", 24), self.count("metadata", 12)
        values: dict[str, Value] = {}
        for _ in range(value_count):
            key = self.string()
            if key in values:
                self.fail(f"metadata {key} stands twice")
            values[key] = self.value(self.u32())
        tensors: dict[str, TensorEntry] = {}
        for _ in range(tensor_count):
            name = self.string()
            if name in tensors:
                self.fail(f"tensor {name} stands twice")
            tensors[name] = self.tensor(name)
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment not in (
            8,
            16,
            32,
            64,
            128,
            256,
            512,
            1024,
            2048,
            4096,
        ):
            self.fail(f"alignment {str(alignment)[:40]} is not supported")
        data_offset = -(-self.at // alignment) * alignment
        for name, entry in tensors.items():
            if entry.offset % alignment or entry.offset > self.file_bytes - data_offset:
                self.fail(f"tensor {name} lies outside the file")
        return Header(self.path, values, tensors, data_offset, self.file_bytes)

    def take(self, size: int) -> bytes:
        if size > self.end - self.at:
            limit = self.end < self.file_bytes
            self.fail(f"header exceeds {HEADER_BYTES_MAX} bytes" if limit else "truncated within the header")
        self.at += size
        return self.data[self.at - size : self.at]

    def u32(self) -> int:
        return int(_U32.unpack(self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack(self.take(8))[0])

    def count(self, what: str, item_bytes: int) -> int:
        """A number of items to come, each of at least ``item_bytes``."""
        count = self.u64()
        if count > ITEMS_MAX or count * item_bytes > self.end - self.at:
            self.fail(f"impossible count of {what}: {count}")
        return count

    def string(self) -> str:
        try:
            return self.take(self.u64()).decode()
        except UnicodeDecodeError as error:
            raise ModelFileError(self.path, f"a string near byte {self.at} is not UTF-8") from error

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.items(self.u32())
        if kind not in _STRUCTS:
            self.fail(f"unknown metadata type {kind} near byte {self.at}")
        scalar: int | float | bool = _STRUCTS[kind].unpack(self.take(_STRUCTS[kind].size))[0]
        return scalar

    def items(self, kind: int) -> Value:
        if kind == _STRING:
            return self.strings(self.count("strings", 8))
        if kind not in _STRUCTS:
            self.fail(f"arrays of metadata type {kind} are not supported")
        size = _STRUCTS[kind].size
        numbers = array("B" if kind == _BOOL else _SCALARS[kind])
        numbers.frombytes(self.take(self.count("numbers", size) * size))
        return numbers

    def strings(self, count: int) -> list[str]:
        """Vocabularies have a hundred thousand strings, so this is ``string`` once more with its calls
        unrolled.
        """
        data, at, end, unpack = self.data, self.at, self.end, _U64.unpack_from
        out = []
        try:
            for _ in range(count):
                begin = at + 8
                at = begin + unpack(data, at)[0]
                if at > end:
                    self.fail("truncated within the header")
                out.append(data[begin:at].decode())
        except struct.error:
            self.fail("truncated within the header")
        except UnicodeDecodeError as error:
            raise ModelFileError(self.path, f"a string near byte {at} is not UTF-8") from error
        self.at = at
        return out

    def tensor(self, name: str) -> TensorEntry:
        dimensions = self.u32()
        if not 1 <= dimensions <= DIMENSIONS_MAX:
            self.fail(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(self.u64() for _ in range(dimensions))
        return TensorEntry(shape[::-1], self.u32(), self.u64())
