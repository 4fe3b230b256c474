"""Where a process puts its finished spans: an OTLP collector if one is named, else a small store in the run directory.

A span is dropped here, and only here, when its trace context says it was not sampled. Nothing waits for a collector or
a disk: what cannot be kept is counted and let go. The store keeps the newest spans only; ``ops.trace`` reads it. Called
by the shell for every ``Span`` effect; opentelemetry is imported only where a collector is named.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from baton.engine.effects import Span
from baton.engine.limits import Limits

#: the folder of the run directory that holds the stores
TRACES_FOLDER = "traces"
CONTEXT_BYTES = 25
SAMPLED = 1


class StoreHeader(msgspec.Struct, frozen=True, array_like=True, tag="process"):
    """First line of a store and of every process that writes on in it: who wrote the spans below."""

    process: str
    resource: dict[str, str | int | float | bool]


class SpanRecord(msgspec.Struct, frozen=True, array_like=True, tag="span"):
    """A finished span as it leaves the process: ids as lower-case hex, times in Unix ns, ``parent`` "" for a root.

    ``events`` are (name, at_ns); ``links`` is one run of hex, 48 digits a link: trace id, span id.
    """

    trace_id: str
    span_id: str
    parent: str
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str | int | float | bool]
    error: str | None = None
    server: bool = False
    events: tuple[tuple[str, int], ...] = ()
    links: str = ""

    def linked(self) -> list[tuple[str, str]]:
        """The links as (trace id, span id)."""
        return [(self.links[at : at + 32], self.links[at + 32 : at + 48]) for at in range(0, len(self.links), 48)]


class Sink(Protocol):
    """Where sampled spans go."""

    @property
    def dropped(self) -> int: ...
    def write(self, record: SpanRecord) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Tracer:
    """One process's way out for spans. ``emit`` only keeps one; ``flush``, for the shell's timer, writes them.

    A process that wakes for every step finds its caches cold, and many spans at once cost a fraction of as many alone.
    """

    def __init__(
        self,
        role: str,
        index: int,
        directory: Path,
        epoch_offset_ns: int,
        limits: Limits,
        resource: Mapping[str, str | int | float | bool],
        incarnation: int = 0,
    ) -> None:
        """``epoch_offset_ns`` is added to the engine's monotonic times; ``resource`` describes server and process."""
        self.epoch_offset_ns = epoch_offset_ns
        self._unsampled = 0
        self._emitted: list[Span] = []
        self._emitted_max = limits.trace_emitted_spans_max
        self._random = random.Random(os.urandom(16))
        process = f"{role}-{index}#{incarnation}"
        attributes = {"service.instance.id": process, **resource}
        self._sink: Sink
        if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
            from baton.ipc.otlp import OtlpSink

            self._sink = OtlpSink(attributes, limits)
        else:
            self._sink = LocalStore(directory / TRACES_FOLDER, f"{role}-{index}", process, attributes, limits)

    @property
    def dropped(self) -> int:
        """Sampled spans that could not be kept or sent."""
        self._write_emitted()
        return self._sink.dropped

    @property
    def unsampled(self) -> int:
        """Spans that were let go for not being sampled."""
        self._write_emitted()
        return self._unsampled

    def emit(self, span: Span) -> None:
        """Keep a finished span if it, or for a step one of its links, is sampled."""
        self._emitted.append(span)
        if len(self._emitted) >= self._emitted_max:
            self._write_emitted()

    def _write_emitted(self) -> None:
        emitted, self._emitted = self._emitted, []
        for span in emitted:
            self._write(span)

    def _write(self, span: Span) -> None:
        own = span.span_id if span.server and span.span_id is not None else span.trace
        links = ""
        if span.links:
            links = b"".join([link[:24] for link in span.links if link[24] & SAMPLED]).hex()
        sampled = bool(links) if span.links else len(own) == CONTEXT_BYTES and bool(own[24] & SAMPLED)
        if not sampled:
            self._unsampled += 1
            return
        offset = self.epoch_offset_ns
        if span.server and span.span_id is not None:
            span_id = own[16:24].hex()
        else:
            span_id = span.span_id.hex() if span.span_id is not None else f"{self._random.getrandbits(64) or 1:016x}"
        self._sink.write(
            SpanRecord(
                own[:16].hex() if own else f"{self._random.getrandbits(128) or 1:032x}",
                span_id,
                span.trace[16:24].hex(),
                span.name,
                span.start_ns + offset,
                span.end_ns + offset,
                span.attributes,
                span.error,
                span.server,
                tuple((name, at_ns + offset) for name, at_ns in span.events),
                links,
            )
        )

    def flush(self) -> None:
        """Make what was emitted visible to readers of the store; a collector is served by a thread of its own."""
        self._write_emitted()
        self._sink.flush()

    def close(self) -> None:
        """Flush and let go, within ``limits.stop_s_max``."""
        self._write_emitted()
        self._sink.close()


