"""What a client is told when it does not get an answer: one `Failure`, in the shape of each door.

Never puts anything into a message that did not come from the client or from our own sentences: details are for the log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from baton.engine.effects import Finish
from baton.ipc.frames import Failure

#: what a client hears when the request ended neither by itself nor with a failure of its own
ENDINGS: dict[str, Failure] = {
    "cancelled": Failure(499, "request_cancelled", "the request was cancelled", None, "cancelled"),
    "disconnected": Failure(499, "request_cancelled", "the client went away", None, "cancelled"),
    "timeout": Failure(504, "timeout_error", "the request ran into its time limit", None, "timeout"),
    "deadline_exceeded": Failure(504, "timeout_error", "the request's deadline passed", None, "deadline_exceeded"),
    "queue_timeout": Failure(
        503, "server_error", "the request waited longer for its turn than it may", None, "queue_timeout"
    ),
    "slow_consumer": Failure(408, "timeout_error", "the client read too slowly", None, "slow_consumer"),
}

#: the reasons that are answers, and what OpenAI calls them
FINISH_REASONS: dict[str, str] = {"stop": "stop", "length": "length"}

_MAX_TOKENS = re.compile(r"\bmax_tokens\b")
INTERNAL = Failure(500, "server_error", "an internal error occurred", None, "internal_error")


class Refused(Exception):
    """The request is not, or no longer, answered; ``failure`` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def bad_request(message: str, param: str | None, code: str | None = None) -> Refused:
    """A client's mistake, to be raised: HTTP 400 naming the field."""
    return Refused(Failure(400, "invalid_request_error", message, param, code))


def failure_of(finish: Finish) -> Failure | None:
    """Why this end is no answer, or None where it is one."""
    if finish.failure is not None:
        return finish.failure
    if finish.reason in FINISH_REASONS:
        return None
    return ENDINGS.get(finish.reason, INTERNAL)


def in_words_of(finish: Finish, names: Mapping[str, str]) -> Finish:
    """The same end, its failure telling of fields as this door's clients call them: ``names``, by the engine's own."""
    if finish.failure is None or not names:
        return finish
    return msgspec.structs.replace(finish, failure=renamed(finish.failure, names))


def renamed(failure: Failure, names: Mapping[str, str]) -> Failure:
    """A failure with other names for its fields."""
    message, param = _MAX_TOKENS.sub(names.get("max_tokens", "max_tokens"), failure.message), failure.param
    return msgspec.structs.replace(failure, message=message, param=None if param is None else names.get(param, param))


def error_body(failure: Failure) -> bytes:
    """OpenAI's error object: ``{"error": {"message", "type", "param", "code"}}``."""
    error = {
        "message": failure.message,
        "type": failure.kind,
        "param": failure.param,
        "code": failure.code,
    }
    return msgspec.json.encode({"error": error})


def retry_after_s(failure: Failure) -> int | None:
    """Whole seconds after which trying again makes sense, as told to every client; None where it makes none."""
    if failure.retry_after_s is not None:
        return failure.retry_after_s
    return 1 if failure.status in (429, 503) else None
