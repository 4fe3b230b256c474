"""What a request asks for and on which terms: the parts of ``frames`` that go with it from process to process."""

from __future__ import annotations

from typing import Any

import msgspec


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
    top_logprobs: int = 0  # how many of the likeliest tokens are told of with each chosen one
    choice: int = 0  # which of the client's n choices; it tells their random numbers apart
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: bytes = b""  # one bit an id, the lowest bit of the first byte is id 0; empty where all are allowed
    bad_words: tuple[str, ...] = ()
    bad_ids: tuple[tuple[int, ...], ...] = ()  # the bad words as token ids, the tokenizer's work
    prompt_logprobs: int | None = None  # so many of the likeliest tokens are told of with each of the prompt's


class Terms(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What admission fixed for the request's life besides its parameters. An empty digest means "none in use".

    ``deadline_ns`` ends the request wherever it is, ``queue_until_ns`` one that no step has begun; 0 is no bound. Of
    two requests that wait the one with the lower ``priority`` is the more urgent.
    """

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
    queue_until_ns: int = 0
    priority: int = 0


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
