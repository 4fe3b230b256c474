"""The C++ kernels' choice of tokens against the sampler's, over logits of every kind and every combination of cuts."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from baton.engine.batch import Sampling
from baton.kernels.native import Choice, Draw
from baton.workers.sampler import GREEDY_BELOW, sample, uniforms
from tests.kernels.native_calls import randn
from tests.workers.test_sampler_reference import distribution

CHOICE, DRAW = np.dtype(Choice), np.dtype(Draw)
PLAIN = Sampling(1.0, 1.0, 0, 0, ())
GREEDY = Sampling(0.0, 1.0, 0, 0, ())
VOCABULARIES = (1, 2, 15, 16, 17, 61, 1000, 1024, 1025, 4099)
PADDING = 40  # columns beyond the vocabulary, of what must not be looked at

CUTS = [
    msgspec.structs.replace(PLAIN, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    for temperature, top_p, top_k, min_p in itertools.product(
        (0.3, 1.0, 2.5), (0.001, 0.5, 0.9, 0.999, 1.0), (0, 1, 5, 300), (0.0, 0.02, 0.5, 1.0)
    )
]
#: a number, or what is just kept, may be so near to an edge that float32 weights, good to some 2e-7, decide either way
NEAR = 5e-7


def choose(library: ctypes.CDLL, logits: Tensor, samplings: Sequence[Sampling]) -> np.ndarray:
    """One choice for each row of ``logits``, as ``CHOICE``; a row's seed gives its number."""
    rows, vocab = logits.shape
    padded = torch.full((rows, vocab + PADDING), torch.nan)
    padded[:, :vocab] = logits
    draws, choices = np.zeros(rows, DRAW), np.zeros(rows + 1, CHOICE)
    drawn = [i for i, s in enumerate(samplings) if s.temperature >= GREEDY_BELOW]
    numbers = uniforms([samplings[i].seed for i in drawn], [0] * len(drawn))
    for i, number in zip(drawn, numbers, strict=True):
        s = samplings[i]
        draws[i] = (number, s.temperature, s.top_p, s.min_p, s.top_k)
    choices["token"][rows] = -77
    workspace = torch.empty(2 * (vocab + 32))
    pointers = (draws.ctypes.data, choices.ctypes.data, workspace.data_ptr())
    library.baton_choose(padded.data_ptr(), rows, vocab + PADDING, vocab, *pointers)
    assert choices["token"][rows] == -77, "written beyond the last row"
    return choices[:rows]


def seeded(samplings: Sequence[Sampling]) -> list[Sampling]:
    return [msgspec.structs.replace(s, seed=seed) for seed, s in enumerate(samplings)]


def is_near(logits: Tensor, s: Sampling, tokens: Sequence[int]) -> bool:
    """Whether the ``tokens`` lie among those chosen where the number and what is kept are moved by ``NEAR``."""
    values, number, found = logits.double(), float(uniforms([s.seed], [0])[0]), list[int]()
    scaled = ((values - values.max()) / s.temperature).numpy()
    lowest = scaled[list(distribution(values.tolist(), s))].min()
    for moved in np.linspace(-NEAR, NEAR, 21):
        ids = np.flatnonzero(scaled >= lowest + moved)
        edges = np.cumsum(np.exp(scaled[ids])) if len(ids) else np.zeros(0)
        for at in (number - NEAR, number, number + NEAR):
            found.extend(ids[np.searchsorted(edges, at * edges[-1:], side="right").clip(max=len(ids) - 1)])
    return all(min(found) <= token <= max(found) for token in tokens)


def check(library: ctypes.CDLL, logits: Tensor, samplings: Sequence[Sampling]) -> int:
    """Both choose alike; how many excused differences there were."""
    found, excused = choose(library, logits, samplings), 0
    expected = sample(logits, samplings, [0] * len(samplings))
    normalisers = logits.double().logsumexp(1)
    for row, (choice, wanted) in enumerate(zip(found, expected, strict=True)):
        assert choice["finite"] == 1 and wanted.flags == 0
        if choice["token"] != wanted.token:
            assert samplings[row].temperature > 0, "a greedy choice knows no near miss"
            assert is_near(logits[row], samplings[row], [choice["token"], wanted.token]), samplings[row]
            excused += 1
        exact = logits[row, choice["token"]].double() - normalisers[row]
        assert choice["logprob"] == pytest.approx(float(exact), abs=1e-5)
        assert choice["log_normaliser"] == pytest.approx(float(normalisers[row]), abs=1e-5)
    return excused


