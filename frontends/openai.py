"""OpenAI's response objects for chats and completions: whole answers, and the chunks of a stream.

Knows shapes only: no socket, no stream. What is the same in every chunk of a response is encoded once, so that a chunk
costs one string encoding and one join. Two extensions: ``token_ids`` in a choice (with ``return_token_ids``; the
prompt's once as ``prompt_token_ids``) and ``stop_reason``, the stop string or end token that ended the output.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from baton.engine.effects import Finish
from baton.engine.stream import together
from baton.frontends.choices import Choices
from baton.frontends.errors import FINISH_REASONS, Refused, failure_of
from baton.frontends.stream import Delta, Stream
from baton.frontends.validate import GenerateRequest
from baton.ipc.frames import PromptScored, Scored

encode = msgspec.json.encode

#: JSON has no infinities; OpenAI writes this for "next to impossible"
LOGPROB_MIN = -9999.0

DONE = b"data: [DONE]\n\n"


def usage(finish: Finish) -> dict[str, Any]:
    """The usage object: the account's numbers."""
    return {
        "prompt_tokens": finish.prompt_tokens,
        "completion_tokens": finish.completion_tokens,
        "total_tokens": finish.prompt_tokens + finish.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": finish.cached_tokens},
    }


def finite(logprob: float) -> float:
    """A log-probability that JSON can say."""
    return LOGPROB_MIN if math.isnan(logprob) or logprob < LOGPROB_MIN else logprob


def shown_token(piece: bytes, mark: str = "") -> str:
    """A token as text; one that is part of a character as OpenAI writes it, ``mark`` and its bytes as escapes."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in piece)


def token_logprobs(logprobs: list[float], scores: list[Scored]) -> list[dict[str, Any]]:
    """One entry a token, in the shape of chats and responses."""
    return [
        {
            **_token_logprob(scored.piece, logprob),
            "top_logprobs": [_token_logprob(other.piece, other.logprob) for other in scored.top],
        }
        for logprob, scored in zip(logprobs, scores, strict=True)
    ]


def _token_logprob(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": shown_token(piece), "bytes": list(piece), "logprob": finite(logprob)}


def prompt_logprobs(scores: list[PromptScored]) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each token of the prompt an object from ids to log-probability, rank and text, the token itself
    first, then the likeliest ones; null for the first of all, that nothing comes before.
    """
    found: list[dict[str, Any] | None] = [None]
    for scored in scores:
        entry = {str(scored.token): _ranked(scored.piece, scored.logprob, scored.rank)}
        for rank, other in enumerate(scored.top, 1):
            entry.setdefault(str(other.token), _ranked(other.piece, other.logprob, rank))
        found.append(entry)
    return found


