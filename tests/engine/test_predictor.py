"""The bound on answer lengths: it holds as often as it says, on real traffic, and never looks ahead."""

from __future__ import annotations

from math import ceil
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.limits import Limits
from baton.engine.predictor import LengthPredictor, prompt_bucket, sampling_class

LIMITS = Limits()
KEY = ("", "m", "sampled-any")


def fed(lengths: list[int], prompt: int = 100, limits: Limits = LIMITS, alpha: float = 0.1) -> LengthPredictor:
    predictor = LengthPredictor(limits, alpha)
    for length in lengths:
        predictor.observe(KEY, prompt, length)
    return predictor


def test_with_too_little_history_nothing_is_said() -> None:
    assert LengthPredictor(LIMITS).bound(KEY, 10, 100) is None
    assert fed([5] * LIMITS.predictor_lengths_min).bound(KEY, 10, 100) is None  # the first had no prediction to miss
    assert fed([5] * (LIMITS.predictor_lengths_min + 1)).bound(KEY, 10, 100) == 5
    assert fed([5] * 100).bound(("", "m", "other"), 10, 100) is None


def test_the_bound_is_the_point_and_the_rank_of_the_score() -> None:
    rng = Random(1)
    lengths = [rng.randint(1, 300) for _ in range(400)]
    scores = []
    for index in range(1, 400):
        seen = sorted(lengths[:index])
        scores.append(max(0, lengths[index] - seen[(index - 1) // 2]))
    rank = ceil(0.9 * (len(scores) + 1))
    expected = sorted(lengths)[(400 - 1) // 2] + sorted(scores)[rank - 1]
    assert fed(lengths).bound(KEY, 100, 10_000) == expected


def test_old_lengths_are_forgotten() -> None:
    predictor = fed([1000] * LIMITS.predictor_lengths_max + [10] * LIMITS.predictor_lengths_max)
    assert predictor.bound(KEY, 100, 10_000) == 10
    history = predictor._histories[KEY]
    assert len(history.recent) == len(history.lengths) == LIMITS.predictor_lengths_max
    assert sum(len(own) for own in history.buckets.values()) == LIMITS.predictor_lengths_max
    assert len(history.scores) <= LIMITS.predictor_lengths_max


def test_the_length_of_the_prompt_counts() -> None:
    predictor = LengthPredictor(LIMITS)
    for _ in range(100):
        predictor.observe(KEY, 20, 10)
        predictor.observe(KEY, 4000, 500)
    short, long = predictor.bound(KEY, 21, 10_000), predictor.bound(KEY, 3900, 10_000)
    assert short is not None and long is not None and short < 100 < long
    assert [prompt_bucket(tokens) for tokens in (0, 1, 2, 3, 4, 5, 6, 7, 8)] == [0, 2, 4, 5, 6, 6, 7, 7, 8]


def test_the_bound_is_never_past_max_tokens() -> None:
    assert fed([500] * 50).bound(KEY, 100, 16) == 16


def test_whoever_outgrew_its_bound_gets_another() -> None:
    lengths = [10] * 90 + [200] * 9 + [900]
    Random(2).shuffle(lengths)
    predictor = fed(lengths * 2)
    seen = [predictor.bound(KEY, 100, 5000, produced) for produced in (0, 50, 250, 950, 4000, 4999)]
    assert seen[0] is not None and seen[0] < 250
    assert seen[1:3] == [200, 900] or seen[1:3] == [900, 900]
    assert seen[3:] == [1900, 5000, 5000]


def test_keys_are_bounded_and_the_least_used_goes_first() -> None:
    predictor = LengthPredictor(Limits(predictor_keys_max=2))
    for tenant in ("a", "b"):
        for _ in range(40):
            predictor.observe((tenant, "m", "s"), 10, 5)
    assert predictor.bound(("a", "m", "s"), 10, 100) == 5  # asking is use
    predictor.observe(("c", "m", "s"), 10, 5)
    assert len(predictor) == 2
    assert predictor.bound(("a", "m", "s"), 10, 100) == 5 and predictor.bound(("b", "m", "s"), 10, 100) is None


@given(
    st.lists(st.tuples(st.integers(0, 1 << 17), st.integers(0, 5000)), min_size=1, max_size=120),
    st.integers(1, 4000),
    st.integers(0, 5000),
)
def test_a_bound_is_between_what_is_there_and_what_is_allowed(
    seen: list[tuple[int, int]], max_tokens: int, produced: int
) -> None:
    predictor = LengthPredictor(Limits(predictor_lengths_min=5, predictor_lengths_max=50))
    for prompt, length in seen:
        predictor.observe(KEY, prompt, length)
    bound = predictor.bound(KEY, 100, max_tokens, min(produced, max_tokens - 1))
    assert bound is None or min(produced, max_tokens - 1) + 1 <= bound <= max_tokens
    later = predictor.bound(KEY, 100, max_tokens, max_tokens - 1)
    assert later in (None, max_tokens)


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.3])
def test_coverage_is_what_it_says_on_exchangeable_lengths(alpha: float) -> None:
    rng, predictor, kept = Random(4), LengthPredictor(LIMITS, alpha), []
    for _ in range(6000):
        prompt, length = rng.randint(1, 2000), int(rng.lognormvariate(4, 1)) + 1
        bound = predictor.bound(KEY, prompt, 1 << 20)
        if bound is not None:
            kept.append(length <= bound)
        predictor.observe(KEY, prompt, length)
    assert sum(kept) / len(kept) == pytest.approx(1 - alpha, abs=0.015)


def test_classes_of_sampling() -> None:
    assert sampling_class(0.0, None) == "greedy-any" != sampling_class(1.0, None)
    assert sampling_class(1.0, 300) == sampling_class(0.7, 511) != sampling_class(0.7, 512)
