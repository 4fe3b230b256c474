"""What all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from baton.workers.model.pull import pull

settings.register_profile("baton", deadline=None)  # a loaded machine is no defect of what is tested
settings.load_profile("baton")


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model in the user's cache, fetched once where it is absent."""
    return pull("smollm2-135m", progress=lambda what, done, total: None)
