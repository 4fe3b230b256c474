"""Fetches a known model, showing on stderr what happens; what is on disk already is used as it is."""

from __future__ import annotations

from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from baton.ops.terminal import err
from baton.workers.model.gguf import ModelFileError
from baton.workers.model.pull import KNOWN_MODELS, pull, resolve


def ensure(model: str) -> Path:
    """The file of a model: a path's, or a known model's, fetched now if it is not here; ``ModelFileError`` if none."""
    try:
        return resolve(model)
    except ModelFileError:
        if model not in KNOWN_MODELS:
            raise
        return fetch(model)


def fetch(name: str) -> Path:
    """Fetch a known model unless it is here and whole; ``ModelFileError`` says why it cannot be had."""
    console = err()
    if not console.is_terminal:
        said = set[str]()

        def tell(what: str, done: int, total: int) -> None:
            if what not in said:
                said.add(what)
                console.print(f"{name}: {what}", highlight=False, soft_wrap=True)

        return pull(name, tell)
    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("looking", total=None)
        return pull(name, lambda what, done, total: bar.update(task, description=what, completed=done, total=total))
