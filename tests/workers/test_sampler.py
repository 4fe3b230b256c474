"""Sampling: each row as if alone, cuts as defined, numbers that only depend on seed and position."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.engine.batch import END_FLAG, INVALID_FLAG, Sampling
from baton.engine.scores import unpack, unpack_entries
from baton.workers.sampler import CANDIDATES, philox4x32, prompt_scores, sample, uniforms

VOCAB = 2000


def make(
    temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 0, end_ids: tuple[int, ...] = ()
) -> Sampling:
    return Sampling(temperature, top_p, top_k, seed, end_ids)


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def support(logits: Tensor, sampling: Sampling, draws: int = 400) -> set[int]:
    rows = [Sampling(sampling.temperature, sampling.top_p, sampling.top_k, seed, ()) for seed in range(draws)]
    return {s.token for s in sample(logits.expand(draws, -1).contiguous(), rows, [0] * draws)}


def test_philox_gives_the_published_answers() -> None:
    """The known-answer vectors of Random123's distribution."""
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    counters = np.array([[0] * 4, [ones] * 4, pi[:4]], np.uint64)
    keys = np.array([[0] * 2, [ones] * 2, pi[4:]], np.uint64)
    assert philox4x32(counters, keys).tolist() == [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]


def test_uniforms_are_uniform_and_independent_of_company() -> None:
    numbers = uniforms([7] * 4096, list(range(4096)))
    assert numbers.min() > 0 and numbers.max() < 1
    assert np.histogram(numbers, 16, (0, 1))[0] == pytest.approx(np.full(16, 256), abs=80)
    assert uniforms([7], [99])[0] == numbers[99]
    assert len({*uniforms([0, 1, -1, 2**64], [0, 0, 0, 0])}) == 3  # seeds count modulo 2**64
    assert uniforms([3], [2**40])[0] != uniforms([3], [0])[0]


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 9e-6, 1e-30])
def test_no_temperature_is_greedy(temperature: float) -> None:
    logits = random_logits(4)
    out = sample(logits, [make(temperature)] * 4, [0] * 4)
    assert [s.token for s in out] == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1).max(-1).values.tolist()
    assert [s.logprob for s in out] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    for sampled in sample(random_logits(8), [make(temperature, 0.9, 40, seed) for seed in range(8)], [3] * 8):
        assert sampled.flags == 0 and math.isfinite(sampled.logprob)


def test_the_logprob_is_of_the_raw_logits() -> None:
    logits = random_logits(1)
    (sampled,) = sample(logits, [make(2.0, 0.5, 10, seed=5)], [0])
    assert sampled.logprob == pytest.approx(logits.log_softmax(-1)[0, sampled.token].item(), abs=1e-5)


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    draws = 4000
    rows = [make(seed=seed) for seed in range(draws)]
    tokens = [s.token for s in sample(logits.expand(draws, 4).contiguous(), rows, [0] * draws)]
    assert np.bincount(tokens, minlength=4) / draws == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)


def test_top_k_keeps_the_k_best() -> None:
    logits = random_logits(1)
    best = set(logits[0].topk(5).indices.tolist())
    assert support(logits, make(5.0, top_k=5)) == best


@pytest.mark.parametrize("top_k", [0, -1, VOCAB, 9_999_999])
def test_top_k_off_is_off(top_k: int) -> None:
    logits = random_logits(6)
    seeds = range(6)
    expected = sample(logits, [make(seed=s) for s in seeds], [0] * 6)
    assert sample(logits, [make(top_k=top_k, seed=s) for s in seeds], [0] * 6) == expected


def test_top_p_keeps_the_smallest_set_of_that_mass() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]]))
    assert support(logits, make(top_p=0.69)) == {1, 3}
    assert support(logits, make(top_p=0.71)) == {1, 3, 4}
    assert support(logits, make(top_p=1e-9)) == {1}
    assert support(logits, make(top_p=0.0)) == {1}


def test_top_p_applies_to_what_top_k_leaves() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]]))
    assert support(logits, make(top_p=0.56, top_k=2)) == {1}  # 0.4 of 0.7 is 0.571
    assert support(logits, make(top_p=0.58, top_k=2)) == {1, 3}


def test_a_nucleus_wider_than_the_candidates_is_found() -> None:
    logits = torch.zeros(1, 4 * CANDIDATES)
    logits[0, : 2 * CANDIDATES] = 1.0
    share = 2 * CANDIDATES * math.e / (2 * CANDIDATES * (math.e + 1))
    tokens = support(logits, make(top_p=share * 0.999), draws=2000)
    assert max(tokens) < 2 * CANDIDATES and max(tokens) > CANDIDATES


