"""Where the commands that look into a server find it."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.ipc.rundir import RunDirectory
from baton.ops.live import run_directory


def test_a_server_is_found_by_its_own_directory_and_by_the_one_it_was_told_to_make_it_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_RUN_DIRECTORY", str(tmp_path))
    directory = RunDirectory.create(tmp_path)
    try:
        for given in (None, str(tmp_path), str(directory.path)):
            assert run_directory(given) == directory.path
    finally:
        directory.remove()


def test_where_no_server_is_a_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_RUN_DIRECTORY", str(tmp_path))
    with pytest.raises(LookupError, match="no running server"):
        run_directory(None)
    with pytest.raises(LookupError, match="is no directory"):
        run_directory(str(tmp_path / "x"))
    assert run_directory(str(tmp_path)) == tmp_path, "what a server left can still be looked into"
