"""What an OpenAI-compatible server says, as far as our own clients need it: its models, and a stream's chunks."""

from __future__ import annotations

import msgspec

from baton.ops.http import Target, get_json

DONE = b"[DONE]"


class Usage(msgspec.Struct):
    """The server's own count."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Delta(msgspec.Struct):
    """The new part of a chat answer."""

    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    """A chunk's choice, of either endpoint."""

    text: str | None = None
    delta: Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    def carries_output(self) -> bool:
        """Whether there is any new output in it."""
        delta = self.delta
        return bool(self.text or self.token_ids or (delta and (delta.content or delta.reasoning_content)))


class Chunk(msgspec.Struct):
    """One event's JSON. ``error`` is the JSON of an error object, "null" where there is none."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")

    def failure(self) -> bytes | None:
        """The error object's JSON if the event is an error."""
        error = bytes(self.error)
        return error if error != b"null" else None


class Lines:
    """Cuts a body into events' data; pieces may end anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of every line that this piece completes; comments and other fields are left out."""
        *lines, self._rest = (self._rest + piece if self._rest else piece).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


async def first_model(where: Target, timeout_s: float) -> str:
    """The name of the server's first model; ``ValueError`` where it has none."""
    listing = msgspec.convert(await get_json(where, "/v1/models", timeout_s), Listing)
    if not listing.data:
        raise ValueError("the server lists no model; name one with --model")
    return listing.data[0].id


class Listed(msgspec.Struct):
    """A model in a server's list."""

    id: str


class Listing(msgspec.Struct):
    """The answer of ``/v1/models``."""

    data: list[Listed]
