"""The frontend's core: one Finish a request, each token once, and the sweep that takes over from the dead."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest

from baton.engine.effects import (
    Account,
    Answered,
    Begin,
    Deliver,
    Effect,
    Finish,
    Gone,
    Open,
    Send,
    Span,
    Taken,
    Tick,
    Wake,
)
from baton.engine.frontend import FrontendCore
from baton.engine.limits import Limits
from baton.engine.states import STATE_NUMBERS
from baton.ipc.board import Board
from baton.ipc.frames import (
    Admitted,
    Cancel,
    Closed,
    Credit,
    Drained,
    Halt,
    Key,
    Life,
    Params,
    Piece,
    Prompt,
    Recall,
    Returned,
    Role,
    Serving,
    Submit,
    Terms,
    Text,
)
from tests.engine.rig import TRACE, address, frames, hand, make_board, only, owner

SECOND = 1_000_000_000
SWEEP = Tick("sweep")


@dataclass
class Bench:
    """A frontend of two slots; the test is everybody else. Door 7 opens in slot 0."""

    limits: Limits = field(default_factory=lambda: Limits(mailbox_tokens_max=4, lives_max=3))
    board: Board = field(default_factory=lambda: make_board(2))
    now_ns: int = 0

    def __post_init__(self) -> None:
        self.core = FrontendCore(address(Role.FRONTEND), self.board, range(2), self.limits)

    def tell(self, event: object) -> list[Effect]:
        self.now_ns += 1
        return self.core.handle(event, self.now_ns)

    def open(self, door: int = 7, **bounds: int) -> list[Effect]:
        terms, prompt = Terms("m", **bounds), Prompt(text="hello")  # type: ignore[arg-type]
        event = Open(
            door, bytes([door] * 16), TRACE, TRACE[16:24], None, terms, Params(seed=3), prompt, self.now_ns, {}
        )
        return self.tell(event)

    def runs(self, epoch: int = 2) -> list[Effect]:
        """The scheduler has taken the request of slot 0."""
        key = hand(self.board, 0, "queued", Role.TOKENIZER, epoch)
        self.board.write(0, msgspec.structs.replace(self.board.row(0), taken=True))
        return self.tell(Admitted(0, key.generation, epoch, [5, 6]))

    def text(self, ids: list[int], start: int = 0, run: int = 2, generation: int = 1) -> list[Effect]:
        return self.tell(Text([Piece(0, generation, run, start, ids, [f"t{token}" for token in ids], [])]))

    def closed(self, length: int, epoch: int = 4, reason: str = "length") -> list[Effect]:
        key = hand(self.board, 0, "closed", Role.DETOKENIZER, epoch)
        return self.tell(Closed(key, TRACE, length, reason, None, "!", None, [5, 6]))

    def dies(self, role: Role) -> list[Effect]:
        """Killed, reaped, raised; the frontend hears of it."""
        incarnation = self.board.live(role, 0) + 1
        self.board.set_live(role, 0, incarnation, 0)
        return self.tell(Life(role, 0, incarnation))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_request_from_the_door_to_its_account(bench: Bench) -> None:
    submit = only(bench.open(), Submit)
    assert (submit.key, submit.delivered, submit.credit) == (Key(0, 1, 1), [], 4)
    assert owner(bench.board, 0) == (1, "tokenizer", False)
    assert only(bench.runs(), Begin) == Begin(7, [5, 6])
    assert only(bench.text([9, 8]), Deliver).texts == ["t9", "t8"]
    finish = only(bench.closed(2), Finish)
    assert finish == Finish(7, "length", None, "!", 2, 2, None)
    out = bench.tell(Answered(7))
    account = only(out, Account)
    assert (account.reason, account.prompt_tokens, account.completion_tokens, account.lives) == ("length", 2, 2, 1)
    assert [effect.span_id for effect in out if isinstance(effect, Span) and effect.server] == [TRACE]
    assert (bench.board.row(0).generation, bench.board.row(0).role) == (2, 0)
    assert (bench.core.streams, bench.core.doors) == ({}, {})


def test_text_that_overtakes_admission_waits_for_it(bench: Bench) -> None:
    bench.open()
    assert bench.text([9]) == []
    out = bench.runs()
    assert [type(effect) for effect in out if not isinstance(effect, Send)] == [Begin, Deliver]


def test_an_end_that_overtakes_admission_brings_the_prompt_and_the_late_admission_begins_nothing(bench: Bench) -> None:
    bench.open()
    bench.text([9])
    out = bench.closed(1)
    assert [type(effect) for effect in out if not isinstance(effect, Span)] == [Begin, Deliver, Finish]
    assert only(out, Finish).prompt_tokens == 2
    assert bench.tell(Admitted(0, 1, 2, [5, 6])) == []


def test_old_repeated_and_foreign_text_is_dropped_or_trimmed(bench: Bench) -> None:
    bench.open()
    bench.runs()
    bench.text([9, 8])
    assert bench.text([9, 8]) == []
    assert only(bench.text([8, 7], 1), Deliver).token_ids == [7]
    assert bench.text([1], 3, run=1) == []
    assert bench.text([1], 3, generation=2) == []


def test_a_gap_in_the_text_is_a_defect(bench: Bench) -> None:
    bench.open()
    bench.runs()
    with pytest.raises(AssertionError, match="gap"):
        bench.text([1], 1)


@pytest.mark.parametrize("role", [Role.TOKENIZER, Role.SCHEDULER, Role.DETOKENIZER])
def test_what_the_dead_owned_is_submitted_again_from_the_delivered_ids(bench: Bench, role: Role) -> None:
    bench.open()
    bench.runs()
    bench.text([9, 8])
    state = {Role.TOKENIZER: "tokenizing", Role.SCHEDULER: "decoding", Role.DETOKENIZER: "flushing"}[role]
    hand(bench.board, 0, state, Role.SCHEDULER, 3)
    out = bench.dies(role)
    submit = only(out, Submit)
    assert (submit.key.epoch, submit.delivered, submit.prompt.token_ids) == (5, [9, 8], [5, 6])
    assert [effect.name for effect in out if isinstance(effect, Span) and effect.error] == [state]
    assert bench.text([7], 2, run=3) == [], "text of the life before"


def test_a_live_owner_is_left_alone_however_often_the_frontend_looks(bench: Bench) -> None:
    bench.open()
    bench.runs()
    for _ in range(3):
        assert [type(effect) for effect in bench.tell(SWEEP)] == [Wake]
    assert owner(bench.board, 0) == (2, "scheduler", True)


def test_a_hand_over_whose_sender_died_is_recalled_once_and_comes_home(bench: Bench) -> None:
    bench.open()
    key = hand(bench.board, 0, "queued", Role.TOKENIZER, 2)
    assert only(bench.dies(Role.TOKENIZER), Recall).key == key
    assert frames(bench.tell(SWEEP), Recall) == []
    home = hand(bench.board, 0, "received", Role.SCHEDULER, 3)
    assert only(bench.tell(Returned(home, TRACE)), Submit).key.epoch == 4
    assert bench.tell(Returned(home, TRACE)) == []


def test_what_a_dead_owner_sent_home_untaken_is_seized_and_its_late_end_is_stale(bench: Bench) -> None:
    bench.open()
    bench.runs()
    key = hand(bench.board, 0, "closed", Role.DETOKENIZER, 4)
    assert only(bench.dies(Role.DETOKENIZER), Submit).key.epoch == 6
    assert frames(bench.tell(Closed(key, TRACE, 0, "length", None, "", None)), Finish) == []
    assert owner(bench.board, 0) == (6, "tokenizer", False)


def test_a_request_interrupted_too_often_is_given_up_with_an_error(bench: Bench) -> None:
    bench.open()
    assert only(bench.dies(Role.TOKENIZER), Submit)
    assert only(bench.dies(Role.TOKENIZER), Submit)
    finish = only(bench.dies(Role.TOKENIZER), Finish)
    assert (finish.reason, finish.failure.code if finish.failure else None) == ("error", "interrupted")


def test_a_cancel_sets_the_word_and_nudges_the_owner_once(bench: Bench) -> None:
    bench.open()
    bench.runs()
    out = bench.tell(Gone(7, "cancelled", True))
    assert bench.board.cancelled(0, 1)
    assert [(effect.role, effect.frame) for effect in out if isinstance(effect, Send)] == [
        (Role.SCHEDULER, Cancel(0, 1, 0))
    ]
    assert bench.tell(Gone(7, "cancelled", True)) == []
    assert only(bench.closed(0, reason="cancelled"), Finish).reason == "cancelled"


def test_a_cancelled_request_whose_owner_dies_is_closed_and_not_submitted_again(bench: Bench) -> None:
    bench.open()
    bench.runs()
    bench.tell(Gone(7, "cancelled", True))
    out = bench.dies(Role.SCHEDULER)
    assert (only(out, Finish).reason, frames(out, Submit)) == ("cancelled", [])


def test_a_client_that_went_away_hears_nothing_and_its_row_is_freed(bench: Bench) -> None:
    bench.open()
    bench.runs()
    bench.tell(Gone(7, "disconnected", False))
    assert [effect for effect in bench.text([9]) if isinstance(effect, Deliver)] == []
    out = bench.closed(1, reason="cancelled")
    assert [effect for effect in out if isinstance(effect, Finish)] == []
    assert only(out, Account).reason == "disconnected"
    assert bench.board.row(0).role == 0


def test_credit_follows_what_the_client_took_and_no_life_widens_the_window(bench: Bench) -> None:
    bench.open()
    bench.runs()
    bench.text([1, 2, 3, 4])
    assert frames(bench.tell(Taken(7, 1)), Credit) == []
    assert only(bench.tell(Taken(7, 2)), Credit) == Credit(0, 1, 2, 6)
    assert only(bench.dies(Role.SCHEDULER), Submit).credit == 6


def test_a_stalled_reader_is_cancelled_as_a_slow_consumer(bench: Bench) -> None:
    bench.open()
    bench.runs()
    bench.text([1])
    bench.now_ns += int(bench.limits.stalled_s_max * SECOND)
    assert only(bench.tell(SWEEP), Cancel)
    assert only(bench.closed(1, reason="cancelled"), Finish).reason == "slow_consumer"


def test_a_reader_that_took_everything_is_not_stalled(bench: Bench) -> None:
    bench.open()
    bench.runs()
    bench.text([1])
    bench.tell(Taken(7, 1))
    bench.now_ns += int(bench.limits.stalled_s_max * SECOND) * 2
    assert frames(bench.tell(SWEEP), Cancel) == []


def test_a_clients_deadline_cancels(bench: Bench) -> None:
    bench.open(deadline_ns=50)
    bench.now_ns = 60
    assert only(bench.tell(SWEEP), Cancel)
    assert only(bench.closed(0, reason="cancelled"), Finish).reason == "deadline_exceeded"


def test_the_servers_bound_of_time_is_a_timeout(bench: Bench) -> None:
    most = int(bench.limits.request_s_max * SECOND)
    bench.open(deadline_ns=most)
    bench.now_ns = most + SECOND
    assert only(bench.tell(SWEEP), Cancel)
    assert only(bench.closed(0, reason="cancelled"), Finish).reason == "timeout"


@pytest.mark.parametrize(("state", "cancelled"), [("queued", True), ("prefilling", False), ("preempted", False)])
def test_time_in_the_queue_is_bounded_until_a_step_begins_the_request(
    bench: Bench, state: str, cancelled: bool
) -> None:
    bench.open(queue_until_ns=50)
    bench.runs()
    number = STATE_NUMBERS[state]
    bench.board.write(0, msgspec.structs.replace(bench.board.row(0), state=number))
    bench.now_ns = 60
    assert bool(frames(bench.tell(SWEEP), Cancel)) is cancelled
    end = only(bench.closed(0, reason="cancelled" if cancelled else "stop"), Finish)
    assert end.reason == ("queue_timeout" if cancelled else "stop")


def test_a_request_that_waits_in_a_second_life_is_not_too_late(bench: Bench) -> None:
    bench.open(queue_until_ns=50)
    bench.runs()
    bench.text([4])
    bench.now_ns = 60
    assert frames(bench.tell(SWEEP), Cancel) == []


def test_cached_tokens_are_on_the_account(bench: Bench) -> None:
    bench.open()
    bench.runs()
    bench.text([4])
    key = hand(bench.board, 0, "closed", Role.DETOKENIZER, 4)
    finish = only(bench.tell(Closed(key, TRACE, 1, "stop", None, "", None, [5, 6], 1)), Finish)
    assert finish.cached_tokens == 1
    assert only(bench.tell(Answered(7)), Account).cached_tokens == 1


def test_an_end_that_nobody_takes_is_forgotten_after_a_while(bench: Bench) -> None:
    bench.open()
    bench.closed(0)
    assert bench.board.row(0).role != 0
    bench.now_ns += int(bench.limits.answer_s_max * SECOND) + 1
    out = bench.tell(SWEEP)
    assert only(out, Account)
    assert bench.tell(Answered(7)) == []
    assert bench.board.row(0).role == 0


def test_a_full_house_and_a_closing_house_refuse_at_the_door(bench: Bench) -> None:
    bench.open(1)
    bench.open(2)
    full = only(bench.open(3), Finish)
    assert (full.reason, full.failure.status if full.failure else 0) == ("refused", 429)
    bench.tell(Serving(True, True, "w"))
    closing = only(bench.open(4), Finish)
    assert (closing.reason, closing.failure.status if closing.failure else 0) == ("refused", 503)


def test_draining_ends_with_the_last_request(bench: Bench) -> None:
    bench.open()
    assert frames(bench.tell(Serving(True, True, "w")), Drained) == []
    bench.closed(0)
    assert only(bench.tell(Answered(7)), Drained)


def test_an_idle_house_is_drained_at_once(bench: Bench) -> None:
    assert only(bench.tell(Serving(True, True, "w")), Drained)


def test_a_halt_tells_every_waiting_client_once(bench: Bench) -> None:
    bench.open(1)
    bench.open(2)
    out = bench.tell(Halt("restarts are used up"))
    finishes = [effect for effect in out if isinstance(effect, Finish)]
    assert {finish.door for finish in finishes} == {1, 2}
    assert all(finish.failure is not None and finish.failure.status == 503 for finish in finishes)
    assert only(bench.open(3), Finish).reason == "refused"


def test_a_successor_adopts_the_slice_cancels_it_and_sees_it_to_its_end(bench: Bench) -> None:
    bench.open()
    bench.runs()
    bench.board.set_live(Role.FRONTEND, 0, 2, 0)
    heir = FrontendCore(address(Role.FRONTEND, 2), bench.board, range(2), bench.limits)
    assert only(heir.start(5), Cancel) == Cancel(0, 1, 0)
    assert bench.board.cancelled(0, 1)
    key = hand(bench.board, 0, "closed", Role.DETOKENIZER, 4, to=2)
    out = heir.handle(Closed(key, TRACE, 3, "cancelled", None, "", None), 6)
    assert [effect for effect in out if not isinstance(effect, Span)] == []
    assert (bench.board.row(0).role, bench.board.row(0).generation, sorted(heir.free)) == (0, 2, [0, 1])


def test_a_successor_seizes_what_was_its_predecessors_own(bench: Bench) -> None:
    bench.open()
    bench.closed(0)
    bench.board.set_live(Role.FRONTEND, 0, 2, 0)
    heir = FrontendCore(address(Role.FRONTEND, 2), bench.board, range(2), bench.limits)
    heir.start(5)
    assert (bench.board.row(0).role, sorted(heir.free)) == (0, [0, 1])


def test_a_slot_is_used_again_under_another_generation(bench: Bench) -> None:
    bench.open()
    bench.closed(0)
    bench.tell(Answered(7))
    assert only(bench.open(8), Submit).key == Key(0, 2, 1)
    assert bench.text([1], generation=1) == []
