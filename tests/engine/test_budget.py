"""How much of a prompt goes beside those that decode: never past the target, and always some in the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.budget import Chunk, Load, chunk_tokens
from baton.engine.limits import Limits
from baton.engine.steptime import StepTime, causal_context

LIMITS = Limits()
BLOCK = 16


def model_of(a: float, b: float, c: float) -> StepTime:
    """A model that knows these coefficients: they are its prior."""
    return StepTime(Limits(step_prior_s=a, token_prior_s=b, context_prior_s=c))


models = st.builds(model_of, st.floats(1e-5, 0.1), st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-5))
loads = st.builds(
    lambda rows, length, other: Load(rows, rows + other, rows * length + causal_context(0, other)),
    st.integers(1, 256),
    st.integers(1, 8192),
    st.integers(0, 64),
)
chunks = st.builds(Chunk, st.integers(0, 1 << 17), st.integers(1, 1 << 17), st.integers(0, 6))
targets = st.floats(0.0, 1.0)


@given(models, loads, chunks, st.integers(0, 1024), targets)
def test_a_step_is_never_longer_than_the_target_but_for_the_starving(
    model: StepTime, load: Load, chunk: Chunk, left: int, target: float
) -> None:
    taken = chunk_tokens(chunk, load, left, target, model, BLOCK, LIMITS)
    most = min(chunk.wanted, left)
    assert 0 <= taken <= most
    seconds = model.predict(load.tokens + taken, load.context + causal_context(chunk.start, taken))
    starving = chunk.held_back_steps >= LIMITS.prefill_wait_steps_max
    if taken and not (starving and taken == min(most, BLOCK)):
        assert seconds <= target
    if starving:
        assert taken >= min(most, BLOCK)
    if 0 < taken < most:  # and as much as fits
        more = model.predict(load.tokens + taken + 1, load.context + causal_context(chunk.start, taken + 1))
        assert more > target * (1 - 1e-9)


@given(models, chunks, st.integers(0, 1024), targets)
def test_where_nobody_decodes_the_budget_alone_counts(model: StepTime, chunk: Chunk, left: int, target: float) -> None:
    assert chunk_tokens(chunk, Load(), left, target, model, BLOCK, LIMITS) == min(chunk.wanted, left)


@given(models, loads, chunks, st.integers(0, 1024))
def test_without_a_target_the_budget_alone_counts(model: StepTime, load: Load, chunk: Chunk, left: int) -> None:
    assert chunk_tokens(chunk, load, left, None, model, BLOCK, LIMITS) == min(chunk.wanted, left)


@given(models, loads, st.integers(1, 600), targets)
def test_every_prompt_is_through_in_bounded_steps(model: StepTime, load: Load, wanted: int, target: float) -> None:
    start, held_back, steps = 0, 0, 0
    while start < wanted:
        taken = chunk_tokens(Chunk(start, wanted - start, held_back), load, 512, target, model, BLOCK, LIMITS)
        start, held_back, steps = start + taken, 0 if taken else held_back + 1, steps + 1
    assert steps <= (LIMITS.prefill_wait_steps_max + 1) * -(-wanted // BLOCK)


def test_a_model_without_slope_takes_what_there_is() -> None:
    model = StepTime(LIMITS)
    model._used = (0.01, 0.0, 0.0)
    assert chunk_tokens(Chunk(0, 10_000), Load(1, 1, 100), 512, 0.02, model, BLOCK, LIMITS) == 512
    assert chunk_tokens(Chunk(0, 10_000), Load(1, 1, 100), 512, 0.005, model, BLOCK, LIMITS) == 0


def test_pieces_smaller_than_a_block_wait_unless_they_are_all_there_is() -> None:
    model = model_of(1e-9, 0.001, 1e-15)
    load = Load(1, 1, 1)
    assert chunk_tokens(Chunk(0, 100), load, 512, 0.0105, model, BLOCK, LIMITS) == 0  # 9 would fit
    assert chunk_tokens(Chunk(0, 9), load, 512, 0.0105, model, BLOCK, LIMITS) == 9
    assert chunk_tokens(Chunk(0, 100), load, 8, 0.0105, model, BLOCK, LIMITS) == 8


def test_a_load_counts_what_its_rows_attend_to() -> None:
    load = Load()
    load.add(100, 1)
    load.add(0, 4)
    assert (load.tokens, load.context) == (5, 101 + 10)
