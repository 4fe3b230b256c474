"""Choosing tokens from logits, all rows of a step at once and each as if it were alone.

A row's choice is a function of its logits, its ``Sampling`` and its output position: sums run along a row in
one order, cuts are by value and so do not depend on how ties are sorted, and the random number is counted,
not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.engine.batch import END_FLAG, INVALID_FLAG, Sampled, Sampling

GREEDY_BELOW = 1e-5
CANDIDATES = 256  # sorted first when looking for the nucleus; rows whose nucleus is larger cause a full sort


def sample(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[Sampled]:
    """Choose one token for each row of float32 ``[rows, vocab]``; ``positions`` are the rows' output
    positions.

    The log-probability is that of the chosen token under the raw logits. A row with non-finite logits answers
    token 0, log-probability 0 and INVALID_FLAG, and does not touch the others. A row that asks for its likeliest
    tokens gets them with their log-probabilities under the raw logits, best first.
    """
    peaks, tokens = logits.max(-1)
    # A row's sum is finite exactly when all of it is, short of logits near the end of float32's range.
    normalisers = logits.logsumexp(-1)
    finite = torch.isfinite(normalisers) & torch.isfinite(logits.sum(-1))
    drawn = [i for i, sampling in enumerate(samplings) if sampling.temperature >= GREEDY_BELOW and finite[i]]
    if drawn:
        tokens[drawn] = _draw(logits[drawn], peaks[drawn], [samplings[i] for i in drawn], [positions[i] for i in drawn])
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - normalisers
    out = []
    for token, logprob, valid, sampling in zip(
        tokens.tolist(), logprobs.tolist(), finite.tolist(), samplings, strict=True
    ):
        if valid:
            out.append(Sampled(token, logprob, END_FLAG if token in sampling.end_ids else 0))
        else:
            out.append(Sampled(0, 0.0, INVALID_FLAG))
    asking = [i for i, sampling in enumerate(samplings) if sampling.top_logprobs and not out[i].flags & INVALID_FLAG]
    if asking:
        counts = [samplings[i].top_logprobs for i in asking]
        for i, tops in zip(asking, top_logprobs(logits[asking], normalisers[asking], counts), strict=True):
            out[i].tops = tops
    return out


#: a pair of ``engine.scores``
_PAIR = np.dtype([("token", "<u4"), ("logprob", "<f4")])


def top_logprobs(logits: Tensor, normalisers: Tensor, counts: Sequence[int]) -> list[bytes]:
    """The ``counts[i]`` likeliest tokens of each row of float32 ``[rows, vocab]``, packed as in ``engine.scores``.

    ``normalisers`` are the rows' log-sum-exp.
    """
    values, tokens = logits.topk(min(max(counts), logits.shape[1]))
    pairs = np.empty(tokens.shape, _PAIR)
    pairs["token"], pairs["logprob"] = tokens.cpu().numpy(), (values - normalisers[:, None]).cpu().numpy()
    return [row[:count].tobytes() for row, count in zip(pairs, counts, strict=True)]


def _draw(logits: Tensor, peaks: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """Tokens by inversion of each row's cut distribution at the row's own random number: int64 ``[rows]``."""
    temperatures = torch.tensor([s.temperature for s in samplings], device=logits.device)
    scaled = (logits - peaks[:, None]).div_(temperatures[:, None])
    weights = scaled.exp()
    cut = [i for i, s in enumerate(samplings) if s.top_p < 1 or 0 < s.top_k < logits.shape[1]]
    if cut:
        floors = torch.full_like(peaks, -math.inf)
        floors[cut] = _floors(scaled[cut], weights[cut], [samplings[i] for i in cut])
        weights.masked_fill_(scaled < floors[:, None], 0.0)
    mass = weights.cumsum(-1, dtype=torch.float64)
    numbers = uniforms([s.seed for s in samplings], positions)
    targets = torch.from_numpy(numbers).to(logits.device)[:, None] * mass[:, -1:]
    return torch.searchsorted(mass, targets, right=True)[:, 0]


def _floors(scaled: Tensor, weights: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """The least scaled logit each row keeps: of its best top-k those that make up top-p of their mass."""
    vocab, device = scaled.shape[1], scaled.device
    counts = torch.tensor([s.top_k if 0 < s.top_k < vocab else vocab for s in samplings], device=device)
    shares = torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=device)
    endless = counts == vocab
    whole = torch.zeros_like(shares)
    if endless.any():
        whole[endless] = weights[endless].cumsum(-1, dtype=torch.float64)[:, -1]
    width = int(torch.where(endless, min(CANDIDATES, vocab), counts).max())
    while True:
        top = scaled.topk(width).values
        within = torch.arange(width, device=device) < counts[:, None]
        kept = torch.where(within, top.exp(), 0.0).double()
        through = kept.cumsum(-1)
        total = torch.where(endless, whole, through[:, -1])
        nucleus = within & (through - kept < (shares * total)[:, None])
        nucleus[:, 0] = True
        # Where no top-k ends it, a nucleus that fills the candidates may go on beyond them.
        if width == vocab or not (nucleus[:, -1] & endless).any():
            return top.masked_fill_(~nucleus, math.inf).amin(-1)
        width = vocab


_PHILOX_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_PHILOX_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Philox4x32-10 of uint32 values held in uint64: counters ``[rows, 4]``, keys ``[rows, 2]`` -> ``[rows,
    4]``.

    Salmon, Moraes, Dror and Shaw, Parallel Random Numbers: As Easy as 1, 2, 3, 2011, section 3.3.
    """
    x0, x1, x2, x3 = counters.astype(np.uint64).T
    k0, k1 = keys.astype(np.uint64).T
    for _ in range(10):
        left, right = x0 * _PHILOX_MULTIPLIERS[0], x2 * _PHILOX_MULTIPLIERS[1]
        x0, x1, x2, x3 = (right >> _SHIFT) ^ x1 ^ k0, right & _LOW, (left >> _SHIFT) ^ x3 ^ k1, left & _LOW
        k0, k1 = (k0 + _PHILOX_WEYL[0]) & _LOW, (k1 + _PHILOX_WEYL[1]) & _LOW
    return np.stack((x0, x1, x2, x3), 1)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One number strictly between 0 and 1 for each (seed, output position), float64 of 32 random bits.

    The seed, modulo 2**64, is Philox's key and the position its counter.
    """
    seed = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], np.uint64)
    position = np.array(positions, np.uint64)
    nothing = np.zeros_like(position)
    counters = np.stack((position & _LOW, position >> _SHIFT, nothing, nothing), 1)
    words = philox4x32(counters, np.stack((seed & _LOW, seed >> _SHIFT), 1))
    return (words[:, 0].astype(np.float64) + 0.5) / 4294967296.0
