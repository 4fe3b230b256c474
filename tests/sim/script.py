"""What the clients of one seed ask for, how the world is cut, and the true answer to every request.

The reference is computed straight from the script: no core, no ring, no increments.
"""

from __future__ import annotations

import codecs
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import msgspec

from baton.engine.batch import Sampling
from baton.engine.limits import Limits
from baton.engine.policies import Policies
from baton.engine.text import TokenTable
from baton.ipc.frames import Candidate, Params, Prompt, PromptScored
from baton.ipc.records import ring_holds
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


def make_shape(rng: random.Random) -> Shape:
    """Cut a world."""
    block_tokens = rng.choice((1, 4, 4, 8))
    capacity = rng.choice((40, 64, 200))
    poison = rng.random() < 0.15
    tokens_per_row_max = 1 if poison else rng.choice((1, 1, 2, 4))
    limits = Limits(
        mailbox_tokens_max=rng.choice((1, 2, 4, 1024)),
        step_tokens_max=rng.choice((3, 8, 64)),
        running_requests_max=rng.choice((2, 4, 16)),
        requests_per_frontend_max=rng.choice((2, 3, 6, 16)),
        request_spans_max=rng.choice((2, 64)),
        sweep_interval_s=0.02,
        stalled_s_max=0.4,
        answer_s_max=0.3,
        lives_max=100,
        resume_s_max=0.1,
        idempotency_s_max=0.05,
        lone_deaths_max=2 if poison else 100,
        predictor_lengths_min=3,
    )
    return Shape(
        limits=limits,
        frontends=rng.choice((1, 2, 2)),
        tokenizers=rng.choice((1, 1, 2, 3)),
        blocks=-(-capacity // block_tokens),
        block_tokens=block_tokens,
        context_tokens=rng.choice((32, 48)),
        mean_tokens=rng.choice((6, 20)),
        token_ring_bytes=rng.choice((1024, 8192)) if tokens_per_row_max == 1 else 16384,
        plan_ring_bytes=8192,
        slow_links=rng.random() < 0.5,
        repeats=rng.random() < 0.3,
        faulty={7: rng.randrange(4)},
        poison=poison,
        tokens_per_row_max=tokens_per_row_max,
    )


def with_swap(seed: int, shape: Shape, limits: Limits) -> Shape:
    """The same world under these limits; two of three have swap space, whose use seems cheap, dear, or now one and now
    the other. It has chance of its own, so that the rest of the world stays as it is.
    """
    rng = random.Random(f"swap {seed}")
    if rng.random() < 1 / 3:
        return replace(shape, limits=limits)
    limits = msgspec.structs.replace(limits, swap_prior_bytes_per_s=rng.choice((1, 300, 1 << 40, 1 << 40)))
    return replace(shape, limits=limits, host_blocks=rng.choice((2, shape.blocks // 2, 4 * shape.blocks)))


def make_wishes(
    rng: random.Random, shape: Shape, count: int, encode: Callable[[str], list[int]] = tokenize
) -> list[Wish]:
    """What ``count`` clients want; ``encode`` is how the world at hand makes ids of a prompt."""
    return [_wish(rng, shape, number, encode) for number in range(count)]


def rank_some(seed: int, wishes: list[Wish], shape: Shape) -> list[Wish]:
    """Some of those who want log-probabilities want the likeliest tokens too, where the token ring has room for them.

    It has chance of its own, so that the other wishes stay as they are.
    """
    rng = random.Random(f"rank {seed}")
    if shape.tokens_per_row_max > 1 or shape.token_ring_bytes <= 1024 or shape.limits.top_logprobs_max < RIVALS:
        return wishes
    ranked: list[Wish] = []
    for wish in wishes:
        if wish.params.logprobs and rng.random() < 0.5:
            wish = replace(wish, params=msgspec.structs.replace(wish.params, top_logprobs=rng.randint(1, RIVALS)))
        ranked.append(wish)
    return ranked


def end_some(seed: int, wishes: list[Wish]) -> list[Wish]:
    """Some name tokens that end their answer, want so many tokens at least, or the stop string in the text.

    It has chance of its own, so that the other wishes stay as they are.
    """
    rng = random.Random(f"end {seed}")
    ended: list[Wish] = []
    for wish in wishes:
        params = wish.params
        if rng.random() < 0.3:
            ids = tuple(rng.sample(range(VOCAB), rng.randint(1, 3)))
            params = msgspec.structs.replace(params, stop_token_ids=ids)
        if rng.random() < 0.3:
            most = params.max_tokens if params.max_tokens is not None else 12
            params = msgspec.structs.replace(params, min_tokens=rng.randint(1, most))
        if rng.random() < 0.4:
            params = msgspec.structs.replace(params, include_stop=True)
        ended.append(replace(wish, params=params))
    return ended


def make_ranked_wishes(
    seed: int, rng: random.Random, shape: Shape, encode: Callable[[str], list[int]] = tokenize
) -> list[Wish]:
    """What the clients of one world want, some of them the likeliest tokens, some to be told of their
    prompt, some an end of their own.
    """
    wishes = rank_some(seed, make_wishes(rng, shape, rng.randrange(6, 15), encode), shape)
    return end_some(seed, ask_about_prompts(seed, wishes, shape))


def ask_about_prompts(seed: int, wishes: list[Wish], shape: Shape) -> list[Wish]:
    """In every other world some clients want to know how likely each token of their prompt was.

    It has chance of its own, so that the other wishes stay as they are.
    """
    rng, limits = random.Random(f"prompt {seed}"), shape.limits
    rows = (limits.running_requests_max * shape.tokens_per_row_max, RIVALS)
    if rng.random() < 0.5 or not ring_holds(shape.token_ring_bytes, *rows, limits.step_tokens_max, RIVALS):
        return wishes
    return [
        replace(wish, params=msgspec.structs.replace(wish.params, prompt_logprobs=rng.randint(0, RIVALS)))
        if rng.random() < 0.4
        else wish
        for wish in wishes
    ]


def keep_some(seed: int, wishes: list[Wish], shape: Shape) -> list[Wish]:
    """In every other world some wishes are kept: repeats of one key, and clients that lose their connection.

    It has chance of its own, so that the other worlds stay as they are.
    """
    rng = random.Random(f"keep {seed}")
    if rng.random() < 1 / 2:
        return wishes
    kept: list[Wish] = []
    for wish in wishes:
        fate, twin = rng.random(), next((other for other in reversed(kept) if other.key), None)
        plain = replace(wish, answers=True, deadline_after_ns=None)
        if fate < 0.3 and twin is not None:
            same = {"prompt": twin.prompt, "prompt_ids": twin.prompt_ids, "params": twin.params, "key": twin.key}
            wish = replace(plain, **same, at_ns=twin.at_ns + rng.randrange(30 * MS))  # type: ignore[arg-type]
            if not twin.drops and rng.random() < 0.5:
                away = (rng.randrange(20 * MS), rng.randrange(60 * MS), rng.randrange(shape.frontends))
                kept[kept.index(twin)] = replace(twin, resumable=True, drops=(away,))
            if rng.random() < 0.5:
                wish = replace(wish, cancel_after_ns=rng.randrange(20 * MS), wants_end=rng.random() < 0.5)
        elif fate < 0.5:
            wish = replace(plain, key=f"key {wish.number}")
        if fate < 0.45 or fate > 0.7:
            drops = [(rng.randrange(60 * MS), _away(rng), rng.randrange(shape.frontends)) for _ in range(3)]
            drops = drops[: rng.randrange(1, 4)]
            wish = replace(wish, answers=True, deadline_after_ns=None, resumable=True, drops=tuple(sorted(drops)))
        kept.append(wish)
    return kept


def _away(rng: random.Random) -> int:
    if rng.random() < 0.2:
        return NEVER
    return rng.randrange(30 * MS) if rng.random() < 0.8 else rng.randrange(300 * MS)


def _wish(rng: random.Random, shape: Shape, number: int, encode: Callable[[str], list[int]]) -> Wish:
    length = rng.choice(
        (1, 3, 0 if rng.random() < 0.1 else 2, rng.randrange(1, 24), rng.randrange(1, 40) if rng.random() < 0.2 else 2)
    )
    text = "".join(rng.choice("abcdefghij klmnop") for _ in range(length))
    as_ids = rng.random() < 0.3
    prompt = Prompt(token_ids=encode(text)) if as_ids else Prompt(text=text)
    params = Params(
        max_tokens=rng.choice((1, 2, rng.randrange(1, 20), rng.randrange(1, 20), None)),
        seed=rng.randrange(8, 1 << 30) if rng.random() < (0.8 if shape.poison else 0.95) else rng.choice((POISON, 7)),
        ignore_eos=rng.random() < 0.4,
        skip_special_tokens=rng.random() < 0.8,
        logprobs=rng.random() < 0.3,
    )
    wish = Wish(
        number=number,
        at_ns=rng.randrange(60 * MS),
        frontend=rng.randrange(shape.frontends),
        prompt=prompt,
        prompt_ids=encode(text),
        params=params,
        reads=rng.choice(("fast", "fast", "slow", "slow", "stalled" if rng.random() < 0.3 else "fast")),
        answers=rng.random() < 0.95,
        cancel_after_ns=rng.randrange(rng.choice((1, 60)) * MS) if rng.random() < 0.3 else None,
        wants_end=rng.random() < 0.5,
        deadline_after_ns=rng.randrange(1, 80) * MS if rng.random() < 0.05 else None,
    )
    fate = rng.random()
    if fate < 0.4:
        return _with_stops(rng, wish, shape)
    return _exact(wish, shape) if fate < 0.6 else wish


def _exact(wish: Wish, shape: Shape) -> Wish:
    """The same wish with as many tokens at most as its answer has, so that two things end it at once."""
    tokens = len(reference(wish, shape).ids)
    return replace(wish, params=msgspec.structs.replace(wish.params, max_tokens=max(1, tokens)))


def _with_stops(rng: random.Random, wish: Wish, shape: Shape) -> Wish:
    """The same wish with stop strings, most of which do occur."""
    text = reference(wish, shape).text.replace("\ufffd", "")
    stops = ["zzz"]
    if len(text) > 2:
        at = rng.randrange(len(text) - 1)
        stops.append(text[at : at + rng.randrange(1, 5)])
    if rng.random() < 0.3:
        stops.append(rng.choice(("a", "cat", "é", "한", "<", "\n", "ab")))
    rng.shuffle(stops)
    params = msgspec.structs.replace(wish.params, stop=tuple(stops))
    return replace(wish, params=params)
