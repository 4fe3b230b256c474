"""The sampler against a slow, obvious one: row by row, token by token, over random parameters and histories."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.engine.batch import END_FLAG, INVALID_FLAG, NOTHING_FLAG, History, Sampled, Sampling
from baton.workers.sampler import sample, uniforms

VOCAB = 61  # small, so that histories repeat, and odd, so that no vector width divides a row
PLAIN = Sampling(1.0, 1.0, 0, 0, ())


def mask(ids: set[int]) -> bytes:
    bits = np.zeros(VOCAB, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def adjusted(logits: list[float], s: Sampling, prompt: list[int], output: list[int]) -> list[float]:
    """The logits as the request's own parameters change them."""
    f = np.float32
    values = [f(value) for value in logits]
    for token, bias in s.logit_bias:
        values[token] += f(bias)
    counts = Counter(output)
    for token in {*prompt, *output}:
        value = values[token]
        value = value / f(s.repetition_penalty) if value > 0 else value * f(s.repetition_penalty)
        value -= f(s.frequency_penalty) * f(counts[token])
        value -= f(s.presence_penalty) * f(counts[token] > 0)
        values[token] = value
    allowed = np.unpackbits(np.frombuffer(s.allowed_ids, np.uint8), bitorder="little") if s.allowed_ids else None
    for token in range(len(values)):
        early = len(output) < s.min_tokens and token in s.end_ids
        outside = allowed is not None and not allowed[token]
        bad = any(word[-1] == token and output[len(output) - len(word) + 1 :] == [*word[:-1]] for word in s.bad_ids)
        if early or outside or bad:
            values[token] = f(-math.inf)
    return [float(value) for value in values]


def distribution(values: list[float], s: Sampling) -> dict[int, float]:
    """The chance of each token that may be chosen."""
    peak = max(values)
    weights = {i: math.exp((v - peak) / s.temperature) for i, v in enumerate(values) if v > -math.inf}
    weights = {i: w for i, w in weights.items() if w >= s.min_p}
    best = sorted(weights, key=lambda i: -weights[i])
    if 0 < s.top_k < len(best):
        best = [i for i in best if weights[i] >= weights[best[s.top_k - 1]]]
    total, through, kept = sum(weights[i] for i in best), 0.0, list[int]()
    for i in best:
        if through >= s.top_p * total and weights[i] < weights[kept[-1]]:
            break
        kept.append(i)
        through += weights[i]
    return {i: weights[i] / through for i in sorted(kept)}


tokens = st.integers(0, VOCAB - 1)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 40, VOCAB]),
    seed=st.integers(0, 2**64 - 1),
    end_ids=st.lists(tokens, max_size=3).map(tuple),
    min_tokens=st.sampled_from([0, 2, 9]),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    logit_bias=st.dictionaries(tokens, st.floats(-8, 8, width=32), max_size=4).map(lambda d: tuple(d.items())),
    allowed_ids=st.just(b"") | st.sets(tokens, min_size=1).map(mask),
    bad_ids=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    choice=st.integers(0, 3),
)
histories = st.tuples(st.lists(tokens, max_size=12), st.lists(tokens, max_size=12))
requests = st.lists(st.tuples(samplings, histories), min_size=1, max_size=6)


