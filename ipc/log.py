"""The log of a process: structlog events on standard error, one line each, with who says it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Log:
    """A thin front that takes a level by name, as the cores' notes carry it."""

    def __init__(self, logger: Any) -> None:  # Any: structlog builds its loggers at run time
        self._logger = logger

    def log(self, level: str, event: str, **fields: Any) -> None:
        """One event with its fields."""
        getattr(self._logger, level)(event, **fields)

    def info(self, event: str, **fields: Any) -> None:
        """Something worth knowing."""
        self._logger.info(event, **fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Something that should not be so, and was dealt with."""
        self._logger.warning(event, **fields)

    def error(self, event: str, **fields: Any) -> None:
        """Something that ended a request or a process."""
        self._logger.error(event, **fields)


class Adopted(logging.Handler):
    """Hands what libraries and doors log by Python's own ``logging`` to a process's log, an event a record."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """One record; an exception goes with it."""
        level = "error" if record.levelno >= logging.ERROR else "warning"
        error: dict[str, Any] = {"exc_info": record.exc_info} if record.exc_info else {}
        try:
            self._log.log(level, "logged", logger=record.name, detail=record.getMessage(), **error)
        except Exception:  # a library's record that does not fit its own format is no error of ours
            self.handleError(record)


@contextmanager
def _absent(package: str) -> Iterator[None]:
    """Inside, a package that is not loaded is not found."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # the import system's own word for it
    try:
        yield
    finally:
        del sys.modules[package]


def make_log(process: str, level: str) -> Log:
    """The log of one process: readable on a terminal, JSON lines elsewhere."""
    with _absent("rich"):  # structlog would load it for its tracebacks: three times its own time, in every process
        import structlog
    terminal = sys.stderr.isatty()
    renderer: Any = structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    processors = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        *([] if terminal else [structlog.processors.format_exc_info]),
        renderer,
    ]
    logger = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        process=process,
    )
    return Log(logger)
