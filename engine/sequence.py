"""A request inside the scheduler: its tokens, its blocks, and why it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from baton.engine.admission import Ask
from baton.engine.batch import Sampling
from baton.engine.ownership import Held
from baton.engine.prefix import Chain
from baton.engine.scores import PromptRecord, entry_bytes, news
from baton.ipc.frames import Failure, Handed, Lease


@dataclass(slots=True, frozen=True)
class End:
    """Why a sequence ends. ``length`` is None while tokens may still be counted (a cancel)."""

    reason: str
    length: int | None = None
    stop_reason: str | int | None = None
    failure: Failure | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the scheduler. ``computed`` of its tokens have their keys and values in ``blocks``.

    ``planned`` counts those that steps in flight will have computed besides; ``pending`` tokens are being sampled by
    such steps and not known here yet. ``in_flight`` is how many steps in flight name it.
    """

    held: Held
    handed: Handed
    sampling: Sampling
    output: list[int]
    base: int
    credit: int
    logprobs: list[float]
    max_tokens: int | None  # where the client set none, how many there is room for, once that is known
    tops: list[bytes] = field(default_factory=list)  # with each output token's log-probability, where asked for
    prompt_scores: bytearray = field(default_factory=bytearray)  # entries as in ``engine.scores``, where asked for
    blocks: list[int] = field(default_factory=list)
    told_blocks: int = 0
    computed: int = 0
    planned: int = 0
    pending: int = 0
    started: bool = False
    in_flight: int = 0
    leaving: bool = False  # to be preempted as soon as no step in flight names it
    admitted: bool = False
    leased_to: int = 0
    preemptions: int = 0  # how often it gave way to others, unless it waited for its client
    host_blocks: list[int] = field(default_factory=list)  # while it waits: where its first host_tokens tokens are
    host_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose keys and values came from the prefix cache, at its first start
    #: whether it may begin with blocks that others computed: not where it wants to know of each of its prompt's tokens
    prefix_reads: bool = True
    lone_deaths: int = 0  # how often a worker died over it alone, unexplained
    arrival: int = 0  # its place among all that came
    chain: Chain | None = None  # the names of its full blocks; None while there is no pool
    registered: int = 0  # blocks that have been registered, or were found
    awaiting_ns: int = 0  # since when it waits for a prefix that somebody else computes
    arrived_ns: int = 0
    resumed: bool = False  # it had a seat, and waits for another
    ask: Ask | None = None  # what it asks for of the cache; None until a pool is there
    work_tokens: int = 0  # how much it was expected to need when it came
    prefix_tokens: int = 0  # how much of it the cache held when it came, where that decides the order
    held_back_steps: int = 0  # for how many steps in a row its prompt was held back
    end: End | None = None

    def __post_init__(self) -> None:
        params = self.handed.params
        self.tops = [b""] * self.base if params.top_logprobs else []
        self.prefix_reads = params.prompt_logprobs is None

    @property
    def slot(self) -> int:
        """The row of the board that is its."""
        return self.held.slot

    @property
    def priority(self) -> int:
        """Its class: lower is more urgent."""
        return self.handed.terms.priority

    @property
    def deadline_ns(self) -> int:
        """When its client gives up; 0 is never."""
        return self.handed.terms.deadline_ns

    def too_late(self, now_ns: int) -> bool:
        """Whether it is not to be begun any more: its deadline has passed, or the time in which a first step was to
        begin. Its frontend, which keeps these times, sees so itself and ends it.
        """
        terms = self.handed.terms
        if terms.deadline_ns and now_ns > terms.deadline_ns:
            return True
        first = self.held.state == "queued" and not self.base
        return first and 0 < terms.queue_until_ns < now_ns

    @property
    def run(self) -> int:
        """The epoch at which the scheduler took the request; it names the tokens of this life."""
        return self.held.epoch

    @property
    def prompt_tokens(self) -> int:
        """How long its prompt is."""
        return len(self.handed.prompt_ids)

    @property
    def sampling_now(self) -> Sampling:
        """Its sampling as a worker is told that starts it, perhaps again: what is known of its prompt is not wanted."""
        known = self.sampling.prompt_logprobs is not None and not self.prompt_due
        return msgspec.structs.replace(self.sampling, prompt_logprobs=None) if known else self.sampling

    @property
    def prompt_due(self) -> bool:
        """Whether something of its prompt was asked for and is not known: no token counts before that."""
        top = self.sampling.prompt_logprobs
        return top is not None and len(self.prompt_scores) < (self.prompt_tokens - 1) * entry_bytes(top)

    @property
    def made(self) -> int:
        """Output tokens, with those that are being sampled."""
        return len(self.output) + self.pending

    @property
    def tokens(self) -> int:
        """Prompt and output tokens, with those that are being sampled."""
        return len(self.handed.prompt_ids) + len(self.output) + self.pending

    @property
    def wanted(self) -> int:
        """Tokens that must still be planned before the next one can be sampled."""
        return self.tokens - self.planned

    def tell_prompt(self, record: PromptRecord) -> bool:
        """Take in what a step computed of the prompt; whether anything was new."""
        top = self.sampling.prompt_logprobs
        known = len(self.prompt_scores) // entry_bytes(top or 0)
        new = news(record, self.held.generation, self.run, known, top)
        self.prompt_scores += new
        return bool(new)

    def lease(self, incarnation: int) -> Lease:
        """Everything that a detokenizer must know of it to go on from here.

        An end that is known bounds its tokens: it does not show in their ids, and the ring may hold more.
        """
        h, handed, p = self.held, self.handed, self.handed.params
        name = (h.slot, h.generation, self.run, incarnation, handed.home, h.trace)
        known = self.end.length if self.end is not None else None
        params = msgspec.structs.replace(p, max_tokens=self.max_tokens if known is None else known)
        logprobs = list(self.logprobs) if p.logprobs else []
        told = (list(self.output), logprobs, self.base, list(self.tops), bytes(self.prompt_scores))
        return Lease(*name, params, *told, self.prompt_tokens)

    @property
    def has_credit(self) -> bool:
        """Whether the client has room for another token."""
        return self.made < self.credit

    @property
    def is_whole(self) -> bool:
        """Whether the last token it may have is there, or is being sampled."""
        return self.max_tokens is not None and self.made >= self.max_tokens
