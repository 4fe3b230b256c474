"""What makes a request one that is kept: its idempotency key, what its body said, and what formatting needs later.

A body is compared field by field in a canonical form, and only where it says what is to be answered: how the answer
travels (``stream`` and the like) and how long it may take may differ between two requests with one key, and the door.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

import msgspec

from baton.engine.desk import NOT_FOUND
from baton.engine.effects import Keep
from baton.frontends import parameters
from baton.frontends.errors import Refused, bad_request
from baton.frontends.fields import decode
from baton.frontends.validate import CHAT, COMPLETION, RESPONSE, GenerateRequest
from baton.ipc.frames import Prompt

#: endpoint -> the shape of its body
ENDPOINTS = {"chat.completions": CHAT, "completions": COMPLETION, "responses": RESPONSE}
RESPONSES = "responses"

KEY_CHARS_MAX = 255
_KEY = re.compile(rf"[\x21-\x7e]{{1,{KEY_CHARS_MAX}}}")
_ID = re.compile(r"[0-9a-f]{32}")
_DIGEST_BYTES = 16
_TRAVEL = frozenset((*parameters.ENVELOPE, *parameters.URGENCY, "stream", "stream_options", "resumable", "store"))


class Memo(msgspec.Struct, frozen=True, gc=False):
    """What a door needs to know of a request whose answer it did not open itself; the request has no prompt."""

    endpoint: str
    created: int
    stream_id: str | None
    request: GenerateRequest


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Memo)


def checked_key(key: str | None, name: str) -> str:
    """An idempotency key as a client wrote it, "" where there is none; 400 naming the field if it cannot be one."""
    if key is None:
        return ""
    if not _KEY.fullmatch(key):
        raise bad_request(f"{name} must have 1 to {KEY_CHARS_MAX} printable characters and no spaces", name)
    return key


def keep(
    request: GenerateRequest, endpoint: str, body: bytes, key: str, created: int, stream_id: str | None = None
) -> Keep | None:
    """What is kept of a request; None where nothing in it asks for that."""
    if not (key or request.resumable or request.stored):
        return None
    if request.best_of > 1:
        message = "a request of several choices cannot be repeated by a key or resumed: a kept answer is one choice"
        raise bad_request(message, "n" if request.n > 1 else "best_of", "unsupported_parameter")
    memo = Memo(endpoint, created, stream_id, replace(request, prompt=Prompt()))
    return Keep(key, digests(endpoint, body) if key else {}, request.resumable, _encoder.encode(memo), request.stored)


def request_id_of(text: str) -> bytes:
    """The 16 bytes of a request id as clients write it; ``Refused`` (404) where it is none."""
    if not _ID.fullmatch(text):
        raise Refused(NOT_FOUND)
    return bytes.fromhex(text)


def response_request_id(response_id: str) -> bytes:
    """The request id in a response's id; ``Refused`` (404) where there is none in it."""
    prefix, _, rest = response_id.partition("_")
    return request_id_of(rest if prefix == "resp" else "")


def read_memo(data: bytes) -> Memo:
    """What ``keep`` wrote."""
    return _decoder.decode(data)


def digests(endpoint: str, body: bytes) -> dict[str, bytes]:
    """What a valid body says, by field: a digest of each known field that is there, in a canonical form."""
    found = {"endpoint": endpoint.encode()}
    for name, raw in ENDPOINTS[endpoint].read(body).raws.items():
        if name not in _TRAVEL:
            value = decode(raw, object, name)
            try:
                canonical = msgspec.json.encode(value, order="sorted")
            except RecursionError:
                raise bad_request(f"{name} is nested too deeply", name) from None
            found[name] = hashlib.blake2b(canonical, digest_size=_DIGEST_BYTES).digest()
    return found
