"""What a client asks to be told, and how often it wants an answer: log-probabilities and choices, within bounds.

Called by the validator; each function complains with the name of the field.
"""

from __future__ import annotations

from baton.engine.limits import Limits
from baton.frontends.errors import bad_request
from baton.frontends.fields import Fields
from baton.workers.config import Card

#: what ``include`` of a response may name
INCLUDED_LOGPROBS = "message.output_text.logprobs"

# The three of an answer's tokens say how many of the likeliest tokens are told of with each chosen one, None for no
# log-probabilities at all.


def chat_logprobs(fields: Fields, limits: Limits) -> int | None:
    """A chat's ``logprobs`` (true or false) and ``top_logprobs``."""
    wanted, top = fields.boolean("logprobs"), fields.integer("top_logprobs", 0, limits.top_logprobs_max)
    if top and not wanted:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    return top or 0 if wanted else None


def completion_logprobs(fields: Fields, limits: Limits) -> int | None:
    """A completion's ``logprobs``, a number."""
    if "logprobs" not in fields or fields.raws["logprobs"] == b"false":
        return None
    return fields.integer("logprobs", 0, limits.top_logprobs_max)


def prompt_logprobs(fields: Fields, card: Card, limits: Limits) -> int | None:
    """How many of the likeliest tokens are told of with each token of the prompt; None where nothing is."""
    if fields.raws.get("prompt_logprobs") == b"false":
        return None
    top = fields.integer("prompt_logprobs", 0, min(limits.prompt_logprobs_max, card.vocab))
    if top is not None and fields.boolean("stream"):
        raise bad_request("prompt_logprobs come with the whole answer, they cannot be streamed", "prompt_logprobs")
    return top


def response_logprobs(fields: Fields, limits: Limits) -> int | None:
    """A response's ``top_logprobs`` and ``include``; either brings them."""
    top = fields.integer("top_logprobs", 0, limits.top_logprobs_max)
    included = fields.decode("include", list[str]) if "include" in fields else []
    for name in included:
        if name != INCLUDED_LOGPROBS:
            message = f"include may name {INCLUDED_LOGPROBS}, nothing else"
            raise bad_request(message, "include", "unsupported_parameter")
    return top or 0 if top or included else None


def check_scores(fields: Fields, length: int, top_logprobs: int | None, limits: Limits) -> None:
    """All log-probabilities of one answer of ``length`` tokens must fit where they are kept until it ends."""
    most = limits.scores_per_request_max
    if top_logprobs and length * (1 + top_logprobs) > most:
        name = "top_logprobs" if "top_logprobs" in fields else "logprobs"
        scores = f"{name} {top_logprobs} for up to {length} tokens are {length * (1 + top_logprobs)} values"
        raise bad_request(f"{scores}, the limit is {most}; ask for fewer tokens", name)


def choices(fields: Fields, limits: Limits) -> tuple[int, int]:
    """How many choices the client gets (``n``), of how many that are made (``best_of``)."""
    most = min(limits.choices_max, limits.requests_per_frontend_max)
    n = fields.integer("n", 1, most) or 1
    best_of = fields.integer("best_of", 1, most) or n
    if best_of < n:
        raise bad_request(f"best_of is {best_of}, less than n, {n}", "best_of")
    if best_of > n and fields.boolean("stream"):
        raise bad_request("best_of above n is not known before the end: it cannot be streamed", "best_of")
    return n, best_of
