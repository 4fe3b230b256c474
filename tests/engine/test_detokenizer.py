"""The detokenizer's core: early and old records, leases, stop strings, and the flush that closes a request."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest

from baton.engine.batch import END_FLAG, INVALID_FLAG
from baton.engine.detokenizer import DetokenizerCore
from baton.engine.effects import Doorbell, Effect, TokenRecord
from baton.engine.limits import Limits
from baton.engine.scores import pack
from baton.engine.text import TokenTable
from baton.ipc.board import Board
from baton.ipc.frames import (
    Cancel,
    CancelAck,
    Candidate,
    Closed,
    Failure,
    Flush,
    Lease,
    Life,
    Params,
    Piece,
    Recall,
    Returned,
    Role,
    Scored,
    StopFound,
    Text,
)
from tests.engine.rig import TRACE, Tape, address, frames, hand, make_board, only, owner

TABLE = TokenTable([bytes([byte]) for byte in range(128)] + ["é".encode()[:1], "é".encode()[1:]], frozenset({1}))
HOME = address(Role.FRONTEND)
FAILURE = Failure(500, "server_error", "broken", None, None)


@dataclass
class Bench:
    """A detokenizer with a test in the places of worker and scheduler; slot 2, generation 1, run 4."""

    board: Board = field(default_factory=make_board)
    tape: Tape = field(default_factory=Tape)

    def __post_init__(self) -> None:
        self.core = DetokenizerCore(address(Role.DETOKENIZER), self.board, self.tape, TABLE, Limits())
        self.run_is(4)

    def run_is(self, run: int) -> None:
        """The row says that the scheduler owns the request since ``run``."""
        hand(self.board, 2, "decoding", Role.SCHEDULER, run)

    def tell(self, event: object) -> list[Effect]:
        return self.core.handle(event, 1)

    def lease(
        self, ids: str = "", base: int = 0, run: int = 4, incarnation: int = 1, params: Params | None = None
    ) -> list[Effect]:
        told = params or Params(max_tokens=50)
        return self.tell(Lease(2, 1, run, incarnation, HOME, TRACE, told, list(ids.encode()), [], base))

    def say(self, text: str, start: int, run: int = 4, flags: int = 0, generation: int = 1) -> list[Effect]:
        for position, token in enumerate(text.encode(), start):
            self.tape.write(TokenRecord(2, generation, run, position, token, flags, -0.5))
        return self.tell(Doorbell())

    def flush(
        self, length: int, reason: str = "length", base: int = 0, run: int = 4, failure: Failure | None = None
    ) -> list[Effect]:
        key = hand(self.board, 2, "flushing", Role.SCHEDULER, run + 1)
        return self.tell(Flush(key, HOME, TRACE, run, base, length, reason, None, failure, [5]))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def pieces(effects: list[Effect]) -> list[Piece]:
    return [piece for text in frames(effects, Text) for piece in text.pieces]


def test_tokens_become_text_in_one_frame_an_event(bench: Bench) -> None:
    bench.lease()
    (piece,) = pieces(bench.say("abc", 0))
    assert (piece.start, piece.token_ids, piece.texts, piece.logprobs) == (0, [97, 98, 99], ["a", "b", "c"], [])
    (piece,) = pieces(bench.say("d", 3))
    assert (piece.start, piece.texts) == (3, ["d"])


def test_records_of_a_live_run_wait_for_its_lease(bench: Bench) -> None:
    assert bench.say("ab", 0) == []
    (piece,) = pieces(bench.lease())
    assert piece.texts == ["a", "b"]


def test_records_of_a_run_that_is_not_alive_are_skipped(bench: Bench) -> None:
    bench.say("ab", 0, run=3)
    bench.say("ab", 0, generation=9)
    bench.board.set_live(Role.SCHEDULER, 0, 2, 0)
    bench.say("ab", 0)
    assert (bench.core.early, bench.core.hands.counts["skipped_records"]) == ({}, 6)


def test_records_that_are_not_the_next_of_the_run_are_skipped(bench: Bench) -> None:
    bench.lease("ab")
    assert pieces(bench.say("b", 1)) == []
    assert pieces(bench.say("z", 7)) == []
    assert pieces(bench.say("z", 2, run=3)) == []
    assert pieces(bench.say("c", 2))[0].texts == ["c"]


def test_a_lease_begins_at_its_base_and_its_text_counts_what_came_before(bench: Bench) -> None:
    """The first byte of é was delivered in an earlier life, its text was not."""
    bench.lease("", run=4)
    lease = Lease(2, 1, 6, 1, HOME, TRACE, Params(max_tokens=9), [97, 128], [], 2)
    bench.run_is(6)
    assert pieces(bench.tell(lease)) == []
    bench.tape.write(TokenRecord(2, 1, 6, 2, 129, 0, 0.0))
    (piece,) = pieces(bench.tell(Doorbell()))
    assert (piece.start, piece.run, piece.texts) == (2, 6, ["é"])


def test_leases_of_old_runs_and_for_another_incarnation_are_dropped(bench: Bench) -> None:
    bench.lease("ab")
    assert bench.lease("abc") == []
    assert bench.lease("abc", run=3) == []
    assert bench.lease("abc", run=9, incarnation=2) == []
    assert (bench.core.leases[2].lease.run, bench.core.leases[2].seen) == (4, 2)


def test_a_stop_string_is_reported_once_and_its_last_token_waits_for_the_end(bench: Bench) -> None:
    bench.lease(params=Params(max_tokens=50, stop=("cd",)))
    out = bench.say("abcd", 0)
    assert only(out, StopFound) == StopFound(2, 1, 4, 4, "cd")
    assert pieces(out)[0].texts == ["a", "b", ""]
    assert bench.say("ef", 4) == []
    out = bench.flush(4, "stop")
    assert [(piece.start, piece.token_ids, piece.texts) for piece in pieces(out)] == [(3, [100], [""])]
    assert (only(out, Closed).length, only(out, Closed).stop_reason) == (4, "cd")


def test_a_flush_is_shortened_to_a_stop_string_found_before_its_end(bench: Bench) -> None:
    bench.lease(params=Params(max_tokens=50, stop=("c",)))
    bench.say("abcde", 0)
    closed = only(bench.flush(5, "error", failure=FAILURE), Closed)
    assert (closed.length, closed.reason, closed.stop_reason, closed.failure) == (3, "stop", "c", None)


def test_a_flush_waits_until_its_length_was_read(bench: Bench) -> None:
    bench.lease()
    bench.say("a", 0)
    assert frames(bench.flush(3), Closed) == []
    assert owner(bench.board, 2) == (5, "detokenizer", True)
    out = bench.say("bc", 1)
    assert pieces(out)[-1].texts == ["b", "c"]
    assert (only(out, Closed).length, only(out, Closed).key.epoch) == (3, 6)
    assert owner(bench.board, 2) == (6, "frontend", False)
    assert bench.core.leases == {}


def test_a_flush_reads_the_ring_itself(bench: Bench) -> None:
    bench.lease()
    bench.tape.write(TokenRecord(2, 1, 4, 0, 97, 0, 0.0))
    assert only(bench.flush(1), Closed).length == 1


def test_what_was_held_back_comes_out_at_the_end(bench: Bench) -> None:
    bench.lease(params=Params(max_tokens=50, stop=("stop",)))
    bench.say("ast", 0)
    assert only(bench.flush(3), Closed).tail == "st"


def test_a_flush_without_tokens_closes_at_once(bench: Bench) -> None:
    closed = only(bench.flush(0, "cancelled"), Closed)
    assert (closed.length, closed.reason, closed.tail, closed.prompt_ids) == (0, "cancelled", "", [5])


def test_nothing_comes_out_past_an_end_flag_or_past_a_token_that_is_none(bench: Bench) -> None:
    bench.lease()
    bench.say("ab", 0, flags=END_FLAG)
    assert bench.core.leases[2].park == 1
    assert only(bench.flush(1, "stop"), Closed).length == 1


def test_an_invalid_token_after_a_stop_string_moves_nothing(bench: Bench) -> None:
    bench.lease(params=Params(max_tokens=50, stop=("b",)))
    bench.say("abc", 0)
    bench.say("\0", 3, flags=INVALID_FLAG)
    assert only(bench.flush(3, "error", failure=FAILURE), Closed).length == 2


def test_logprobs_travel_only_where_asked_for(bench: Bench) -> None:
    bench.lease(params=Params(max_tokens=50, logprobs=True))
    assert pieces(bench.say("a", 0))[0].logprobs == [-0.5]


def test_a_tokens_own_bytes_and_its_rivals_travel_with_it_once(bench: Bench) -> None:
    params = Params(max_tokens=50, logprobs=True, top_logprobs=2)
    rivals = pack([(128, -0.5), (97, -1.5)])
    bench.tell(Lease(2, 1, 4, 1, HOME, TRACE, params, [97, 128], [-1.0, -0.5], 1, [b"", rivals]))
    bench.tape.write(TokenRecord(2, 1, 4, 2, 129, 0, -0.25, pack([(129, -0.25), (300, -9.0)])))
    said = pieces(bench.tell(Doorbell()))
    assert [(piece.start, piece.texts) for piece in said] == [(2, ["é"])]
    assert said[0].scores == [Scored(b"\xa9", [Candidate(129, -0.25, b"\xa9"), Candidate(300, -9.0, b"")])]


def test_what_was_leased_goes_out_with_its_rivals(bench: Bench) -> None:
    params = Params(max_tokens=50, logprobs=True, top_logprobs=1)
    lease = Lease(2, 1, 4, 1, HOME, TRACE, params, [97, 98], [-1.0, -0.5], 1, [b"", pack([(98, -0.5)])])
    (piece,) = pieces(bench.tell(lease))
    assert (piece.start, piece.token_ids, piece.logprobs) == (1, [98], [-0.5])
    assert piece.scores == [Scored(b"b", [Candidate(98, -0.5, b"b")])]


def test_a_death_notice_reads_the_ring_and_drops_the_leases_of_the_dead(bench: Bench) -> None:
    bench.lease()
    bench.tape.write(TokenRecord(2, 1, 4, 0, 97, 0, 0.0))
    assert pieces(bench.tell(Life(Role.WORKER, 0, 2)))[0].texts == ["a"]
    assert list(bench.core.leases) == [2]
    bench.board.set_live(Role.SCHEDULER, 0, 2, 0)
    bench.tell(Life(Role.SCHEDULER, 0, 2))
    assert bench.core.leases == {}


def test_a_stale_flush_is_dropped_and_an_untaken_one_is_recalled(bench: Bench) -> None:
    key = hand(bench.board, 2, "flushing", Role.SCHEDULER, 5)
    flush = Flush(key, HOME, TRACE, 4, 0, 0, "length", None, None, [])
    stale = msgspec.structs.replace(flush, key=msgspec.structs.replace(key, epoch=4))
    assert bench.tell(stale) == []
    assert only(bench.tell(Recall(key, 0, TRACE)), Returned).key.epoch == 6
    assert bench.tell(flush) == []


def test_every_cancel_is_acknowledged(bench: Bench) -> None:
    assert only(bench.tell(Cancel(7, 9, 0)), CancelAck) == CancelAck(7, 9)