class LocalStore:
    """A process's spans on disk: step spans in one log, all others in another, so that steps never push requests out.

    Invariant: both logs together stay under ``limits.trace_store_bytes_max``.
    """

    def __init__(
        self,
        folder: Path,
        place: str,
        process: str,
        resource: Mapping[str, str | int | float | bool],
        limits: Limits,
    ) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        header = StoreHeader(process, dict(resource))
        half = limits.trace_store_bytes_max // 4
        self._spans = Log(folder / f"{place}.spans", header, half, limits.trace_buffer_bytes_max)
        self._steps = Log(folder / f"{place}.steps", header, half, limits.trace_buffer_bytes_max)

    @property
    def dropped(self) -> int:
        """Spans lost because the disk refused them."""
        return self._spans.dropped + self._steps.dropped

    def write(self, record: SpanRecord) -> None:
        """Append one record to the log of its kind."""
        (self._steps if record.links else self._spans).append(record)

    def flush(self) -> None:
        """Write out both buffers."""
        self._spans.flush()
        self._steps.flush()

    def close(self) -> None:
        """Write out and close both logs."""
        self._spans.close()
        self._steps.close()


class Log:
    """Append-only lines of JSON in two halves: the file, and ``<file>.old`` once the file has been full.

    A line is found again after any damage, so a successor simply writes on where a killed process stopped.
    """

    def __init__(self, path: Path, header: StoreHeader, half_bytes_max: int, buffer_bytes_max: int) -> None:
        self.dropped = 0
        self._path = path
        self._header = header
        self._half_bytes_max = half_bytes_max
        self._buffer_bytes_max = min(buffer_bytes_max, half_bytes_max)
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._waiting = 0
        self._fd = -1
        self._size = 0

    def append(self, record: SpanRecord) -> None:
        """Encode into the buffer; written out when the buffer is full."""
        self._encoder.encode_into(record, self._buffer, -1)
        self._buffer += b"\n"
        self._waiting += 1
        if len(self._buffer) >= self._buffer_bytes_max:
            self.flush()

    def flush(self) -> None:
        """Write the buffer out, into a new file where this one would outgrow its half; an error drops the buffer."""
        if not self._buffer:
            return
        try:
            if self._fd < 0:
                self._open()
            elif self._size + len(self._buffer) > self._half_bytes_max:
                self._rotate()
            self._write(self._buffer)
        except OSError:
            self.dropped += self._waiting
        self._buffer.clear()
        self._waiting = 0

    def close(self) -> None:
        """Write out and close; the log may be appended to again."""
        self.flush()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size
        if self._size + len(self._buffer) > self._half_bytes_max:
            self._rotate()
        else:
            self._write(b"\n" + msgspec.json.encode(self._header) + b"\n")

    def _rotate(self) -> None:
        os.close(self._fd)
        self._fd = -1
        os.replace(self._path, self._path.with_suffix(f"{self._path.suffix}.old"))
        self._open()

    def _write(self, data: bytes | bytearray) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view)
            self._size += written
            view = view[written:]
        view.release()
