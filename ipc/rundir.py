"""The run directory: where one server's sockets, board, rings and traces live, on tmpfs, mode 0700.

Each server makes a directory of its own under a base and locks it as long as it lives; a directory that nobody locks
belongs to a dead server and is swept by the next start. Two servers never touch each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

LOCK = "lock"
SOCKET_PATH_BYTES_MAX = 107
_LONGEST_NAME = "/0123456789ab/detokenizer-15.sock"


def default_base() -> Path:
    """Where run directories go: BATON_RUN_DIRECTORY, else a tmpfs this user may write to, else the temp directory."""
    named = os.environ.get("BATON_RUN_DIRECTORY")
    if named:
        return Path(named)
    shm = Path("/dev/shm")
    root = shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())
    return root / f"baton-{os.getuid()}"


class RunDirectory:
    """A live run directory, locked by this process. Invariant: while the lock is held nobody sweeps it."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, base: Path) -> RunDirectory:
        """Sweep the base, then make and lock a new directory. OSError says what is wrong with the base."""
        if len(os.fsencode(base)) + len(_LONGEST_NAME) > SOCKET_PATH_BYTES_MAX:
            raise OSError(f"the run directory {base} is too long for a socket's name ({SOCKET_PATH_BYTES_MAX} bytes)")
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = base.stat()
        if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
            raise OSError(f"the run directory {base} must belong to this user alone (mode 0700)")
        with _alone(base):
            sweep(base)
            name = secrets.token_hex(6)
            fresh = base / f".{name}"
            fresh.mkdir(mode=0o700)
            lock = os.open(fresh / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path = base / name
            fresh.rename(path)
        return cls(path, lock)

    def remove(self) -> None:
        """Remove the directory with all that is in it, and give up the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def live_instances(base: Path) -> list[Path]:
    """Run directories whose server lives, newest first."""
    found = [path for path in _instances(base) if not path.name.startswith(".") and _locked(path)]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def sweep(base: Path) -> list[Path]:
    """Remove what dead servers left under the base. The caller keeps others from starting meanwhile."""
    dead = [path for path in _instances(base) if not _locked(path)]
    for path in dead:
        shutil.rmtree(path, ignore_errors=True)
    return dead


@contextlib.contextmanager
def _alone(base: Path) -> Iterator[None]:
    """One start at a time: a directory that is being made looks like a dead one until it is locked."""
    gate = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(gate, fcntl.LOCK_EX)
        yield
    finally:
        os.close(gate)


def _instances(base: Path) -> list[Path]:
    try:
        return [path for path in base.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []


def _locked(path: Path) -> bool:
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