def test_ties_at_the_cut_are_kept() -> None:
    assert support(torch.zeros(1, 8), make(top_k=2)) == set(range(8))


def test_non_finite_logits_flag_their_row_alone() -> None:
    logits = random_logits(5)
    clean = sample(logits, [make(seed=s) for s in range(5)], [0] * 5)
    for row, bad in ((1, math.nan), (2, math.inf), (3, -math.inf)):
        logits[row, 17] = bad
    out = sample(logits, [make(seed=s) for s in range(5)], [0] * 5)
    assert [s.flags for s in out] == [0, INVALID_FLAG, INVALID_FLAG, INVALID_FLAG, 0]
    assert out[0] == clean[0] and out[4] == clean[4] and out[1].logprob == 0.0


def test_end_ids_set_the_flag() -> None:
    logits = torch.zeros(2, 10)
    logits[:, 4] = 50.0
    assert [s.flags for s in sample(logits, [make(end_ids=(3, 4)), make()], [0, 0])] == [END_FLAG, 0]


SAMPLINGS = st.builds(
    make,
    st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    st.sampled_from([0.1, 0.9, 1.0]),
    st.sampled_from([0, 1, 7, 900, VOCAB]),
    st.integers(0, 2**64 - 1),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(SAMPLINGS, min_size=2, max_size=6), st.integers(0, 1000), st.integers(0, 10**6))
def test_a_row_does_not_depend_on_the_others(samplings: list[Sampling], seed: int, position: int) -> None:
    logits = random_logits(len(samplings), seed)
    positions = [position + i for i in range(len(samplings))]
    together = sample(logits, samplings, positions)
    alone = [sample(logits[i : i + 1], [s], positions[i : i + 1])[0] for i, s in enumerate(samplings)]
    assert [s.token for s in together] == [s.token for s in alone]
    assert [s.logprob for s in together] == pytest.approx([s.logprob for s in alone], abs=1e-5)


def test_the_likeliest_tokens_are_those_of_the_raw_logits_best_first() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    asked = [0, 3, 20, 1000]
    rows = [Sampling(1.0, 0.5, 5, seed, (), top_logprobs=count) for seed, count in enumerate(asked)]
    out = sample(logits, rows, [0] * 4)
    raw = logits.log_softmax(-1)
    for row, (sampled, count) in enumerate(zip(out, asked, strict=True)):
        best = raw[row].topk(min(count, 50))
        pairs = unpack(sampled.tops)
        assert [token for token, _ in pairs] == best.indices.tolist()
        assert [logprob for _, logprob in pairs] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_the_likeliest_tokens_are_the_same_alone_and_in_a_batch() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(4))
    rows = [Sampling(0.0, 1.0, 0, 0, (), top_logprobs=count) for count in (5, 0, 1, 2, 20, 3, 0, 4)]
    together = sample(logits, rows, [0] * 8)
    alone = [sample(logits[i : i + 1], [rows[i]], [0])[0] for i in range(8)]
    assert [[token for token, _ in unpack(s.tops)] for s in together] == [
        [token for token, _ in unpack(s.tops)] for s in alone
    ]


def test_a_row_without_sound_numbers_has_no_likeliest_tokens() -> None:
    logits = torch.full((2, 9), float("nan"))
    logits[1] = torch.arange(9.0)
    rows = [Sampling(0.0, 1.0, 0, 0, (), top_logprobs=2)] * 2
    out = sample(logits, rows, [0, 0])
    assert out[0].tops == b"" and [token for token, _ in unpack(out[1].tops)] == [8, 7]


@pytest.mark.parametrize("top", [0, 1, 20])
def test_a_prompts_tokens_have_their_own_log_probability_their_rank_and_the_likeliest(top: int) -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(5))
    targets = [0, 49, 3, int(logits[3].argmax()), int(logits[4].argmin()), 7, 8]
    raw, found = logits.log_softmax(-1), list(unpack_entries(prompt_scores(logits, targets, top), top))
    assert len(found) == 7 and (found[3][0], found[4][0]) == (1, 50)
    for row, (target, (rank, ((token, logprob), *others))) in enumerate(zip(targets, found, strict=True)):
        assert (token, rank) == (target, 1 + int((raw[row] > raw[row, target]).sum()))
        assert logprob == pytest.approx(raw[row, target].item(), abs=1e-5)
        best = raw[row].topk(top) if top else None
        assert [other for other, _ in others] == (best.indices.tolist() if best else [])
        assert [score for _, score in others] == pytest.approx(best.values.tolist() if best else [], abs=1e-5)
