"""Answers that outlive their connection: what was said so far, who listens, and what is kept for those who ask again.

An answer is kept because its request has an idempotency key, because its client may come back, or because it was to
be stored. It is a log of tokens, so whoever listens from token *n* on gets the rest once, however often others did.
This module knows neither frames nor rows; the desk (``engine.desk``) moves what is said between answers, doors and the
frontend's core.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from baton.engine.effects import Deliver, DoorEffect, Finish, Keep
from baton.engine.limits import Limits
from baton.ipc.frames import Scored

#: who listens: a frontend's index and incarnation, and its number for the door
Visitor = tuple[int, int, int]
#: the reasons of an end that is an answer; only such a one is given to who repeats a key
GOOD = ("stop", "length")

#: what an answer takes besides its tokens, and a token with its id, text and log-probability, about
_ANSWER_BYTES, _TOKEN_BYTES, _ID_BYTES = 2048, 160, 36
#: and what comes with log-probabilities: a token's bytes, and each candidate with its number and bytes
_SCORED_BYTES, _CANDIDATE_BYTES = 160, 160


def home_of(tenant: str, key: str, frontends: int) -> int:
    """The frontend that answers for a key."""
    return zlib.crc32(f"{tenant}\0{key}".encode()) % frontends


def differences(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    """The fields in which two bodies differ, by their digests."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


@dataclass(slots=True)
class Listener:
    """One client of an answer: what it was sent, what it took, when that last changed, and whether it has the end."""

    visitor: Visitor
    sent: int
    taken: int
    progress_ns: int
    told: bool = False


@dataclass(slots=True, eq=False)
class Answer:
    """One kept answer. ``door`` is its number at the frontend's core; ``idle_ns`` is since when nobody listens.

    ``lost`` listeners went without a word, the last at ``lost_ns``, and may come back to a resumable one.
    """

    door: int
    request_id: bytes
    tenant: str
    keep: Keep
    resumable: bool
    prompt_ids: list[int] | None = None
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    scores: list[Scored] = field(default_factory=list)
    scores_bytes: int = 0
    finish: Finish | None = None
    taken: int = 0
    listeners: dict[Visitor, Listener] = field(default_factory=dict)
    idle_ns: int = 0
    lost: int = 0
    lost_ns: int = 0

    def add(self, effect: Deliver, now_ns: int) -> None:
        """More output."""
        for listener in self.listeners.values():
            if listener.taken == len(self.token_ids):
                listener.progress_ns = now_ns
        self.token_ids += effect.token_ids
        self.texts += effect.texts
        self.logprobs += effect.logprobs
        self.scores += effect.scores
        self.scores_bytes += sum(_SCORED_BYTES + _CANDIDATE_BYTES * len(scored.top) for scored in effect.scores)

    def due(self, listener: Listener, window: int) -> list[DoorEffect]:
        """What a listener may be sent now: at most ``window`` tokens that it has not taken, and then the end."""
        out: list[DoorEffect] = []
        if listener.told:
            return out
        door, sent = listener.visitor[2], listener.sent
        upto = min(len(self.token_ids), listener.taken + window)
        if upto > sent:
            scores = (self.logprobs[sent:upto], self.scores[sent:upto])
            out.append(Deliver(door, self.token_ids[sent:upto], self.texts[sent:upto], *scores))
            listener.sent = upto
        finish = self.finish
        if finish is not None and listener.sent == len(self.token_ids):
            listener.told = True
            out.append(self.end(listener, finish.reason, finish))
        return out

    def end(self, listener: Listener, reason: str, finish: Finish | None = None) -> Finish:
        """The end as one listener hears it: the answer's own, or (``finish`` is None) one for it alone."""
        door, prompt_tokens = listener.visitor[2], len(self.prompt_ids or [])
        if finish is None:
            return Finish(door, reason, None, "", listener.sent, prompt_tokens, None)
        return Finish(
            *(door, reason, finish.stop_reason, finish.tail, finish.completion_tokens, finish.prompt_tokens),
            finish.failure,
            finish.cached_tokens,
            finish.prompt_scores,
        )

    @property
    def repeatable(self) -> bool:
        """Whether it may be given to who repeats its key: it has one, and has not ended badly."""
        return bool(self.keep.key) and (self.finish is None or self.finish.reason in GOOD)

    @property
    def lasting(self) -> bool:
        """Whether it has ended well and somebody may ask for it later, by its key or by its id."""
        good = self.finish is not None and self.finish.reason in GOOD
        return good and (bool(self.keep.key) or self.keep.stored)

    @property
    def bytes(self) -> int:
        """What it takes in memory, about."""
        prompt = _ID_BYTES * len(self.prompt_ids or [])
        return _ANSWER_BYTES + len(self.keep.memo) + prompt + _TOKEN_BYTES * len(self.token_ids) + self.scores_bytes


class Answers:
    """All kept answers. Invariant: those that have ended take at most ``idempotency_bytes_max``, the oldest give way.

    One that runs is bounded by what its request may say, and there are as many of them as rows at most.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.running: dict[int, Answer] = {}  # by door
        self.ended: dict[int, Answer] = {}  # by door, the oldest first
        self.by_id: dict[bytes, Answer] = {}
        self.by_key: dict[tuple[str, str], Answer] = {}
        self.bytes = 0

    def add(self, answer: Answer) -> None:
        """A new one, that runs."""
        self.running[answer.door] = self.by_id[answer.request_id] = answer
        if answer.keep.key:
            self.by_key[(answer.tenant, answer.keep.key)] = answer

    def end(self, answer: Answer, finish: Finish, now_ns: int) -> None:
        """It has ended; others give way for it, or it is too large itself. Who listens to one still hears its rest."""
        answer.finish, answer.idle_ns = finish, now_ns
        answer.scores_bytes += sum(_SCORED_BYTES + _CANDIDATE_BYTES * len(told.top) for told in finish.prompt_scores)
        if not answer.repeatable:
            self.forget_key(answer)
        self.running.pop(answer.door, None)
        self.ended[answer.door] = answer
        self.bytes += answer.bytes
        while self.bytes > self.limits.idempotency_bytes_max:
            self.drop(next(iter(self.ended.values())))

    def forget_key(self, answer: Answer) -> None:
        """Whoever repeats its key from now on begins anew."""
        name = (answer.tenant, answer.keep.key)
        if self.by_key.get(name) is answer:
            del self.by_key[name]

    def drop(self, answer: Answer) -> None:
        """Keep it no longer: it is not found any more. Repeats change nothing."""
        self.forget_key(answer)
        self.running.pop(answer.door, None)
        self.by_id.pop(answer.request_id, None)
        if self.ended.pop(answer.door, None) is not None:
            self.bytes -= answer.bytes

    def awaited(self, answer: Answer, now_ns: int) -> bool:
        """Whether somebody who listened may still come back for the rest."""
        return answer.resumable and answer.lost > 0 and now_ns - answer.lost_ns < self.limits.resume_s_max * 1e9

    def overdue(self, answer: Answer, now_ns: int) -> bool:
        """Whether nobody has listened for longer than it is worth keeping."""
        if answer.listeners:
            return False
        bounds = [0.0]
        if answer.resumable:
            bounds.append(self.limits.resume_s_max)
        if answer.lasting:
            bounds.append(self.limits.idempotency_s_max)
        return now_ns - answer.idle_ns >= max(bounds) * 1e9
