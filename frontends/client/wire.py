"""What the SDK and the ZeroMQ door say to each other: a small vocabulary of its own, with a version of its own.

A message is one byte of version and one msgpack-encoded struct. The request itself travels as the JSON that HTTP would
carry, so that every door has the same validator. A ``tag`` is the client's number for one of its requests.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")

VERSION = 1
_PREFIX = bytes([VERSION])


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False, tag_field="t", tag=True):
    """What all messages are."""


class Problem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Why a request has no answer: what HTTP would say, field by field; its ``Retry-After`` header last."""

    status: int
    kind: str
    message: str
    param: str | None
    code: str | None
    retry_after_s: int | None = None


# ---------------------------------------------------------------------------------------------- client -> server


class Hello(Message, frozen=True):
    """The first message of a connection."""

    client: str


class Generate(Message, frozen=True):
    """A request; ``operation`` is "chat" or "text_completion", ``body`` its JSON object.

    With ``n`` choices the tags from ``tag`` on are theirs, one each.
    """

    tag: int
    operation: str
    body: bytes
    traceparent: str | None
    idempotency_key: str | None = None
    resumable: bool = False


class Resume(Message, frozen=True):
    """A resumable request of a connection that broke: go on behind output token ``position``."""

    tag: int
    request_id: str
    position: int


class Cancel(Message, frozen=True):
    """End this request early; it is answered by an ``Ended`` like any other. Unknown tags have ended already."""

    tag: int


class Taken(Message, frozen=True):
    """How far the application has read, by tag. Also the answer to every ``Ping``, empty if need be."""

    positions: dict[int, int]


class Bye(Message, frozen=True):
    """The client closes for good; whatever it left open is cancelled."""


# ---------------------------------------------------------------------------------------------- server -> client


class Welcome(Message, frozen=True):
    """The answer to ``Hello``: the model served, and the terms of the connection."""

    server: str
    model: str
    report_tokens: int
    ping_s: float
    body_bytes_max: int
    resume_s: float = 0.0


class Began(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The request was admitted. ``prompt_ids`` only where ids were asked for."""

    tag: int
    request_id: str
    prompt_ids: list[int]
    ignored: tuple[str, ...]


class Candidate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token that might have been chosen: its id, its log-probability, and the bytes it stands for."""

    token: int
    logprob: float
    piece: bytes


class Scored(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What goes with one token's log-probability: the bytes it stands for, and the likeliest tokens in its place."""

    piece: bytes
    top: list[Candidate]


class PromptScored(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is told of a token of the prompt: itself, its rank in its place (1 is the likeliest) and the likeliest."""

    token: int
    logprob: float
    piece: bytes
    rank: int
    top: list[Candidate]


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New output of one request: one text a token, and what was held back in ``tail`` where it is the last."""

    tag: int
    position: int
    token_ids: list[int]
    texts: list[str]
    logprobs: list[float]
    tail: str
    scores: list[Scored] = []


class Ended(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The end of a request: an answer, or a problem."""

    tag: int
    reason: str
    stop_reason: str | int | None
    prompt_tokens: int
    completion_tokens: int
    problem: Problem | None
    cached_tokens: int = 0
    prompt_scores: list[PromptScored] = []


class Update(Message, frozen=True):
    """Everything that is new for one client, for all its requests at once; to be read in this order."""

    began: list[Began]
    pieces: list[Piece]
    ended: list[Ended]


class Ping(Message, frozen=True):
    """The server lives."""


class Goodbye(Message, frozen=True):
    """The server ends the connection."""

    reason: str
    stopping: bool = False  # the server ends, not this client alone


ToServer = Hello | Generate | Resume | Cancel | Taken | Bye
ToClient = Welcome | Update | Ping | Goodbye

_encoder = msgspec.msgpack.Encoder()
_to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
_to_client: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)


class WireError(Exception):
    """The other side does not speak this protocol, or not this version."""


def encode(message: ToServer | ToClient) -> bytes:
    """The bytes of a message."""
    return _PREFIX + _encoder.encode(message)


def read_by_server(data: bytes) -> ToServer:
    """A client's message; raises ``WireError``."""
    return _decode(data, _to_server)


def read_by_client(data: bytes) -> ToClient:
    """A server's message; raises ``WireError``."""
    return _decode(data, _to_client)


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    if data[:1] != _PREFIX:
        spoken = data[0] if data else "nothing"
        raise WireError(f"protocol version {VERSION} is spoken here, not {spoken}")
    try:
        return decoder.decode(memoryview(data)[1:])
    except (msgspec.DecodeError, RecursionError):
        raise WireError("the message cannot be read") from None
