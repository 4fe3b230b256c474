"""Steps by the C++ kernels: what of a row the kernels do themselves, and what is left to torch.

They choose greedily or by temperature with top-k, top-p and min-p. A row whose logits are to be changed first, or that
wants the likeliest tokens, goes through ``workers.sampler``; which way a row goes depends on that row alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from baton.engine.batch import END_FLAG, INVALID_FLAG, Sampled, Sampling, StepRow
from baton.kernels.native import Team
from baton.kernels.reference import padded_blocks
from baton.workers.cache import KvPool
from baton.workers.model.native import DRAW, NativeLlama, Outcome
from baton.workers.model.packed import PackedWeights
from baton.workers.sampler import GREEDY_BELOW, prompt_scores, sample, uniforms

SCORED_AT_ONCE = 32  # tokens of a prompt


class NativeSteps:
    """Computes steps at once: what ``launch`` gives back is the answer."""

    asynchronous = False
    padded = staticmethod(padded_blocks)  # these kernels gather nothing, and need less

    def __init__(self, weights: PackedWeights, library: ctypes.CDLL, team: Team, pool: KvPool, vocab: int) -> None:
        self._model = NativeLlama(weights, library, team, pool.keys, pool.values, vocab)
        self._vocab = vocab

    def launch(self, rows: Sequence[StepRow], layers: int | None = None) -> list[Sampled]:
        """Compute every row; one answer for each that samples, in order."""
        sampled = [row for row in rows if row.sample]
        special = [i for i, row in enumerate(sampled) if _is_special(row)]
        outcome = self._model.step(rows, _draws(sampled, special), layers)
        answers = _answers(outcome, sampled)
        if special:
            self._choose(special, sampled, outcome, answers)
        if any(row.targets for row in rows):
            first = 0
            for row in rows:
                self._score(row, first)
                first += len(row.tokens)
        return answers

    def phases_s(self) -> dict[str, float]:
        """See ``NativeLlama.phases_s``."""
        return self._model.phases_s()

    def collect(self, launched: list[Sampled]) -> list[Sampled]:
        """What was chosen."""
        return launched

    def _choose(self, special: list[int], sampled: list[StepRow], outcome: Outcome, answers: list[Sampled]) -> None:
        """Have torch answer the ``special`` ones of the rows."""
        theirs = [sampled[i] for i in special]
        with torch.inference_mode():
            chosen = sample(
                outcome.logits[special, : self._vocab],
                [row.sampling for row in theirs],
                [row.position for row in theirs],
                [row.history for row in theirs],
            )
        for i, answer in zip(special, chosen, strict=True):
            answers[i] = answer

    def _score(self, row: StepRow, first: int) -> None:
        """Leave a row its prompt's log-probabilities; a few tokens at a time, so that few logits are there at once."""
        scores, top = [], row.sampling.prompt_logprobs or 0
        for begin in range(0, len(row.targets), SCORED_AT_ONCE):
            targets = row.targets[begin : begin + SCORED_AT_ONCE]
            logits = self._model.more_logits(range(first + begin, first + begin + len(targets))).logits
            with torch.inference_mode():
                scores.append(prompt_scores(logits[: len(targets), : self._vocab], targets, top))
        row.prompt_scores = b"".join(scores)


def _is_special(row: StepRow) -> bool:
    return bool(row.sampling.top_logprobs) or row.sampling.adjusts(row.position)


def _draws(rows: Sequence[StepRow], special: Sequence[int]) -> bytearray:
    """What the kernels are to do for each row; nothing where all choose greedily."""
    elsewhere = set(special)
    drawn = [i for i, row in enumerate(rows) if row.sampling.temperature >= GREEDY_BELOW and i not in elsewhere]
    if not drawn:
        return bytearray()
    draws = bytearray(len(rows) * DRAW.size)
    theirs: list[Sampling] = [rows[i].sampling for i in drawn]
    numbers = uniforms([s.seed for s in theirs], [rows[i].position for i in drawn], [s.choice for s in theirs])
    for i, s, number in zip(drawn, theirs, numbers.tolist(), strict=True):
        DRAW.pack_into(draws, i * DRAW.size, number, s.temperature, s.top_p, s.min_p, max(s.top_k, 0))
    return draws


def _answers(outcome: Outcome, rows: Sequence[StepRow]) -> list[Sampled]:
    answers = []
    for (token, logprob, _, finite), row in zip(outcome.choices, rows, strict=True):
        if finite:
            answers.append(Sampled(token, logprob, END_FLAG if token in row.sampling.end_ids else 0))
        else:
            answers.append(Sampled(0, 0.0, INVALID_FLAG))
    return answers