def _ranked(piece: bytes, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": shown_token(piece), "bytes": list(piece)}


class Chat:
    """The shapes of one chat response."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def first(self) -> bytes:
        """The delta before any text: who speaks."""
        return b'"delta":{"role":"assistant","content":""}'

    def piece(self, text: str) -> bytes:
        """The part of a chunk's choice that carries text."""
        return b'"delta":{"content":' + encode(text) + b"}"

    def last(self) -> bytes:
        """The same in the chunk with the finish reason."""
        return b'"delta":{}'

    def whole(self, text: str) -> dict[str, Any]:
        """The same in a whole answer."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def about_prompt(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Where in a whole answer the prompt's log-probabilities stand: beside the choices."""
        return [body]

    def logprobs(self, delta: Delta) -> dict[str, Any]:
        """One entry a token: itself, its bytes, its log-probability, and the likeliest tokens in its place."""
        return {"content": token_logprobs(delta.logprobs, delta.scores), "refusal": None}


class Completion:
    """The shapes of one text completion. Remembers where in the text the next token begins."""

    object_name = "text_completion"
    chunk_name = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self) -> None:
        self.offset = 0

    def first(self) -> bytes | None:
        """Nothing comes before the text."""
        return None

    def piece(self, text: str) -> bytes:
        """The part of a chunk's choice that carries text."""
        return b'"text":' + encode(text)

    def last(self) -> bytes:
        """The same in the chunk with the finish reason."""
        return b'"text":""'

    def whole(self, text: str) -> dict[str, Any]:
        """The same in a whole answer."""
        return {"text": text}

    def about_prompt(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Where in a whole answer the prompt's log-probabilities stand: in each choice, as vLLM has them."""
        choices: list[dict[str, Any]] = body["choices"]
        return choices

    def logprobs(self, delta: Delta) -> dict[str, Any]:
        """Four parallel lists; offsets count characters of the output, and the chosen token is among the top ones."""
        offsets = []
        for text in delta.texts:
            offsets.append(self.offset)
            self.offset += len(text)
        shown = [shown_token(scored.piece, "bytes:") for scored in delta.scores]
        top = [
            {shown_token(other.piece, "bytes:"): finite(other.logprob) for other in reversed(scored.top)}
            | {token: finite(logprob)}
            for token, logprob, scored in zip(shown, delta.logprobs, delta.scores, strict=True)
        ]
        return {
            "tokens": shown,
            "token_logprobs": [finite(logprob) for logprob in delta.logprobs],
            "top_logprobs": top if any(scored.top for scored in delta.scores) else None,
            "text_offset": offsets,
        }


class Chunks:
    """The server-sent events of one response, in OpenAI's order: role, content, finish reason, usage, done."""

    def __init__(self, stream: Stream, kind: Chat | Completion, index: int = 0) -> None:
        self.kind = kind
        request = stream.request
        self.ids = request.return_token_ids
        self.scores = request.params.logprobs
        self.usage = request.include_usage
        self.stream = stream
        head = {
            "id": kind.id_prefix + stream.id.hex(),
            "object": kind.chunk_name,
            "created": stream.created,
            "model": request.model,
        }
        if request.service_tier is not None:
            head["service_tier"] = request.service_tier
        self.head = b"data: " + encode(head)[:-1]
        self.open = self.head + b',"choices":[{"index":%d,' % index
        self.close = b"]" + (b',"usage":null' if self.usage else b"") + b"}\n\n"
        self.plain = b',"logprobs":null,"finish_reason":null}' + self.close

    def first(self) -> bytes:
        """What can be sent as soon as the request was admitted; may be nothing."""
        part = self.kind.first()
        prompt = b""
        if self.ids:
            prompt = b',"prompt_token_ids":' + encode(self.stream.prompt_ids)
        if part is None and not prompt:
            return b""
        choice = (part or self.kind.last()) + b',"logprobs":null,"finish_reason":null}'
        return self.open + choice + b"]" + prompt + self.close[1:]

    def delta(self, delta: Delta) -> bytes:
        """One delta; nothing where there is nothing to see in it."""
        text = delta.text
        if not (self.ids or self.scores):
            return self.open + self.kind.piece(text) + self.plain if text else b""
        if not text and not delta.token_ids:
            return b""
        scores = encode(self.kind.logprobs(delta)) if self.scores else b"null"
        ids = b',"token_ids":' + encode(delta.token_ids) if self.ids else b""
        rest = b',"logprobs":' + scores + b',"finish_reason":null' + ids + b"}"
        return self.open + self.kind.piece(text) + rest + self.close

    def end(self, finish: Finish) -> bytes:
        """The finish reason, the usage if it was asked for, and the end mark."""
        return self.last(finish) + self.closing(finish)

    def last(self, finish: Finish) -> bytes:
        """The finish reason."""
        reason = encode(FINISH_REASONS[finish.reason])
        stop = encode(finish.stop_reason)
        rest = b',"logprobs":null,"finish_reason":' + reason + b',"stop_reason":' + stop + b"}"
        return self.open + self.kind.last() + rest + self.close

    def closing(self, finish: Finish) -> bytes:
        """The usage if it was asked for, and the end mark."""
        if self.usage:
            return self.head + b',"choices":[],"usage":' + encode(usage(finish)) + b"}\n\n" + DONE
        return DONE


async def collect(stream: Stream, kind: Chat | Completion) -> bytes:
    """The whole answer as one JSON body, of a stream that has begun; raises ``Refused`` where it ends without one."""
    whole = Delta([], [], [], 0, [])
    async for delta in stream:
        _extend(whole, delta)
        stream.took(delta.position)
    assert stream.final is not None
    return _body(stream, kind, [(whole, stream.final)], stream.final)


async def collect_choices(choices: Choices, kind: Chat | Completion) -> bytes:
    """The same of several choices; of more than the client wants, those whose tokens are likeliest on average."""
    streams = choices.streams
    wholes = [Delta([], [], [], 0, []) for _ in streams]
    async for index, said in choices:
        if isinstance(said, Delta):
            _extend(wholes[index], said)
            streams[index].took(said.position)
        elif (failure := failure_of(said)) is not None:
            raise Refused(failure)
    found = list(zip(wholes, choices.finishes, strict=True))
    wanted = streams[0].request.n
    if wanted < len(found):
        found = sorted(found, key=lambda choice: -mean(choice[0].logprobs))[:wanted]
    return _body(streams[0], kind, found, together(choices.finishes))


def mean(logprobs: list[float]) -> float:
    """The mean log-probability; that of no tokens is the worst."""
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf


def _extend(whole: Delta, delta: Delta) -> None:
    whole.token_ids += delta.token_ids
    whole.texts += delta.texts
    whole.logprobs += delta.logprobs
    whole.scores += delta.scores
    whole.tail = delta.tail


def _body(stream: Stream, kind: Chat | Completion, found: list[tuple[Delta, Finish]], account: Finish) -> bytes:
    """The answer's JSON: its choices in this order, and the usage of all that were made."""
    request = stream.request
    failure = failure_of(account)
    if failure is not None:
        raise Refused(failure)
    body: dict[str, Any] = {
        "id": kind.id_prefix + stream.id.hex(),
        "object": kind.object_name,
        "created": stream.created,
        "model": request.model,
        "choices": [_choice(type(kind)(), index, *each, request) for index, each in enumerate(found)],
        "usage": usage(account),
    }
    if request.service_tier is not None:
        body["service_tier"] = request.service_tier
    if request.return_token_ids:
        body["prompt_token_ids"] = stream.prompt_ids
    if request.params.prompt_logprobs is not None:
        scores = prompt_logprobs(account.prompt_scores)
        for place in kind.about_prompt(body):
            place["prompt_logprobs"] = scores
    return encode(body)


def _choice(
    kind: Chat | Completion, index: int, whole: Delta, finish: Finish, request: GenerateRequest
) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        **kind.whole(whole.text),
        "logprobs": kind.logprobs(whole) if request.tells_logprobs else None,
        "finish_reason": FINISH_REASONS[finish.reason],
        "stop_reason": finish.stop_reason,
    }
    if request.return_token_ids:
        choice["token_ids"] = whole.token_ids
    return choice
