"""Fetches a model by its alias with a progress bar on stderr; what is on disk already is used as it is."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from baton.workers.model.pull import pull


def fetch(alias: str) -> Path:
    """Where the model called ``alias`` is, downloaded now if it was not there before; raises if there is none."""
    columns = (
        "[progress.description]{task.description}",
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(alias, total=None, visible=False)

        def progress(done: int, total: int | None) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        return pull(alias, progress)
