"""The tokenizer's core: takes, encodes, checks against the context, hands on; reads the cancel word."""

from __future__ import annotations

import pytest

from baton.engine.effects import Effect, Encode, Encoded
from baton.engine.limits import Limits
from baton.engine.tokenizer import TokenizerCore
from baton.ipc.board import Board
from baton.ipc.frames import (
    Cancel,
    CancelAck,
    Closed,
    Failure,
    Handed,
    Key,
    Params,
    Prompt,
    Recall,
    Returned,
    Role,
    Submit,
    Terms,
)
from tests.engine.rig import TRACE, address, frames, hand, make_board, only, owner


@pytest.fixture
def board() -> Board:
    return make_board()


@pytest.fixture
def core(board: Board) -> TokenizerCore:
    return TokenizerCore(address(Role.TOKENIZER), board, 10, 8, Limits())


def submit(key: Key, ids: list[int] | None = None, max_tokens: int | None = None) -> Submit:
    prompt = Prompt(text="hello") if ids is None else Prompt(token_ids=ids)
    params = Params(max_tokens=max_tokens)
    return Submit(key, address(Role.FRONTEND), TRACE, Terms("m"), params, prompt, [4, 5], 77)


def answer(board: Board, core: TokenizerCore, ids: list[int], max_tokens: int | None = None) -> list[Effect]:
    return core.handle(submit(hand(board, 0, "tokenizing", Role.FRONTEND), ids, max_tokens), 1)


def test_a_text_is_encoded_and_handed_on_with_everything_it_came_with(board: Board, core: TokenizerCore) -> None:
    key = hand(board, 0, "tokenizing", Role.FRONTEND)
    assert only(core.handle(submit(key), 1), Encode).prompt.text == "hello"
    handed = only(core.handle(Encoded(0, 1, [1, 2, 3], None), 2), Handed)
    assert (handed.prompt_ids, handed.delivered, handed.credit) == ([1, 2, 3], [4, 5], 77)
    assert handed.params == submit(key).params
    assert (handed.key.epoch, owner(board, 0)) == (2, (2, "scheduler", False))
    assert core.pending == {}


def test_token_ids_need_no_encoding(board: Board, core: TokenizerCore) -> None:
    assert only(answer(board, core, [1, 2], 3), Handed).params.max_tokens == 3


@pytest.mark.parametrize(
    ("ids", "max_tokens", "said"),
    [
        ([], None, ["no tokens"]),
        ([1] * 10, None, ["10 tokens", "has 10 and"]),
        ([1] * 6, 5, ["6 prompt tokens", "max_tokens 5", "11", "10"]),
    ],
)
def test_what_does_not_fit_the_context_is_refused_with_the_numbers(
    board: Board, core: TokenizerCore, ids: list[int], max_tokens: int | None, said: list[str]
) -> None:
    closed = only(answer(board, core, ids, max_tokens), Closed)
    assert closed.reason == "refused"
    assert closed.failure is not None
    assert closed.failure.status == 400
    assert all(number in closed.failure.message for number in said)
    assert owner(board, 0) == (2, "frontend", False)


@pytest.mark.parametrize(("ids", "max_tokens"), [([1] * 9, None), ([1] * 9, 1), ([1] * 5, 5)])
def test_what_just_fits_is_handed_on(board: Board, core: TokenizerCore, ids: list[int], max_tokens: int | None) -> None:
    handed = only(answer(board, core, ids, max_tokens), Handed)
    assert handed.params.max_tokens == max_tokens


@pytest.mark.parametrize(
    ("prompt", "field"),
    [(Prompt(text="x" * 73), "prompt"), (Prompt(messages=[{"role": "user", "content": "x" * 73}]), "messages")],
)
def test_a_text_that_is_too_large_in_any_case_is_refused_unread(
    board: Board, core: TokenizerCore, prompt: Prompt, field: str
) -> None:
    key = hand(board, 0, "tokenizing", Role.FRONTEND)
    event = Submit(key, address(Role.FRONTEND), TRACE, Terms("m"), Params(), prompt, [], 77)
    failure = only(core.handle(event, 1), Closed).failure
    assert failure is not None
    assert (failure.status, failure.param, failure.code) == (400, field, "context_length_exceeded")
    assert "at least 10 tokens" in failure.message


def test_a_prompt_that_cannot_be_rendered_is_refused_with_its_reason(board: Board, core: TokenizerCore) -> None:
    failure = Failure(400, "invalid_request_error", "no such role", "messages", None)
    core.handle(submit(hand(board, 0, "tokenizing", Role.FRONTEND)), 1)
    assert only(core.handle(Encoded(0, 1, [], failure), 2), Closed).failure == failure


def test_the_cancel_word_is_read_when_taking_and_before_giving(board: Board, core: TokenizerCore) -> None:
    board.set_cancel(0, 1)
    assert only(answer(board, core, [1]), Closed).reason == "cancelled"
    core.handle(submit(hand(board, 1, "tokenizing", Role.FRONTEND)), 1)
    board.set_cancel(1, 1)
    assert only(core.handle(Encoded(1, 1, [1], None), 2), Closed).reason == "cancelled"


def test_a_nudge_ends_what_is_being_encoded_and_the_late_encoding_is_dropped(board: Board, core: TokenizerCore) -> None:
    core.handle(submit(hand(board, 0, "tokenizing", Role.FRONTEND)), 1)
    out = core.handle(Cancel(0, 1, 0), 2)
    assert (only(out, CancelAck).slot, only(out, Closed).reason) == (0, "cancelled")
    assert core.handle(Encoded(0, 1, [1], None), 3) == []
    assert only(core.handle(Cancel(5, 8, 0), 4), CancelAck) == CancelAck(5, 8)


def test_stale_submissions_are_dropped_and_untaken_ones_recalled(board: Board, core: TokenizerCore) -> None:
    key = hand(board, 0, "tokenizing", Role.FRONTEND)
    assert only(core.handle(Recall(key, 0, TRACE), 1), Returned).key == Key(0, 1, 2)
    assert core.handle(submit(key), 2) == []
    assert frames(core.handle(Recall(key, 0, TRACE), 3), Returned) == []
