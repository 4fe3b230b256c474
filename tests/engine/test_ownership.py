"""The rules of handing over, one test a rule."""

from __future__ import annotations

import msgspec
import pytest

from baton.engine.effects import Effect, Span
from baton.engine.ownership import Held, Ownership
from baton.ipc.board import Board
from baton.ipc.frames import Key, Role
from tests.engine.rig import TRACE, address, hand, make_board, owner


@pytest.fixture
def board() -> Board:
    return make_board()


def scheduler(board: Board, incarnation: int = 1, spans_max: int = 64) -> Ownership:
    return Ownership(board, address(Role.SCHEDULER, incarnation), spans_max)


def test_giving_names_the_receiver_before_the_frame_is_sent(board: Board) -> None:
    board.set_live(Role.DETOKENIZER, 0, 7, 0)
    hands, out = scheduler(board), list[Effect]()
    held = hands.take(hand(board, 3, "queued", Role.TOKENIZER, 2), TRACE)
    assert held is not None
    key = hands.give(held, Role.DETOKENIZER, 0, "flushing", 9, out)
    row = board.row(3)
    assert key == Key(3, 1, 3)
    assert (row.epoch, row.role, row.incarnation, row.taken) == (3, Role.DETOKENIZER, 7, False)
    assert (row.from_role, row.from_incarnation) == (Role.SCHEDULER, 1)
    assert [effect.name for effect in out if isinstance(effect, Span)] == ["queued"]


def test_taking_writes_taken(board: Board) -> None:
    assert scheduler(board).take(hand(board, 3, "queued", Role.TOKENIZER, 2), TRACE) == Held(
        3, 1, 2, "queued", 0, TRACE
    )
    assert owner(board, 3) == (2, "scheduler", True)


def test_the_same_hand_over_is_taken_once(board: Board) -> None:
    hands, key = scheduler(board), hand(board, 3, "queued", Role.TOKENIZER, 2)
    assert hands.take(key, TRACE) is not None
    assert hands.take(key, TRACE) is None
    assert hands.counts["stale_frames"] == 1


def test_a_hand_over_once_taken_stays_taken_even_if_the_row_says_otherwise(board: Board) -> None:
    hands, key = scheduler(board), hand(board, 3, "queued", Role.TOKENIZER, 2)
    assert hands.take(key, TRACE) is not None
    board.write(3, msgspec.structs.replace(board.row(3), taken=False))
    assert hands.take(key, TRACE) is None


@pytest.mark.parametrize("change", [{"epoch": 3}, {"generation": 2}, {"incarnation": 2}, {"role": 5}, {"index": 1}])
def test_a_frame_that_the_row_does_not_name_is_dropped(board: Board, change: dict[str, int]) -> None:
    key = hand(board, 3, "queued", Role.TOKENIZER, 2)
    changed = msgspec.structs.replace(board.row(3), **change)
    board.write(3, changed)
    assert scheduler(board).take(key, TRACE) is None
    assert board.row(3) == changed


def test_an_untaken_hand_over_of_a_dead_sender_goes_home(board: Board) -> None:
    hands, key, out = scheduler(board), hand(board, 3, "queued", Role.TOKENIZER, 2), list[Effect]()
    assert hands.recall(key, TRACE, 0, 5, out) == Key(3, 1, 3)
    assert owner(board, 3) == (3, "frontend", False)
    assert hands.take(key, TRACE) is None, "the frame came after all"


def test_what_was_taken_is_not_recalled(board: Board) -> None:
    hands, key = scheduler(board), hand(board, 3, "queued", Role.TOKENIZER, 2)
    hands.take(key, TRACE)
    assert hands.recall(key, TRACE, 0, 5, []) is None
    assert owner(board, 3) == (2, "scheduler", True)


def test_a_move_keeps_the_owner_and_the_epoch_and_ends_a_span(board: Board) -> None:
    hands, out = scheduler(board), list[Effect]()
    held = hands.take(hand(board, 3, "queued", Role.TOKENIZER, 2), TRACE)
    assert held is not None
    hands.move(held, "prefilling", 10, out)
    hands.move(held, "prefilling", 11, out)
    assert owner(board, 3) == (2, "scheduler", True)
    assert len(out) == 1


def test_moves_that_are_not_in_the_table_or_not_ours_raise(board: Board) -> None:
    hands = scheduler(board)
    held = hands.take(hand(board, 3, "queued", Role.TOKENIZER, 2), TRACE)
    assert held is not None
    for state in ("decoding", "tokenizing", "flushing"):
        with pytest.raises(AssertionError):
            hands.move(held, state, 10, [])
    with pytest.raises(AssertionError, match="does not belong"):
        hands.give(held, Role.FRONTEND, 0, "flushing", 10, [])


def test_past_the_bound_flips_are_events_and_the_spans_leave_no_hole(board: Board) -> None:
    hands, out = scheduler(board, spans_max=2), list[Effect]()
    held = hands.take(hand(board, 3, "queued", Role.TOKENIZER, 2), TRACE)
    assert held is not None
    for now_ns, state in enumerate(["prefilling", "decoding", "paused", "decoding", "paused", "decoding"], 1):
        hands.move(held, state, now_ns, out)
    hands.give(held, Role.DETOKENIZER, 0, "flushing", 9, out)
    spans = [effect for effect in out if isinstance(effect, Span)]
    assert [(span.name, span.start_ns, span.end_ns) for span in spans] == [
        ("queued", 0, 1),
        ("prefilling", 1, 2),
        ("decoding", 2, 9),
    ]
    assert spans[-1].events == (("decoding", 4), ("paused", 5))


def test_the_cancel_word_means_one_generation(board: Board) -> None:
    hands = scheduler(board)
    held = hands.take(hand(board, 3, "queued", Role.TOKENIZER, 2), TRACE)
    assert held is not None
    board.set_cancel(3, 2)
    assert not hands.cancelled(held)
    board.set_cancel(3, 1)
    assert hands.cancelled(held)
