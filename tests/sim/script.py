"""The words of the simulator: a world's shape, what a client wants, and the true answer to every request.

The reference is computed straight from the script: no core, no ring, no increments.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from itertools import pairwise

from baton.engine.batch import Sampling
from baton.engine.limits import Limits
from baton.engine.policies import Policies
from baton.engine.text import TokenTable
from baton.ipc.frames import Candidate, Params, Prompt, PromptScored
from baton.workers.fake import choose, follow, prompt_entry

MS = 1_000_000
NEVER = -1
END = 1
_SMILE, _HAN = "😀".encode(), "한".encode()
PIECES = [
    *(b"<s>", b"</s>", b"a", b" b", b"ab", b"ba ", b"the", b" cat", b"s", b"\n", b"xyz", b"1", b"22", "é".encode()),
    *("日本".encode(), _SMILE[:2], _SMILE[2:], _HAN[:1], _HAN[1:2], _HAN[2:], "ö".encode()[:1], "ö".encode()[1:]),
    *(b"ca", b"t ", b"<", b">", b"", b"end", b" of", b" line"),
]
#: ids after those of the pieces, of which level two makes prompts: a byte each
BYTES = [bytes([byte]) for byte in range(256) if bytes([byte]) not in PIECES]
TABLE = TokenTable(PIECES, frozenset({0, END}))
VOCAB = len(PIECES)
POISON = 6
RIVALS = 2


@dataclass(frozen=True)
class Shape:
    """How one world is cut: deliberately small, so that every bound is met."""

    limits: Limits
    frontends: int
    tokenizers: int
    blocks: int
    block_tokens: int
    context_tokens: int
    mean_tokens: int
    token_ring_bytes: int
    plan_ring_bytes: int
    slow_links: bool
    repeats: bool
    faulty: dict[int, int]
    poison: bool  # the worker dies of requests with seed POISON, at their second token
    tokens_per_row_max: int  # so many tokens a step may yield for one request
    ranks: int = 1
    policies: Policies = field(default_factory=Policies)
    host_blocks: int = 0

    @property
    def capacity(self) -> int:
        """Tokens the whole pool holds."""
        return self.blocks * self.block_tokens


@dataclass(frozen=True)
class Wish:
    """One client: what it asks, how it reads, and when it gives up."""

    number: int
    at_ns: int
    frontend: int
    prompt: Prompt
    prompt_ids: list[int]
    params: Params
    reads: str  # fast, slow, stalled
    answers: bool
    cancel_after_ns: int | None
    wants_end: bool
    deadline_after_ns: int | None
    key: str = ""
    resumable: bool = False
    #: when the connection is lost, how long until the client is back, and at which frontend
    drops: tuple[tuple[int, int, int], ...] = ()

    @property
    def kept(self) -> bool:
        """Whether its answer has a life of its own."""
        return bool(self.key) or self.resumable


@dataclass(frozen=True)
class Truth:
    """The true end of a request that nobody disturbs."""

    reason: str
    stop_reason: str | int | None = None
    ids: list[int] = field(default_factory=list)
    text: str = ""


def tokenize(text: str) -> list[int]:
    """The tokenizing double: one id a character."""
    return [2 + ord(char) % (VOCAB - 2) for char in text]


def certain(ids: list[int], skip_special: bool) -> str:
    """The text that is certain once ``ids`` are known; bytes of an unfinished character are not."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(_bytes(ids, skip_special))


def whole(ids: list[int], skip_special: bool) -> str:
    """The text of ``ids`` and nothing after them."""
    return _bytes(ids, skip_special).decode("utf-8", "replace")


def _bytes(ids: list[int], skip_special: bool) -> bytes:
    return b"".join(PIECES[token] for token in ids if not (skip_special and token in TABLE.special))


def reference(wish: Wish, shape: Shape) -> Truth:
    """The true answer, token by token from the script."""
    params, prompt = wish.params, len(wish.prompt_ids)
    room = min(shape.context_tokens, shape.capacity)
    limit = params.max_tokens if params.max_tokens is not None else max(1, room - prompt)
    too_long = prompt + (params.max_tokens or 0) > shape.context_tokens or prompt >= shape.context_tokens
    if not prompt or too_long or prompt + limit > shape.capacity:
        return Truth("refused")
    sampling = sampling_of(params)
    state, ids = 0, list[int]()
    for token in wish.prompt_ids:
        state = follow(state, token)
    while True:
        poisoned = shape.poison and params.seed == POISON and len(ids) == 1
        if poisoned or shape.faulty.get(params.seed) == len(ids):
            return Truth("error", None, ids, whole(ids, params.skip_special_tokens))
        token = choose(state, sampling, VOCAB, shape.mean_tokens, len(ids))
        ids.append(token)
        state = follow(state, token)
        shown = ids[:-1] if token in params.stop_token_ids and not params.include_stop else ids
        found = _stops_with_the_last(shown, params) if shown is ids and len(ids) > params.min_tokens else []
        if found:
            at, stop = min(found, key=lambda match: match[0])
            text = certain(ids, params.skip_special_tokens)
            return Truth("stop", stop, ids, text[: at + len(stop)] if params.include_stop else text[:at])
        if token in sampling.end_ids or len(ids) == limit:
            reason = "stop" if token in sampling.end_ids else "length"
            named = token in params.stop_token_ids and (token != END or params.ignore_eos)
            return Truth(reason, token if named else None, ids, whole(shown, params.skip_special_tokens))


def _stops_with_the_last(ids: list[int], params: Params) -> list[tuple[int, str]]:
    """The stop strings that are complete with the last token, and where they begin."""
    text, before = (certain(known, params.skip_special_tokens) for known in (ids, ids[:-1]))
    starts = ((text.find(stop, max(0, len(before) - len(stop) + 1)), stop) for stop in params.stop)
    return [(at, stop) for at, stop in starts if at >= 0]


def sampling_of(params: Params) -> Sampling:
    """How the script samples for these parameters."""
    end_ids = params.stop_token_ids if params.ignore_eos else (END, *params.stop_token_ids)
    cuts = (params.temperature, params.top_p, params.top_k, params.seed)
    return Sampling(*cuts, end_ids, params.min_tokens, top_logprobs=params.top_logprobs)


def prompt_scores(wish: Wish) -> list[PromptScored]:
    """What its client must be told of the prompt."""
    top, state, told, pieces = wish.params.prompt_logprobs, 0, list[PromptScored](), [*PIECES, *BYTES]
    if top is None:
        return told
    for before, token in pairwise(wish.prompt_ids):
        state = follow(state, before)
        rank, ((_, logprob), *rivals) = prompt_entry(state, token, top, VOCAB)
        likeliest = [Candidate(rival, score, pieces[rival]) for rival, score in rivals]
        told.append(PromptScored(token, logprob, pieces[token], rank, likeliest))
    return told
