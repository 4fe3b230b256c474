"""The live view says what the board says, and never writes to it."""

from __future__ import annotations

import io
import re
from pathlib import Path

import msgspec
from click.testing import CliRunner
from rich.console import Console

from baton.engine.ownership import BoardRow
from baton.engine.states import STATE_NUMBERS
from baton.ipc.board import Board
from baton.ipc.clock import now_ns
from baton.ipc.frames import Role
from baton.ops.cli import cli
from baton.ops.top import Frame, Place, Request, look, render


def shown(frame: Frame, before: Frame | None = None, rows_max: int = 10) -> str:
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(render(frame, before, rows_max))
    return console.export_text()


def request(number: int, held_s: float, delivered: int = 0) -> Request:
    return Request(f"{number:032x}", "decoding", "scheduler-0#1", held_s, 5, 7, delivered, False, number == 2)


def frame(at_s: float, requests: list[Request], pulse: int = 0) -> Frame:
    gauges = {"kv_blocks_total": 100, "kv_blocks_free": 60, "kv_blocks_cached": 9}
    return Frame(at_s, [Place("scheduler-0#1", 42, 61.0, pulse, True)], requests, gauges)


def test_a_frame_shows_processes_totals_and_requests() -> None:
    text = shown(frame(1.0, [request(1, 0.5), request(2, 2.25)]))
    assert re.search(r"scheduler-0#1 +42 +61 s +ready", text)
    assert "2 requests  2 decoding   KV 40 of 100 blocks, 9 cached" in text
    lines = [line for line in text.splitlines() if "decoding  " in line and "requests" not in line]
    assert lines[0].startswith(f"{2:032x}") and "2.25 s" in lines[0] and lines[0].rstrip().endswith("cancel")


def test_rates_come_from_the_frame_before() -> None:
    before = frame(1.0, [request(1, 0.1, delivered=10), request(3, 0.1, delivered=50)], pulse=100)
    text = shown(frame(3.0, [request(1, 0.1, delivered=30), request(4, 0.1, delivered=6)], pulse=300), before)
    assert "13 tokens/s to these" in text
    assert re.search(r"61 s +100 +ready", text)


def test_what_does_not_fit_is_counted() -> None:
    text = shown(frame(1.0, [request(number, 0.1) for number in range(5)]), rows_max=2)
    assert "… and 3 more" in text


def board(path: Path) -> Board:
    made = Board.create(path, 1, 4)
    made.set_live(Role.SCHEDULER, 0, 3, now_ns())
    made.set_pid(Role.SCHEDULER, 0, 42)
    made.set_gauges((1, 0, 100, 60, 9, 0, 0, 0, 0, 0, 0, 0))
    made.claim(2, b"\xab" * 16, bytes(25))
    row = BoardRow(1, 5, Role.SCHEDULER, 0, 3, False, Role.TOKENIZER, 0, 1, STATE_NUMBERS["queued"], now_ns())
    made.write(2, row)
    made.count(2, 11, 12)
    return made


def test_the_board_is_read_as_it_stands(tmp_path: Path) -> None:
    made = board(tmp_path / "board")
    found = look(made)
    made.close()
    (row,) = found.requests
    expected = Request("ab" * 16, "queued", "scheduler-0#3", row.held_s, 11, 12, 0, True, False)
    assert row == expected
    assert [msgspec.structs.replace(place, up_s=0) for place in found.places] == [
        Place("scheduler-0#3", 42, 0, 0, False)
    ]
    assert found.gauges["kv_blocks_free"] == 60


def test_once_prints_one_frame(tmp_path: Path) -> None:
    board(tmp_path / "board").close()
    before = (tmp_path / "board").read_bytes()
    result = CliRunner().invoke(cli, ["top", "--once", "--run-directory", str(tmp_path)])
    assert result.exit_code == 0
    assert "ab" * 16 in result.stdout and "queued" in result.stdout
    assert (tmp_path / "board").read_bytes() == before


def test_a_directory_without_a_board_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["top", "--once", "--run-directory", str(tmp_path)])
    assert (result.exit_code, result.stderr) == (1, f"baton: {tmp_path} has no board\n")
