"""Spans to an OpenTelemetry collector over OTLP/HTTP.

Only ``ipc.tracing`` imports this module, and only where a collector is named, because opentelemetry takes a third of a
second to import. Endpoint, headers, timeouts and the rest are read from the standard OTEL_* variables by the exporter.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from baton.engine.limits import Limits
from baton.ipc.tracing import SpanRecord

SCOPE = InstrumentationScope("baton")
SAMPLED_FLAG = TraceFlags(TraceFlags.SAMPLED)
UNSET = Status(StatusCode.UNSET)


class CountedExporter(SpanExporter):
    """The OTLP exporter, counting spans it was given (``taken``) and spans not accepted (``failed``)."""

    def __init__(self) -> None:
        self.taken = 0
        self.failed = 0
        self._exporter = OTLPSpanExporter()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send one batch; called by the processor's thread."""
        self.taken += len(spans)
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        """Stop retrying and close the connection."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # opentelemetry leaves this one untyped


class OtlpSink:
    """Hands spans to the SDK's batch processor: a bounded queue and a thread. The oldest are lost when it is full."""

    def __init__(self, resource: Mapping[str, str | int | float | bool], limits: Limits) -> None:
        self._stop_s_max = limits.stop_s_max
        self._resource = Resource.create({"service.name": "baton", **resource}).merge(OTELResourceDetector().detect())
        self._exporter = CountedExporter()
        self._queue_max = limits.trace_buffer_spans_max
        self._processor = BatchSpanProcessor(
            self._exporter, max_queue_size=self._queue_max, max_export_batch_size=min(512, self._queue_max)
        )
        self._queued = 0
        self._lost = 0

    @property
    def dropped(self) -> int:
        """Spans that did not fit the queue or that the collector did not accept."""
        return self._lost + self._exporter.failed

    def write(self, record: SpanRecord) -> None:
        """Queue one span."""
        if self._queued - self._exporter.taken >= self._queue_max:
            self._lost += 1
        else:
            self._queued += 1
        self._processor.on_end(RecordedSpan(record, self._resource))

    def flush(self) -> None:
        """Nothing to do: the processor's thread exports on its own schedule."""

    def close(self) -> None:
        """Send what is queued; a collector that does not answer is given up after half of ``limits.stop_s_max``."""
        last = threading.Thread(target=self._processor.shutdown, daemon=True)
        last.start()
        last.join(self._stop_s_max / 2)
        if last.is_alive():
            self._exporter.shutdown()


class RecordedSpan(ReadableSpan):
    """The SDK's form of a record, ids unchanged. A step's many links are built where they are read, by the exporter."""

    def __init__(self, record: SpanRecord, resource: Resource) -> None:
        self._record = record
        parent = context(record.trace_id, record.parent, remote=record.server) if record.parent else None
        super().__init__(
            name=record.name,
            context=context(record.trace_id, record.span_id, remote=False),
            parent=parent,
            resource=resource,
            attributes=record.attributes,
            events=[Event(name, timestamp=at_ns) for name, at_ns in record.events],
            kind=SpanKind.SERVER if record.server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, record.error) if record.error is not None else UNSET,
            start_time=record.start_ns,
            end_time=record.end_ns,
            instrumentation_scope=SCOPE,
        )

    @property
    def links(self) -> Sequence[Link]:
        """The requests a step worked for."""
        return [Link(context(trace_id, span_id, remote=False)) for trace_id, span_id in self._record.linked()]


def context(trace_id: str, span_id: str, remote: bool) -> SpanContext:
    """A sampled context from hex ids."""
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=remote, trace_flags=SAMPLED_FLAG)
