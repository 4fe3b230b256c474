"""The validator: what is accepted, what is refused and by which name, and that nothing else ever comes out."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.limits import Limits
from baton.frontends import parameters
from baton.frontends.errors import Refused
from baton.frontends.validate import GenerateRequest, Validator
from baton.ipc.frames import Failure
from tests.frontends.double import CARD

LIMITS = Limits()
VALIDATOR = Validator(CARD, LIMITS)
CHAT: dict[str, Any] = {"model": "model-1", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "model-1", "prompt": "hi"}
INPUT: dict[str, Any] = {"model": "model-1", "input": "hi"}

Parse = Callable[[bytes], GenerateRequest]


def refusal(parse: Parse, body: Any) -> Failure:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(Refused) as refused:
        parse(raw)
    return refused.value.failure


def chat(**fields: Any) -> GenerateRequest:
    return VALIDATOR.chat(json.dumps({**CHAT, **fields}).encode())


def complete(**fields: Any) -> GenerateRequest:
    return VALIDATOR.completion(json.dumps({**TEXT, **fields}).encode())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": 1 << 63}, "seed"),
        ({"seed": True}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_completion_tokens": 4097}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats"),
        ({"logprobs": 1}, "logprobs"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"user": 5}, "user"),
        ({"user": "x" * 257}, "user"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {"a": "x" * 70_000}}, "metadata"),
        ({"model": 3}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "x"}] * 2049}, "messages"),
    ],
)
def test_a_bad_field_of_a_chat_is_named(fields: dict[str, Any], param: str) -> None:
    failure = refusal(VALIDATOR.chat, {**CHAT, **fields})
    assert (failure.status, failure.kind, failure.param) == (400, "invalid_request_error", param)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        (["a", "b"], "prompt"),
        ([[1], [2]], "prompt"),
        ([[]], "prompt[0]"),
        ([1, True], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([-1], "prompt"),
        ([1000], "prompt"),
        ([10**30], "prompt"),
        ([[["a"]]], "prompt[0][0]"),
    ],
)
def test_a_bad_prompt_is_named(prompt: Any, param: str) -> None:
    assert refusal(VALIDATOR.completion, {**TEXT, "prompt": prompt}).param == param


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [1, 2], [[1, 2]]])
def test_a_prompt_has_four_forms(prompt: Any) -> None:
    read = complete(prompt=prompt).prompt
    assert (read.text == "hi") if "hi" in prompt else (read.token_ids == [1, 2])


def test_prompt_and_output_must_fit_the_context() -> None:
    assert complete(prompt=[1] * 4080, max_tokens=16).params.max_tokens == 16
    failure = refusal(VALIDATOR.completion, {**TEXT, "prompt": [1] * 4081, "max_tokens": 16})
    assert failure.code == "context_length_exceeded"
    assert "4081" in failure.message and "16" in failure.message and "4096" in failure.message


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"3", b'"x"', b"\xff", b'{"a":1}x', b'{"a":NaN}'])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    for parse in (VALIDATOR.chat, VALIDATOR.completion, VALIDATOR.response):
        assert refusal(parse, body).status == 400


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1" * 400])
@pytest.mark.parametrize("name", ["temperature", "top_p", "max_tokens", "seed"])
def test_numbers_that_are_none_are_refused(word: str, name: str) -> None:
    body = json.dumps(CHAT)[:-1] + f', "{name}": {word}}}'
    assert refusal(VALIDATOR.chat, body.encode()).status == 400


def test_an_unknown_model_is_not_found() -> None:
    failure = refusal(VALIDATOR.chat, {**CHAT, "model": "gpt-9"})
    assert (failure.status, failure.code, failure.param) == (404, "model_not_found", "model")
    assert refusal(VALIDATOR.chat, {"messages": CHAT["messages"]}).param == "model"


TABLES = [
    (VALIDATOR.chat, CHAT, parameters.REFUSED_CHAT),
    (VALIDATOR.completion, TEXT, parameters.REFUSED_COMPLETION),
    (VALIDATOR.response, INPUT, parameters.REFUSED_RESPONSE),
]


@pytest.mark.parametrize(
    ("parse", "body", "name", "neutral"),
    [(parse, body, name, neutral) for parse, body, table in TABLES for name, (neutral, _) in table.items()],
)
def test_what_is_not_supported_is_refused_by_name_and_neutral_values_pass(
    parse: Parse, body: dict[str, Any], name: str, neutral: tuple[Any, ...]
) -> None:
    for value in (None, *neutral):
        assert parse(json.dumps({**body, name: value}).encode()).ignored == ()
    failure = refusal(parse, {**body, name: [["something", 3.25]]})
    assert (failure.status, failure.param, failure.code) == (400, name, "unsupported_parameter")
    assert name in failure.message


def test_completions_logprobs_beyond_the_chosen_token_are_explained() -> None:
    assert complete(logprobs=0).params.logprobs
    assert not complete(logprobs=None).params.logprobs and not complete().params.logprobs
    assert complete(logprobs=2).params.top_logprobs == 2


def test_neutral_means_the_same_type_too() -> None:
    assert refusal(VALIDATOR.chat, {**CHAT, "n": True}).param == "n"


def test_parameters_are_read() -> None:
    request = chat(
        temperature=0,
        top_p=0.5,
        top_k=10**9,
        seed=-1,
        stop="x",
        max_completion_tokens=7,
        logprobs=True,
        ignore_eos=True,
    )
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.0, 0.5, CARD.vocab, (1 << 64) - 1)
    assert (params.stop, params.max_tokens, params.logprobs, params.ignore_eos) == (("x",), 7, True, True)
    assert chat(top_k=-1).params.top_k == chat(top_k=0).params.top_k == 0
    assert chat().params.seed != chat().params.seed
    assert chat().params.max_tokens is None and complete().params.max_tokens == 16


def test_messages_are_brought_to_one_form() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": None, "audio": None},
    ]
    assert chat(messages=messages).prompt.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab", "name": "ann"},
        {"role": "assistant", "content": ""},
    ]


def test_labels_are_recorded_and_nothing_more() -> None:
    names = {"service_tier": "flex", "prompt_cache_key": "k", "request_id": "r"}
    request = chat(user="ann", metadata={"team": "x"}, store=True, **names)
    assert not request.stored, "a chat cannot be asked for again: its store is a label"
    assert request.labels == {
        "baton.store": "true",
        "baton.client_request_id": "r",
        "user.id": "ann",
        "baton.service_tier": "flex",
        "baton.prompt_cache_key": "k",
        "baton.metadata.team": "x",
    }


def test_typos_are_accepted_and_named() -> None:
    request = chat(temperatur=0.9, **{"odd\r\nname": 1}, stream=True, stream_options={"include_usge": True})
    assert set(request.ignored) == {"temperatur", "odd??name", "include_usge"}
    assert len(chat(**{f"x{number}": 1 for number in range(100)}).ignored) == 16


BOMBS = [
    b'{"model":"model-1","messages":' + b"[" * 200_000,
    b'{"a":' * 200_000,
    b'{"model":"model-1","messages":[' + b",".join([b"[]"] * 1_300_000) + b"]}",
    b'{"model":"model-1","messages":[' + b",".join([b'{"role":"user","content":[]}'] * 140_000) + b"]}",
    b'{"model":"model-1","prompt":[' + b",".join([b"[]"] * 1_300_000) + b"]}",
    b'{"model":"model-1","prompt":[' + b",".join([b'""'] * 1_000_000) + b"]}",
    b'{"model":"model-1","tools":[' + b",".join([b"[]"] * 1_300_000) + b"]}",
    b'{"model":"model-1","metadata":{' + b",".join(b'"%d":""' % number for number in range(400_000)) + b"}}",
    b"{" + b",".join(b'"%d":0' % number for number in range(400_000)) + b"}",
]


def cost_s(work: Callable[[], object]) -> float:
    """The least processor time of three tries: what else the machine does can only add to it."""
    tries = []
    for _ in range(3):
        started = time.process_time()
        work()
        tries.append(time.process_time() - started)
    return min(tries)


@pytest.fixture(scope="module")
def reading_s() -> float:
    """What it costs here and now to make objects of a harmless body as large as the bombs."""
    return cost_s(lambda: msgspec.json.decode(b"[" + b",".join([b"[]"] * 1_300_000) + b"]"))


@pytest.mark.parametrize("body", BOMBS, ids=range(len(BOMBS)))
def test_bombs_are_refused_for_less_than_half_of_what_reading_them_would_cost(body: bytes, reading_s: float) -> None:
    for parse in (VALIDATOR.chat, VALIDATOR.completion, VALIDATOR.response):
        assert refusal(parse, body).status == 400
        assert cost_s(lambda parse=parse: refusal(parse, body)) < reading_s / 2  # type: ignore[misc]


NAMES = st.sampled_from(
    sorted(
        {*parameters.CHAT, *parameters.COMPLETION, *parameters.RESPONSE, *parameters.STREAMING}
        | {*parameters.REFUSED_CHAT, *parameters.REFUSED_RESPONSE, "odd"}
    )
)

ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["user", "model-1", "text", "message"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "name"]) | st.text(), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(fields=st.dictionaries(NAMES, ANY_JSON, max_size=6), start=st.sampled_from([{}, CHAT, TEXT, INPUT]))
def test_whatever_comes_in_only_a_request_or_a_refusal_comes_out(fields: dict[str, Any], start: dict[str, Any]) -> None:
    body = json.dumps({**start, **fields}).encode()
    for parse in (VALIDATOR.chat, VALIDATOR.completion, VALIDATOR.response):
        try:
            request = parse(body)
        except Refused as refused:
            failure = refused.failure
            assert failure.status in (400, 404) and failure.message
            assert failure.param is not None or b"NaN" in body or b"Infinity" in body or b"\\ud" in body
        else:
            assert isinstance(request, GenerateRequest)
            assert math.isfinite(request.params.temperature) and 0 < request.params.top_p <= 1


@settings(max_examples=300, deadline=None)
@given(body=st.binary(max_size=200) | ANY_JSON.map(lambda value: json.dumps(value).encode()))
def test_whatever_bytes_come_in(body: bytes) -> None:
    for parse in (VALIDATOR.chat, VALIDATOR.completion, VALIDATOR.response):
        assert refusal(parse, body).status in (400, 404)
