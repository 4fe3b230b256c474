"""What can go wrong with a request, from the SDK's side. Everything is a ``BatonError``."""

from __future__ import annotations

from baton.frontends.client.wire import Problem


class BatonError(Exception):
    """Any failure of a request or a connection."""


class NotConnected(BatonError):
    """No server was found or it did not answer, or the connection broke; the request may be tried again."""


class RequestTimeout(BatonError, TimeoutError):
    """The time allowed for the request is over; it was cancelled."""


class RequestFailed(BatonError):
    """The server refused the request or could not finish it; the fields are those of HTTP's error object.

    ``retry_after_s`` is in how many seconds the server expects to have room; None where asking again makes no sense.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.status = problem.status
        self.kind = problem.kind
        self.message = problem.message
        self.param = problem.param
        self.code = problem.code
        self.retry_after_s = problem.retry_after_s


class SaidGoodbye(NotConnected):
    """The server ended, in good order: what it had not admitted by then it never will."""
