"""What the tests of the kernels share."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from baton.kernels.native import Team


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    """Torch's threads, waiting for one another on a busy machine, would take six times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def teams(native_library: ctypes.CDLL) -> Iterator[list[Team]]:
    """Teams of one, two and three threads."""
    opened = [Team(native_library, threads) for threads in (1, 2, 3)]
    yield opened
    for team in opened:
        team.close()
