"""The board: rows are read whole while they are written, and survive a writer killed in the middle."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.ownership import BoardRow
from baton.ipc.board import COPIES, ROW_WORDS, ROWS_AT, Board
from baton.ipc.frames import Role
from tests.ipc.victim import victim

#: another process writes one row over and over: every field says the same number
ENDLESS_WRITER = """
import sys
from pathlib import Path
from baton.engine.ownership import BoardRow
from baton.ipc.board import Board
board, number = Board.open(Path(sys.argv[1])), 1
while True:
    if number == 2:
        sys.stdout.write("ready\\n")
        sys.stdout.flush()
    n, s = number, number % 200
    board.write(1, BoardRow(n, n, s % 7, s % 16, n, bool(s % 2), s % 7, s % 16, n, s, n))
    number += 1
"""

small, word = st.integers(0, 255), st.integers(0, 2**32 - 1)
rows = st.builds(
    BoardRow, word, word, small, small, word, st.booleans(), small, small, word, small, st.integers(0, 2**63)
)


def is_whole(row: BoardRow) -> bool:
    n, s = row.generation, row.generation % 200
    return row == BoardRow(n, n, s % 7, s % 16, n, bool(s % 2), s % 7, s % 16, n, s, n)


def make(frontends: int = 1, slots: int = 3) -> Board:
    return Board.format(bytearray(Board.size(frontends, slots)), frontends, slots)


@given(st.lists(rows, min_size=1, max_size=4))
def test_a_row_is_what_was_written_last(written: list[BoardRow]) -> None:
    board = make()
    for row in written:
        board.write(1, row)
        assert board.row(1) == row
    assert board.row(0) == board.row(2) == BoardRow(generation=1)


def test_a_reader_never_sees_half_a_row_and_a_killed_writer_leaves_a_whole_one(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", 1, 3)
    seen = set[int]()
    for _ in range(3):
        with victim(ENDLESS_WRITER, tmp_path / "board"):
            enough, until = len(seen) + 200, time.monotonic() + 30
            while len(seen) < enough:
                row = board.row(1)
                seen.add(row.generation)
                assert is_whole(row), row
                assert time.monotonic() < until, "the writer stands still"
        assert is_whole(board.row(1))
    board.close()


@given(rows, rows, st.integers(0, 3), st.integers(0, 2**64 - 1))
def test_a_writer_that_dies_before_it_is_done_has_written_nothing(
    old: BoardRow, new: BoardRow, words_written: int, torn: int
) -> None:
    """The copy that is being filled is not the one that is read."""
    buffer = bytearray(Board.size(1, 3))
    board = Board.format(buffer, 1, 3)
    board.write(1, old)
    words = memoryview(buffer).cast("Q")
    at = ROWS_AT + ROW_WORDS
    filling = at + COPIES + 4 * ((words[at] + 1) & 1)
    for offset in range(words_written):
        words[filling + offset] = torn
    assert board.row(1) == old
    board.write(1, new)
    assert board.row(1) == new


def test_the_cancel_word_outlives_the_row_and_means_one_generation() -> None:
    board = make()
    board.set_cancel(2, 5)
    assert [board.cancelled(2, generation) for generation in (4, 5, 6)] == [False, True, False]
    board.write(2, BoardRow(generation=6))
    assert not board.cancelled(2, 6)


def test_a_claim_names_the_request_and_starts_its_counters_anew() -> None:
    board = make()
    board.count(0, 9, 9)
    board.set_delivered(0, 9)
    board.claim(0, bytes(range(16)), bytes(range(100, 125)))
    board.write(0, BoardRow(generation=1, role=Role.FRONTEND))
    assert board.identity(0) == (bytes(range(16)), bytes(range(100, 125)))
    (view,) = board.rows()
    assert (view.slot, view.prompt_tokens, view.sampled, view.delivered, view.cancelled) == (0, 0, 0, 0, False)
    board.count(0, 12, 34)
    board.set_delivered(0, 30)
    (view,) = board.rows()
    assert (view.prompt_tokens, view.sampled, view.delivered) == (12, 34, 30)


def test_slices_do_not_overlap_and_cover_the_board() -> None:
    board = make(3, 4)
    assert [slot for frontend in range(3) for slot in board.slice(frontend)] == list(range(12))


def test_the_life_table() -> None:
    board = make()
    assert board.live(Role.WORKER, 3) == 0
    board.set_live(Role.WORKER, 3, 2, 77)
    board.set_pid(Role.WORKER, 3, 4711)
    board.set_phase(Role.WORKER, 3, "ready", 11)
    board.beat(Role.WORKER, 3)
    (place,) = board.places()
    assert (place.role, place.index, place.incarnation, place.pid, place.since_ns) == (Role.WORKER, 3, 2, 4711, 77)
    assert (place.pulse, place.ready) == (1, True)
    board.set_live(Role.WORKER, 3, 3, 99)
    (place,) = board.places()
    assert (place.incarnation, place.pid, place.pulse, place.ready) == (3, 0, 0, False)


def test_the_gauges() -> None:
    board = make()
    board.set_live(Role.SCHEDULER, 0, 1, 7)
    board.expect(Role.SCHEDULER, 0, 99)
    board.set_gauges((1, 2, 30, 4, 5, 6, 7, 480, 800, 90, 10, 11, 12, 13, 14))
    (place,) = board.places()
    assert (place.incarnation, place.since_ns, place.expected_ns) == (1, 7, 99), "nothing lies on anything else"
    assert board.gauges() == {
        "requests_running": 1,
        "requests_waiting": 2,
        "kv_blocks_total": 30,
        "kv_blocks_free": 4,
        "kv_blocks_cached": 5,
        "preemptions_recompute": 6,
        "preemptions_swap": 7,
        "kv_tokens_total": 480,
        "prefix_queries_tokens": 800,
        "prefix_hits_tokens": 90,
        "prefix_evictions_blocks": 10,
        "ledger_growth": 11,
        "ledger_resume": 12,
        "ledger_headroom": 13,
        "ledger_swapped": 14,
    }


def test_a_file_that_is_no_board_is_refused() -> None:
    with pytest.raises(ValueError, match="not a board"):
        Board(bytearray(Board.size(1, 1)))
