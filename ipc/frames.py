"""The whole vocabulary: every message one process may send another.

Frozen, tagged, array-like msgspec structs. A frame that does not decode, is too large or speaks another version of the
protocol is the peer's fault: the link drops and counts it. Frames decide nothing; ``engine`` does. This module imports
nothing of Baton but addresses and the parts of a request, which it passes on, so that every layer may import it.

Terms: a *slot* is a row of the board; its *generation* tells one request in that slot from the next; the *epoch* grows
with every hand-over; a *run* is the epoch at which the scheduler took the request.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from baton.ipc.addresses import PLACES_MAX as PLACES_MAX
from baton.ipc.addresses import Address as Address
from baton.ipc.addresses import Index as Index
from baton.ipc.addresses import Key as Key
from baton.ipc.addresses import Role as Role
from baton.ipc.addresses import Slot as Slot
from baton.ipc.request import Failure as Failure
from baton.ipc.request import Params as Params
from baton.ipc.request import Prompt as Prompt
from baton.ipc.request import Terms as Terms

PROTOCOL_VERSION = 1

Size = Annotated[int, Meta(gt=0)]
Trace = Annotated[bytes, Meta(min_length=25, max_length=25)]


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False, tag_field="t", tag=True):
    """What all frames are: frozen, array-like, tagged by their class name."""


# ---------------------------------------------------------------------------------------------- hand-overs


class Submit(Frame, frozen=True):
    """Frontend -> tokenizer: the request. After a crash it carries the prompt's ids and the ids already delivered.

    ``credit`` is the output position up to which tokens may be made, as in ``Credit``. ``begun``: an owner that died
    had admitted it, and its client was told so.
    """

    key: Key
    home: Address
    trace: Trace
    terms: Terms
    params: Params
    prompt: Prompt
    delivered: list[int]
    credit: int
    begun: bool = False


class Handed(Frame, frozen=True):
    """Tokenizer -> scheduler: the request with its prompt as ids and ``params.max_tokens`` resolved."""

    key: Key
    home: Address
    trace: Trace
    terms: Terms
    params: Params
    prompt_ids: Annotated[list[int], Meta(min_length=1)]
    delivered: list[int]
    credit: int
    begun: bool = False


class Flush(Frame, frozen=True):
    """Scheduler -> detokenizer: the request has ended; ``length`` bounds its output tokens, ``reason`` says why."""

    key: Key
    home: Address
    trace: Trace
    run: int
    base: int
    length: int
    reason: str
    stop_reason: str | int | None
    failure: Failure | None
    prompt_ids: list[int]
    cached_tokens: int = 0


class Closed(Frame, frozen=True):
    """Any owner -> frontend: the end. ``length`` output tokens count, ``tail`` is text that was held back.

    ``prompt_ids`` are those of an admitted request: this frame may come before ``Admitted``, which takes another way.
    ``cached_tokens`` of them were not computed: their keys and values came from the prefix cache.
    """

    key: Key
    trace: Trace
    length: int
    reason: str
    stop_reason: str | int | None
    tail: str
    failure: Failure | None
    prompt_ids: list[int] = []
    cached_tokens: int = 0


class Returned(Frame, frozen=True):
    """Any owner -> frontend: a recalled request comes home."""

    key: Key
    trace: Trace


# ---------------------------------------------------------------------------------------------- leases, reports


class Admitted(Frame, frozen=True):
    """Scheduler -> frontend: the request is in; ``run`` names its tokens from now on. The ids are for its lease."""

    slot: int
    generation: int
    run: int
    prompt_ids: list[int]


class Lease(Frame, frozen=True):
    """Scheduler -> detokenizer: all output ids so far; text goes out from ``base`` on. For one incarnation only."""

    slot: Slot
    generation: int
    run: int
    incarnation: int
    home: Address
    trace: Trace
    params: Params
    token_ids: list[int]
    logprobs: list[float]
    base: int
    tops: list[bytes] = []  # packed as in ``engine.scores``, one a token where they were asked for
    prompt_scores: bytes = b""  # entries as in ``engine.scores``, from prompt position 1 on
    prompt_tokens: int = 0


class StopFound(Frame, frozen=True):
    """Detokenizer -> scheduler: stop string ``text`` is complete with output token number ``length``."""

    slot: int
    generation: int
    run: int
    length: int
    text: str


class Candidate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token that might have been chosen: its id, its log-probability, and the bytes it stands for."""

    token: int
    logprob: float
    piece: bytes


