"""How a request's tokens are to be chosen and what ends them: every parameter of that checked against its range.

One part of the validator. What passes here costs bounded memory and time wherever it goes; the engine is never asked
whether it makes sense.
"""

from __future__ import annotations

import re
import secrets

from baton.engine.limits import Limits
from baton.frontends.errors import bad_request
from baton.frontends.fields import Fields
from baton.ipc.frames import Params
from baton.workers.config import Card

#: OpenAI's ranges
PENALTY_MAX = 2.0
BIAS_MAX = 100.0
#: so that no logit leaves the range of float32
REPETITION_MIN, REPETITION_MAX = 0.01, 100.0

_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def read_sampling(
    fields: Fields, card: Card, limits: Limits, max_tokens: int | None, top_logprobs: int | None
) -> Params:
    """The parameters of choosing and of ending; ``Refused`` names the first that is wrong.

    A seed may be any signed 64-bit number; without one a random one is fixed here, so that whoever goes on with the
    request goes on with the same random numbers.
    """
    seed = fields.integer("seed", -(1 << 63), (1 << 63) - 1)
    top_k = fields.integer("top_k", -1, None) or 0
    low, high = -PENALTY_MAX, PENALTY_MAX
    return Params(
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 0.0, 2.0, 1.0),
        top_p=fields.number("top_p", 0.0, 1.0, 1.0, above=True),
        top_k=min(max(top_k, 0), card.vocab),
        min_p=fields.number("min_p", 0.0, 1.0, 0.0),
        presence_penalty=fields.number("presence_penalty", low, high, 0.0),
        frequency_penalty=fields.number("frequency_penalty", low, high, 0.0),
        repetition_penalty=fields.number("repetition_penalty", REPETITION_MIN, REPETITION_MAX, 1.0),
        seed=secrets.randbits(64) if seed is None else seed % (1 << 64),
        stop=_stop(fields, limits),
        stop_token_ids=_ids(fields, "stop_token_ids", card, limits.stop_token_ids_max),
        include_stop=fields.boolean("include_stop_str_in_output"),
        ignore_eos=fields.boolean("ignore_eos"),
        min_tokens=_min_tokens(fields, card, max_tokens),
        logit_bias=_logit_bias(fields, card, limits),
        allowed_ids=_allowed(fields, card, limits),
        bad_words=_bad_words(fields, limits),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs or 0,
    )


def _stop(fields: Fields, limits: Limits) -> tuple[str, ...]:
    if "stop" not in fields:
        return ()
    if fields.raws["stop"].startswith(b'"'):
        strings = [fields.decode("stop", str)]
    else:
        strings = fields.strings("stop", limits.stop_strings_max)
    for string in strings:
        if not string:
            raise bad_request("stop strings must not be empty", "stop")
        if len(string) > limits.stop_string_chars_max:
            most = limits.stop_string_chars_max
            raise bad_request(f"a stop string has {len(string)} characters, the limit is {most}", "stop")
    return tuple(strings)


def _bad_words(fields: Fields, limits: Limits) -> tuple[str, ...]:
    if "bad_words" not in fields:
        return ()
    words = fields.strings("bad_words", limits.bad_words_max)
    for word in words:
        if not word.strip():
            raise bad_request("bad_words must not be empty or all space", "bad_words")
        if len(word) > limits.bad_word_chars_max:
            most = limits.bad_word_chars_max
            raise bad_request(f"one of bad_words has {len(word)} characters, the limit is {most}", "bad_words")
    return tuple(dict.fromkeys(words))


def _min_tokens(fields: Fields, card: Card, max_tokens: int | None) -> int:
    least = fields.integer("min_tokens", 0, card.context_tokens_max) or 0
    if max_tokens is not None and least > max_tokens:
        raise bad_request(f"min_tokens is {least}, more than max_tokens, {max_tokens}", "min_tokens")
    return least


def _ids(fields: Fields, name: str, card: Card, most: int) -> tuple[int, ...]:
    if name not in fields:
        return ()
    ids = fields.integers(name, most)
    if ids and (min(ids) < 0 or max(ids) >= card.vocab):
        raise bad_request(f"{name} has an id outside the vocabulary of {card.vocab}", name)
    return tuple(dict.fromkeys(ids))


def _allowed(fields: Fields, card: Card, limits: Limits) -> bytes:
    """A bit for each id of the vocabulary, the lowest of the first byte is id 0."""
    name = "allowed_token_ids"
    if name not in fields:
        return b""
    size, most = -(-card.vocab // 8), limits.allowed_ids_bytes_max
    if size > most:
        why = f"is not supported with a vocabulary of more than {8 * most}, this one has {card.vocab}"
        raise bad_request(f"{name} {why}", name, "unsupported_parameter")
    ids = _ids(fields, name, card, card.vocab)
    if not ids:
        raise bad_request(f"{name} must not be empty: nothing could be said", name)
    bits = bytearray(size)
    for token in ids:
        bits[token >> 3] |= 1 << (token & 7)
    return bytes(bits)


def _logit_bias(fields: Fields, card: Card, limits: Limits) -> tuple[tuple[int, float], ...]:
    """OpenAI's form: an object from ids, written as strings, to numbers from -100 to 100."""
    name = "logit_bias"
    if name not in fields:
        return ()
    biases = fields.numbers(name, limits.logit_bias_entries_max)
    for key, bias in biases.items():
        if not _ID.fullmatch(key) or int(key) >= card.vocab:
            raise bad_request(f"{name} names {key[:32]!r}, no id of the vocabulary of {card.vocab}", name)
        if not -BIAS_MAX <= bias <= BIAS_MAX:
            raise bad_request(f"{name} must be between {-BIAS_MAX} and {BIAS_MAX}, got {bias:.6g}", name)
    return tuple((int(key), bias) for key, bias in biases.items())
