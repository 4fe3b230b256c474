"""What a client asked to be told of its prompt: computed chunk by chunk, kept, leased and told once, whoever dies."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from baton.engine.effects import Doorbell, Finish, Open, StepDone, TokenRecord
from baton.engine.frontend import FrontendCore
from baton.engine.limits import Limits
from baton.engine.scores import PromptRecord, news, pack_entry, unpack_entries
from baton.engine.stream import Stream
from baton.engine.tokenizer import TokenizerCore
from baton.ipc.frames import (
    Candidate,
    Closed,
    Lease,
    Life,
    Params,
    PromptPiece,
    PromptScored,
    Role,
    Submit,
    Terms,
    Text,
)
from baton.ipc.frames import Prompt as Asked
from baton.workers.fake import follow, prompt_entry
from tests.engine.rig import TRACE, VOCAB, Engine, address, frames, hand, make_board, only, truth
from tests.engine.test_detokenizer import HOME, Bench
from tests.engine.test_prefix_use import caching

PROMPT = list(range(2, 13))
ASKED = Params(max_tokens=20, seed=3, ignore_eos=True, prompt_logprobs=2)


def entries(prompt: list[int], top: int = 2) -> bytes:
    """What the scripted runner must say of a prompt."""
    state, found = 0, b""
    for before, token in pairwise(prompt):
        state = follow(state, before)
        found += pack_entry(*prompt_entry(state, token, top, VOCAB))
    return found


def lease_of(engine: Engine, incarnation: int) -> Lease:
    """What a new detokenizer is leased."""
    engine.board.set_live(Role.DETOKENIZER, 0, incarnation, 0)
    return only(engine.tell(Life(Role.DETOKENIZER, 0, incarnation)), Lease)


@pytest.mark.parametrize("step_tokens_max", [1, 3, 5, 64])
def test_chunks_of_a_prompt_make_one_whole(step_tokens_max: int) -> None:
    engine = Engine(Limits(step_tokens_max=step_tokens_max))
    engine.submit(0, PROMPT, ASKED)
    while not engine.core.sequences[0].output:
        assert engine.step()
    assert lease_of(engine, 2).prompt_scores == entries(PROMPT)


def test_nothing_is_computed_of_prompts_that_nobody_asked_about() -> None:
    engine = Engine()
    engine.submit(0, PROMPT, msgspec.structs.replace(ASKED, prompt_logprobs=None))
    engine.compute()
    assert [done.prompts for done in engine.tape.steps] == [[]]
    engine.tell(Doorbell())
    assert lease_of(engine, 2).prompt_scores == b""


def test_a_lost_worker_costs_no_entry_and_repeats_none() -> None:
    engine = Engine(Limits(step_tokens_max=4))
    engine.submit(0, PROMPT, ASKED)
    engine.step()
    assert lease_of(engine, 2).prompt_scores == entries(PROMPT)[: 4 * 28]
    engine.start_worker(2, 64)
    while not engine.core.sequences[0].output:
        assert engine.step()
    assert lease_of(engine, 3).prompt_scores == entries(PROMPT)
    engine.start_worker(3, 64)
    assert engine.plans[-1].starts[0].sampling.prompt_logprobs is None, "all of it is known"


def test_a_request_that_asks_begins_with_no_cached_prefix_and_others_may_with_its_own() -> None:
    engine, plain = caching(), msgspec.structs.replace(ASKED, prompt_logprobs=None)
    for slot, params in enumerate((plain, ASKED, plain)):
        engine.submit(slot, PROMPT, msgspec.structs.replace(params, max_tokens=2))
        engine.run()
    cached = [engine.flushed()[slot].cached_tokens for slot in range(3)]
    assert cached[1] == 0 and cached[2] > 0


def test_no_token_counts_before_all_that_was_asked_of_its_prompt_is_known() -> None:
    engine = Engine(Limits(step_tokens_max=4))
    engine.submit(0, PROMPT, ASKED)
    assert engine.compute()
    (lost,) = engine.tape.steps
    engine.tape.steps = [msgspec.structs.replace(lost, prompts=[])]  # as a reader that gave up a damaged ring has it
    engine.tell(Doorbell())
    assert engine.step() and engine.step(), "the prompt is computed, and the first token sampled"
    assert engine.output(0) == []
    engine.start_worker(2, 64)  # for whoever damages a ring is replaced
    while not engine.core.sequences[0].output:
        assert engine.step()
    assert engine.output(0) == truth(PROMPT, ASKED, 1)
    assert lease_of(engine, 2).prompt_scores == entries(PROMPT)


def test_entries_are_new_once() -> None:
    record = PromptRecord(0, 1, 3, 2, 3, pack_entry(1, [(5, -1.0)]) * 3)
    assert news(record, 1, 3, 1, 0) == record.entries
    assert news(record, 1, 3, 3, 0) == pack_entry(1, [(5, -1.0)])
    assert news(record, 1, 3, 9, 0) == b""
    assert news(record, 2, 3, 1, 0) == news(record, 1, 4, 1, 0) == news(record, 1, 3, 1, None) == b""
    assert news(record, 1, 3, 0, 0) == b"", "what does not join on does not count"
    with pytest.raises(AssertionError, match="entries of 20 bytes are asked for"):
        news(record, 1, 3, 1, 1)


def test_the_detokenizer_tells_each_entry_once_and_before_any_text() -> None:
    bench, params = Bench(), Params(max_tokens=50, prompt_logprobs=1)
    known = pack_entry(7, [(97, -2.0), (98, -0.5)])
    more = pack_entry(1, [(128, -0.25), (128, -0.25)])
    lease = Lease(2, 1, 4, 1, HOME, TRACE, params, [97], [], 0, [], known)
    bench.tape.steps.append(StepDone(1, 1, [], [PromptRecord(2, 1, 4, 1, 2, known + more)]))
    out = bench.tell(lease)
    texts = frames(out, Text)
    a, b = Candidate(98, -0.5, b"b"), Candidate(128, -0.25, b"\xc3")
    first, second = PromptScored(97, -2.0, b"a", 7, [a]), PromptScored(128, -0.25, b"\xc3", 1, [b])
    assert texts[0].prompts == [PromptPiece(2, 1, 4, 1, [first])] and texts[1].pieces[0].texts == ["a"]
    (text,) = frames(bench.tell(Doorbell()), Text)
    assert text.prompts == [PromptPiece(2, 1, 4, 2, [second])] and text.pieces == []
    bench.tape.steps.append(StepDone(1, 2, [], [PromptRecord(2, 1, 4, 2, 1, more), PromptRecord(2, 1, 3, 3, 1, more)]))
    assert frames(bench.tell(Doorbell()), Text) == []


def test_the_detokenizer_says_nothing_of_an_answer_before_all_that_was_asked_of_its_prompt() -> None:
    bench, params = Bench(), Params(max_tokens=50, prompt_logprobs=0)
    first, second = (pack_entry(1, [(97, -1.0)]), pack_entry(2, [(98, -1.0)]))
    bench.tell(Lease(2, 1, 4, 1, HOME, TRACE, params, [], [], 0, [], first, prompt_tokens=3))
    token = TokenRecord(2, 1, 4, 0, 97, 0, -1.0)
    bench.tape.steps.append(StepDone(1, 1, [token]))  # what was told of the prompt before it is lost
    assert frames(bench.tell(Doorbell()), Text) == []
    bench.tape.steps.append(StepDone(1, 2, [token], [PromptRecord(2, 1, 4, 2, 1, second)]))
    told, said = frames(bench.tell(Doorbell()), Text)
    assert len(told.prompts) == 1 and said.pieces[0].texts == ["a"]


def scored(token: int) -> PromptScored:
    return PromptScored(token, -1.0, b"x", 1, [])


def test_the_frontend_trims_what_it_knows_and_a_later_life_is_asked_for_the_rest_only() -> None:
    board = make_board()
    front = FrontendCore(address(Role.FRONTEND), board, range(4), Limits())
    front.start(0)
    opened = Open(7, bytes(16), TRACE, TRACE[16:24], None, Terms("m"), ASKED, Asked(token_ids=[1, 2, 3, 4]), 0, {})
    submit = only(front.handle(opened, 1), Submit)
    assert submit.params.prompt_logprobs == 2
    name = (submit.key.slot, submit.key.generation)
    front.handle(Text([], [PromptPiece(*name, 2, 1, [scored(2), scored(3)])]), 2)
    front.handle(Text([], [PromptPiece(*name, 2, 2, [scored(3), scored(4)]), PromptPiece(*name, 0, 1, [scored(9)])]), 3)
    (stream,) = front.streams.values()
    assert stream.slot == submit.key.slot
    assert [each.token for each in stream.prompt_scores] == [2, 3, 4]
    with pytest.raises(AssertionError, match="gap"):
        stream.tell_prompt(PromptPiece(*name, 2, 9, [scored(5)]))
    assert stream.params(ASKED) is ASKED
    stream.delivered.append(5)
    assert stream.params(ASKED).prompt_logprobs is None, "what comes before its first token is all there"
    key = hand(board, stream.slot, "closed", Role.SCHEDULER, 4)
    out = front.handle(Closed(key, TRACE, 1, "length", None, "", None, [1, 2, 3, 4]), 4)
    assert [each.token for each in only(out, Finish).prompt_scores] == [2, 3, 4]


def test_of_several_choices_the_first_asks_about_the_prompt() -> None:
    stream = Stream(0, 0, 1, None, TRACE, choice=1)
    assert (stream.params(ASKED).choice, stream.params(ASKED).prompt_logprobs) == (1, None)


@pytest.mark.parametrize(("tokens", "good"), [(5, True), (6, False)])
def test_a_prompt_with_more_values_than_are_kept_is_refused_by_name(tokens: int, good: bool) -> None:
    board = make_board()
    core = TokenizerCore(address(Role.TOKENIZER), board, 100, 8, Limits(scores_per_request_max=12))
    key = hand(board, 0, "tokenizing", Role.FRONTEND)
    prompt = Asked(token_ids=list(range(tokens)))
    out = core.handle(Submit(key, address(Role.FRONTEND), TRACE, Terms("m"), ASKED, prompt, [], 8), 0)
    failures = [closed.failure for closed in frames(out, Closed)]
    assert [failure.param for failure in failures if failure is not None] == ([] if good else ["prompt_logprobs"])


def test_an_entry_is_packed_and_unpacked() -> None:
    two = pack_entry(9, [(3, -1.5), (4, -0.5)]) + pack_entry(1, [(5, -0.25), (5, -0.25)])
    assert list(unpack_entries(two, 1)) == [(9, [(3, -1.5), (4, -0.5)]), (1, [(5, -0.25), (5, -0.25)])]
