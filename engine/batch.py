"""One step of the model as the runner sees it: which tokens of which sequences, and how the next one is chosen.

Pure data, shared by the worker's core, the real runner and the scripted one. Nothing here knows torch.
"""

from __future__ import annotations

import msgspec

from baton.ipc.frames import Params

END_FLAG = 1
INVALID_FLAG = 2
UNKNOWN = -1  # in place of a token that the step before is still sampling: the device has it
#: beside INVALID_FLAG: the logits were sound, but the request's own parameters forbid every token
NOTHING_FLAG = 4


class Sampling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How one request's tokens are chosen; fixed at admission.

    ``temperature`` below 1e-5 is greedy; ``top_k`` 0 or -1 is off; ``end_ids`` are the ids that set the end flag
    (empty where the end of sequence is ignored) and are not chosen at output positions below ``min_tokens``.
    ``allowed_ids`` is a bit an id, the lowest of the first byte is id 0; ``bad_ids`` are sequences of ids whose last
    one is not chosen after the others. With each token come ``top_logprobs`` of the likeliest ones, with each of the
    prompt's its own log-probability and ``prompt_logprobs`` of the likeliest, unless that is None.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    end_ids: tuple[int, ...]
    min_tokens: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: bytes = b""
    bad_ids: tuple[tuple[int, ...], ...] = ()
    choice: int = 0
    top_logprobs: int = 0
    prompt_logprobs: int | None = None

    @property
    def penalised(self) -> bool:
        """Whether tokens that were there before are more or less likely for it."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def needs_history(self) -> bool:
        """Whether the next choice depends on which tokens came before, beyond what the model makes of them."""
        return self.penalised or any(len(ids) > 1 for ids in self.bad_ids)

    def adjusts(self, position: int) -> bool:
        """Whether the logits are changed before the token at this output position is chosen."""
        too_early = position < self.min_tokens and bool(self.end_ids)
        return bool(too_early or self.logit_bias or self.allowed_ids or self.bad_ids or self.penalised)


def sampling_of(params: Params, model_end_ids: tuple[int, ...]) -> Sampling:
    """What a request's parameters mean for the choice of its tokens, with a model that ends by ``model_end_ids``."""
    p = params
    return Sampling(
        p.temperature,
        p.top_p,
        p.top_k,
        p.seed,
        p.stop_token_ids if p.ignore_eos else (*model_end_ids, *p.stop_token_ids),
        p.min_tokens,
        p.min_p,
        p.presence_penalty,
        p.frequency_penalty,
        p.repetition_penalty,
        p.logit_bias,
        p.allowed_ids,
        p.bad_ids,
        p.choice,
        p.top_logprobs,
        p.prompt_logprobs,
    )


class History(msgspec.Struct, gc=False):
    """What came before a choice: a reference to the sequence's tokens, prompt first. It may have grown since."""

    tokens: list[int]
    prompt_tokens: int


class StepRow(msgspec.Struct, gc=False):
    """One sequence's part of a step: ``tokens`` are computed at absolute positions ``start, start + 1, ...``.

    ``blocks`` is the sequence's block table and covers ``start + len(tokens)`` tokens. With ``sample`` one token is
    chosen after the last of them; ``position`` is its place in the output (0 is the first generated token) and
    ``history`` what came before, where the sampling needs it. The last token may be ``UNKNOWN`` where a step is
    launched before the one before it was collected. ``targets`` are the prompt's own tokens after each of the first
    ``tokens``, where their log-probabilities are wanted; the runner leaves ``prompt_scores`` for them, entries as in
    ``engine.scores``.
    """

    slot: int
    tokens: list[int]
    start: int
    blocks: list[int]
    sample: bool
    position: int
    sampling: Sampling
    history: History | None = None
    targets: list[int] = []
    prompt_scores: bytes = b""


class Sampled(msgspec.Struct, gc=False):
    """A chosen token and its log-probability.

    ``flags`` is an or of END_FLAG, INVALID_FLAG (no token could be chosen: non-finite logits) and NOTHING_FLAG.
    ``tops`` are the likeliest tokens, packed as in ``engine.scores``;
    ``more`` are the tokens after it that the same step yielded, as speculation does: every one of them but the last
    has been computed, so that the cache holds its keys and values too.
    """

    token: int
    logprob: float
    flags: int
    tops: bytes = b""
    more: tuple[Sampled, ...] = ()
