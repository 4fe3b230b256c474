"""The W3C trace context at the doors: reading ``traceparent`` strictly, and choosing the root span of a request.

A context is 25 bytes: 16 of trace id, 8 of span id, 1 of flags (bit 0: sampled). A header that breaks the rules is
treated as absent, as the recommendation demands (W3C Trace Context, section 3.2).
"""

from __future__ import annotations

import random
import re
import secrets

_SHAPE = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


def parse(header: str | None) -> bytes | None:
    """The 25-byte context of a ``traceparent`` header, or None where there is no valid one."""
    found = _SHAPE.fullmatch(header) if header is not None else None
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return None
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return bytes.fromhex(trace_id) + bytes.fromhex(span_id) + bytes([int(flags, 16) & _SAMPLED])


def of_headers(headers: list[str]) -> bytes | None:
    """The same for all ``traceparent`` headers of a request: more than one is as good as none."""
    return parse(headers[0]) if len(headers) == 1 else None


def root(parent: bytes | None, sample_ratio: float) -> bytes:
    """The context of a new root span: in the parent's trace, or in a new one that is sampled with that ratio."""
    span_id = secrets.token_bytes(8)
    if parent is not None:
        return parent[:16] + span_id + parent[24:]
    sampled = _SAMPLED if random.random() < sample_ratio else 0
    return secrets.token_bytes(16) + span_id + bytes([sampled])
