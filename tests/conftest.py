"""What all tests share."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
from hypothesis import settings

from baton.workers.model.pull import pull

# A loaded machine is no defect of what is tested. `HYPOTHESIS_PROFILE=deep` looks for longer.
settings.register_profile("baton", deadline=None, max_examples=50)
settings.register_profile("deep", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "baton"))

#: further flags for the compiler of the C++ kernels; only these tests know it
KERNEL_FLAGS = "BATON_TESTS_KERNEL_FLAGS"


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model in the user's cache, fetched once where it is absent."""
    return pull("smollm2-135m", progress=lambda what, done, total: None)


@pytest.fixture(scope="session")
def native_library() -> ctypes.CDLL:
    """The C++ kernels, built into the user's cache where absent; where they cannot be had, a test is skipped."""
    from baton.kernels.native import NativeUnavailable, load
    from baton.workers.model.paths import cache_directory

    try:
        return load(cache_directory("kernels"), tuple(os.environ.get(KERNEL_FLAGS, "").split()))
    except NativeUnavailable as error:
        pytest.skip(str(error))
