"""The one validator of every door: from a client's JSON object to a ``GenerateRequest``, or a 400 that names the field.

Whatever comes in, only ``Refused`` comes out as an exception. Text prompts are measured later, in the tokenizer's
process; prompts of token ids are measured here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from baton.engine.limits import Limits
from baton.frontends import asked, parameters
from baton.frontends.errors import Refused, bad_request, renamed
from baton.frontends.fields import Fields, Shape, decode
from baton.frontends.sampling import read_sampling
from baton.ipc.frames import Failure, Params, Prompt
from baton.workers.config import Card

#: what OpenAI documents as the default of /v1/completions; a chat goes on to the end of the context
COMPLETION_TOKENS_DEFAULT = 16

METADATA_ENTRIES_MAX = 16
METADATA_NAME_CHARS_MAX = 64
METADATA_CHARS_MAX = 512
METADATA_BYTES_MAX = 1 << 16

#: a developer's message is what OpenAI now calls a system message; templates know it by its old name
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TEXT_PARTS = ("text", "input_text", "output_text")

#: {"role":"user"}
_MESSAGE_BYTES_MIN = 15

_LABELS = tuple(parameters.LABELS)
CHAT = Shape("Chat", (*parameters.CHAT, *parameters.STREAMING, *_LABELS, *parameters.REFUSED_CHAT))
COMPLETION = Shape(
    "Completion", (*parameters.COMPLETION, *parameters.STREAMING, *_LABELS, *parameters.REFUSED_COMPLETION)
)
RESPONSE = Shape("Response", (*parameters.ENVELOPE, *parameters.RESPONSE, *_LABELS, *parameters.REFUSED_RESPONSE))

#: what the endpoints call the prompt and ``max_tokens``; a completion calls them so itself
CHAT_NAMES = {"prompt": "messages"}
NEWER_CHAT_NAMES = {**CHAT_NAMES, "max_tokens": "max_completion_tokens"}
RESPONSE_NAMES = {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"}
STREAM_OPTIONS = Shape("StreamOptions", ("include_usage", *parameters.REFUSED_STREAM_OPTIONS))


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A valid request, the same whichever door it came through.

    ``operation`` is "chat" or "text_completion"; ``labels`` are attributes for its trace; ``ignored`` names what the
    client sent and nobody reads. A ``resumable`` one waits for a client that lost its connection, the answer of a
    ``stored`` one is kept for a while. ``deadline_ms`` and ``queue_ms_max`` count from its receipt; of two that wait
    the one with the lower ``priority`` goes first. ``service_tier`` is the one in effect, None where none was asked
    for. Of ``best_of`` choices the client gets ``n``; ``tells_logprobs`` where it asked for log-probabilities itself.
    ``names`` says what its endpoint calls the engine's ``prompt`` and ``max_tokens``.
    """

    operation: str
    model: str
    params: Params
    prompt: Prompt
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    resumable: bool = False
    stored: bool = False
    n: int = 1
    best_of: int = 1
    tells_logprobs: bool = False
    deadline_ms: int | None = None
    queue_ms_max: int | None = None
    priority: int = 0
    service_tier: str | None = None
    instructions: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    names: dict[str, str] = field(default_factory=dict)


class Part(msgspec.Struct, gc=False):
    """One content part of a message."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, gc=False):
    """One message of a chat, or one item of a response's input, as far as it is read."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    type: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()
    function_call: msgspec.Raw = msgspec.Raw()
    audio: msgspec.Raw = msgspec.Raw()


