"""Which tokenizer gets a request: rows are spread over all there are, and a further life tries the next one."""

from __future__ import annotations

from baton.engine.effects import Send
from baton.ipc.frames import Life, Recall, Role, Submit
from tests.engine.rig import frames, only
from tests.engine.test_frontend import Bench


def sent_to(effects: list[object]) -> tuple[Role, int]:
    """Where the one Submit goes."""
    (send,) = [effect for effect in effects if isinstance(effect, Send) and isinstance(effect.frame, Submit)]
    return send.role, send.index


def test_rows_are_spread_over_the_tokenizers() -> None:
    bench = Bench()
    bench.board.set_live(Role.TOKENIZER, 1, 1, 0)
    assert [sent_to(bench.open(door)) for door in (7, 8)] == [(Role.TOKENIZER, 0), (Role.TOKENIZER, 1)]  # type: ignore[arg-type]
    assert [bench.board.row(slot).index for slot in (0, 1)] == [0, 1]


def test_what_a_dead_tokenizer_had_goes_to_the_next_one() -> None:
    bench = Bench()
    bench.board.set_live(Role.TOKENIZER, 1, 1, 0)
    bench.open(7)
    bench.open(8)
    bench.board.set_live(Role.TOKENIZER, 1, 2, 0)
    out = bench.tell(Life(Role.TOKENIZER, 1, 2))
    assert sent_to(out) == (Role.TOKENIZER, 0)  # type: ignore[arg-type]
    assert only(out, Submit).key.slot == 1
    assert [bench.board.row(slot).index for slot in (0, 1)] == [0, 0]
    bench.board.set_live(Role.TOKENIZER, 0, 2, 0)
    out = bench.tell(Life(Role.TOKENIZER, 0, 2))
    assert {frame.key.slot for frame in frames(out, Submit)} == {0, 1}
    assert [bench.board.row(slot).index for slot in (0, 1)] == [1, 1]


def test_a_request_is_recalled_from_the_tokenizer_that_its_row_names() -> None:
    bench = Bench()
    bench.board.set_live(Role.TOKENIZER, 1, 1, 0)
    bench.open(7)
    bench.open(8)
    bench.board.set_live(Role.FRONTEND, 0, 2, 0)  # who sent it is gone; another adopts the slice
    out = bench.tell(Life(Role.FRONTEND, 0, 2))
    sends = [effect for effect in out if isinstance(effect, Send)]
    recalled = {send.index: send.frame.key.slot for send in sends if isinstance(send.frame, Recall)}
    assert recalled == {0: 0, 1: 1}
