"""Numbers that JSON cannot say are refused before they are sent: on the way they would become null, or an error."""

from __future__ import annotations

import math
from typing import Any

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
            message = f"{name} is or contains {odd}"
            raise RequestFailed(Problem(400, "invalid_request_error", message, name, None))


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
