"""What a core asks its shell to do. Effects are carried out in order, before the next event is handled.

A core never acts by itself, except on the shared tables it was given (the board, the rings): those are data structures.
Timers come back as ``Tick`` events.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from baton.engine.batch import Sampling
from baton.engine.scores import PromptRecord
from baton.ipc.frames import AnyFrame, Failure, Params, Prompt, PromptScored, Role, Scored, Terms


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send a frame to whoever fills the place (role, index)."""

    role: Role
    index: int
    frame: AnyFrame


class Wake(msgspec.Struct, frozen=True, gc=False):
    """Come back with ``Tick(name)`` at ``at_ns``; a later Wake of the same name replaces an earlier one."""

    at_ns: int
    name: str


class Tick(msgspec.Struct, frozen=True, gc=False):
    """The event of a timer that ran out."""

    name: str


class Span(msgspec.Struct, frozen=True, gc=False):
    """A finished span. ``trace`` is the 25-byte context whose span is the parent; ``span_id`` only where it was
    promised to others before (the root). Times are of the engine's monotonic clock, in ns.

    ``events`` are (name, at_ns); ``links`` are 25-byte contexts.
    """

    name: str
    trace: bytes
    start_ns: int
    end_ns: int
    attributes: dict[str, str | int | float | bool]
    error: str | None = None
    span_id: bytes | None = None
    server: bool = False
    events: tuple[tuple[str, int], ...] = ()
    links: tuple[bytes, ...] = ()


class Note(msgspec.Struct, frozen=True, gc=False):
    """A line for the log: an event's name and its fields."""

    level: str
    event: str
    fields: dict[str, str | int | float]


# ---------------------------------------------------------------------------------------------- tokenizer


class Encode(msgspec.Struct, frozen=True, gc=False):
    """Render and tokenise a prompt, and each of ``bad_words``; comes back as ``Encoded`` for the same request."""

    slot: int
    generation: int
    prompt: Prompt
    bad_words: tuple[str, ...] = ()


class Encoded(msgspec.Struct, frozen=True, gc=False):
    """The event after ``Encode``: the ids of the prompt and of the bad words, or why there are none."""

    slot: int
    generation: int
    token_ids: list[int]
    failure: Failure | None
    bad_ids: tuple[tuple[int, ...], ...] = ()


# ---------------------------------------------------------------------------------------------- scheduler and worker


