"""OpenAI's Responses API as events: the response object, its one output message, and what is said while it grows.

Knows shapes only. Every event carries ``response_id``, ``stream_id`` and a ``sequence_number`` that counts from 0 in
each response. A cancelled response ends with ``response.incomplete`` whose response has status "cancelled": the
vocabulary has no terminal event of that name.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton.engine.effects import Finish
from baton.frontends.errors import failure_of
from baton.frontends.validate import GenerateRequest
from baton.ipc.frames import Failure

encode = msgspec.json.encode

#: a failure's status -> the error codes that a response object may carry
_CODES = {429: "rate_limit_exceeded"}


class ResponseEvents:
    """The events of one response, in order; each method gives the next one, encoded."""

    def __init__(self, request_id: bytes, stream_id: str | None, request: GenerateRequest, created: int) -> None:
        self.id = "resp_" + request_id.hex()
        self.item_id = "msg_" + request_id.hex()
        self.stream_id = stream_id
        self.request = request
        self.created = created
        self.sequence = 0
        self.texts: list[str] = []
        self.speaking = False
        names = {"response_id": self.id, "stream_id": stream_id, "item_id": self.item_id}
        places = {"output_index": 0, "content_index": 0, "logprobs": []}
        delta = {"type": "response.output_text.delta", **names, **places}
        self._delta = encode(delta)[:-1] + b',"delta":'

    def begin(self, queued: bool) -> bytes:
        """The response exists, under this id; it may wait for others of its stream."""
        fields: dict[str, Any] = {"response": self._response("queued" if queued else "in_progress")}
        if self.request.ignored:
            fields["ignored_params"] = self.request.ignored
        return self._event("response.created", **fields)

    def admitted(self) -> list[bytes]:
        """The engine has it: the (still empty) output message is announced."""
        self.speaking = True
        return [
            self._event("response.in_progress", response=self._response("in_progress")),
            self._event("response.output_item.added", output_index=0, item=self._item("in_progress", None)),
            self._part("response.content_part.added", part=_text_part("")),
        ]

    def delta(self, text: str) -> bytes:
        """More text."""
        self.texts.append(text)
        number = self.sequence
        self.sequence += 1
        return self._delta + encode(text) + b',"sequence_number":%d}' % number

    def finish(self, finish: Finish) -> list[bytes]:
        """The last events: the message is done, and the terminal one."""
        failure = failure_of(finish)
        cancelled = finish.reason == "cancelled"
        complete = failure is None and finish.reason == "stop"
        text = "".join(self.texts)
        output: list[dict[str, Any]] = []
        events: list[bytes] = []
        if self.speaking:
            item = self._item("completed" if complete else "incomplete", text)
            output.append(item)
            events += [
                self._part("response.output_text.done", text=text, logprobs=[]),
                self._part("response.content_part.done", part=_text_part(text)),
                self._event("response.output_item.done", output_index=0, item=item),
            ]
        if cancelled:
            return [*events, self._end("response.incomplete", "cancelled", output, finish)]
        if failure is not None:
            return [*events, self._end("response.failed", "failed", output, finish, error=response_error(failure))]
        if complete:
            return [*events, self._end("response.completed", "completed", output, finish)]
        details = {"reason": "max_output_tokens"}
        return [*events, self._end("response.incomplete", "incomplete", output, finish, incomplete_details=details)]

    def never_started(self) -> bytes:
        """The terminal event of a response that was cancelled while it waited for others of its stream."""
        return self._event("response.incomplete", response=self._response("cancelled"))

    def _end(self, kind: str, status: str, output: list[dict[str, Any]], finish: Finish, **more: Any) -> bytes:
        used = {
            "input_tokens": finish.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": finish.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": finish.prompt_tokens + finish.completion_tokens,
        }
        return self._event(kind, response=self._response(status, output=output, usage=used, **more))

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self.sequence
        self.sequence += 1
        head = {"type": kind, "response_id": self.id, "stream_id": self.stream_id, "sequence_number": number}
        return encode({**head, **fields})

    def _part(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self.item_id, output_index=0, content_index=0, **fields)

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [_text_part(text)]
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
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
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.labels.get("user.id"),
            **more,
        }


def response_error(failure: Failure) -> dict[str, str | None]:
    """The ``error`` of a failed response. Its codes are few; ``type`` and ``param`` say what HTTP would have said."""
    code = _CODES.get(failure.status, "invalid_prompt" if failure.status < 500 else "server_error")
    return {"code": code, "message": failure.message, "param": failure.param, "type": failure.kind}


def error_event(failure: Failure, response_id: str | None, stream_id: str | None) -> bytes:
    """An ``error`` event: a message from the client was not carried out. It belongs to no response's sequence."""
    inner = {"type": failure.kind, "code": failure.code, "message": failure.message, "param": failure.param}
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
            "error": inner,
        }
    )


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
