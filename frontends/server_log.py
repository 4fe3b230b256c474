"""What aiohttp logs of a connection: one line where a client wrote nonsense, a traceback where the fault is ours.

aiohttp's protocol logs whatever its parser raises as an unhandled exception, also once the client has its 400. A client
must not be able to fill the log like that, so its mistakes keep their place in it and lose the traceback. What it wrote
is not repeated there. ``Doors`` gives the logger to aiohttp.
"""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

log = logging.getLogger("baton.http.connection")

#: what aiohttp raises where the bytes of a request are not what they should be
_CLIENTS = (HttpProcessingError, web.RequestPayloadError)


def _shorten(record: logging.LogRecord) -> bool:
    """A filter that keeps every record; those of a client's mistake become a warning of one line."""
    error = record.exc_info[1] if record.exc_info else None
    if record.levelno >= logging.ERROR and isinstance(error, _CLIENTS):
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg, record.args = "a request could not be read: %s", (type(error).__name__,)
        record.exc_info = record.exc_text = None
    return True


log.addFilter(_shorten)
