"""Writes the pages of ``docs/`` that are derived from the program: ``python -m baton.ops.docs DIRECTORY``."""

from __future__ import annotations

import sys
from pathlib import Path

from baton.engine.states import STATES, diagram
from baton.ops.figures import ledger_figure, step_figure

STATES_PAGE = "states.md"
STEP_FIGURE = "scheduling-step.svg"
LEDGER_FIGURE = "scheduling-ledger.svg"


def states_page() -> str:
    """The states of a request: who owns each, where it may go, and the diagram."""
    rows = [
        f"| `{name}` | {role.name.lower()} | {', '.join(f'`{move}`' for move in moves) or 'the end'} |"
        for name, (role, moves) in STATES.items()
    ]
    return "\n".join(
        [
            "# The states of a request",
            "",
            "Written by `make docs` from the table in `engine/states.py`; a test fails when this page is out of date.",
            "A move between two owners is a hand-over and raises the request's epoch; any other move does not.",
            "",
            "| state | owner | may move to |",
            "| --- | --- | --- |",
            *rows,
            "",
            "```mermaid",
            diagram().rstrip(),
            "```",
            "",
        ]
    )


def main(directory: Path) -> None:
    """Write every derived page and figure into ``directory``."""
    for name, text in derived().items():
        (directory / name).write_text(text, encoding="utf-8")


def derived() -> dict[str, str]:
    """What is derived from the program: a file's name in ``docs/`` and what stands in it."""
    return {STATES_PAGE: states_page(), STEP_FIGURE: step_figure(), LEDGER_FIGURE: ledger_figure()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
