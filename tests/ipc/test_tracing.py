"""Spans reach the store or the collector with the ids they were given, unsampled ones reach neither."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2

from baton.engine.effects import Span
from baton.engine.limits import Limits
from baton.ipc.tracing import SpanRecord, StoreHeader, Tracer

TRACE, ROOT, PARENT = b"T" * 16, b"R" * 8, b"P" * 8
SAMPLED = TRACE + ROOT + b"\x01"
UNSAMPLED = TRACE + ROOT + b"\x00"


def state(name: str, trace: bytes = SAMPLED, **more: object) -> Span:
    return msgspec.structs.replace(Span(name, trace, 10, 30, {"baton.owner": "scheduler-0#1"}), **more)


@pytest.fixture(autouse=True)
def _no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


def tracer(directory: Path, limits: Limits | None = None, incarnation: int = 1) -> Tracer:
    return Tracer("scheduler", 0, directory, 1000, limits or Limits(), {"service.version": "0"}, incarnation)


def lines(path: Path) -> list[StoreHeader | SpanRecord]:
    decoder = msgspec.json.Decoder(StoreHeader | SpanRecord)
    return [decoder.decode(line) for line in path.read_bytes().splitlines() if line]


def spans(path: Path) -> list[SpanRecord]:
    return [line for line in lines(path) if isinstance(line, SpanRecord)]


def test_a_state_span_hangs_under_the_span_of_its_context(tmp_path: Path) -> None:
    out = tracer(tmp_path)
    out.emit(state("decoding", error="it died", events=(("paused", 20),)))
    out.close()
    header, span = lines(tmp_path / "traces" / "scheduler-0.spans")
    assert isinstance(header, StoreHeader) and header.process == "scheduler-0#1"
    assert header.resource["service.version"] == "0"
    assert isinstance(span, SpanRecord)
    assert (span.trace_id, span.parent) == (TRACE.hex(), ROOT.hex())
    assert len(span.span_id) == 16 and span.span_id != span.parent
    assert (span.start_ns, span.end_ns, span.events) == (1010, 1030, (("paused", 1020),))
    assert (span.name, span.error, span.server) == ("decoding", "it died", False)


@pytest.mark.parametrize(("context", "parent"), [(b"", ""), (TRACE + PARENT + b"\x01", PARENT.hex())])
def test_the_root_keeps_the_id_that_was_promised(tmp_path: Path, context: bytes, parent: str) -> None:
    out = tracer(tmp_path)
    out.emit(Span("chat", context, 0, 1, {}, span_id=SAMPLED, server=True))
    out.flush()
    (span,) = spans(tmp_path / "traces" / "scheduler-0.spans")
    assert (span.trace_id, span.span_id, span.parent, span.server) == (TRACE.hex(), ROOT.hex(), parent, True)


def test_unsampled_spans_are_dropped_and_counted(tmp_path: Path) -> None:
    out = tracer(tmp_path)
    out.emit(state("decoding", UNSAMPLED))
    out.emit(Span("chat", b"", 0, 1, {}, span_id=UNSAMPLED, server=True))
    out.emit(Span("step", b"", 0, 1, {}, links=(UNSAMPLED,)))
    out.emit(Span("orphan", b"", 0, 1, {}))
    out.close()
    assert out.unsampled == 4
    assert list((tmp_path / "traces").iterdir()) == []


def test_a_step_keeps_its_sampled_links_in_a_log_of_its_own(tmp_path: Path) -> None:
    out = tracer(tmp_path)
    out.emit(Span("step", b"", 0, 1, {"baton.step": 3}, links=(SAMPLED, UNSAMPLED)))
    out.close()
    (span,) = spans(tmp_path / "traces" / "scheduler-0.steps")
    assert span.linked() == [(TRACE.hex(), ROOT.hex())]
    assert span.parent == "" and len(span.trace_id) == 32


def test_spans_that_nobody_flushes_are_written_once_there_are_many(tmp_path: Path) -> None:
    out = tracer(tmp_path, Limits(trace_emitted_spans_max=3, trace_buffer_bytes_max=1))
    store = tmp_path / "traces" / "scheduler-0.spans"
    for number in range(2):
        out.emit(state(f"state-{number}"))
    assert not store.exists()
    out.emit(state("state-2"))
    assert [span.name for span in spans(store)] == ["state-0", "state-1", "state-2"]
    out.close()


def test_the_store_is_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    limits = Limits(trace_store_bytes_max=40_000, trace_buffer_bytes_max=1_000)
    out = tracer(tmp_path, limits)
    for number in range(2_000):
        out.emit(state(f"state-{number}"))
    out.close()
    current = tmp_path / "traces" / "scheduler-0.spans"
    old = tmp_path / "traces" / "scheduler-0.spans.old"
    assert current.stat().st_size <= 10_000 and old.stat().st_size <= 10_000
    assert isinstance(lines(current)[0], StoreHeader)
    kept = [span.name for span in spans(old) + spans(current)]
    assert kept == [f"state-{number}" for number in range(2_000 - len(kept), 2_000)]
    assert out.dropped == 0


def test_a_successor_writes_on_behind_a_torn_line(tmp_path: Path) -> None:
    first = tracer(tmp_path)
    first.emit(state("one"))
    first.close()
    path = tmp_path / "traces" / "scheduler-0.spans"
    with path.open("ab") as file:
        file.write(b'["span","54')
    second = tracer(tmp_path, incarnation=2)
    second.emit(state("two"))
    second.close()
    whole = [line for line in path.read_bytes().splitlines() if line and line != b'["span","54']
    assert [msgspec.json.decode(line)[0] for line in whole] == ["process", "span", "process", "span"]


def test_what_the_disk_refuses_is_dropped_and_counted(tmp_path: Path) -> None:
    out = tracer(tmp_path)
    (tmp_path / "traces").rmdir()
    out.emit(state("one"))
    out.emit(state("two"))
    out.flush()
    assert out.dropped == 2
    (tmp_path / "traces").mkdir()
    out.emit(state("three"))
    out.close()
    assert [span.name for span in spans(tmp_path / "traces" / "scheduler-0.spans")] == ["three"]


def test_without_a_collector_opentelemetry_is_not_imported() -> None:
    code = "import sys, baton.ipc.tracing; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


class Collector(http.server.ThreadingHTTPServer):
    """A collector that keeps what it is sent."""

    def __init__(self, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.status = status
        self.batches: list[ExportTraceServiceRequest] = []


class Receiver(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.batches.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_with_a_collector_spans_go_there_whole(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    out = tracer(tmp_path)
    out.emit(state("decoding", error="it died", events=(("paused", 20),)))
    out.emit(Span("chat", b"", 0, 1, {"gen_ai.usage.output_tokens": 7}, span_id=SAMPLED, server=True))
    out.emit(Span("step", b"", 0, 1, {}, links=(SAMPLED, UNSAMPLED)))
    out.emit(state("queued", UNSAMPLED))
    out.close()
    assert out.dropped == 0
    assert not (tmp_path / "traces").exists()
    sent = [resource for batch in collector.batches for resource in batch.resource_spans]
    resource = {pair.key: pair.value.string_value for pair in sent[0].resource.attributes}
    assert (resource["service.name"], resource["service.instance.id"]) == ("baton", "scheduler-0#1")
    found = {span.name: span for part in sent for scope in part.scope_spans for span in scope.spans}
    assert set(found) == {"decoding", "chat", "step"}
    decoding, chat, step = found["decoding"], found["chat"], found["step"]
    assert (decoding.trace_id, decoding.parent_span_id) == (TRACE, ROOT)
    assert (decoding.status.code, decoding.status.message) == (trace_pb2.Status.STATUS_CODE_ERROR, "it died")
    assert [(event.name, event.time_unix_nano) for event in decoding.events] == [("paused", 1020)]
    assert (chat.span_id, chat.parent_span_id, chat.kind) == (ROOT, b"", trace_pb2.Span.SPAN_KIND_SERVER)
    assert [(link.trace_id, link.span_id) for link in step.links] == [(TRACE, ROOT)]


def test_a_collector_that_is_not_there_delays_the_end_by_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9/v1/traces")
    out = tracer(tmp_path, Limits(stop_s_max=0.2, trace_buffer_spans_max=8))
    for _ in range(20):
        out.emit(state("decoding"))
    out.close()
    assert out.dropped > 0
