"""What is kept of an incident: before a process is killed for being hung, everything that may explain it is written.

A dump is one text file in the user's state directory: who and why, the life table, the board, what each living process
says it holds, and the Python stacks of all. The number of dumps is bounded; the oldest go first.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from baton.engine.states import STATE_NAMES
from baton.ipc.board import Board
from baton.ipc.frames import Role

STACKS_SIGNAL = signal.SIGUSR1
STACKS_SUFFIX = ".stacks"
STORY_SUFFIX = ".story"


def dump_directory() -> Path:
    """Where dumps are kept: ``$XDG_STATE_HOME/baton/dumps``, by default under ``~/.local/state``."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "baton" / "dumps"


def write_dump(run: Path, board: Board, name: str, why: str, dumps_max: int) -> Path:
    """Write a dump of the server in ``run``; stacks and stories are those that lie there by now."""
    directory = dump_directory()
    directory.mkdir(parents=True, exist_ok=True)
    kept = sorted(directory.glob("*.txt"))
    for old in kept[: max(0, len(kept) - dumps_max + 1)]:
        old.unlink(missing_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    path = directory / f"{stamp}-{time.monotonic_ns()}-{name}.txt"
    parts = [f"{name}: {why}\n", "\n== processes\n", *_processes(board), "\n== requests\n", *_requests(board)]
    for suffix, title in ((STORY_SUFFIX, "holds"), (STACKS_SUFFIX, "stacks")):
        for file in sorted(run.glob(f"*{suffix}")):
            parts.append(f"\n== {file.stem} {title}\n{file.read_text(errors='replace')}")
    path.write_text("".join(parts))
    return path


def _processes(board: Board) -> list[str]:
    return [
        f"{p.role.name.lower()}-{p.index}#{p.incarnation} pid {p.pid} {p.phase} "
        f"pulse {p.pulse} expects {p.expected_ns} ns\n"
        for p in board.places()
    ]


def _requests(board: Board) -> list[str]:
    lines = []
    for view in board.rows():
        row = view.row
        owner = f"{Role(row.role).name.lower()}-{row.index}#{row.incarnation}"
        lines.append(
            f"slot {view.slot} {view.request_id.hex()} {STATE_NAMES[row.state]} of {owner} epoch {row.epoch} "
            f"taken {row.taken} prompt {view.prompt_tokens} sampled {view.sampled} delivered {view.delivered} "
            f"cancelled {view.cancelled}\n"
        )
    return lines
