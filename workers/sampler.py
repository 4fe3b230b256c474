"""Choosing tokens from logits, all rows of a step at once and each as if it were alone.

A row's choice is a function of its logits, its ``Sampling``, its output position and its history: sums run
along a row in one order, cuts are by value and so do not depend on how ties are sorted, and the random number
is counted, not drawn.

The order is that of vLLM's V1 sampler (``vllm/v1/sample/sampler.py``): the log-probability is of the raw
logits; then logit bias, the repetition penalty (Keskar et al., CTRL, 2019, section 4.1, over prompt and
output), the frequency and the presence penalty (over the output), and what is forbidden, whose place does not
matter; then the temperature, min-p, top-k, and top-p of what these left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.engine.batch import END_FLAG, INVALID_FLAG, NOTHING_FLAG, History, Sampled, Sampling
from baton.kernels.upload import upload

GREEDY_BELOW = 1e-5
CANDIDATES = 256  # sorted first when looking for the nucleus; rows whose nucleus is larger cause a full sort
#: a pair of ``engine.scores``
_PAIR = np.dtype([("token", "<u4"), ("logprob", "<f4")])


@dataclass(slots=True)
class Choice:
    """What was chosen for the rows of a step, of which the host knows nothing yet: ``tokens`` is int64 ``[rows]``.

    ``read`` are the tensors to be read: tokens, log-probabilities, whether the logits are finite and whether some
    token may be chosen, each ``[rows]``; then tokens and log-probabilities of the likeliest ones, ``[asking, most]``.
    """

    tokens: Tensor
    samplings: Sequence[Sampling]
    asking: list[int]  # the rows that want their likeliest tokens
    read: list[Tensor]
    ready: torch.cuda.Event | None = None  # comes once all of ``read`` is on the host

    def fetch(self) -> None:
        """Have the device send what is to be read as soon as it is there; nobody waits for it here."""
        if self.tokens.device.type == "cpu":
            return
        there = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in self.read]
        for host, part in zip(there, self.read, strict=True):
            host.copy_(part, non_blocking=True)
        self.read = there
        self.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch says nothing of it
        self.ready.record()

    def answers(self) -> list[Sampled]:
        """One ``Sampled`` a row, once the device has come so far; see ``sample``."""
        if self.ready is not None:
            self.ready.synchronize()
        tokens, logprobs, finite, sound = (part.tolist() for part in self.read[:4])
        out = []
        for token, logprob, valid, some, sampling in zip(tokens, logprobs, finite, sound, self.samplings, strict=True):
            if some:
                out.append(Sampled(token, logprob, END_FLAG if token in sampling.end_ids else 0))
            else:
                out.append(Sampled(0, 0.0, INVALID_FLAG | NOTHING_FLAG if valid else INVALID_FLAG))
        if self.asking:
            pairs = np.empty(self.read[4].shape, _PAIR)
            pairs["token"], pairs["logprob"] = self.read[4].numpy(), self.read[5].numpy()
            for row, i in zip(pairs, self.asking, strict=True):
                if not out[i].flags & INVALID_FLAG:
                    out[i].tops = row[: self.samplings[i].top_logprobs].tobytes()
        return out


def sample(
    logits: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    histories: Sequence[History | None] | None = None,
) -> list[Sampled]:
    """Choose one token for each row of float32 ``[rows, vocab]``; ``positions`` are the rows' output
    positions, ``histories`` what came before where a row's sampling needs it.

    The log-probability is that of the chosen token under the raw logits, which are left as they are. A row
    with non-finite logits answers token 0, log-probability 0 and INVALID_FLAG, and does not touch the others;
    so does one whose every token is forbidden, with NOTHING_FLAG beside it. A row that asks for its likeliest
    tokens gets them with their log-probabilities under the raw logits, best first.
    """
    return choose(logits, samplings, positions, histories).answers()


def choose(
    logits: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    histories: Sequence[History | None] | None = None,
) -> Choice:
    """As ``sample``, but what was chosen stays on the device, and nothing waits for it.

    Only where a row cuts by top-p alone the device is waited for: whether its nucleus lies among the likeliest
    ``CANDIDATES`` must be seen.
    """
    adjusted = [i for i, sampling in enumerate(samplings) if sampling.adjusts(positions[i])]
    raw, device = logits, logits.device
    if adjusted:
        logits = _adjust(logits.clone(), adjusted, samplings, positions, histories or [None] * len(samplings))
    peaks, tokens = logits.max(-1)
    # A row's sum is finite exactly when all of it is, short of logits near the end of float32's range.
    normalisers = raw.logsumexp(-1)
    finite = torch.isfinite(normalisers) & torch.isfinite(raw.sum(-1))
    sound = finite & torch.isfinite(peaks) if adjusted else finite
    drawn = [i for i, sampling in enumerate(samplings) if sampling.temperature >= GREEDY_BELOW]
    if drawn:
        rows = upload(drawn, device)
        among = _draw(logits[rows], peaks[rows], [samplings[i] for i in drawn], [positions[i] for i in drawn])
        tokens[rows] = among.clamp_(max=logits.shape[1] - 1)  # of a row that is not sound it may be anything
    logprobs = raw.gather(1, tokens[:, None])[:, 0] - normalisers
    read = [tokens, logprobs, finite, sound]
    asking = [i for i, sampling in enumerate(samplings) if sampling.top_logprobs]
    if asking:
        most, rows = min(max(samplings[i].top_logprobs for i in asking), logits.shape[1]), upload(asking, device)
        values, likeliest = raw[rows].topk(most)
        read += [likeliest, values - normalisers[rows][:, None]]
    return Choice(tokens, samplings, asking, read)


def prompt_scores(logits: Tensor, targets: Sequence[int], top: int) -> bytes:
    """What is told of a prompt's ``targets`` under their rows of float32 ``[targets, vocab]``: entries as in
    ``engine.scores``, with the ``top`` likeliest each. Ties have the better rank.
    """
    chosen = logits.gather(1, torch.tensor(targets, device=logits.device)[:, None])
    normalisers = logits.logsumexp(-1)
    entries = np.empty(len(targets), [("rank", "<u4"), ("pairs", _PAIR, (1 + top,))])
    entries["rank"] = 1 + (logits > chosen).sum(-1).cpu().numpy()
    pairs = entries["pairs"]
    pairs["token"][:, 0], pairs["logprob"][:, 0] = targets, (chosen[:, 0] - normalisers).cpu().numpy()
    if top:
        values, tokens = logits.topk(top)
        pairs["token"][:, 1:] = tokens.cpu().numpy()
        pairs["logprob"][:, 1:] = (values - normalisers[:, None]).cpu().numpy()
    return entries.tobytes()


def _adjust(
    logits: Tensor,
    rows: Sequence[int],
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    histories: Sequence[History | None],
) -> Tensor:
    """Change the ``rows`` of the logits, in place, as their requests ask; the others are not touched."""
    _add_biases(logits, [(i, samplings[i].logit_bias) for i in rows if samplings[i].logit_bias])
    _penalise(logits, [(i, samplings[i], positions[i], histories[i]) for i in rows if samplings[i].penalised])
    forbidden = [(i, _forbidden(samplings[i], positions[i], histories[i])) for i in rows]
    pairs = [(i, token) for i, tokens in forbidden for token in tokens if 0 <= token < logits.shape[1]]
    if pairs:
        at = upload(pairs, logits.device).T
        logits[at[0], at[1]] = -math.inf
    limited = [i for i in rows if samplings[i].allowed_ids]
    if limited:
        bits = [np.frombuffer(samplings[i].allowed_ids, np.uint8) for i in limited]
        masks = [np.unpackbits(b, count=logits.shape[1], bitorder="little") for b in bits]
        allowed, at = upload(np.stack(masks), logits.device).bool(), upload(limited, logits.device)
        logits[at] = logits[at].masked_fill_(~allowed, -math.inf)
    return logits


def _add_biases(logits: Tensor, biases: Sequence[tuple[int, Sequence[tuple[int, float]]]]) -> None:
    entries = [(i, token, bias) for i, row in biases for token, bias in row if 0 <= token < logits.shape[1]]
    if entries:
        rows, tokens, values = zip(*entries, strict=True)
        at = upload((rows, tokens), logits.device)
        logits.index_put_((at[0], at[1]), upload(values, logits.device), accumulate=True)


def _penalise(logits: Tensor, rows: Sequence[tuple[int, Sampling, int, History | None]]) -> None:
    """Only the tokens that were there before are looked at, each once a row."""
    ids, counts, sizes = [], [], []
    for _, _, position, history in rows:
        assert history is not None, "a row with penalties came without its history"
        before = np.array(history.tokens[: history.prompt_tokens + position], np.int64)
        assert len(before) == history.prompt_tokens + position, "a row's history ends before its position"
        unique, where = np.unique(before, return_inverse=True)
        ids.append(unique)
        counts.append(np.bincount(where[history.prompt_tokens :], minlength=len(unique)))
        sizes.append(len(unique))
    if not ids:
        return
    device = logits.device
    tokens, count = torch.from_numpy(np.concatenate(ids)), torch.from_numpy(np.concatenate(counts)).float()
    known = tokens < logits.shape[1]
    each = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(sizes))[known]
    tokens, count = upload(tokens[known], device), upload(count[known], device)
    repeated, frequent, present = (
        upload(torch.tensor(values)[each], device)
        for values in zip(
            *((s.repetition_penalty, s.frequency_penalty, s.presence_penalty) for _, s, _, _ in rows), strict=True
        )
    )
    at = upload(torch.tensor([i for i, *_ in rows])[each], device), tokens
    values = logits[at]
    values = torch.where(values > 0, values / repeated, values * repeated)
    values -= frequent * count
    values -= present * (count > 0)
    logits[at] = values


def _forbidden(sampling: Sampling, position: int, history: History | None) -> list[int]:
    """The ids a row may not choose now: ends that come too early, and what would complete a bad word."""
    tokens = list(sampling.end_ids) if position < sampling.min_tokens else []
    for ids in sampling.bad_ids:
        before = len(ids) - 1
        if before == 0:
            tokens.append(ids[0])
        elif before <= position:
            assert history is not None, "a row with bad words came without its history"
            now = history.prompt_tokens + position
            if tuple(history.tokens[now - before : now]) == ids[:-1]:
                tokens.append(ids[-1])
    return tokens


def _draw(logits: Tensor, peaks: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """Tokens by inversion of each row's cut distribution at the row's own random number: int64 ``[rows]``."""
    temperatures = upload([s.temperature for s in samplings], logits.device)
    scaled = (logits - peaks[:, None]).div_(temperatures[:, None])
    weights = scaled.exp()
    least = None
    if any(s.min_p > 0 for s in samplings):
        logarithms = [math.log(s.min_p) if s.min_p > 0 else -math.inf for s in samplings]
        least = upload(logarithms, logits.device)[:, None]
        weights.masked_fill_(scaled < least, 0.0)
    cut = [i for i, s in enumerate(samplings) if s.top_p < 1 or 0 < s.top_k < logits.shape[1]]
    if cut:
        floors = torch.full_like(peaks, -math.inf)
        at = upload(cut, logits.device)
        floors[at] = _floors(scaled[at], weights[at], None if least is None else least[at], [samplings[i] for i in cut])
        weights.masked_fill_(scaled < floors[:, None], 0.0)
    mass = weights.cumsum(-1, dtype=torch.float64)
    numbers = uniforms([s.seed for s in samplings], positions, [s.choice for s in samplings])
    targets = upload(numbers, logits.device)[:, None] * mass[:, -1:]
    return torch.searchsorted(mass, targets, right=True)[:, 0]


def _floors(scaled: Tensor, weights: Tensor, least: Tensor | None, samplings: Sequence[Sampling]) -> Tensor:
    """The least scaled logit each row keeps: of its best top-k, from ``least`` [rows, 1] up, those that make
    up top-p of their mass.
    """
    vocab, device = scaled.shape[1], scaled.device
    most = [s.top_k if 0 < s.top_k < vocab else vocab for s in samplings]
    open_ended = [i for i, count in enumerate(most) if count == vocab]
    counts, shares = upload(most, device), upload([s.top_p for s in samplings], device, torch.float64)
    endless = counts == vocab
    whole = torch.zeros_like(shares)
    if open_ended:
        at = upload(open_ended, device)
        whole[at] = weights[at].cumsum(-1, dtype=torch.float64)[:, -1]
    width = max(min(CANDIDATES, vocab) if count == vocab else count for count in most)
    while True:
        top = scaled.topk(width).values
        within = torch.arange(width, device=device) < counts[:, None]
        counted = within if least is None else within & (top >= least)
        kept = torch.where(counted, top.exp(), 0.0).double()
        through = kept.cumsum(-1)
        total = torch.where(endless, whole, through[:, -1])
        nucleus = within & (through - kept < (shares * total)[:, None])
        nucleus[:, 0] = True
        # Where no top-k ends it, a nucleus that fills the candidates may go on beyond them.
        if width == vocab or not open_ended or not (nucleus[:, -1] & endless).any():
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


def uniforms(seeds: Sequence[int], positions: Sequence[int], choices: Sequence[int] | None = None) -> np.ndarray:
    """One number strictly between 0 and 1 for each (seed, output position, choice), float64 of 32 random bits.

    The seed, modulo 2**64, is Philox's key; the position and the choice (0 where none are given) its counter.
    """
    seed = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], np.uint64)
    position = np.array(positions, np.uint64)
    nothing = np.zeros_like(position)
    choice = nothing if choices is None else np.array(choices, np.uint64)
    counters = np.stack((position & _LOW, position >> _SHIFT, choice, nothing), 1)
    words = philox4x32(counters, np.stack((seed & _LOW, seed >> _SHIFT), 1))
    return (words[:, 0].astype(np.float64) + 0.5) / 4294967296.0
