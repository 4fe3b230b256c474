"""What a client may write in a request, as literal tables: what is read, what only labels, what is refused by name.

Nothing a client sends is dropped silently. A parameter is read by ``validate``, or recorded as a label, or refused by
name unless its value changes nothing; what another door reads is known here too. A name that is in no table is a typo
or a newcomer: it is accepted, counted and named in the ``X-Ignored-Params`` header.
"""

from __future__ import annotations

#: labels: recorded in the request's trace, without any other effect. A user is *not* a tenant: a client's word for
#: whom it serves must not partition the prefix cache.
LABELS: dict[str, str] = {
    "user": "user.id",
    "safety_identifier": "baton.safety_identifier",
    "prompt_cache_key": "baton.prompt_cache_key",
    "request_id": "baton.client_request_id",
}

#: how long a request may take, wait for its turn, and which of two that wait goes first
URGENCY = ("deadline_ms", "queue_ms_max", "priority", "service_tier")

#: service tier -> the tier it is here, and which way it moves the priority of a request that names none itself
TIERS: dict[str, tuple[str, int]] = {
    "auto": ("default", 0),
    "default": ("default", 0),
    "scale": ("default", 0),
    "flex": ("flex", 1),
    "priority": ("priority", -1),
    "fast": ("priority", -1),
    "ultrafast": ("priority", -1),
}

#: read at every door
SAMPLING = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "metadata",
    "store",
    *URGENCY,
)

CHAT = (
    *SAMPLING,
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "n",
)
COMPLETION = (*SAMPLING, "prompt", "max_tokens", "logprobs", "prompt_logprobs", "n", "best_of")
STREAMING = ("stream", "stream_options", "return_token_ids")
RESPONSE = (
    *(*SAMPLING, "input", "instructions", "max_output_tokens", "stream", "resumable"),
    *("top_logprobs", "include"),
)
#: around the parameters of a response in a message of a socket
ENVELOPE = ("type", "event_id", "stream_id", "response_id", "traceparent", "idempotency_key", "starting_after")

NEVER: tuple[object, ...] = ()
NOT_YET = "is not supported yet"
NO_TOOLS = "is not supported: tools cannot be called yet"
NO_GRAMMAR = "is not supported: output cannot be constrained yet"
NO_SEQUEL = "is not supported: a response cannot be gone on with, send the whole conversation"
NO_BACKGROUND = "is not supported: a request belongs to its connection; resumable lets it come back"
NO_TEMPLATES = "is not supported: no prompts are kept here"
NO_RESUMING = "is not supported here: only responses, and the SDK's requests, can be resumed"
ELSEWHERE = "is a parameter of another endpoint, not of this one"
IN_MESSAGE = "is not read from the body of an HTTP request: it belongs to the messages of a WebSocket"
BESIDE = "is not read from inside of response: it belongs beside it"
INSIDE = "is not read from beside response: it belongs inside it"
FOREIGN = "is no field of this type of message"
KEEPS_STREAM = "is not read here: the response keeps the stream_id it was created with"
KEEPS_TRACE = "is not read here: the response keeps the trace it was created with"
ONLY_CREATE = "is not read here: it belongs to response.create"
ONLY_RESUME = "is not read here: it belongs to response.resume"
ONLY_LATER = "is not read here: a new response is given its id; response.resume and response.cancel name one"
IN_HEADER = "is not read from the body of an HTTP request: send it as the Idempotency-Key header"
NO_MEDIA = "is not supported: this model reads and writes text"

#: parameter -> (values that change nothing, why any other is refused); null changes nothing anywhere
REFUSED_EVERYWHERE: dict[str, tuple[tuple[object, ...], str]] = {
    "use_beam_search": ((False,), NOT_YET),
    "length_penalty": ((1,), NOT_YET),
    "logits_processors": (([],), NOT_YET),
    "truncate_prompt_tokens": (NEVER, NOT_YET),
    "return_tokens_as_token_ids": ((False,), "is not supported; return_token_ids gives the ids"),
    "spaces_between_special_tokens": ((True,), NOT_YET),
    "add_special_tokens": (NEVER, NOT_YET),
    "detokenize": ((True,), NOT_YET),
    "cache_salt": (NEVER, NOT_YET),
    "prompt_cache_options": (({},), NOT_YET),
    "prompt_cache_retention": (("in_memory",), NOT_YET),
    "moderation": (NEVER, NOT_YET),
    "guided_decoding_backend": (NEVER, NO_GRAMMAR),
    "guided_whitespace_pattern": (NEVER, NO_GRAMMAR),
    "structural_tag": (NEVER, NO_GRAMMAR),
    "media_io_kwargs": (({},), NO_MEDIA),
    "flat_logprobs": ((False,), NOT_YET),
    "logprob_token_ids": (([],), NOT_YET),
    "prompt_embeds": (NEVER, NOT_YET),
    "thinking_token_budget": (NEVER, NOT_YET),
    "include_reasoning": ((True, False), NOT_YET),
    "repetition_detection": (NEVER, NOT_YET),
    "stream_interval": ((1,), NOT_YET),
    "vllm_xargs": (({},), NOT_YET),
    "extra_args": (({},), NOT_YET),
    "output_kind": (NEVER, "is not supported: stream says how the answer comes"),
    "skip_reading_prefix_cache": ((False,), NOT_YET),
    "kv_transfer_params": (NEVER, NOT_YET),
    "mm_processor_kwargs": (({},), NO_MEDIA),
    "response_format": (({"type": "text"},), NO_GRAMMAR),
    "structured_outputs": (NEVER, NO_GRAMMAR),
    "guided_json": (NEVER, NO_GRAMMAR),
    "guided_regex": (NEVER, NO_GRAMMAR),
    "guided_choice": (NEVER, NO_GRAMMAR),
    "guided_grammar": (NEVER, NO_GRAMMAR),
    "tools": (([],), NO_TOOLS),
    "tool_choice": (("none", "auto"), NO_TOOLS),
    "parallel_tool_calls": ((True, False), NO_TOOLS),
}

