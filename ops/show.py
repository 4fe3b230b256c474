"""Prints the configuration: what is in force and where each value came from."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table

from baton.ops.configure import Configuration
from baton.ops.terminal import out


def configuration(configured: Configuration, as_json: bool, console: Console | None = None) -> None:
    """Print every setting with its source, as a table or as one JSON object by setting."""
    console = console if console is not None else out()
    values = configured.values()
    if as_json:
        document = {name: {"value": value, "source": configured.sources[name]} for name, value in values.items()}
        console.out(msgspec.json.format(msgspec.json.encode(document), indent=2).decode(), highlight=False)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", overflow="fold")
    for name, value in values.items():
        source = configured.sources[name]
        shown = "" if value is None else str(value)
        table.add_row(name, shown, source, style="dim" if source == "default" else None)
    console.print(table)
