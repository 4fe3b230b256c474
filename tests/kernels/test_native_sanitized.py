"""The tests of the C++ kernels once more, on a library that watches its own memory and arithmetic."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from baton.kernels import native
from baton.workers.model.paths import cache_directory
from tests.conftest import KERNEL_FLAGS

ROOT = Path(__file__).parents[2]
FLAGS = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-fno-sanitize-recover=undefined")
WATCHED = [f"tests/kernels/test_native_{what}.py" for what in ("linear", "attention", "choice")]
#: the C++ library too, for the watch over exceptions looks for it before torch has brought it in
PRELOADED = ("libasan.so", "libubsan.so", "libstdc++.so")


def watched(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command that loads a library built with ``FLAGS``."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    assert compiler is not None
    asked = [[compiler, f"-print-file-name={name}"] for name in PRELOADED]
    paths = [subprocess.run(one, capture_output=True, text=True, check=True).stdout.strip() for one in asked]
    if missing := [path for path in paths if not os.path.isabs(path)]:
        pytest.skip(f"{compiler} has no {', '.join(missing)}")
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(paths),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own are many
        "UBSAN_OPTIONS": "print_stacktrace=1",
        KERNEL_FLAGS: " ".join(FLAGS),
    }
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def library() -> Path:
    """Built out here, where the compiler itself is not watched; it has far more to do than usual."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "BUILD_S_MAX", 1200)
        try:
            return native.built(cache_directory("kernels"), FLAGS)
        except native.NativeUnavailable as error:
            pytest.skip(str(error))


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_nothing_reads_or_writes_beyond_its_memory_or_overflows(library: Path) -> None:
    pytest_command = [
        sys.executable,
        "-m",
        "pytest",
        "-qsx",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
    ]  # -s: it aborts
    done = watched([*pytest_command, *WATCHED])
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("baton_rms_norm(x.data_ptr(), x.data_ptr(), out.data_ptr(), 1, 64, 1e-5)", ""),
        ("baton_rms_norm(x.data_ptr(), x.data_ptr(), out.data_ptr(), 2, 64, 1e-5)", "heap-buffer-overflow"),
        ("baton_workspace_bytes(Model(), 1, 1, 1)", "division by zero"),
    ],
    ids=["nothing", "a row too many", "no heads"],
)
def test_the_watch_notices_what_it_is_there_for(library: Path, call: str, says: str) -> None:
    code = f"""
import torch
from baton.kernels.native import Model, load
from baton.workers.model.paths import cache_directory
library = load(cache_directory("kernels"), {FLAGS!r})
x, out = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)
library.{call}
"""
    done = watched([sys.executable, "-c", code])
    assert (done.returncode != 0) == bool(says) and says in done.stderr, done.stderr[-2000:]
