"""What the clients of one seed ask for, and what they do meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import msgspec

from baton.ipc.frames import Params, Prompt
from baton.ipc.records import ring_holds
from tests.sim.script import MS, NEVER, POISON, RIVALS, VOCAB, Shape, Wish, reference, tokenize


def make_wishes(
    rng: random.Random, shape: Shape, count: int, encode: Callable[[str], list[int]] = tokenize
) -> list[Wish]:
    """What ``count`` clients want; ``encode`` is how the world at hand makes ids of a prompt."""
    return [_wish(rng, shape, number, encode) for number in range(count)]


def begin_alike(seed: int, wishes: list[Wish], encode: Callable[[str], list[int]]) -> list[Wish]:
    """In every other world most prompts begin with the same text or with a part of it, some say nothing else.

    It has chance of its own, so that the other worlds stay as they are.
    """
    rng = random.Random(f"alike {seed}")
    if rng.random() < 1 / 2:
        return wishes
    common = encode("".join(rng.choice("abcdefghij") for _ in range(rng.randrange(4, 20))))
    alike: list[Wish] = []
    for wish in wishes:
        if rng.random() < 0.7:
            own = rng.choice(([], wish.prompt_ids, wish.prompt_ids))
            ids = common[: rng.choice((len(common), len(common), rng.randrange(1, len(common))))] + own
            wish = replace(wish, prompt=Prompt(token_ids=ids), prompt_ids=ids)
        alike.append(wish)
    return alike


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
    """What the clients of one world want, some of them the same beginning, some the likeliest tokens, some to be
    told of their prompt, some an end of their own.
    """
    wishes = begin_alike(seed, make_wishes(rng, shape, rng.randrange(6, 15), encode), encode)
    wishes = rank_some(seed, wishes, shape)
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
