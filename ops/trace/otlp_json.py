"""Stories as OTLP JSON, the form collectors and trace viewers import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from baton.ops.trace.store import Stored
from baton.ops.trace.story import Story

KIND_INTERNAL, KIND_SERVER = 1, 2
STATUS_UNSET, STATUS_ERROR = 0, 2
Json = dict[str, object]


def document(stories: Iterable[Story]) -> Json:
    """One TracesData object; spans are grouped by the process they came from, each span once."""
    processes: dict[str, tuple[Json, dict[str, Json]]] = {}
    for story in stories:
        for stored in [*([story.root] if story.root else []), *story.states, *story.steps]:
            resource: Json = {"attributes": _attributes({"service.name": "baton", **stored.resource})}
            _, spans = processes.setdefault(stored.process, (resource, {}))
            spans[stored.span.span_id] = _span(stored)
    return {
        "resourceSpans": [
            {"resource": resource, "scopeSpans": [{"scope": {"name": "baton"}, "spans": list(spans.values())}]}
            for resource, spans in processes.values()
        ]
    }


def _span(stored: Stored) -> Json:
    span = stored.span
    status = {"code": STATUS_UNSET} if span.error is None else {"code": STATUS_ERROR, "message": span.error}
    return {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "parentSpanId": span.parent,
        "name": span.name,
        "kind": KIND_SERVER if span.server else KIND_INTERNAL,
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
        "events": [{"name": name, "timeUnixNano": str(at_ns)} for name, at_ns in span.events],
        "links": [{"traceId": trace_id, "spanId": span_id} for trace_id, span_id in span.linked()],
        "status": status,
    }


def _attributes(attributes: Mapping[str, str | int | float | bool]) -> list[Json]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: str | int | float | bool) -> Json:
    """Protobuf's JSON form: 64-bit integers are strings."""
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
