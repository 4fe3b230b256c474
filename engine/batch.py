"""One step of the model as the runner sees it: which tokens of which sequences, and how the next one is chosen.

Pure data, shared by the worker's core, the real runner and the scripted one. Nothing here knows torch.
"""

from __future__ import annotations

import msgspec

END_FLAG = 1
INVALID_FLAG = 2


class Sampling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How one request's tokens are chosen; fixed at admission.

    ``temperature`` below 1e-5 is greedy; ``top_k`` 0 or -1 is off; ``end_ids`` are the ids that set the end flag
    (empty where the end of sequence is ignored). With each token come ``top_logprobs`` of the likeliest ones.
    ``choice`` tells the random numbers of one request's choices apart.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    end_ids: tuple[int, ...]
    top_logprobs: int = 0
    choice: int = 0


class StepRow(msgspec.Struct, gc=False):
    """One sequence's part of a step: ``tokens`` are computed at absolute positions ``start, start + 1, ...``.

    ``blocks`` is the sequence's block table and covers ``start + len(tokens)`` tokens. With ``sample`` one token is
    chosen after the last of them; ``position`` is its place in the output (0 is the first generated token).
    """

    slot: int
    tokens: list[int]
    start: int
    blocks: list[int]
    sample: bool
    position: int
    sampling: Sampling


class Sampled(msgspec.Struct, gc=False):
    """A chosen token and its log-probability; ``flags`` is an or of END_FLAG and INVALID_FLAG (non-finite logits).

    ``tops`` are the likeliest tokens, packed as in ``engine.scores``;
    ``more`` are the tokens after it that the same step yielded, as speculation does: every one of them but the last
    has been computed, so that the cache holds its keys and values too.
    """

    token: int
    logprob: float
    flags: int
    tops: bytes = b""
    more: tuple[Sampled, ...] = ()
