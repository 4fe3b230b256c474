"""What all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from baton.workers.model.pull import pull

# A loaded machine is no defect of what is tested. `HYPOTHESIS_PROFILE=deep` looks for longer.
settings.register_profile("baton", deadline=None, max_examples=50)
settings.register_profile("deep", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "baton"))


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model in the user's cache, fetched once where it is absent."""
    return pull("smollm2-135m", progress=lambda what, done, total: None)
