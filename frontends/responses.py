"""OpenAI's Responses API as events: the response object, its one output message, and what is said while it grows.

Knows shapes only. Every event carries ``response_id``, ``stream_id`` and a ``sequence_number`` that grows from 0 on in
each response. A cancelled response ends with ``response.incomplete`` whose response has status "cancelled": the
vocabulary has no terminal event of that name.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton.engine.desk import AHEAD
from baton.engine.effects import Finish
from baton.frontends.errors import Refused, failure_of, retry_after_s
from baton.frontends.openai import token_logprobs
from baton.frontends.stream import Delta
from baton.frontends.validate import GenerateRequest
from baton.ipc.frames import Failure, Scored

encode = msgspec.json.encode

#: a failure without a code of its own: its status -> a code, which OpenAI's clients want in a response object
_CODES = {429: "rate_limit_exceeded"}


#: events before the first output token: created, in_progress, output_item.added, content_part.added
_PRELUDE = 4
#: events after the output: output_text.done, content_part.done, output_item.done, and the terminal one
_CODA = 4


def tokens_before(number: int) -> int:
    """How many output tokens whoever has event ``number`` has, if the answer is that long."""
    return max(0, number - (_PRELUDE - 1))


class ResponseEvents:
    """The events of one response, in order; each method gives the next ones, encoded.

    An event's number follows from what it says alone: four events come before the output, then each token counts one
    and a delta has the number of its last, then the text that was held back counts one, if there is any, then come the
    last events. So whoever resumes ``after`` a number gets what follows it, under the same numbers, however often the
    deltas before were merged.
    """

    def __init__(
        self,
        request_id: bytes,
        stream_id: str | None,
        request: GenerateRequest,
        created: int,
        after: int = -1,
        position: int = 0,
        text: str = "",
        scores: tuple[list[float], list[Scored]] = ([], []),
    ) -> None:
        self.id = "resp_" + request_id.hex()
        self.item_id = "msg_" + request_id.hex()
        self.stream_id = stream_id
        self.request = request
        self.created = created
        self.after = after
        self.position = position
        self.texts = [text]
        self.logprobs = token_logprobs(*scores)
        self.tail = False
        self.speaking = False
        names = {"response_id": self.id, "stream_id": stream_id, "item_id": self.item_id}
        places = {"output_index": 0, "content_index": 0}
        delta = {"type": "response.output_text.delta", **names, **places}
        self._delta = encode(delta)[:-1] + b',"delta":'

    def begin(self, queued: bool) -> list[bytes]:
        """The response exists, under this id; it may wait for others of its stream."""
        fields: dict[str, Any] = {"response": self.response("queued" if queued else "in_progress")}
        if self.request.ignored:
            fields["ignored_params"] = self.request.ignored
        return self._event(0, "response.created", **fields)

    def admitted(self) -> list[bytes]:
        """The engine has it: the (still empty) output message is announced."""
        self.speaking = True
        return [
            *self._event(1, "response.in_progress", response=self.response("in_progress")),
            *self._event(2, "response.output_item.added", output_index=0, item=self._item("in_progress", None)),
            *self._part(3, "response.content_part.added", part=_text_part("", [])),
        ]

    def delta(self, delta: Delta) -> list[bytes]:
        """More output; no event where there is nothing to read in it."""
        text = delta.text
        self.position = delta.position
        self.tail = self.tail or bool(delta.tail)
        number = _PRELUDE - 1 + self.position + self.tail
        self.texts.append(text)
        scores = token_logprobs(delta.logprobs, delta.scores) if delta.scores else []
        self.logprobs += scores
        if not (text or scores) or number <= self.after:
            return []
        said = encode(text) + b',"logprobs":' + (encode(scores) if scores else b"[]")
        return [self._delta + said + b',"sequence_number":%d}' % number]

    def check(self, finish: Finish | None, began: bool) -> None:
        """Refuse whoever claims to have an event behind the last one of a response that is over."""
        if finish is not None:
            last = _PRELUDE + self.position + bool(finish.tail) + _CODA - 1 if began else 1
            if self.after > last:
                raise Refused(AHEAD)

    def finish(self, finish: Finish, again: bool = False) -> list[bytes]:
        """The last events: the message is done, and the terminal one, ``again`` where the client has that already."""
        status, _ = outcome(finish)
        kind = "response.incomplete" if status == "cancelled" else f"response.{status}"
        events: list[bytes] = []
        number, text = 1, "".join(self.texts)
        if self.speaking:
            number = _PRELUDE + self.position + self.tail
            item = self._item("completed" if status == "completed" else "incomplete", text)
            events += self._part(number, "response.output_text.done", text=text, logprobs=self.logprobs)
            events += self._part(number + 1, "response.content_part.done", part=_text_part(text, self.logprobs))
            events += self._event(number + 2, "response.output_item.done", output_index=0, item=item)
            number += _CODA - 1
        if again or number != self.after:  # the end is no secret to one that was too far ahead of it
            self.after = -1
        return [*events, *self._event(number, kind, response=self.ended(finish, text))]

    def never_started(self) -> list[bytes]:
        """The terminal event of a response that was cancelled while it waited for others of its stream."""
        return self._event(1, "response.incomplete", response=self.response("cancelled"))

    def ended(self, finish: Finish, text: str) -> dict[str, Any]:
        """The response object at the end."""
        status, more = outcome(finish)
        output = [self._item("completed" if status == "completed" else "incomplete", text)] if self.speaking else []
        used = {
            "input_tokens": finish.prompt_tokens,
            "input_tokens_details": {"cached_tokens": finish.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": finish.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": finish.prompt_tokens + finish.completion_tokens,
        }
        return self.response(status, output=output, usage=used, **more)

    def running(self, text: str) -> dict[str, Any]:
        """The response object in the middle."""
        return self.response("in_progress", output=[self._item("in_progress", text)] if self.speaking else [])

    def _event(self, number: int, kind: str, **fields: Any) -> list[bytes]:
        if number <= self.after:
            return []
        head = {"type": kind, "response_id": self.id, "stream_id": self.stream_id, "sequence_number": number}
        return [encode({**head, **fields})]

    def _part(self, number: int, kind: str, **fields: Any) -> list[bytes]:
        return self._event(number, kind, item_id=self.item_id, output_index=0, content_index=0, **fields)

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [_text_part(text, self.logprobs)]
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def response(self, status: str, **more: Any) -> dict[str, Any]:
        """The response object; what Baton does not have is there with the value that says so."""
        request, params = self.request, self.request.params
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": params.max_tokens,
            "max_tool_calls": None,
            "metadata": request.metadata,
            "model": request.model,
            "output": [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": request.service_tier or "default",
            "store": request.stored,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": params.top_logprobs,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.labels.get("user.id"),
            **more,
        }


def outcome(finish: Finish) -> tuple[str, dict[str, Any]]:
    """The status of a response that has ended, and what its object says of that."""
    failure = failure_of(finish)
    if finish.reason == "cancelled":
        return "cancelled", {}
    if failure is not None:
        return "failed", {"error": response_error(failure)}
    if finish.reason == "stop":
        return "completed", {}
    return "incomplete", {"incomplete_details": {"reason": "max_output_tokens"}}


def response_error(failure: Failure) -> dict[str, str | int | None]:
    """The ``error`` of a failed response: what HTTP would have said. OpenAI's own codes are fewer."""
    code = _CODES.get(failure.status, "invalid_prompt" if failure.status < 500 else "server_error")
    error: dict[str, str | int | None] = {"code": failure.code or code, "message": failure.message}
    return {**error, "param": failure.param, "type": failure.kind, **_retry(failure)}


def _retry(failure: Failure) -> dict[str, int]:
    """``retry_after_s``, where HTTP would have sent ``Retry-After``."""
    wait_s = retry_after_s(failure)
    return {} if wait_s is None else {"retry_after_s": wait_s}


def error_event(failure: Failure, response_id: str | None, stream_id: str | None) -> bytes:
    """An ``error`` event: a message from the client was not carried out. It belongs to no response's sequence."""
    inner = {"type": failure.kind, "code": failure.code, "message": failure.message, "param": failure.param}
    retry = _retry(failure)
    return encode(
        {
            "type": "error",
            "response_id": response_id,
            "stream_id": stream_id,
            "sequence_number": 0,
            "status": failure.status,
            "code": failure.code,
            "message": failure.message,
            "param": failure.param,
            **retry,
            "error": {**inner, **retry},
        }
    )


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