class Validator:
    """Knows the model's card and the limits; keeps nothing of any request."""

    def __init__(self, card: Card, limits: Limits) -> None:
        self.card = card
        self.limits = limits

    def chat(self, body: bytes) -> GenerateRequest:
        """A body of ``/v1/chat/completions``."""
        fields = CHAT.read(body)
        self._common(fields, parameters.REFUSED_CHAT)
        if "messages" not in fields:
            raise bad_request("messages is required", "messages")
        messages = self._messages(fields, "messages")
        limit = self._max_tokens(fields, "max_completion_tokens")
        older = self._max_tokens(fields, "max_tokens")
        if limit is not None and older is not None and limit != older:
            raise bad_request("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
        names = CHAT_NAMES if limit is None else NEWER_CHAT_NAMES
        params = self._params(fields, limit or older, asked.chat_logprobs(fields, self.limits), names)
        request = self._request(fields, "chat", params, Prompt(messages=messages))
        n, best_of = asked.choices(fields, self.limits)
        return replace(self._about_prompt(fields, request), n=n, best_of=best_of, names=names)

    def completion(self, body: bytes) -> GenerateRequest:
        """A body of ``/v1/completions``."""
        fields = COMPLETION.read(body)
        self._common(fields, parameters.REFUSED_COMPLETION)
        if "prompt" not in fields:
            raise bad_request("prompt is required", "prompt")
        limit = self._max_tokens(fields, "max_tokens") or COMPLETION_TOKENS_DEFAULT
        n, best_of = asked.choices(fields, self.limits)
        told = asked.completion_logprobs(fields, self.limits)
        params = self._params(fields, limit, 0 if told is None and best_of > n else told)
        prompt = self._prompt(fields)
        self._check_length(prompt, params, "prompt")
        request = self._request(fields, "text_completion", params, prompt)
        request = self._about_prompt(fields, request)
        return replace(request, n=n, best_of=best_of, tells_logprobs=told is not None)

    def response(self, body: bytes, whole: str | None = None, socket: bool = False) -> GenerateRequest:
        """A body of ``/v1/responses``, or the parameters of a socket's ``response.create``, beside its envelope or
        (``whole``) in a field of their own. ``input`` may also be token ids.
        """
        fields = RESPONSE.read(body, whole)
        self._common(fields, parameters.REFUSED_RESPONSE)
        if whole is not None:
            fields.refuse(parameters.REFUSED_INSIDE)
        elif not socket:
            fields.refuse(parameters.REFUSED_OVER_HTTP)
        stream = fields.boolean("stream", socket)
        if socket and not stream:
            raise bad_request("stream cannot be false here: a socket always streams", "stream")
        top = asked.response_logprobs(fields, self.limits)
        params = self._params(fields, self._max_tokens(fields, "max_output_tokens"), top, RESPONSE_NAMES)
        instructions = fields.text("instructions", self.limits.body_bytes_max)
        prompt = self._input(fields, instructions)
        self._check_length(prompt, params, "input")
        request = self._request(fields, "chat", params, prompt, instructions, stream)
        return replace(request, stored=fields.boolean("store"), names=RESPONSE_NAMES)

    # -------------------------------------------------------------------------------- what all kinds share

    def _common(self, fields: Fields, refused: dict[str, tuple[tuple[object, ...], str]]) -> None:
        fields.refuse(refused)
        if "model" not in fields:
            raise bad_request("model is required", "model")
        name = fields.decode("model", str)
        if name != self.card.name:
            shown = name[: self.limits.label_chars_max]
            message = f"the model {shown!r} does not exist; this server has {self.card.name!r}"
            raise Refused(Failure(404, "invalid_request_error", message, "model", "model_not_found"))

    def _params(
        self, fields: Fields, max_tokens: int | None, top_logprobs: int | None, names: dict[str, str] | None = None
    ) -> Params:
        try:
            asked.check_scores(fields, max_tokens or self.card.context_tokens_max, top_logprobs, self.limits)
            return read_sampling(fields, self.card, self.limits, max_tokens, top_logprobs)
        except Refused as refused:
            raise Refused(renamed(refused.failure, names or {})) from None

    def _about_prompt(self, fields: Fields, request: GenerateRequest) -> GenerateRequest:
        top = asked.prompt_logprobs(fields, self.card, self.limits)
        return replace(request, params=msgspec.structs.replace(request.params, prompt_logprobs=top))

    def _request(
        self,
        fields: Fields,
        operation: str,
        params: Params,
        prompt: Prompt,
        instructions: str | None = None,
        stream: bool | None = None,
    ) -> GenerateRequest:
        if stream is None:
            stream = fields.boolean("stream")
        include_usage = _include_usage(fields, stream)
        labels = {}
        for name, attribute in parameters.LABELS.items():
            value = fields.text(name, self.limits.label_chars_max)
            if value is not None:
                labels[attribute] = value
        if "store" in fields:
            labels["baton.store"] = "true" if fields.boolean("store") else "false"
        tier, priority = self._urgency(fields)
        if "service_tier" in fields:
            labels["baton.service_tier"] = fields.decode("service_tier", str)
        metadata = self._metadata(fields)
        labels.update((f"baton.metadata.{name}", value) for name, value in metadata.items())
        return GenerateRequest(
            operation=operation,
            model=self.card.name,
            params=params,
            prompt=prompt,
            stream=stream,
            include_usage=include_usage,
            return_token_ids=fields.boolean("return_token_ids"),
            tells_logprobs=params.logprobs,
            resumable=fields.boolean("resumable"),
            deadline_ms=fields.integer("deadline_ms", 1, int(self.limits.request_s_max * 1000)),
            queue_ms_max=fields.integer("queue_ms_max", 1, int(self.limits.request_s_max * 1000)),
            priority=priority,
            service_tier=tier,
            instructions=instructions,
            metadata=metadata,
            labels=labels,
            ignored=fields.ignored,
        )

    def _urgency(self, fields: Fields) -> tuple[str | None, int]:
        """The service tier in effect and the priority: the client's own, else that of the tier."""
        most = self.limits.priority_max
        named = fields.integer("priority", -most, most)
        if "service_tier" not in fields:
            return None, named or 0
        asked = fields.decode("service_tier", str)
        if asked not in parameters.TIERS:
            raise bad_request(f"service_tier must be one of {', '.join(parameters.TIERS)}", "service_tier")
        tier, way = parameters.TIERS[asked]
        return (tier, way * self.limits.tier_classes) if named is None else ("default", named)

    def _metadata(self, fields: Fields) -> dict[str, str]:
        if "metadata" not in fields:
            return {}
        if len(fields.raws["metadata"]) > METADATA_BYTES_MAX:
            raise bad_request(f"metadata may have {METADATA_BYTES_MAX} bytes", "metadata")
        metadata = fields.decode("metadata", dict[str, str])
        if len(metadata) > METADATA_ENTRIES_MAX:
            raise bad_request(f"metadata has more than {METADATA_ENTRIES_MAX} entries", "metadata")
        for name, value in metadata.items():
            if len(name) > METADATA_NAME_CHARS_MAX or len(value) > METADATA_CHARS_MAX:
                bounds = f"{METADATA_NAME_CHARS_MAX} characters a name and {METADATA_CHARS_MAX} a value"
                raise bad_request(f"metadata may have {bounds}", "metadata")
        return metadata

    def _max_tokens(self, fields: Fields, name: str) -> int | None:
        most = min(self.limits.output_tokens_max, self.card.context_tokens_max)
        return fields.integer(name, 1, most)

    # -------------------------------------------------------------------------------- prompts

    def _messages(self, fields: Fields, name: str) -> list[dict[str, Any]]:
        raw, most = fields.raws[name], self.limits.messages_max
        if len(raw) > most * _MESSAGE_BYTES_MIN and raw.startswith(b"["):  # counted before any is read: a bomb is cheap
            count = len(decode(raw, list[msgspec.Raw], name))
            if count > most:
                raise bad_request(f"{name} has {count} messages, the limit is {most}", name)
        messages = fields.decode(name, list[Message])
        if not messages:
            raise bad_request(f"{name} must not be empty", name)
        if len(messages) > most:
            raise bad_request(f"{name} has {len(messages)} messages, the limit is {most}", name)
        return [_message(message, f"{name}[{number}]") for number, message in enumerate(messages)]

    def _prompt(self, fields: Fields) -> Prompt:
        """A string, a list of ids, or a list of exactly one of either."""
        raw = fields.raws["prompt"]
        if not raw.startswith(b"["):
            return _text_prompt(decode(raw, str, "prompt"), "prompt")
        if raw[1:].lstrip(b" \t\r\n")[:1] not in (b'"', b"["):
            return self._ids(raw, "prompt")
        try:
            one = bytes(msgspec.json.decode(raw, type=tuple[msgspec.Raw])[0])
        except msgspec.ValidationError:
            why = "several prompts in one request are not supported yet"
            raise bad_request(why, "prompt", "unsupported_parameter") from None
        if one.startswith(b"["):
            return self._ids(one, "prompt[0]")
        return _text_prompt(decode(one, str, "prompt[0]"), "prompt")

    def _input(self, fields: Fields, instructions: str | None) -> Prompt:
        if "input" not in fields:
            raise bad_request("input is required", "input")
        raw = fields.raws["input"]
        if raw.startswith(b"[") and raw[1:].lstrip(b" \t\r\n")[:1] not in (b"{", b"]"):
            if instructions is not None:
                raise bad_request("instructions cannot be added to an input of token ids", "instructions")
            return self._ids(raw, "input")
        messages: list[dict[str, Any]]
        if raw.startswith(b"["):
            messages = self._messages(fields, "input")
        else:
            messages = [{"role": "user", "content": _text_prompt(decode(raw, str, "input"), "input").text}]
        if instructions is not None:
            messages.insert(0, {"role": "system", "content": instructions})
        return Prompt(messages=messages)

    def _ids(self, raw: bytes, name: str) -> Prompt:
        ids = decode(raw, list[int], name)
        if not ids:
            raise bad_request(f"{name} must not be empty", name)
        if min(ids) < 0 or max(ids) >= self.card.vocab:
            raise bad_request(f"{name} has an id outside the vocabulary of {self.card.vocab}", name)
        return Prompt(token_ids=ids)

    def _check_length(self, prompt: Prompt, params: Params, name: str) -> None:
        """A prompt of ids and its output must fit the context together."""
        if prompt.token_ids is None:
            return
        count, context = len(prompt.token_ids), self.card.context_tokens_max
        wanted = params.max_tokens or 1
        if count + wanted > context:
            message = f"the prompt has {count} tokens and {wanted} are to follow, the context holds {context}"
            raise bad_request(message, name, "context_length_exceeded")


def _message(message: Message, place: str) -> dict[str, Any]:
    """One message with its content as one string; what cannot be shown to the model is refused by name."""
    if message.type not in (None, "message"):
        raise bad_request(f"{place}: items of type {message.type[:64]!r} are not supported", f"{place}.type")
    if message.role not in ROLES:
        raise bad_request(f"{place}.role must be one of {', '.join(ROLES)}", f"{place}.role")
    for name in ("tool_calls", "function_call", "audio"):
        if bytes(getattr(message, name)) not in (b"", b"null", b"[]"):
            raise bad_request(f"{place}.{name} is not supported", f"{place}.{name}", "unsupported_parameter")
    content = message.content
    if content is None:
        raise bad_request(f"{place}.content is required", f"{place}.content")
    if isinstance(content, list):
        for number, part in enumerate(content):
            where = f"{place}.content[{number}]"
            if part.type not in TEXT_PARTS:
                raise bad_request(f"{where}: parts of type {part.type[:64]!r} are not supported", f"{where}.type")
            if part.text is None:
                raise bad_request(f"{where}.text is required", f"{where}.text")
        content = "".join(part.text or "" for part in content)
    read: dict[str, Any] = {"role": ROLES[message.role], "content": content}
    if message.name is not None:
        read["name"] = message.name
    return read


def _text_prompt(text: str, name: str) -> Prompt:
    if not text:
        raise bad_request(f"{name} must not be empty", name)
    return Prompt(text=text)


def _include_usage(fields: Fields, stream: bool) -> bool:
    if "stream_options" not in fields:
        return False
    options = STREAM_OPTIONS.read(fields.raws["stream_options"], "stream_options")
    if options.raws and not stream:
        raise bad_request("stream_options is only allowed with stream", "stream_options")
    options.refuse(parameters.REFUSED_STREAM_OPTIONS)
    fields.ignored += options.ignored
    return options.boolean("include_usage")
