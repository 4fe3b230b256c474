"""Finds the run directory of a live server, for the commands that look into one."""

from __future__ import annotations

from pathlib import Path

from baton.ipc.rundir import default_base, live_instances


def run_directory(given: str | None) -> Path:
    """The directory given, or that of the server started last; LookupError where there is none.

    ``given`` may also be what ``baton serve --run-directory`` was given, in which each server makes its own.
    """
    base = default_base() if given is None else Path(given)
    if given is not None and not base.is_dir():
        raise LookupError(f"{given} is no directory")
    instances = live_instances(base)
    if instances:
        return instances[0]
    if given is None:
        raise LookupError(f"no running server found in {base}; name one with --run-directory")
    return base
