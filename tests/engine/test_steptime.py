"""The step-time model: it finds the coefficients, follows a change, and never says what cannot be."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.limits import Limits
from baton.engine.steptime import StepTime, Transfer, causal_context

LIMITS = Limits()
Truth = tuple[float, float, float]


def seconds(truth: Truth, tokens: int, context: int) -> float:
    return truth[0] + truth[1] * tokens + truth[2] * context


def work(rng: Random) -> tuple[int, int]:
    """A step as serving makes them: some rows that decode, often a chunk of a prompt."""
    rows, length = rng.randint(1, 64), rng.randint(16, 2000)
    chunk = rng.choice([0, 0, 64, 256, 512])
    return rows + chunk, rows * length + causal_context(rng.randint(0, 1000), chunk)


def feed(model: StepTime, truth: Truth, rng: Random, steps: int, noise: float = 0.05, hiccups: float = 0.0) -> None:
    for _ in range(steps):
        tokens, context = work(rng)
        taken = seconds(truth, tokens, context) * max(0.2, rng.gauss(1.0, noise))
        model.observe(tokens, context, taken * (20.0 if rng.random() < hiccups else 1.0))


def worst_error(model: StepTime, truth: Truth, rng: Random) -> float:
    cases = [work(rng) for _ in range(200)]
    return max(abs(model.predict(*case) / seconds(truth, *case) - 1) for case in cases)


def test_a_chunk_attends_to_itself_and_to_what_came_before() -> None:
    assert causal_context(0, 4) == 1 + 2 + 3 + 4
    assert causal_context(10, 3) == 11 + 12 + 13
    assert causal_context(99, 1) == 100


@pytest.mark.parametrize("scale", [0.001, 1.0, 100.0], ids=["an accelerator", "as the prior", "a slow machine"])
@pytest.mark.parametrize("hiccups", [0.0, 0.03])
def test_coefficients_are_recovered_from_noisy_steps(scale: float, hiccups: float) -> None:
    truth = (0.004 * scale, 0.0003 * scale, 4e-7 * scale)
    model, rng = StepTime(LIMITS), Random(7)
    feed(model, truth, rng, 600, hiccups=hiccups)
    for found, real in zip(model.coefficients, truth, strict=True):
        assert found == pytest.approx(real, rel=0.35)
    assert worst_error(model, truth, rng) < (0.1 if hiccups else 0.06)


def test_a_change_of_the_machine_is_followed() -> None:
    model, rng = StepTime(LIMITS), Random(3)
    feed(model, (0.004, 0.0003, 2e-8), rng, 1000)
    slower = (0.012, 0.0006, 1e-7)
    assert worst_error(model, slower, rng) > 0.4
    feed(model, slower, rng, 100)
    assert worst_error(model, slower, rng) < 0.15
    feed(model, (0.004, 0.0003, 2e-8), rng, 100)
    assert worst_error(model, (0.004, 0.0003, 2e-8), rng) < 0.15


def test_one_hiccup_hardly_moves_the_prediction() -> None:
    model, rng = StepTime(LIMITS), Random(5)
    feed(model, (0.004, 0.0003, 2e-8), rng, 300)
    before = model.predict(40, 20_000)
    model.observe(40, 20_000, 30.0)
    assert model.predict(40, 20_000) == pytest.approx(before, rel=0.02)


def test_before_any_step_the_prior_answers() -> None:
    model = StepTime(LIMITS)
    expected = LIMITS.step_prior_s + 10 * LIMITS.token_prior_s + 100 * LIMITS.context_prior_s
    assert model.predict(10, 100) == pytest.approx(expected) and model.steps == 0


def test_times_that_are_none_are_not_counted() -> None:
    model = StepTime(LIMITS)
    for taken in (0.0, -1.0, float("nan"), float("inf")):
        model.observe(8, 80, taken)
    assert model.steps == 0 and model.predict(8, 80) == StepTime(LIMITS).predict(8, 80)


def test_steps_all_alike_fit_themselves_and_explode_nowhere() -> None:
    model, rng = StepTime(LIMITS), Random(11)
    for _ in range(5000):
        model.observe(8, 800, 0.02 * rng.gauss(1, 0.05))
    assert model.predict(8, 800) == pytest.approx(0.02, rel=0.1)
    assert model.predict(16, 1600) <= 0.05
    for _ in range(60):  # and what was never excited is learned once it is
        model.observe(512, 140_000, 0.5)
        model.observe(8, 800, 0.02)
    assert model.predict(512, 140_000) == pytest.approx(0.5, rel=0.1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 4096),
            st.integers(0, 1 << 24),
            st.floats(1e-6, 1e4) | st.sampled_from([1e-300, 1e-9, 1e300]),
        ),
        max_size=150,
    )
)
def test_whatever_is_seen_predictions_are_finite_and_grow_with_the_work(seen: list[tuple[int, int, float]]) -> None:
    model = StepTime(LIMITS)
    for tokens, context, taken in seen:
        model.observe(tokens, context, taken)
        assert all(0.0 <= one < float("inf") for one in model.coefficients)
        assert 0.0 <= model.predict(1, 1) <= model.predict(2, 1) <= model.predict(2, 100) < float("inf")


def test_recompute_and_swap_cross_at_a_length() -> None:
    model, transfer = StepTime(LIMITS), Transfer(1 << 20, LIMITS)
    assert model.recompute_s(100, 512) == pytest.approx(model.predict(100, causal_context(0, 100)))
    assert model.recompute_s(1024, 512) > 2 * model.recompute_s(512, 512) - 1e-12
    transfer.observe(10, 10 * (1 << 20) / 1e6)  # a very slow copy: 1 MB/s
    assert transfer.swap_s(10) > model.recompute_s(160, 512)
    fast = Transfer(1 << 20, LIMITS)
    fast.observe(10, 10 * (1 << 20) / 1e11)
    assert fast.swap_s(10) < model.recompute_s(160, 512)


def test_the_bandwidth_is_learned_and_survives_a_hiccup() -> None:
    transfer = Transfer(1000, LIMITS)
    assert transfer.bytes_per_s == pytest.approx(LIMITS.swap_prior_bytes_per_s)
    for _ in range(50):
        transfer.observe(4, 4000 / 2e9)
    assert transfer.bytes_per_s == pytest.approx(2e9, rel=0.01)
    transfer.observe(4, 10.0)
    assert transfer.bytes_per_s > 1.4e9
    for _ in range(60):
        transfer.observe(4, 4000 / 1e9)
    assert transfer.bytes_per_s == pytest.approx(1e9, rel=0.05)
    before = transfer.moves
    transfer.observe(0, 1.0)
    transfer.observe(1, 0.0)
    assert transfer.moves == before
