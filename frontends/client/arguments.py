"""What cannot be sent as it was meant is refused before it is sent, by name.

Numbers that JSON cannot say would become null on the way; and a message that the server cannot read ends the
connection, with all that others ask over it.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from baton.frontends.client.errors import RequestFailed
from baton.frontends.client.wire import Problem

_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1


def check_numbers(parameters: dict[str, Any]) -> None:
    """Raise ``RequestFailed`` (400, as the server would) naming the first parameter that holds such a number."""
    for name, value in parameters.items():
        try:
            odd = _odd(value)
        except RecursionError:
            odd = "something nested too deeply"
        if odd is not None:
            raise _refused(name, f"is or contains {odd}")


def check_options(
    traceparent: object = None, timeout_s: object = None, idempotency_key: object = None, resumable: object = False
) -> None:
    """Raise ``RequestFailed`` naming the first of a request's own options that is of another type."""
    for name, value in (("traceparent", traceparent), ("idempotency_key", idempotency_key)):
        if value is not None and not (isinstance(value, str) and _is_text(value)):
            raise _refused(name, f"must be a string, got {value!r:.40}")
    if timeout_s is not None and (isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float)):
        raise _refused("timeout_s", f"must be a number of seconds, got {timeout_s!r:.40}")
    if not isinstance(resumable, bool):
        raise _refused("resumable", f"must be true or false, got {resumable!r:.40}")


def encode_body(body: dict[str, Any]) -> bytes:
    """The JSON of a request; ``RequestFailed`` naming the first field that cannot be written."""
    try:
        return msgspec.json.encode(body)
    except (TypeError, ValueError, RecursionError):
        for name, value in body.items():
            try:
                msgspec.json.encode(value)
            except (TypeError, ValueError, RecursionError) as error:  # a lone surrogate is a ValueError
                raise _refused(name, f"cannot be written as JSON: {error}") from None
        raise


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refused(name: str, what: str) -> RequestFailed:
    return RequestFailed(Problem(400, "invalid_request_error", f"{name} {what}", name, None))


def _odd(value: object) -> str | None:
    """What is wrong with a value, or None."""
    if isinstance(value, float):
        return None if math.isfinite(value) else "a number that is not finite"
    if isinstance(value, int):
        return None if _INT_MIN <= value <= _INT_MAX else "a number of more than 64 bits"
    if isinstance(value, dict):
        return next((odd for one in value.values() if (odd := _odd(one)) is not None), None)
    if isinstance(value, list | tuple | set | frozenset):
        return next((odd for one in value if (odd := _odd(one)) is not None), None)
    return None
