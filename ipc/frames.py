"""The whole vocabulary: every message one process may send another.

Frozen, tagged, array-like msgspec structs. A frame that does not decode, is too large or speaks another version of the
protocol is the peer's fault: the link drops and counts it. Frames decide nothing; ``engine`` does. This module imports
nothing of Baton, so that every layer may import it.

Terms: a *slot* is a row of the board; its *generation* tells one request in that slot from the next; the *epoch* grows
with every hand-over; a *run* is the epoch at which the scheduler took the request.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 1
PLACES_MAX = 16  # indices a role may have

Slot = Annotated[int, Meta(ge=0)]
Index = Annotated[int, Meta(ge=0, lt=PLACES_MAX)]
Size = Annotated[int, Meta(gt=0)]
Trace = Annotated[bytes, Meta(min_length=25, max_length=25)]


class Role(enum.IntEnum):
    """What a process is. The numbers go into shared memory; they are names, not an order."""

    FRONTEND = 1
    TOKENIZER = 2
    SCHEDULER = 3
    WORKER = 4
    DETOKENIZER = 5
    SUPERVISOR = 6


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False, tag_field="t", tag=True):
    """What all frames are: frozen, array-like, tagged by their class name."""


class Address(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Who a process is: (role, model, replica, index) names a place, ``incarnation`` the process that fills it now."""

    role: Role
    model: str
    replica: int
    index: Index
    incarnation: int

    @property
    def place(self) -> tuple[Role, int]:
        """What stays when the process is restarted, within one replica."""
        return self.role, self.index

    def __str__(self) -> str:
        return f"{self.role.name.lower()}-{self.index}#{self.incarnation}"


class Key(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Names one hand-over of one request: accepted only if the row says the same."""

    slot: Slot
    generation: int
    epoch: int


class Params(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the client asked for, validated at the door and fixed for the request's life."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: bool = False


class Terms(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What admission fixed for the request's life besides its parameters. An empty digest means "none in use"."""

    model: str
    tenant: str = ""
    service_class: str = "default"
    workflow: str = ""
    deadline_ns: int = 0
    weights_digest: str = ""
    tokenizer_digest: str = ""
    template_digest: str = ""
    adapter_digest: str = ""
    grammar_digest: str = ""


class Prompt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A prompt in one of three forms: a chat (rendered by the model's template), a text, or token ids."""

    messages: list[dict[str, Any]] | None = None  # JSON objects, exactly as the client sent them
    text: str | None = None
    token_ids: list[int] | None = None


class Failure(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Why a request was refused or failed: an HTTP status, OpenAI's error type and code, a sentence, the field.

    ``retry_after_s`` is in how many seconds trying again makes sense, where the refusal knows it.
    """

    status: int
    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None


# ---------------------------------------------------------------------------------------------- hand-overs


class Submit(Frame, frozen=True):
    """Frontend -> tokenizer: the request. After a crash it carries the prompt's ids and the ids already delivered.

    ``credit`` is the output position up to which tokens may be made, as in ``Credit``.
    """

    key: Key
    home: Address
    trace: Trace
    terms: Terms
    params: Params
    prompt: Prompt
    delivered: list[int]
    credit: int


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


class Closed(Frame, frozen=True):
    """Any owner -> frontend: the end. ``length`` output tokens count, ``tail`` is text that was held back.

    ``prompt_ids`` are those of an admitted request: this frame may come before ``Admitted``, which takes another way.
    """

    key: Key
    trace: Trace
    length: int
    reason: str
    stop_reason: str | int | None
    tail: str
    failure: Failure | None
    prompt_ids: list[int] = []


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


class StopFound(Frame, frozen=True):
    """Detokenizer -> scheduler: stop string ``text`` is complete with output token number ``length``."""

    slot: int
    generation: int
    run: int
    length: int
    text: str


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The text of consecutive output tokens of one request, one string a token (empty while text is held back)."""

    slot: int
    generation: int
    run: int
    start: int
    token_ids: list[int]
    texts: list[str]
    logprobs: list[float]


class Text(Frame, frozen=True):
    """Detokenizer -> frontend: all pieces of one step for that frontend, in one frame."""

    pieces: list[Piece]


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
    """Worker -> scheduler: rank ``rank`` of ``ranks`` is up, with these weights and this cache."""

    address: Address
    rank: Index
    ranks: Size
    layout: KVLayout
    weights_digest: str
    vocab: int
    context_tokens_max: int
    weights_bytes: int = 0
    workspace_bytes: int = 0  # the most that a step was measured to take beyond weights and cache
    host_blocks: int = 0  # blocks of swap space


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