def some_logits(shape: str, rows: int, vocab: int) -> Tensor:
    random = randn(rows, vocab, seed=vocab)
    return {
        "spread": random * 3,
        "peaked": random * 0.1 + 20 * (torch.arange(vocab) == vocab * 2 // 3),
        "steep": random * 12,
        "nearly flat": random * 1e-3,
        "tied": (random * 2).round(),
        "flat": torch.full_like(random, -2.5),
        "low": random - 30,
    }[shape]


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("shape", ["spread", "peaked", "steep", "nearly flat", "tied", "flat", "low"])
def test_choices_are_the_samplers(native_library: ctypes.CDLL, shape: str, vocab: int) -> None:
    """Both compute in float32, so that a choice in a hundred thousand may fall to the neighbour: one is excused."""
    samplings = seeded([GREEDY, *CUTS])
    assert check(native_library, some_logits(shape, len(samplings), vocab), samplings) <= 1


@pytest.mark.parametrize(("shape", "excused"), [("spread", 1), ("nearly flat", 8), ("flat", 0), ("tied", 0)])
def test_a_nucleus_may_be_as_large_as_a_whole_vocabulary(native_library: ctypes.CDLL, shape: str, excused: int) -> None:
    """Nearly flat, neighbours differ by less than float32 weights do, and so which few of them are just kept: then a
    third of the choices may fall to a neighbour.
    """
    cuts = [(t, p, k, m) for t in (0.7, 1.0, 3.0) for p in (0.95, 0.9999) for k in (0, 20_000) for m in (0.0, 1e-4)]
    samplings = seeded(
        [msgspec.structs.replace(PLAIN, temperature=t, top_p=p, top_k=k, min_p=m) for t, p, k, m in cuts]
    )
    assert check(native_library, some_logits(shape, len(samplings), 49_152), samplings) <= excused


def test_the_first_of_the_likeliest_is_chosen_greedily(native_library: ctypes.CDLL) -> None:
    logits = randn(200, 1030)
    for row in range(200):
        logits[row, [row * 5 % 1030, (row * 5 + 16) % 1030, (row * 7 + 1) % 1030]] = 9.0
    found = choose(native_library, logits, [GREEDY] * 200)
    assert found["token"].tolist() == [int((row == 9).nonzero()[0]) for row in logits]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("vocab", [1, 16, 17, 1025])
def test_a_row_that_is_not_finite_is_said_to_be_so_and_spoils_no_other(
    native_library: ctypes.CDLL, vocab: int, bad: float
) -> None:
    samplings = seeded([GREEDY, *CUTS])
    logits = randn(len(samplings), vocab) * 3
    clean = choose(native_library, logits, samplings)
    places = {row: (0, vocab // 2, vocab - 1)[row % 9 // 3] for row in range(0, len(samplings), 3)}
    for row, at in places.items():
        logits[row, at] = bad
    found = choose(native_library, logits, samplings)
    assert found["finite"].tolist() == [row not in places for row in range(len(samplings))]
    sound = [row for row in range(len(samplings)) if row not in places]
    assert found[sound].tobytes() == clean[sound].tobytes()
    assert not found["token"][list(places)].any()


def test_rows_of_nothing_finite_are_said_to_be_so(native_library: ctypes.CDLL) -> None:
    logits = torch.stack([torch.full((33,), bad) for bad in (math.nan, math.inf, -math.inf)])
    for sampling in (GREEDY, PLAIN):
        assert not choose(native_library, logits, [sampling] * 3)["finite"].any()


def test_a_row_is_the_same_bit_for_bit_alone_and_among_others(native_library: ctypes.CDLL) -> None:
    samplings = seeded([GREEDY, *CUTS])
    logits = some_logits("spread", len(samplings), 1025)
    together = choose(native_library, logits, samplings)
    alone = [choose(native_library, logits[i : i + 1], samplings[i : i + 1]) for i in range(len(samplings))]
    assert together.tobytes() == b"".join(choice.tobytes() for choice in alone)


def test_the_ends_of_what_a_number_can_be_choose_what_was_kept(native_library: ctypes.CDLL) -> None:
    vocab = 3000
    logits, workspace = some_logits("spread", 1, vocab), torch.empty(2 * (vocab + 32))
    kept = sorted(distribution(logits[0].tolist(), msgspec.structs.replace(PLAIN, top_k=9, top_p=0.8)))
    for number, token in ((0.0, kept[0]), (2.0**-33, kept[0]), (1 - 2.0**-33, kept[-1]), (1.0, kept[-1])):
        draw, choice = np.array([(number, 1.0, 0.8, 0.0, 9)], DRAW), np.zeros(1, CHOICE)
        pointers = (draw.ctypes.data, choice.ctypes.data, workspace.data_ptr())
        native_library.baton_choose(logits.data_ptr(), 1, vocab, vocab, *pointers)
        assert choice["token"].item() == token


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1.3},
        {"temperature": 1.3, "min_p": 0.02, "top_p": 0.95},
        {"temperature": 0.7, "top_k": 20},
        {"top_k": 30, "top_p": 0.9},
        {"top_p": 0.9999},
    ],
    ids=str,
)
def test_draws_follow_the_obvious_distribution(native_library: ctypes.CDLL, how: dict[str, float]) -> None:
    """Pearson's chi-square of 20,000 draws with fixed seeds; chance passes the bound once in 10,000."""
    draws, sampling = 20_000, msgspec.structs.replace(PLAIN, **how)
    logits = randn(1, 61, seed=5) * 1.5
    samplings = [msgspec.structs.replace(sampling, seed=seed) for seed in range(draws)]
    got = Counter(choose(native_library, logits.expand(draws, -1), samplings)["token"].tolist())
    chances = distribution(logits[0].tolist(), sampling)
    assert got.keys() <= chances.keys()
    common = [token for token, chance in chances.items() if chance * draws >= 10]
    square = sum((got[t] - chances[t] * draws) ** 2 / (chances[t] * draws) for t in common)
    freedom = len(common) - 1
    assert len(common) > 5
    assert square < freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson and Hilferty
