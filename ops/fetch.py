"""Fetches a known model, showing on stderr what happens; what is on disk already is used as it is."""

from __future__ import annotations

from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

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
        return pull(name, lambda line: console.print(line, highlight=False, soft_wrap=True))
    # pip does not say how far it is, so the bar only shows that it is at work.
    columns = (TextColumn(name), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("looking", total=None)
        return pull(name, lambda line: bar.update(task, description=line))
