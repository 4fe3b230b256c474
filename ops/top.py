"""``baton top``: who holds which request, live from the board. ``render`` is pure; only ``look`` reads.

It maps the board read-only and writes nothing, so it can neither slow nor disturb the server it watches.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from baton.engine.states import STATE_NAMES
from baton.ipc.board import Board
from baton.ipc.clock import now_ns
from baton.ipc.frames import Role
from baton.ops.live import run_directory
from baton.ops.terminal import out


class Place(msgspec.Struct, frozen=True):
    """A process. ``pulse`` counts the events it has handled."""

    name: str
    pid: int
    up_s: float
    pulse: int
    ready: bool


class Request(msgspec.Struct, frozen=True):
    """A live request; ``held_s`` is the time in its state, ``in_flight`` says that it is between two owners."""

    request_id: str
    state: str
    owner: str
    held_s: float
    prompt_tokens: int
    sampled: int
    delivered: int
    in_flight: bool
    cancelled: bool


class Frame(msgspec.Struct, frozen=True):
    """The board at one moment, ``at_s`` on the monotonic clock."""

    at_s: float
    places: list[Place]
    requests: list[Request]
    gauges: dict[str, int]


def look(board: Board) -> Frame:
    """Read everything once."""
    now = now_ns()
    places = [
        Place(
            f"{place.role.name.lower()}-{place.index}#{place.incarnation}",
            place.pid,
            (now - place.since_ns) / 1e9,
            place.pulse,
            place.ready,
        )
        for place in board.places()
    ]
    requests = [
        Request(
            view.request_id.hex(),
            STATE_NAMES.get(view.row.state, "?"),
            f"{Role(view.row.role).name.lower()}-{view.row.index}#{view.row.incarnation}",
            (now - view.row.since_ns) / 1e9,
            view.prompt_tokens,
            view.sampled,
            view.delivered,
            not view.row.taken,
            view.cancelled,
        )
        for view in board.rows()
    ]
    return Frame(now / 1e9, places, requests, board.gauges())


def render(frame: Frame, before: Frame | None, rows_max: int) -> RenderableType:
    """One screen: processes, a line of totals, and the ``rows_max`` requests longest in their state."""
    elapsed_s = frame.at_s - before.at_s if before is not None else 0.0
    states = Counter(request.state for request in frame.requests)
    totals = Text.assemble(
        (f"{len(frame.requests)} requests", "bold"),
        "".join(f"  {count} {state}" for state, count in states.items()),
    )
    kv_total = frame.gauges.get("kv_blocks_total", 0)
    if kv_total:
        used = kv_total - frame.gauges.get("kv_blocks_free", 0)
        totals.append(f"   KV {used} of {kv_total} blocks, {frame.gauges.get('kv_blocks_cached', 0)} cached")
    if before is not None and elapsed_s > 0:
        totals.append(f"   {_delivered(frame, before) / elapsed_s:.0f} tokens/s to these", "bold green")
    longest = sorted(frame.requests, key=lambda request: -request.held_s)
    parts: list[RenderableType] = [_processes(frame, before, elapsed_s), totals]
    if longest:
        parts.append(_requests(longest[:rows_max]))
    if len(longest) > rows_max:
        parts.append(Text(f"… and {len(longest) - rows_max} more", "dim"))
    return Group(*parts)


def _delivered(frame: Frame, before: Frame) -> int:
    """Tokens delivered between two frames, of the requests that are in both or new."""
    then = {request.request_id: request.delivered for request in before.requests}
    return sum(max(0, request.delivered - then.get(request.request_id, 0)) for request in frame.requests)


def _processes(frame: Frame, before: Frame | None, elapsed_s: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("process", "pid", "up", "events/s", ""):
        table.add_column(name, justify="left" if name in ("process", "") else "right")
    then = {place.name: place.pulse for place in before.places} if before is not None else {}
    for place in frame.places:
        rate = f"{(place.pulse - then[place.name]) / elapsed_s:.0f}" if place.name in then and elapsed_s > 0 else ""
        status = Text("ready", "green") if place.ready else Text("starting", "yellow")
        table.add_row(place.name, str(place.pid), f"{place.up_s:.0f} s", rate, status)
    return table


def _requests(requests: list[Request]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("request", "state", "owner", "for", "prompt", "sampled", "delivered", ""):
        table.add_column(name, justify="left" if name in ("request", "state", "owner", "") else "right", no_wrap=True)
    for request in requests:
        marks = " ".join(
            word for word, set_ in (("handed over", request.in_flight), ("cancel", request.cancelled)) if set_
        )
        table.add_row(
            request.request_id,
            request.state,
            request.owner,
            f"{request.held_s:.2f} s",
            str(request.prompt_tokens),
            str(request.sampled),
            str(request.delivered),
            Text(marks, "yellow"),
        )
    return table


def run(directory: str | None, interval_s: float, once: bool, console: Console | None = None) -> None:
    """Show frames until interrupted or the server ends; LookupError where there is no server."""
    console = console if console is not None else out()
    path = run_directory(directory) / "board"
    try:
        board = Board.open(path, readonly=True)
    except FileNotFoundError:
        raise LookupError(f"{path.parent} has no board") from None
    try:
        if once:
            frame = look(board)
            console.print(render(frame, None, len(frame.requests)))
        else:
            _watch(board, path, interval_s, console)
    finally:
        board.close()


def _watch(board: Board, path: Path, interval_s: float, console: Console) -> None:
    before: Frame | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while path.exists():
                frame = look(board)
                room = max(1, console.height - len(frame.places) - 5)
                live.update(render(frame, before, room), refresh=True)
                before = frame
                time.sleep(interval_s)
        except KeyboardInterrupt:
            return
    console.print("the server has ended")
