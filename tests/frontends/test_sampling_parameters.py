"""Every parameter of sampling and of ending, at every door: in its range it is read, outside it is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from baton.engine.limits import Limits
from baton.frontends.errors import Refused
from baton.frontends.validate import GenerateRequest, Validator
from baton.ipc.frames import Params
from tests.frontends.double import CARD
from tests.frontends.wrong import CASES

LIMITS = Limits()
VALIDATOR = Validator(CARD, LIMITS)


def socket(body: bytes) -> GenerateRequest:
    """A ``response.create`` of a WebSocket, its parameters beside the envelope."""
    return VALIDATOR.response(body, socket=True)


def nested(body: bytes) -> GenerateRequest:
    """The same with the parameters in a field of their own."""
    return VALIDATOR.response(body, "response", socket=True)


#: the SDK sends the bodies of chats and completions to the same validator
DOORS: list[tuple[Callable[[bytes], GenerateRequest], dict[str, Any]]] = [
    (VALIDATOR.chat, {"model": "model-1", "messages": [{"role": "user", "content": "hi"}]}),
    (VALIDATOR.completion, {"model": "model-1", "prompt": "hi", "max_tokens": 64}),
    (VALIDATOR.response, {"model": "model-1", "input": "hi"}),
    (socket, {"type": "response.create", "model": "model-1", "input": "hi"}),
    (nested, {"model": "model-1", "input": "hi"}),
]
NAMES = ["chat", "completion", "response", "socket", "nested"]
doors = pytest.mark.parametrize(("parse", "body"), DOORS, ids=NAMES)

V = CARD.vocab


@doors
@pytest.mark.parametrize(("name", "value"), CASES, ids=[f"{name}={value[:24]}" for name, value in CASES])
def test_what_is_wrong_is_refused_by_name(
    parse: Callable[[bytes], GenerateRequest], body: dict[str, Any], name: str, value: str
) -> None:
    raw = (json.dumps(body)[:-1] + f', "{name}": {value}}}').encode()
    with pytest.raises(Refused) as refused:
        parse(raw)
    failure = refused.value.failure
    assert failure.status == 400
    # What is no JSON at all is refused as a whole; the field it stands in is not known then.
    no_json = any(word in value for word in ("NaN", "Infinity"))
    assert (failure.param or "").startswith(name) or (no_json and "not valid JSON" in failure.message)
    assert len(failure.message) < 300


RIGHT: list[tuple[str, Any, str, Any]] = [
    ("temperature", 0, "temperature", 0.0),
    ("temperature", 2, "temperature", 2.0),
    ("top_p", 1, "top_p", 1.0),
    ("top_k", -1, "top_k", 0),
    ("top_k", 10**30, "top_k", V),
    ("min_p", 0.25, "min_p", 0.25),
    ("presence_penalty", -2, "presence_penalty", -2.0),
    ("frequency_penalty", 2, "frequency_penalty", 2.0),
    ("repetition_penalty", 1.3, "repetition_penalty", 1.3),
    ("seed", -1, "seed", 2**64 - 1),
    ("min_tokens", 64, "min_tokens", 64),
    ("ignore_eos", True, "ignore_eos", True),
    ("include_stop_str_in_output", True, "include_stop", True),
    ("stop", "x", "stop", ("x",)),
    ("stop", ["a", "b"], "stop", ("a", "b")),
    ("stop_token_ids", [3, 3, V - 1], "stop_token_ids", (3, V - 1)),
    ("allowed_token_ids", [0, 9], "allowed_ids", b"\x01\x02" + bytes(V // 8 - 2)),
    ("bad_words", ["no", " way", "no"], "bad_words", ("no", " way")),
    ("logit_bias", {"0": -100, "17": 5.5}, "logit_bias", ((0, -100.0), (17, 5.5))),
    ("bad_words", [], "bad_words", ()),
    ("stop_token_ids", [], "stop_token_ids", ()),
    ("logit_bias", {}, "logit_bias", ()),
]


@doors
@pytest.mark.parametrize(("name", "value", "field", "read"), RIGHT)
def test_what_is_right_is_read(
    parse: Callable[[bytes], GenerateRequest], body: dict[str, Any], name: str, value: Any, field: str, read: Any
) -> None:
    params = parse(json.dumps({**body, name: value}).encode()).params
    assert getattr(params, field) == read
    absent = parse(json.dumps({**body, name: None}).encode()).params
    assert getattr(absent, field) == getattr(Params(), field) or field == "seed"


def test_more_at_least_than_at_most_is_refused() -> None:
    parse, body = DOORS[1]
    with pytest.raises(Refused) as refused:
        parse(json.dumps({**body, "min_tokens": 65}).encode())
    assert refused.value.failure.param == "min_tokens" and "64" in refused.value.failure.message


def test_a_vocabulary_too_large_for_a_set_of_ids_is_said() -> None:
    import msgspec

    card = msgspec.structs.replace(CARD, vocab=8 * LIMITS.allowed_ids_bytes_max + 1)
    with pytest.raises(Refused) as refused:
        Validator(card, LIMITS).completion(json.dumps({**DOORS[1][1], "allowed_token_ids": [1]}).encode())
    assert refused.value.failure.code == "unsupported_parameter"