_CHAT_ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    "best_of": ((1,), "belongs to completions"),
    "functions": (([],), NO_TOOLS),
    "function_call": (("none", "auto"), NO_TOOLS),
    "modalities": ((["text"],), NO_MEDIA),
    "audio": (NEVER, NO_MEDIA),
    "prediction": (NEVER, NOT_YET),
    "reasoning_effort": (("none",), NOT_YET),
    "verbosity": (NEVER, NOT_YET),
    "web_search_options": (NEVER, NO_TOOLS),
    "chat_template": (NEVER, "is not supported: the model's own template is used"),
    "chat_template_kwargs": (({},), NOT_YET),
    "documents": (([],), NOT_YET),
    "add_generation_prompt": ((True,), NOT_YET),
    "continue_final_message": ((False,), NOT_YET),
    "echo": ((False,), NOT_YET),
    "suffix": (("",), NOT_YET),
    "resumable": ((False,), NO_RESUMING),
    "idempotency_key": (NEVER, IN_HEADER),
}

_COMPLETION_ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    "top_logprobs": (NEVER, "belongs to chats; here logprobs itself says how many"),
    "echo": ((False,), NOT_YET),
    "suffix": (("",), NOT_YET),
    "resumable": ((False,), NO_RESUMING),
    "idempotency_key": (NEVER, IN_HEADER),
}

_RESPONSE_ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    "n": ((1,), "is not supported here: a response has one choice"),
    "prompt_logprobs": ((False,), "belongs to chats and completions"),
    "best_of": ((1,), "belongs to completions"),
    "previous_response_id": (NEVER, NO_SEQUEL),
    "conversation": (NEVER, NO_SEQUEL),
    "background": ((False,), NO_BACKGROUND),
    "prompt": (NEVER, NO_TEMPLATES),
    "reasoning": (({}, {"effort": "none"}), NOT_YET),
    "text": (({}, {"format": {"type": "text"}}), NO_GRAMMAR),
    "truncation": (("disabled",), NOT_YET),
    "max_tool_calls": (NEVER, NO_TOOLS),
    "context_management": (([],), NOT_YET),
    "generate": ((True,), NOT_YET),
    "background_options": (NEVER, NO_BACKGROUND),
    "image": (NEVER, NO_MEDIA),
    "access_programs": (NEVER, NOT_YET),
    "stream_options": (({},), NOT_YET),
}

#: what any door knows: at the others it is no typo
_ANYWHERE = {
    **(_CHAT_ONLY | _COMPLETION_ONLY | _RESPONSE_ONLY),
    **dict.fromkeys((*CHAT, *COMPLETION, *RESPONSE, *STREAMING), (NEVER, ELSEWHERE)),
    **REFUSED_EVERYWHERE,
}


def _refused(
    read: tuple[str, ...], own: dict[str, tuple[tuple[object, ...], str]]
) -> dict[str, tuple[tuple[object, ...], str]]:
    return {name: entry for name, entry in {**_ANYWHERE, **own}.items() if name not in read}


REFUSED_CHAT = _refused((*CHAT, *STREAMING), _CHAT_ONLY)
REFUSED_COMPLETION = _refused((*COMPLETION, *STREAMING), _COMPLETION_ONLY)
REFUSED_RESPONSE = _refused((*RESPONSE, *ENVELOPE), _RESPONSE_ONLY)
#: of the envelope, where there is none: in the body of an HTTP request, and in a message's ``response``
REFUSED_OVER_HTTP = dict.fromkeys(ENVELOPE, (NEVER, IN_MESSAGE)) | {"idempotency_key": (NEVER, IN_HEADER)}
REFUSED_INSIDE = dict.fromkeys(ENVELOPE, (NEVER, BESIDE))
#: type of a message -> of the envelope, what means nothing in it
REFUSED_IN_MESSAGE: dict[str, dict[str, tuple[tuple[object, ...], str]]] = {
    "response.create": {
        "starting_after": (NEVER, ONLY_RESUME),
        "response_id": (NEVER, ONLY_LATER),
    },
    "response.resume": {
        "stream_id": (NEVER, KEEPS_STREAM),
        "traceparent": (NEVER, KEEPS_TRACE),
        "idempotency_key": (NEVER, ONLY_CREATE),
        "response": (NEVER, ONLY_CREATE),
    },
    "response.cancel": {
        "starting_after": (NEVER, ONLY_RESUME),
        "traceparent": (NEVER, ONLY_CREATE),
        "idempotency_key": (NEVER, ONLY_CREATE),
        "response": (NEVER, ONLY_CREATE),
    },
}

REFUSED_STREAM_OPTIONS: dict[str, tuple[tuple[object, ...], str]] = {
    "include_obfuscation": ((False,), "is not supported"),
    "continuous_usage_stats": ((False,), NOT_YET),
}