class Start(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence enters a worker's slot: all its token ids so far and how the next ones are chosen."""

    slot: int
    generation: int
    run: int
    token_ids: list[int]
    prompt_tokens: int
    sampling: Sampling


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """``count`` tokens of a slot are computed from position ``start`` on; ``blocks`` join its block table first."""

    slot: int
    start: int
    count: int
    blocks: list[int]
    sample: bool


class Plan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step, as a change against what the workers keep per slot. Written to the plan ring for every rank.

    ``incarnations`` names the process of each rank; others drop it. ``step`` is the scheduler's incarnation in the
    upper, a counter in the lower 32 bits. ``ends`` are slots to forget before ``starts``. ``moves`` of blocks, each
    (``engine.blocks.Move``, source, destination), are carried out in order before the rows are computed.
    """

    incarnations: tuple[int, ...]
    step: int
    ends: list[int]
    starts: list[Start]
    rows: list[Row]
    moves: list[tuple[int, int, int]] = []


class TokenRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sampled token as it stands in the token ring; ``position`` counts output tokens from 0.

    ``tops`` are the likeliest tokens in its place where they were asked for, packed as in ``engine.scores``.
    """

    slot: int
    generation: int
    run: int
    position: int
    token: int
    flags: int
    logprob: float
    tops: bytes = b""


class StepDone(msgspec.Struct, frozen=True, gc=False):
    """What one step put into the token ring. A prompt's entries are all there before its first output token is."""

    incarnation: int
    step: int
    records: list[TokenRecord]
    prompts: list[PromptRecord] = []


class Doorbell(msgspec.Struct, frozen=True, gc=False):
    """The event of a rung doorbell: something was written to a ring this process reads."""


class TokenRing(Protocol):
    """The reading end of the token ring, as the scheduler and the detokenizer see it."""

    def read(self) -> list[StepDone]:
        """Everything committed since the last call; raises ``RingDamaged`` on a torn or overwritten record."""


# ---------------------------------------------------------------------------------------------- frontend and doors


class Keep(msgspec.Struct, frozen=True, gc=False):
    """What is kept of a request besides its answer, so that somebody may ask for the answer again.

    ``key`` is the client's idempotency key ("" for none) and ``digests`` say what its body was, by field. A
    ``resumable`` answer waits for a client that went away, a ``stored`` one is kept for a while once it is whole.
    ``memo`` is the door's own and comes back in ``Named``.
    """

    key: str
    digests: dict[str, bytes]
    resumable: bool
    memo: bytes
    stored: bool = False


class Open(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Event: a door has a valid request. ``door`` is the door's own number for it, ``received_ns`` when it came.

    ``siblings`` are the doors of its other choices: each is a request of its own, all are admitted or none.
    """

    door: int
    request_id: bytes
    trace: bytes
    span_id: bytes
    parent: bytes | None
    terms: Terms
    params: Params
    prompt: Prompt
    received_ns: int
    attributes: dict[str, str | int | float | bool]
    keep: Keep | None = None
    siblings: tuple[int, ...] = ()


class Attach(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Event: a client wants a kept answer, from output token ``after`` on."""

    door: int
    request_id: bytes
    after: int


class Look(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Event: a client wants to see a kept answer as it is now. It hears ``Seen`` or a refusing ``Finish``; after
    either the door says ``Answered``.
    """

    door: int
    request_id: bytes


class Gone(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Event: the client of this request went away, or asked for a cancel (then it still wants the end)."""

    door: int
    reason: str
    wants_end: bool


class Taken(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Event: the client's socket took everything up to output token ``position``."""

    door: int
    position: int


class Answered(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Event: the client has its whole answer (or its connection is gone): the request may be forgotten."""

    door: int
    error: str | None = None


class Named(msgspec.Struct, frozen=True, gc=False, tag=True):
    """To the door of a kept request: which answer it gets, and from which output token on.

    ``text``, ``logprobs`` and ``scores`` are those of the tokens before it.
    """

    door: int
    request_id: bytes
    memo: bytes
    position: int
    text: str
    logprobs: list[float] = []
    scores: list[Scored] = []


class Begin(msgspec.Struct, frozen=True, gc=False, tag=True):
    """To the door: the request was tokenised and admitted; headers may go out."""

    door: int
    prompt_ids: list[int]


class Deliver(msgspec.Struct, frozen=True, gc=False, tag=True):
    """To the door: new output tokens with their text."""

    door: int
    token_ids: list[int]
    texts: list[str]
    logprobs: list[float]
    scores: list[Scored] = []


class Finish(msgspec.Struct, frozen=True, gc=False, tag=True):
    """To the door: the end. Before a ``Begin`` it is a refusal if ``failure`` is set.

    ``prompt_scores`` are of the prompt's second token and those after it, where they were asked for and computed.
    """

    door: int
    reason: str
    stop_reason: str | int | None
    tail: str
    completion_tokens: int
    prompt_tokens: int
    failure: Failure | None
    cached_tokens: int = 0
    prompt_scores: list[PromptScored] = []


class Seen(msgspec.Struct, frozen=True, gc=False, tag=True):
    """To the door: a kept answer as it is now; ``finish`` is None while it runs."""

    door: int
    request_id: bytes
    memo: bytes
    began: bool
    text: str
    finish: Finish | None
    logprobs: list[float] = []
    scores: list[Scored] = []


#: what a door may say, and what it may hear
DoorEvent = Open | Attach | Look | Gone | Taken | Answered
DoorEffect = Named | Begin | Deliver | Finish | Seen


class Account(msgspec.Struct, frozen=True, gc=False):
    """The one account of a request, from which bill, log, metrics and trace take their numbers.

    ``release_ns`` is how long a cancelled request held on to anything after it was cancelled, ``code`` that of its
    failure.
    """

    request_id: bytes
    trace: bytes
    model: str
    tenant: str
    reason: str
    prompt_tokens: int
    completion_tokens: int
    received_ns: int
    first_token_ns: int
    closed_ns: int
    lives: int
    status: int
    release_ns: int | None = None
    cached_tokens: int = 0
    code: str | None = None


# ---------------------------------------------------------------------------------------------- supervisor


class Spawn(msgspec.Struct, frozen=True, gc=False):
    """Effect: start the process that fills this place now. There will be one ``Died`` for it, whatever happens."""

    role: Role
    index: int
    incarnation: int


class Died(msgspec.Struct, frozen=True, gc=False):
    """Event: a process ended and was reaped; ``how`` in words. ``fault``: it was not somebody's signal."""

    role: Role
    index: int
    incarnation: int
    how: str
    fault: bool


class Inquire(msgspec.Struct, frozen=True, gc=False):
    """Effect: a process is to be killed; ask the others what they hold, and all for their stacks."""

    role: Role
    index: int


class Dump(msgspec.Struct, frozen=True, gc=False):
    """Effect: keep what came of the inquiry, and why it was made."""

    role: Role
    index: int
    why: str


class Kill(msgspec.Struct, frozen=True, gc=False):
    """Effect: kill the process that fills this place; it will have died."""

    role: Role
    index: int


class Opened(msgspec.Struct, frozen=True, gc=False):
    """Effect: every process is up for the first time; the server serves."""


class Over(msgspec.Struct, frozen=True, gc=False):
    """Effect: every process is reaped. ``failure`` says why the server could not go on, if it was not asked to end."""

    failure: str | None


class StopAsked(msgspec.Struct, frozen=True, gc=False):
    """Event: somebody wants the server to end: first in good order, a second time at once."""


Effect = (
    Send | Wake | Span | Note | Encode | Plan | DoorEffect | Account | Spawn | Inquire | Dump | Kill | Opened | Over
)