class Scored(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What goes with one token's log-probability: the bytes it stands for, and the likeliest tokens in its place."""

    piece: bytes
    top: list[Candidate]


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The text of consecutive output tokens of one request, one string a token (empty while text is held back).

    ``logprobs`` and ``scores`` have an entry a token where they were asked for.
    """

    slot: int
    generation: int
    run: int
    start: int
    token_ids: list[int]
    texts: list[str]
    logprobs: list[float]
    scores: list[Scored] = []


class PromptScored(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is told of a token of the prompt: itself, its rank in its place (1 is the likeliest) and the likeliest."""

    token: int
    logprob: float
    piece: bytes
    rank: int
    top: list[Candidate]


class PromptPiece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What was computed of consecutive tokens of one request's prompt, from prompt position ``start`` on."""

    slot: int
    generation: int
    run: int
    start: int
    scores: list[PromptScored]


class Text(Frame, frozen=True):
    """Detokenizer -> frontend: all pieces of one step for that frontend, in one frame; a prompt's come before text."""

    pieces: list[Piece]
    prompts: list[PromptPiece] = []


class Credit(Frame, frozen=True):
    """Frontend -> scheduler: output tokens up to ``position`` may be made for this request."""

    slot: int
    generation: int
    run: int
    position: int


class Cancel(Frame, frozen=True):
    """Frontend ``home`` -> owner: look at the cancel word of this row. Always acknowledged."""

    slot: int
    generation: int
    home: Index


class CancelAck(Frame, frozen=True):
    """Owner -> frontend: the nudge was read (also for a request never seen or long gone)."""

    slot: int
    generation: int


class Recall(Frame, frozen=True):
    """Frontend ``home`` -> owner: if this hand-over is still untaken, its frame died with the sender: give it back."""

    key: Key
    home: Index
    trace: Trace


class Relay(Frame, frozen=True):
    """Frontend <-> frontend: what a door of the one and the desk of the other say, for incarnation ``receiver``."""

    sender: Address
    receiver: int
    number: int  # grows; what is heard a second time was repeated
    said: bytes


# ---------------------------------------------------------------------------------------------- workers


class KVLayout(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How a worker keeps its KV cache."""

    block_tokens: Size
    blocks: Size
    block_bytes: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str


class WorkerHello(Frame, frozen=True):
    """Worker -> scheduler: rank ``rank`` of ``group`` is up, idle, with these weights and an empty cache.

    ``group`` is the incarnation of every rank, by the life table: only ranks that say the same work together.
    A step yields at most ``tokens_per_row_max`` tokens for each row that samples: more than one with speculation.
    """

    address: Address
    rank: Index
    group: tuple[int, ...]
    layout: KVLayout
    weights_digest: str
    vocab: int
    context_tokens_max: int
    tokens_per_row_max: Size = 1
    weights_bytes: int = 0
    workspace_bytes: int = 0  # the most that a step was measured to take beyond weights and cache
    host_blocks: int = 0  # blocks of swap space
    swap_bytes_per_s: int = 0  # how fast blocks were seen to move there and back; 0 where that was not measured


# ---------------------------------------------------------------------------------------------- supervisor


class Ready(Frame, frozen=True):
    """Any process -> supervisor: start-up is done; ``detail`` is shown to people (the port of a door, say)."""

    address: Address
    detail: dict[str, str]


class StartFailed(Frame, frozen=True):
    """Any process -> supervisor: start-up cannot succeed; the reason in one line."""

    address: Address
    reason: str


class Life(Frame, frozen=True):
    """Supervisor -> all: the life table changed; ``incarnation`` fills that place from now on.

    ``fault`` says that the one before died of something nobody did to it: it crashed or hung.
    """

    role: Role
    index: Index
    incarnation: int
    fault: bool = False


class Ping(Frame, frozen=True):
    """Supervisor -> any: work to be seen doing. Reading it moves the pulse on; there is no answer."""


class Tell(Frame, frozen=True):
    """Supervisor -> any: write what you hold into ``file``, for a dump."""

    file: str


class Serving(Frame, frozen=True):
    """Supervisor -> frontends: whether every process is up; ``draining`` refuses new work. Names the weights served."""

    ready: bool
    draining: bool
    weights_digest: str


class Drained(Frame, frozen=True):
    """Frontend -> supervisor: draining, and no request is left."""

    address: Address


class Damaged(Frame, frozen=True):
    """Reader of a ring -> supervisor: ``writer`` left something in it that is no record; it is not to be trusted."""

    reader: Address
    writer: Address
    detail: str


class Halt(Frame, frozen=True):
    """Supervisor -> any: end now, in good order."""

    reason: str


# fmt: off
AnyFrame = (
    Submit | Handed | Flush | Closed | Returned | Admitted | Lease
    | StopFound | Text | Credit | Cancel | CancelAck | Recall | Relay
    | WorkerHello | Ready | StartFailed | Life | Ping | Tell | Serving
    | Drained | Damaged | Halt
)
# fmt: on


class Envelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One frame on a link: protocol version, sender, number on that link (from 1 for each pair of incarnations)."""

    version: int
    sender: Address
    number: int
    frame: AnyFrame
