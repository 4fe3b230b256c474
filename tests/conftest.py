"""What all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.workers.model.pull import pull


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model in the user's cache, fetched once where it is absent."""
    return pull("smollm2-135m", progress=lambda what, done, total: None)
