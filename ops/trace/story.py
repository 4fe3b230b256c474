"""One request's life, put together from all processes' spans: its root, the states under it, the steps that link to it.

It decides nothing about how a story looks; ``waterfall`` and ``otlp_json`` do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from baton.ipc.tracing import SpanRecord
from baton.ops.trace.store import Stored, read

REQUEST_ID = "gen_ai.response.id"
HEX_ID = re.compile(r"([0-9a-f]{32})$")
TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}$")


@dataclass(frozen=True, slots=True)
class Story:
    """``root`` is None while the request runs (or after its root was overwritten); ``states`` are in order of start."""

    trace_id: str
    span_id: str
    root: Stored | None
    states: list[Stored]
    steps: list[Stored]

    @property
    def start_ns(self) -> int:
        """When the request began, as far as is known."""
        return self.root.span.start_ns if self.root else min(stored.span.start_ns for stored in self.states)

    @property
    def end_ns(self) -> int:
        """When it ended, or how far it is known."""
        return self.root.span.end_ns if self.root else max(stored.span.end_ns for stored in self.states)

    def coverage(self) -> float:
        """The share of the whole time in which some state is on record, from 0 to 1."""
        covered, reached = 0, self.start_ns
        for stored in self.states:
            begin, end = max(stored.span.start_ns, reached), min(stored.span.end_ns, self.end_ns)
            if end > begin:
                covered += end - begin
                reached = end
        whole = self.end_ns - self.start_ns
        return covered / whole if whole else 1.0


def find(directory: Path, which: str) -> list[Story]:
    """The stories meant by "last", a request id with any prefix, a trace id or a traceparent; LookupError if none.

    A trace id may stand for several requests, for a client may send many within one trace; oldest first.
    """
    if which == "last":
        roots = [stored.span for stored in read(directory, REQUEST_ID, "spans") if stored.span.server]
        if not roots:
            raise LookupError(f"no finished request on record in {directory}")
        return [_told(directory, max(roots, key=lambda span: span.end_ns))]
    text = which.lower().replace("-", "") if len(which) == 36 else which.lower()
    digits = TRACEPARENT.match(text) or HEX_ID.search(text)
    if digits is None:
        raise LookupError(f"{which!r} is neither 'last' nor a request or trace id (32 hexadecimal digits)")
    wanted = digits[1]
    for stored in read(directory, wanted, "spans"):
        if stored.span.attributes.get(REQUEST_ID) == wanted:
            return [_told(directory, stored.span)]
    stories = _stories(directory, wanted)
    if not stories:
        raise LookupError(f"nothing on record of {which!r} in {directory} (not sampled, too old, or never seen)")
    return stories


def _told(directory: Path, root: SpanRecord) -> Story:
    for story in _stories(directory, root.trace_id):
        if story.span_id == root.span_id:
            return story
    raise LookupError("the request was on record a moment ago and is not any more")


def _stories(directory: Path, trace_id: str) -> list[Story]:
    """All stories of one trace, by the span the states hang under."""
    roots: dict[str, Stored] = {}
    states: dict[str, list[Stored]] = {}
    steps: dict[str, list[Stored]] = {}
    for stored in read(directory, trace_id):
        span = stored.span
        if span.links:
            for linked_trace, linked_span in span.linked():
                if linked_trace == trace_id:
                    steps.setdefault(linked_span, []).append(stored)
        elif span.trace_id != trace_id:
            continue
        elif span.server:
            roots[span.span_id] = stored
        else:
            states.setdefault(span.parent, []).append(stored)
    stories = [
        Story(
            trace_id,
            span_id,
            roots.get(span_id),
            sorted(states.get(span_id, []), key=lambda stored: (stored.span.start_ns, stored.span.end_ns)),
            sorted(steps.get(span_id, []), key=lambda stored: stored.span.start_ns),
        )
        for span_id in roots.keys() | states.keys()
    ]
    return sorted(stories, key=lambda story: story.start_ns)
