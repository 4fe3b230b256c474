"""What may end an answer and when: named end tokens, a minimum, stop strings that come too early; and bad words."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.batch import INVALID_FLAG, NOTHING_FLAG, Sampled, sampling_of
from baton.engine.effects import Encode, Encoded, Start
from baton.engine.limits import Limits
from baton.engine.stopping import StopScanner, no_token, stop_token
from baton.engine.text import TextState, TokenTable
from baton.engine.tokenizer import TokenizerCore
from baton.ipc.frames import Closed, Handed, Params, Prompt, Role, Submit, Terms
from tests.engine.rig import END, TRACE, Engine, address, hand, make_board, only

TABLE = TokenTable([bytes([byte]) for byte in range(128)], frozenset({1}))


# ------------------------------------------------------------------------------------------ end tokens


@pytest.mark.parametrize(
    ("token", "ignore_eos", "reason"),
    [(END, False, None), (END, True, END), (5, False, 5), (5, True, 5), (6, False, None)],
)
def test_the_stop_reason_is_the_token_the_client_named(token: int, ignore_eos: bool, reason: int | None) -> None:
    params = Params(stop_token_ids=(END, 5), ignore_eos=ignore_eos)
    assert stop_token(token, params, (END,)) == reason


def test_end_tokens_are_the_models_and_the_clients() -> None:
    assert sampling_of(Params(stop_token_ids=(5,)), (END,)).end_ids == (END, 5)
    assert sampling_of(Params(stop_token_ids=(5,), ignore_eos=True), (END,)).end_ids == (5,)


def flush_of(engine: Engine, params: Params, delivered: tuple[int, ...] = ()) -> tuple[str, str | int | None, int]:
    engine.submit(0, [4, 5, 6], params, delivered)
    engine.run()
    flush = engine.flushed()[0]
    return flush.reason, flush.stop_reason, flush.length


def test_a_named_token_ends_the_answer_and_is_its_reason() -> None:
    engine = Engine()
    engine.runner.mean_tokens = 1  # ends at every token it may, by the first end id
    assert flush_of(engine, Params(max_tokens=9, stop_token_ids=(7,), ignore_eos=True)) == ("stop", 7, 1)


def test_a_minimum_holds_back_every_end() -> None:
    engine = Engine()
    engine.runner.mean_tokens = 1  # ends at every token it may
    assert flush_of(engine, Params(max_tokens=9, stop_token_ids=(7,), min_tokens=4)) == ("stop", None, 5)


def test_a_resubmission_that_ended_by_a_named_token_says_so_again() -> None:
    assert flush_of(Engine(), Params(max_tokens=9, stop_token_ids=(7,)), (3, 7)) == ("stop", 7, 2)


def test_a_request_that_forbids_every_token_is_told_that_it_did() -> None:
    engine = Engine()

    def nothing(rows: object) -> list[Sampled]:
        return [Sampled(0, 0.0, INVALID_FLAG | NOTHING_FLAG)]

    engine.runner.step = nothing  # type: ignore[method-assign]
    engine.submit(0, [4], Params(max_tokens=3))
    engine.run()
    failure = engine.flushed()[0].failure
    assert failure is not None and (failure.status, failure.code) == (400, "no_token_left")
    assert engine.core.counts["no_token_left"] == 1
    assert no_token(INVALID_FLAG).code == "invalid_logits" and no_token(INVALID_FLAG).status == 500


def test_a_worker_gets_a_history_only_where_the_choice_depends_on_it() -> None:
    engine = Engine()
    for slot, params in enumerate((Params(max_tokens=2), Params(max_tokens=2, presence_penalty=1.0))):
        engine.submit(slot, [4, 5], params)
    seen = []
    inner = engine.runner.step

    def step(rows: list) -> list[Sampled]:  # type: ignore[type-arg]
        seen.extend((row.slot, None if row.history is None else row.history.prompt_tokens) for row in rows)
        return inner(rows)

    engine.runner.step = step  # type: ignore[assignment, method-assign]
    engine.run()
    assert {*seen} == {(0, None), (1, 2)}


def test_the_worst_parameters_of_a_full_batch_fit_one_plan() -> None:
    """A plan that starts every request at once must fit half the ring, with the largest prompt that is begun."""
    limits, most = Limits(), 1 << 31
    start = Start(
        most, most, most, [most], 1,
        sampling_of(
            Params(
                seed=(1 << 64) - 1,
                presence_penalty=1.0,
                stop_token_ids=(most,) * limits.stop_token_ids_max,
                logit_bias=((most, 1.0),) * limits.logit_bias_entries_max,
                allowed_ids=bytes(limits.allowed_ids_bytes_max),
                bad_ids=((most,),) * limits.bad_words_tokens_max,
            ),
            (most,) * 4,
        ),
    )  # fmt: skip
    size = len(msgspec.msgpack.encode(start)) + 64
    assert size * limits.running_requests_max < limits.plan_ring_bytes // 2


# ------------------------------------------------------------------------------------------ stop strings


def say(params: Params, text: str) -> tuple[list[str], str | None, str]:
    state = TextState(TABLE, params)
    pieces = []
    for char in text:
        pieces.append(state.push(ord(char)))
        if state.hit is not None:
            break
    return pieces, state.hit, state.finish()


def test_no_stop_string_is_complete_before_the_minimum() -> None:
    params = Params(stop=("ab",), min_tokens=2)
    assert say(params, "abcab.") == (["", "ab", "c", "", ""], "ab", "")


def test_a_stop_string_may_begin_before_the_minimum() -> None:
    assert say(Params(stop=("abc",), min_tokens=2), "xabcd") == (["x", "", "", ""], "abc", "")


def test_a_shorter_stop_string_inside_what_was_held_too_early_is_none() -> None:
    """While "abcd" may come, "ab" is held; "b", complete before the minimum, must not be found in it later."""
    assert say(Params(stop=("abcd", "b"), min_tokens=2), "abxb") == (["", "", "abx", ""], "b", "")


def test_the_stop_string_is_part_of_the_text_where_asked_for() -> None:
    params = Params(stop=("stop",), include_stop=True)
    assert say(params, "a stop!") == (["a", " ", "", "", "", "stop"], "stop", "")


def test_the_token_that_ends_has_no_text_unless_asked_for() -> None:
    assert say(Params(stop_token_ids=(ord("!"),)), "hi!")[0] == ["h", "i", ""]
    assert say(Params(stop_token_ids=(ord("!"),), include_stop=True), "hi!")[0] == ["h", "i", "!"]


texts = st.text(st.sampled_from("ab"), max_size=12)


@given(
    texts, st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=3), min_size=1, max_size=3), st.integers(0, 12)
)
def test_the_stop_is_the_first_that_is_complete_after_the_minimum(text: str, stops: list[str], least: int) -> None:
    wanted = None
    for length in range(least + 1, len(text) + 1):
        found = [(length - len(stop), stop) for stop in stops if text[:length].endswith(stop)]
        if found:
            wanted = min(found, key=lambda match: match[0])
            break
    pieces, hit, tail = say(Params(stop=tuple(stops), min_tokens=least), text)
    if wanted is None:
        assert (hit, "".join(pieces) + tail) == (None, text)
    else:
        assert (hit, "".join(pieces) + tail) == (wanted[1], text[: wanted[0]])


def test_a_scanner_that_is_not_to_heed_releases_what_it_would_have_stopped_at() -> None:
    scanner = StopScanner(("aa",))
    assert scanner.feed("aa", heed=False) == "a" and scanner.hit is None
    assert scanner.feed("b") == "ab"


# ------------------------------------------------------------------------------------------ bad words


def bad_words_core(limits: Limits | None = None) -> tuple[TokenizerCore, Submit]:
    board = make_board()
    core = TokenizerCore(address(Role.TOKENIZER), board, 10, 8, limits or Limits())
    key = hand(board, 0, "tokenizing", Role.FRONTEND)
    params = Params(bad_words=("no", "way"))
    return core, Submit(key, address(Role.FRONTEND), TRACE, Terms("m"), params, Prompt(token_ids=[1, 2]), [], 77)


def test_bad_words_are_encoded_even_beside_a_prompt_of_ids_and_go_on_as_ids() -> None:
    core, submit = bad_words_core()
    encode = only(core.handle(submit, 1), Encode)
    assert (encode.bad_words, encode.prompt.token_ids) == (("no", "way"), [1, 2])
    handed = only(core.handle(Encoded(0, 1, [1, 2], None, ((5,), (6, 7))), 2), Handed)
    assert (handed.prompt_ids, handed.params.bad_ids) == ([1, 2], ((5,), (6, 7)))
    assert sampling_of(handed.params, ()).needs_history


def test_bad_words_of_too_many_tokens_are_refused() -> None:
    core, submit = bad_words_core(Limits(bad_words_tokens_max=2))
    core.handle(submit, 1)
    failure = only(core.handle(Encoded(0, 1, [1, 2], None, ((5,), (6, 7))), 2), Closed).failure
    assert failure is not None and (failure.status, failure.param) == (400, "bad_words")
    assert "3" in failure.message and "2" in failure.message
