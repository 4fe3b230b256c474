"""Where commands print. A pipe has no width of its own, and a table cut to 80 columns is of no use to grep."""

from __future__ import annotations

import sys

from rich.console import Console

PIPE_COLUMNS = 160


def out() -> Console:
    """Standard output, wide where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def err() -> Console:
    """Standard error: progress and complaints."""
    return Console(stderr=True)
