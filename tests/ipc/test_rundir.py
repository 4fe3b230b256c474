"""Run directories: private, one a server, swept when their server is dead and never before."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
from pathlib import Path

import pytest

from baton.ipc.rundir import LOCK, RunDirectory, default_base, live_instances, sweep
from tests.ipc.victim import victim

SERVER = """
import sys, time
from pathlib import Path
from baton.ipc.rundir import RunDirectory
directory = RunDirectory.create(Path(sys.argv[1]))
(directory.path / "board").write_bytes(b"x")
sys.stdout.write("ready\\n")
sys.stdout.flush()
while True:
    time.sleep(1)
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "r"


def test_two_servers_live_side_by_side_and_each_removes_its_own(base: Path) -> None:
    first, second = RunDirectory.create(base), RunDirectory.create(base)
    assert set(live_instances(base)) == {first.path, second.path}
    assert first.path.stat().st_mode & 0o777 == 0o700
    first.remove()
    assert live_instances(base) == [second.path]
    second.remove()
    assert list(base.iterdir()) == []


def test_what_a_killed_server_left_is_swept_by_the_next_start(base: Path) -> None:
    with victim(SERVER, base):
        (left,) = live_instances(base)
        assert sweep(base) == []
    assert (left / "board").exists()
    assert live_instances(base) == []
    directory = RunDirectory.create(base)
    assert list(base.iterdir()) == [directory.path]
    directory.remove()


def test_a_directory_left_half_made_is_swept(base: Path) -> None:
    base.mkdir(mode=0o700)
    (base / ".0123").mkdir()
    (base / ".4567").mkdir()
    (base / ".4567" / LOCK).touch()
    directory = RunDirectory.create(base)
    assert list(base.iterdir()) == [directory.path]
    directory.remove()


def start(base: Path, barrier: object, alive: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    directory = RunDirectory.create(base)
    alive.wait()  # type: ignore[attr-defined]
    assert (directory.path / LOCK).exists()
    directory.remove()


def test_many_servers_start_at_once(base: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, alive = context.Barrier(12), context.Barrier(13)
    processes = [context.Process(target=start, args=(base, barrier, alive)) for _ in range(12)]
    for process in processes:
        process.start()
    alive.wait(30)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 12
    assert list(base.iterdir()) == []


def test_nobody_sweeps_while_a_directory_is_half_made(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its making and its lock a directory looks dead; a sweep then must be impossible."""
    real, refused = os.open, []

    def watched(path: Path, flags: int, mode: int = 0o777) -> int:
        if path.name == LOCK:
            other = real(base, os.O_RDONLY)
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                refused.append(path)
            os.close(other)
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", watched)
    RunDirectory.create(base).remove()
    assert len(refused) == 1


def test_a_base_that_others_may_enter_is_refused(base: Path) -> None:
    base.mkdir()
    base.chmod(0o755)
    with pytest.raises(OSError, match="must belong to this user alone"):
        RunDirectory.create(base)


def test_a_base_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too long"):
        RunDirectory.create(tmp_path / ("x" * 100))


def test_the_environment_names_the_base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATON_RUN_DIRECTORY", str(tmp_path))
    assert default_base() == tmp_path
    monkeypatch.delenv("BATON_RUN_DIRECTORY")
    assert default_base().name == f"baton-{os.getuid()}"
