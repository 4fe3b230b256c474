"""The reading side of ``ipc.tracing``'s stores: every process's spans of one run directory.

The directory may be another server's, running or killed in the middle of a line: what does not decode is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from baton.ipc.tracing import TRACES_FOLDER, SpanRecord, StoreHeader

Resource = dict[str, str | int | float | bool]


class Stored(NamedTuple):
    """A span and the process whose store it came from."""

    process: str
    resource: Resource
    span: SpanRecord


def read(directory: Path, needle: str, kind: str = "*") -> Iterator[Stored]:
    """Every span whose line contains ``needle`` (an id as hex, an attribute's name), oldest half first.

    ``kind`` is "spans", "steps" or "*" for both. Raises LookupError where the directory has no store at all.
    """
    folder = directory / TRACES_FOLDER
    if not folder.is_dir():
        raise LookupError(f"{directory} keeps no traces; a server told of an OTLP collector sends them there instead")
    for path in sorted(folder.glob(f"*.{kind}")):
        if path.suffix in (".spans", ".steps"):
            older = path.with_suffix(f"{path.suffix}.old")
            yield from _read_log(older, path.name.rpartition(".")[0], needle.encode())
            yield from _read_log(path, path.name.rpartition(".")[0], needle.encode())


def _read_log(path: Path, process: str, needle: bytes) -> Iterator[Stored]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    decoder = msgspec.json.Decoder(StoreHeader | SpanRecord)
    resource: Resource = {}
    for line in data.splitlines():
        if needle not in line and not line.startswith(b'["process"'):
            continue
        try:
            found = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if isinstance(found, StoreHeader):
            process, resource = found.process, found.resource
        else:
            yield Stored(process, resource, found)
