"""Finds the run directory of a live server, for the commands that look into one."""

from __future__ import annotations

from pathlib import Path

from baton.ipc.rundir import default_base, live_instances


def run_directory(given: str | None) -> Path:
    """The directory given, or that of the server started last; LookupError where there is none."""
    if given is not None:
        path = Path(given)
        if not path.is_dir():
            raise LookupError(f"{given} is no directory")
        return path
    base = default_base()
    instances = live_instances(base)
    if not instances:
        raise LookupError(f"no running server found in {base}; name one with --run-directory")
    return instances[0]
