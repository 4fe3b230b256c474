"""What one step of a worker computes and what comes of it: plain structs, without behaviour.

The scheduler's side fills in ``StepRow``s, ``workers.runner`` computes them and answers with ``Sampled``s.
Nothing here knows torch, a model or a clock.
"""

from __future__ import annotations

import msgspec

END_FLAG = 1
"""The token is one of the request's end ids."""
INVALID_FLAG = 2
"""The row's logits were not finite; token and log-probability mean nothing."""


class Sampling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How one request's tokens are chosen; ``temperature`` below 1e-5 is greedy, ``top_k`` below 1 is off."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    end_ids: tuple[int, ...]  # ids that set END_FLAG; empty where the end of sequence is ignored


class StepRow(msgspec.Struct, gc=False):
    """One sequence's part of a step: the tokens to compute and where their keys and values belong."""

    slot: int
    tokens: list[int]  # the ids computed in this step
    start: int  # absolute position of the first of them
    blocks: list[int]  # block table of the sequence, covering start + len(tokens)
    sample: bool  # whether a token is sampled after the last of them
    position: int  # output position of that token (0 is the first generated)
    sampling: Sampling


class Sampled(msgspec.Struct, gc=False):
    """The token chosen for a row, its log-probability under the raw logits, and the flags above."""

    token: int
    logprob: float
    flags: int
