"""A process of its own that is there to be killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def victim(program: str, *arguments: object) -> Iterator[None]:
    """Run a program until it has said its first line; at the end it is killed, and reaped, wherever it is."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            process.kill()
