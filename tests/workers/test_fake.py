"""The scripted runner: pure, exact about its cache, and free of clocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.batch import END_FLAG, INVALID_FLAG, Sampled, Sampling, StepRow
from baton.workers.fake import ScriptedRunner, choose, follow

VOCAB = 50


def sampling(seed: int = 3, end_ids: tuple[int, ...] = ()) -> Sampling:
    return Sampling(1.0, 1.0, 0, seed, end_ids)


def row(tokens: list[int], start: int, blocks: list[int], sample: bool = True, position: int = 0) -> StepRow:
    return StepRow(0, tokens, start, blocks, sample, position, sampling())


def runner(step_ns: int = 0, token_ns: int = 0) -> ScriptedRunner:
    return ScriptedRunner(VOCAB, 8, 4, step_ns=step_ns, token_ns=token_ns)


def after(context: list[int], how: Sampling, mean_tokens: int = 256) -> int:
    """The token after a context, straight from the script."""
    state = 0
    for token in context:
        state = follow(state, token)
    return choose(state, how, VOCAB, mean_tokens)


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24), st.lists(st.integers(1, 6), max_size=12))
def test_any_chunks_and_any_blocks_give_the_same_token(context: list[int], cuts: list[int]) -> None:
    whole = runner().step([row(context, 0, [0, 1, 2, 3, 4, 5])])
    chunked, start, blocks = runner(), 0, [7, 2, 5, 0, 6, 1]
    for size in cuts:
        if start + size < len(context):
            assert chunked.step([row(context[start : start + size], start, blocks, sample=False)]) == []
            start += size
    assert chunked.step([row(context[start:], start, blocks)]) == whole
    assert whole[0].token == after(context, sampling())


def test_a_batch_says_what_each_says_alone() -> None:
    rows = [row([1, 2], 0, [0]), row([3], 0, [1], sample=False), row([4, 5, 6], 0, [2])]
    assert runner().step(rows) == runner().step(rows[:1]) + runner().step(rows[2:])


def test_a_block_that_somebody_else_wrote_changes_what_is_said() -> None:
    scripted = runner()
    scripted.step([row([1, 2, 3], 0, [0], sample=False)])
    scripted.step([row([9, 9, 9], 0, [0], sample=False)])
    assert scripted.step([row([4], 3, [0])])[0].token != after([1, 2, 3, 4], sampling())


def test_end_ids_come_as_often_as_asked_carry_the_flag_and_never_otherwise() -> None:
    tokens = [choose(follow(0, number), sampling(number, (7, 8)), VOCAB, 10) for number in range(5000)]
    assert 150 < tokens.count(7) < 350 and 150 < tokens.count(8) < 350, "500 ends, half of them each"
    ends = ScriptedRunner(VOCAB, 8, 4, mean_tokens=1)
    assert ends.step([StepRow(0, [1], 0, [0], True, 0, sampling(end_ids=(7,)))])[0].flags == END_FLAG
    assert ends.step([row([1], 0, [0])])[0].flags == 0


@given(st.integers(0, 1 << 64), st.integers(0, 40), st.sets(st.integers(0, VOCAB - 1), max_size=3))
def test_no_end_comes_before_the_minimum_and_every_one_after_it_may(state: int, minimum: int, ids: set[int]) -> None:
    how = Sampling(1.0, 1.0, 0, 3, tuple(ids), minimum)
    tokens = [choose(state + number, how, VOCAB, 2, position=number) for number in range(80)]
    assert not ids & set(tokens[:minimum])
    assert not ids or ids & set(tokens[minimum:])


def test_a_faulty_request_gets_no_token_at_its_position() -> None:
    faulty = ScriptedRunner(VOCAB, 8, 4, faulty={3: 2})
    assert faulty.step([row([1], 0, [0], position=1)])[0].flags == 0
    assert faulty.step([row([1], 0, [0], position=2)]) == [Sampled(0, 0.0, INVALID_FLAG)]


def test_the_time_model_counts_steps_and_tokens() -> None:
    timed = runner(step_ns=1000, token_ns=10)
    assert timed.cost_ns([row([1, 2], 0, [0]), row([3], 0, [1])]) == 1030
