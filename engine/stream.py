"""The frontend's lease on one request, and the account it closes with."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from baton.engine.effects import Account, Finish, Open, Span
from baton.engine.limits import Limits
from baton.engine.ownership import Held
from baton.ipc.frames import Failure, Params, Piece, PromptPiece, PromptScored

#: what a client is told when the engine itself failed, or has no room
LOST = Failure(500, "server_error", "the request was interrupted too often and was given up", None, "interrupted")
STOPPING = Failure(503, "server_error", "the server is shutting down", None, "shutting_down")
FULL = Failure(429, "rate_limit_error", "too many requests are open; try again later", None, "overloaded")

#: the reasons of an end that is an answer
ANSWERS = ("stop", "length")

#: the states of a request that no step has begun
BEFORE_A_STEP = ("received", "tokenizing", "queued")


@dataclass(slots=True)
class Stream:
    """The frontend's lease on one request. ``door`` is None once nobody listens; an orphan's opener is dead.

    While its clients are ``absent`` it is paused at the end of its credit, and nobody is called slow.
    """

    slot: int
    generation: int
    door: int | None
    opened: Open | None
    trace: bytes
    held: Held | None = None
    orphan: bool = False
    submitted: int = 0
    run: int = 0
    prompt_ids: list[int] | None = None
    delivered: list[int] = field(default_factory=list)
    early: list[Piece] = field(default_factory=list)
    began: bool = False
    granted: int = 0
    taken: int = 0
    progress_ns: int = 0
    first_token_ns: int = 0
    cancel_reason: str | None = None
    cancelled_ns: int = 0
    release_ns: int | None = None
    recalled: int = -1
    lives: int = 1
    finish: Finish | None = None
    absent: bool = False
    cached_tokens: int = 0
    prompt_scores: list[PromptScored] = field(default_factory=list)
    choice: int = 0
    family: list[Stream] = field(default_factory=list, repr=False)  # the streams of all choices of its request
    settled: bool = False

    def params(self, asked: Params) -> Params:
        """The parameters of its next life: which choice it is, and what its client has not been told of the prompt.

        Only the first choice tells of the prompt that all have, and no life does again once all of it is here: before
        the first output token it is.
        """
        told = self.choice or self.delivered
        top = None if told else asked.prompt_logprobs
        if (self.choice, top) == (asked.choice, asked.prompt_logprobs):
            return asked
        return msgspec.structs.replace(asked, choice=self.choice, prompt_logprobs=top)

    def tell_prompt(self, piece: PromptPiece) -> bool:
        """Keep what is new of the prompt's log-probabilities; whether anything was."""
        known = len(self.prompt_scores) + 1
        assert piece.start <= known, f"gap: prompt scores from {piece.start} on, known up to {known}"
        new = piece.scores[known - piece.start :]
        self.prompt_scores += new
        return bool(new)


def unknown(piece: Piece, known: int) -> Piece:
    """What a piece says beyond the ``known`` first tokens of the output."""
    assert piece.start <= known, f"gap: text at {piece.start}, delivered {known}"
    skip = known - piece.start
    what = (piece.token_ids[skip:], piece.texts[skip:], piece.logprobs[skip:], piece.scores[skip:])
    return Piece(piece.slot, piece.generation, piece.run, known, *what)


def together(finishes: list[Finish]) -> Finish:
    """The end of a request of several choices: what the prompt cost counts once, output counts for every choice.

    Its reason is that of the first choice that failed, else of the first that has no answer, else of the first.
    """
    first = max(finishes, key=lambda finish: (finish.failure is not None, finish.reason not in ANSWERS))
    return msgspec.structs.replace(
        first,
        completion_tokens=sum(finish.completion_tokens for finish in finishes),
        prompt_tokens=max(finish.prompt_tokens for finish in finishes),
        cached_tokens=min(finish.cached_tokens for finish in finishes),
        prompt_scores=max((finish.prompt_scores for finish in finishes), key=len),
    )


def settle(stream: Stream, now_ns: int) -> tuple[Span | Account, ...]:
    """A stream has ended for good: the last one of its request brings the request's account."""
    stream.settled = True
    family = stream.family or [stream]
    if stream.opened is None or not all(each.settled for each in family):
        return ()
    return accounts(family, stream.opened, now_ns)


def accounts(family: list[Stream], opened: Open, now_ns: int) -> tuple[Span, Account]:
    """The request's root span and its account: the one place from which bill, log, metrics and trace take numbers."""
    finish = together([each.finish for each in family if each.finish is not None])
    failure, lives = finish.failure, 1 + sum(each.lives - 1 for each in family)
    first_token_ns = min((each.first_token_ns for each in family if each.first_token_ns), default=0)
    release_ns = max((each.release_ns for each in family if each.release_ns is not None), default=None)
    attributes = {
        **opened.attributes,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": opened.terms.model,
        "gen_ai.response.id": opened.request_id.hex(),
        "gen_ai.response.finish_reasons": finish.reason,
        "gen_ai.usage.input_tokens": finish.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": finish.cached_tokens,
        "gen_ai.usage.output_tokens": finish.completion_tokens,
        "baton.lives": lives,
    }
    if len(family) > 1:
        attributes["gen_ai.request.choice.count"] = len(family)
    name = str(opened.attributes.get("gen_ai.operation.name", "request"))
    error = failure.message if failure is not None else None
    span = Span(
        name, opened.parent or b"", opened.received_ns, now_ns, attributes, error, span_id=opened.trace, server=True
    )
    account = Account(
        opened.request_id,
        opened.trace,
        opened.terms.model,
        opened.terms.tenant,
        finish.reason,
        finish.prompt_tokens,
        finish.completion_tokens,
        opened.received_ns,
        first_token_ns,
        now_ns,
        lives,
        failure.status if failure is not None else 200,
        release_ns,
        finish.cached_tokens,
        failure.code if failure is not None else None,
    )
    return span, account


def out_of_time(stream: Stream, opened: Open, state: str, now_ns: int, limits: Limits) -> str | None:
    """The reason to cancel a request that has not ended: a bound of the server's or of its client's, or None.

    A client's time in the queue is bounded for as long as no step has begun its request for the first time.
    """
    terms = opened.terms
    if terms.deadline_ns and now_ns > terms.deadline_ns:
        return "timeout" if now_ns - opened.received_ns > limits.request_s_max * 1e9 else "deadline_exceeded"
    if terms.queue_until_ns and now_ns > terms.queue_until_ns and not stream.delivered and state in BEFORE_A_STEP:
        return "queue_timeout"
    behind = not stream.absent and stream.taken < len(stream.delivered)
    return "slow_consumer" if behind and now_ns - stream.progress_ns > limits.stalled_s_max * 1e9 else None
