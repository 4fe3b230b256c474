"""Log-probabilities of likely tokens at every door: shapes, bytes of half characters, bounds, and kept answers."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from baton.engine.limits import Limits
from baton.frontends.client import AsyncClient, Client
from baton.frontends.errors import Refused
from baton.frontends.openai import shown_token
from baton.frontends.validate import Validator
from tests.frontends.conftest import House
from tests.frontends.double import CARD, play
from tests.frontends.talk import CHAT, TEXT, events

INPUT: dict[str, Any] = {"model": "model-1", "input": "hi"}
INCLUDE = ["message.output_text.logprobs"]
HALF = b"\xf0\x9f"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def entry(text: str, logprob: float = -0.5, top: list[Any] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"token": text, "bytes": list(text.encode()), "logprob": logprob}
    return found if top is None else {**found, "top_logprobs": top}


HALF_ENTRY = {"token": "\\xf0\\x9f", "bytes": [0xF0, 0x9F], "logprob": -1.5}


@pytest.mark.parametrize(
    ("piece", "chat", "completion"),
    [(b"ab", "ab", "ab"), ("né".encode(), "né", "né"), (HALF, "\\xf0\\x9f", "bytes:\\xf0\\x9f"), (b"", "", "")],
)
def test_a_token_is_shown_as_text_or_as_its_bytes(piece: bytes, chat: str, completion: str) -> None:
    assert (shown_token(piece), shown_token(piece, "bytes:")) == (chat, completion)


async def test_a_chat_tells_of_the_likeliest_tokens_with_their_bytes(house: House) -> None:
    house.engine.on_submit = play("né", "x")
    async with openai.AsyncOpenAI(base_url=house.url + "/v1", api_key="none") as api:
        done = await api.chat.completions.create(model="model-1", messages=MESSAGES, logprobs=True, top_logprobs=2)
    scores = done.choices[0].logprobs
    assert scores is not None and scores.content is not None
    assert scores.content[0].model_dump() == entry("né", top=[entry("né"), HALF_ENTRY])
    assert [one.token for one in scores.content[1].top_logprobs] == ["x", "\\xf0\\x9f"]


async def test_a_streamed_chat_tells_the_same(house: House) -> None:
    house.engine.on_submit = play("a", "")
    async with house.post("/v1/chat/completions", {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 1}) as got:
        chunks = await events(got)
    said = [part for chunk in chunks[1:-2] for part in chunk["choices"][0]["logprobs"]["content"]]
    assert said == [entry("a", top=[entry("a")]), entry("", top=[entry("")])]


async def test_a_completion_has_a_table_for_each_token(house: House) -> None:
    house.engine.on_submit = play("ab", "c")
    async with openai.AsyncOpenAI(base_url=house.url + "/v1", api_key="none") as api:
        done = await api.completions.create(model="model-1", prompt="x", logprobs=2)
    scores = done.choices[0].logprobs
    assert scores is not None and scores.tokens == ["ab", "c"]
    assert scores.top_logprobs == [{"bytes:\\xf0\\x9f": -1.5, "ab": -0.5}, {"bytes:\\xf0\\x9f": -1.5, "c": -0.5}]


@pytest.mark.parametrize(
    ("fields", "top"),
    [({"include": INCLUDE}, 0), ({"top_logprobs": 1}, 1), ({"include": INCLUDE, "top_logprobs": 2}, 2)],
)
async def test_a_response_includes_them(house: House, fields: dict[str, Any], top: int) -> None:
    house.engine.on_submit = play("a", "b")
    async with openai.AsyncOpenAI(base_url=house.url + "/v1", api_key="none") as api:
        done = await api.responses.create(model="model-1", input="hi", extra_body=fields)
    part = done.output[0].content[0]  # type: ignore[union-attr]
    rivals = [[entry(text), HALF_ENTRY][:top] for text in "ab"]
    assert [one.model_dump() for one in part.logprobs] == [  # type: ignore[union-attr]
        entry("a", top=rivals[0]),
        entry("b", top=rivals[1]),
    ]
    assert done.top_logprobs == top


async def test_a_streamed_response_has_them_in_its_deltas_and_at_its_end(house: House) -> None:
    house.engine.on_submit = play("a", "", "b")
    async with house.client.ws_connect(house.places["websocket"]) as socket:
        await socket.send_json({"type": "response.create", **INPUT, "top_logprobs": 1})
        said: list[Any] = []
        while not said or said[-1]["type"] != "response.completed":
            said.append(json.loads(await socket.receive_str()))
    whole = [entry(text, top=[entry(text)]) for text in ("a", "", "b")]
    deltas = [event for event in said if event["type"] == "response.output_text.delta"]
    assert [part for delta in deltas for part in delta["logprobs"]] == whole
    done = next(event for event in said if event["type"] == "response.output_text.done")
    assert done["logprobs"] == whole == said[-1]["response"]["output"][0]["content"][0]["logprobs"]


@pytest.mark.sdk
async def test_the_sdk_has_bytes_and_candidates(house: House) -> None:
    house.engine.on_submit = play("a", "b")
    async with AsyncClient(house.places["zmq"]) as client:
        done = await client.chat(MESSAGES, logprobs=True, top_logprobs=2)
    assert done.logprobs == [-0.5, -0.5] and [scored.piece for scored in done.scores] == [b"a", b"b"]
    assert [(one.token, one.logprob, one.piece) for one in done.scores[1].top] == [(100, -0.5, b"b"), (101, -1.5, HALF)]


async def test_the_blocking_sdk_has_them_too(house: House) -> None:
    house.engine.on_submit = play("a")

    def ask() -> list[bytes]:
        with Client(house.places["zmq"]) as client, client.stream(prompt="x", logprobs=1) as stream:
            list(stream)
            return [scored.top[0].piece for scored in stream.scores]

    assert await house.engine.reception.loop.run_in_executor(None, ask) == [b"a"]


async def test_a_repeated_key_gets_the_same_log_probabilities(house: House) -> None:
    house.engine.on_submit = play("a", "b")
    bodies = []
    for _ in range(2):
        body = {**CHAT, "logprobs": True, "top_logprobs": 2}
        async with house.post("/v1/chat/completions", body, headers={"Idempotency-Key": "k"}) as response:
            bodies.append((await response.json())["choices"][0]["logprobs"])
    assert bodies[0] == bodies[1] and len(bodies[0]["content"]) == 2 and len(house.engine.jobs) == 1


async def test_a_resumed_response_ends_with_all_log_probabilities(house: House) -> None:
    house.engine.on_submit = play("a", "b")
    body = {**INPUT, "resumable": True, "top_logprobs": 1}
    async with house.post("/v1/responses", body) as response:
        first = await response.json()
    whole = first["output"][0]["content"][0]["logprobs"]
    assert len(whole) == 2
    path = f"{house.url}/v1/responses/{first['id']}"
    async with house.client.get(path) as response:
        assert (await response.json())["output"][0]["content"][0]["logprobs"] == whole
    async with house.client.get(path + "?stream=true&starting_after=4") as response:
        said = await events(response)
    deltas = [event for event in said if event["type"] == "response.output_text.delta"]
    assert [part for delta in deltas for part in delta["logprobs"]] == whole[1:]
    assert said[-1]["response"]["output"][0]["content"][0]["logprobs"] == whole


VALIDATOR = Validator(CARD, Limits(scores_per_request_max=10_000))


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("chat", {"top_logprobs": 1}, "top_logprobs"),
        ("chat", {"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        *(("chat", {"logprobs": True, "top_logprobs": bad}, "top_logprobs") for bad in (-1, 21, 10**9, True, 1.5, "2")),
        ("chat", {"logprobs": True, "top_logprobs": 20}, "top_logprobs"),
        *(("completion", {"logprobs": bad}, "logprobs") for bad in (-1, 21, 10**9, True, "2")),
        ("completion", {"logprobs": 2, "top_logprobs": 2}, "top_logprobs"),
        ("completion", {"logprobs": 20, "max_tokens": 477}, "logprobs"),
        *(("response", {"top_logprobs": bad}, "top_logprobs") for bad in (-1, 21, 10**9)),
        ("response", {"include": ["file_search_call.results"]}, "include"),
        ("response", {"include": "all"}, "include"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(kind: str, fields: dict[str, Any], param: str) -> None:
    parse = {"chat": VALIDATOR.chat, "completion": VALIDATOR.completion, "response": VALIDATOR.response}[kind]
    body = {"chat": CHAT, "completion": TEXT, "response": INPUT}[kind]
    with pytest.raises(Refused) as refused:
        parse(json.dumps({**body, **fields}).encode())
    assert (refused.value.failure.status, refused.value.failure.param) == (400, param)


def test_what_fits_the_bound_is_taken() -> None:
    body = json.dumps({**TEXT, "logprobs": 20, "max_tokens": 476}).encode()
    assert VALIDATOR.completion(body).params.top_logprobs == 20
    chat = VALIDATOR.chat(json.dumps({**CHAT, "logprobs": True, "top_logprobs": 0}).encode())
    assert (chat.params.logprobs, chat.params.top_logprobs) == (True, 0)
