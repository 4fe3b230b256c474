"""A model is fetched only where it is known and not here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from baton.ops import fetch
from baton.ops.cli import cli
from baton.workers.model.gguf import ModelFileError


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """An empty cache, and a download that only remembers what it was asked for."""
    asked: list[str] = []

    def pull(model: str, progress: Callable[[str, int, int], None]) -> Path:
        asked.append(model)
        progress("downloading", 50, 100)
        return tmp_path / model

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fetch, "pull", pull)
    return asked


def test_a_known_model_that_is_not_here_is_fetched(pulled: list[str], tmp_path: Path) -> None:
    assert fetch.ensure("smollm2-135m") == tmp_path / "smollm2-135m"
    assert pulled == ["smollm2-135m"]


def test_a_file_is_used_as_it_is(pulled: list[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.touch()
    assert fetch.ensure(str(file)) == file
    assert pulled == []


def test_an_unknown_name_is_an_error_and_nothing_is_fetched(pulled: list[str]) -> None:
    with pytest.raises(ModelFileError):
        fetch.ensure("gpt-17")
    assert pulled == []


def test_pull_prints_the_place_and_its_failure_is_one_line(pulled: list[str], tmp_path: Path) -> None:
    assert CliRunner().invoke(cli, ["pull", "smollm2-135m"]).stdout == f"{tmp_path / 'smollm2-135m'}\n"


def test_pull_of_an_unknown_name_is_one_line() -> None:
    result = CliRunner().invoke(cli, ["pull", "gpt-17"])
    assert result.exit_code == 1
    assert result.stderr.startswith("baton: gpt-17: not a known model") and result.stderr.count("\n") == 1
