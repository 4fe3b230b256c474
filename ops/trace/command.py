"""``baton trace``: find the stories asked for and print them."""

from __future__ import annotations

import msgspec
from rich.console import Console

from baton.ops.live import run_directory
from baton.ops.terminal import out
from baton.ops.trace.otlp_json import document
from baton.ops.trace.story import find
from baton.ops.trace.waterfall import waterfall


def run(which: str, directory: str | None, list_steps: bool, as_json: bool, console: Console | None = None) -> None:
    """Print the request ``which`` (see ``story.find``); LookupError where there is none or no server."""
    console = console if console is not None else out()
    stories = find(run_directory(directory), which)
    if as_json:
        console.out(msgspec.json.encode(document(stories)).decode(), highlight=False)
        return
    for story in stories:
        console.print(waterfall(story, list_steps))
