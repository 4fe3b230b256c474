"""What the tests of the C++ kernels share."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from baton.kernels.native import Team


@pytest.fixture(scope="session")
def teams(native_library: ctypes.CDLL) -> Iterator[list[Team]]:
    """Teams of one, two and three threads."""
    opened = [Team(native_library, threads) for threads in (1, 2, 3)]
    yield opened
    for team in opened:
        team.close()