def random_logits(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def run(logits: Tensor, rows: list[tuple[Sampling, tuple[list[int], list[int]]]]) -> list[Sampled]:
    """Sample, with what a history grew by since at the end of it."""
    known = [
        History(prompt + output + [0] * 3, len(prompt)) if s.needs_history else None for s, (prompt, output) in rows
    ]
    return sample(logits, [s for s, _ in rows], [len(output) for _, (_, output) in rows], known)


@settings(max_examples=150, deadline=None)
@given(requests, st.integers(0, 10**6))
def test_every_choice_is_the_obvious_one(rows: list[tuple[Sampling, tuple[list[int], list[int]]]], seed: int) -> None:
    logits = random_logits(len(rows), seed)
    for got, (s, (prompt, output)), row in zip(run(logits, rows), rows, logits.tolist(), strict=True):
        values = adjusted(row, s, prompt, output)
        if max(values) == -math.inf:
            assert (got.token, got.flags) == (0, INVALID_FLAG | NOTHING_FLAG)
            continue
        assert got.flags == (END_FLAG if got.token in s.end_ids else 0)
        assert got.logprob == pytest.approx(row[got.token] - math.log(sum(map(math.exp, row))), abs=1e-4)
        if s.temperature == 0:
            assert values[got.token] == pytest.approx(max(values), abs=1e-5)
            continue
        chances = distribution(values, s)
        number, through = float(uniforms([s.seed], [len(output)], [s.choice])[0]), 0.0
        wanted, near = -1, False
        for token, chance in chances.items():
            near = near or abs(through + chance - number) < 1e-5
            through += chance
            if through > number:
                wanted = token
                break
        assert got.token == wanted or near or _cut_is_near(values, s)


def _cut_is_near(values: list[float], s: Sampling) -> bool:
    """Whether the set of tokens itself depends on the last bit: a cut that falls on an edge."""
    wider = [msgspec.structs.replace(s, top_p=s.top_p * (1 + e), min_p=s.min_p * (1 + e)) for e in (-1e-5, 1e-5)]
    return distribution(values, wider[0]).keys() != distribution(values, wider[1]).keys()


@settings(max_examples=150, deadline=None)
@given(requests, st.integers(0, 10**6))
def test_alone_and_in_a_batch_are_the_same(rows: list[tuple[Sampling, tuple[list[int], list[int]]]], seed: int) -> None:
    logits = random_logits(len(rows), seed)
    before = logits.clone()
    together = run(logits, rows)
    alone = [run(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert [(s.token, s.flags) for s in together] == [(s.token, s.flags) for s in alone]
    assert [s.logprob for s in together] == pytest.approx([s.logprob for s in alone], abs=1e-6)
    assert torch.equal(logits, before), "the raw logits were changed"


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1.3, "min_p": 0.02, "top_p": 0.95},
        {"temperature": 0.7, "top_k": 20, "logit_bias": ((3, 4.0), (7, -4.0))},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"allowed_ids": mask({1, 2, 3, 5, 8, 13, 21, 34, 55}), "bad_ids": ((5,), (1, 2, 8)), "min_tokens": 9},
    ],
    ids=["cuts", "bias", "penalties", "forbidden"],
)
def test_draws_follow_the_obvious_distribution(how: dict[str, object]) -> None:
    """Pearson's chi-square of 20,000 draws with fixed seeds; chance passes the bound once in 10,000."""
    draws, prompt, output = 20_000, [4, 4, 9], [1, 2, 1, 2]
    s = msgspec.structs.replace(PLAIN, end_ids=(13,), **how)
    logits = random_logits(1, 5) / 2
    rows = [(msgspec.structs.replace(s, seed=seed), (prompt, output)) for seed in range(draws)]
    got = Counter(one.token for one in run(logits.expand(draws, -1), rows))
    chances = distribution(adjusted(logits[0].tolist(), s, prompt, output), s)
    assert got.keys() <= chances.keys()
    common = [token for token, chance in chances.items() if chance * draws >= 10]
    square = sum((got[t] - chances[t] * draws) ** 2 / (chances[t] * draws) for t in common)
    freedom = len(common) - 1
    assert len(common) > 5
    assert square < freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson and Hilferty


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_comes_before_the_minimum_and_it_may_come_right_at_it(temperature: float) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 9]] = 60.0
    s = Sampling(temperature, 1.0, 0, 3, (7, 9), min_tokens=4)
    ends = [run(logits, [(s, ([1], [0] * position))])[0].flags for position in range(6)]
    assert ends == [0, 0, 0, 0, END_FLAG, END_FLAG]


def test_choices_of_one_request_differ_and_the_first_is_the_one_of_before() -> None:
    numbers = uniforms([5] * 4, [0] * 4, [0, 1, 2, 3])
    assert len({*numbers}) == 4 and numbers[0] == uniforms([5], [0])[0]


def test_a_bad_word_of_many_tokens_is_broken_at_its_last_one() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 60.0
    s = Sampling(0.0, 1.0, 0, 0, (), bad_ids=((1, 2, 3),))
    said = [run(logits, [(s, ([1, 2], output))])[0].token for output in ([], [2], [1, 2], [1, 1, 2], [2, 1])]
    assert [token == 3 for token in said] == [True, True, False, False, True]


def test_a_history_is_asked_for_only_where_it_matters() -> None:
    assert not PLAIN.needs_history and not PLAIN.adjusts(0)
    assert not Sampling(1.0, 1.0, 0, 0, (), bad_ids=((4,),), min_tokens=3, logit_bias=((1, 2.0),)).needs_history
    for how in ({"bad_ids": ((4, 5),)}, {"presence_penalty": 1.0}, {"frequency_penalty": -1.0}):
        assert msgspec.structs.replace(PLAIN, **how).needs_history
    assert Sampling(1.0, 1.0, 0, 0, (), repetition_penalty=1.1).needs_history
    minimum = Sampling(1.0, 1.0, 0, 0, (1,), min_tokens=3)
    assert [minimum.adjusts(position) for position in (2, 3)] == [True, False]
