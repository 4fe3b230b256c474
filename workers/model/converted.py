"""The converted-weights file: tensors as the model wants them, mapped instead of read at the next start.

Layout: the tensors, each at a multiple of 64 bytes; a msgpack ``ConvertedHeader``; a trailer of the header's
length, its SHA-256 and a magic. The header stands last so that a file is written in one pass, and holds a
digest of the tensors, so a file that was cut, padded or damaged anywhere is known for what it is. Knows no
GGUF.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from baton.workers.model.config import ModelConfig
from baton.workers.model.huge import huge_bytes

FORMAT_VERSION = 2  # raised whenever conversion or layout changes: old files are then no longer found
HEADER_BYTES_MAX = 64 << 20
_ALIGNMENT = 64
_PIECE_BYTES = 8 << 20
_MAGIC = b"BATONWGT"
_UNFINISHED = ".converting-"
_SUFFIX = ".weights"
UNUSED_DAYS_MAX = 30
_TRAILER = struct.Struct("<Q32s8s")
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "uint8": torch.uint8}


class Place(msgspec.Struct, frozen=True):
    """Where a tensor lies in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class ConvertedHeader(msgspec.Struct, frozen=True):
    """All that is needed to use the file without the GGUF it was made from."""

    config: ModelConfig
    tensors: tuple[Place, ...]
    data_bytes: int
    data_digest: str


class Converted(msgspec.Struct, frozen=True):
    """A mapped file: its tensors are views of the mapping, ``digest`` that of its header (and so of all of
    it).
    """

    config: ModelConfig
    tensors: dict[str, Tensor]
    digest: str


def write_converted(path: Path, config: ModelConfig, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a converted file and rename it into place; raises OSError and leaves nothing behind where it
    fails. What a process left that was killed meanwhile goes with the next conversion, and so does what no start has
    used for ``UNUSED_DAYS_MAX``: files of earlier versions, of models that are not served any more.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path.parent)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{_UNFINISHED}{os.getpid()}-")
    try:
        with open(descriptor, "wb") as file:
            places = []
            for name, tensor in tensors:
                file.write(bytes(-file.tell() % _ALIGNMENT))
                dtype = str(tensor.dtype).removeprefix("torch.")
                places.append(Place(name, dtype, tuple(tensor.shape), file.tell()))
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            file.flush()
            size = file.tell()
            digest = _data_digest(torch.from_file(temporary, shared=False, size=size, dtype=torch.uint8))
            header = msgspec.msgpack.encode(ConvertedHeader(config, tuple(places), size, digest))
            file.write(header + _TRAILER.pack(len(header), hashlib.sha256(header).digest(), _MAGIC))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _sweep(directory: Path) -> None:
    """Remove unfinished files whose writers are gone: their names say who they were."""
    for left in directory.glob(f"{_UNFINISHED}*"):
        writer = left.name.removeprefix(_UNFINISHED).partition("-")[0]
        if not (writer.isdigit() and Path(f"/proc/{writer}").exists()):
            left.unlink(missing_ok=True)
    for kept in directory.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # another process may be sweeping, too
            if time.time() - kept.stat().st_mtime > UNUSED_DAYS_MAX * 86400:
                kept.unlink()


def map_converted(path: Path, *, resident: bool = False) -> Converted | None:
    """Map a converted file after checking every byte of it; None where it is absent or damaged.

    ``resident`` reads it into memory of huge pages instead: what is read through every step wants few of them.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _TRAILER.size, 0))
            trailer = file.read()
            if len(trailer) != _TRAILER.size:
                return None
            length, checksum, magic = _TRAILER.unpack(trailer)
            if magic != _MAGIC or length > min(size - _TRAILER.size, HEADER_BYTES_MAX):
                return None
            file.seek(size - _TRAILER.size - length)
            encoded = file.read(length)
    except OSError:
        return None
    if hashlib.sha256(encoded).digest() != checksum:
        return None
    header = msgspec.msgpack.decode(encoded, type=ConvertedHeader)
    if header.data_bytes + length + _TRAILER.size != size:
        return None
    data = torch.from_file(str(path), shared=False, size=header.data_bytes, dtype=torch.uint8)
    kept = huge_bytes(header.data_bytes) if resident else None
    if _data_digest(data, kept) != header.data_digest:
        return None
    data = data if kept is None else kept
    with contextlib.suppress(OSError):  # the time of its last use; a cache that cannot be written keeps no such times
        os.utime(path)
    tensors = {place.name: _view(data, place) for place in header.tensors}
    return Converted(header.config, tensors, checksum.hex())


def _view(data: Tensor, place: Place) -> Tensor:
    dtype = _DTYPES[place.dtype]
    elements = 1
    for extent in place.shape:
        elements *= extent
    return data[place.offset : place.offset + elements * dtype.itemsize].view(dtype).view(place.shape)


def _data_digest(data: Tensor, kept: Tensor | None = None) -> str:
    """SHA-256 of the SHA-256s of pieces: hashlib lets go of the interpreter, so all cores take part.

    Where there is a place to keep the data, each piece is copied there first, and what is there is what is checked.
    """
    pieces = list(torch.split(data, _PIECE_BYTES))
    places = pieces if kept is None else list(torch.split(kept, _PIECE_BYTES))

    def digest(piece: Tensor, place: Tensor) -> bytes:
        if kept is not None:
            place.copy_(piece)
        return hashlib.sha256(place.numpy().data).digest()

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return hashlib.sha256(b"".join(pool.map(digest, pieces, places))).hexdigest()
