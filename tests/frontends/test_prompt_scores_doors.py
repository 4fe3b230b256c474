"""Log-probabilities of the prompt at every door: vLLM's shape over HTTP, structures in the SDK, bounds by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.engine.limits import Limits
from baton.frontends.client import AsyncClient, Candidate, Client, PromptScored
from baton.frontends.errors import Refused
from baton.frontends.validate import Validator
from baton.ipc import frames
from baton.ipc.frames import PromptPiece, Text
from tests.frontends.conftest import House
from tests.frontends.double import CARD, Job
from tests.frontends.talk import CHAT, TEXT

MESSAGES: Any = [{"role": "user", "content": "hi"}]
HALF = b"\xf0\x9f"


def tell(job: Job) -> None:
    """A script: the prompt's second and third token, then one of output."""
    job.admit()
    if job.submit.params.prompt_logprobs is not None:
        first = frames.PromptScored(6, -2.5, b"b", 7, [frames.Candidate(9, -0.5, HALF)])
        second = frames.PromptScored(7, float("-inf"), b"c", 1, [frames.Candidate(7, float("-inf"), b"c")])
        job.engine.feed(Text([], [PromptPiece(job.slot, job.generation, job.run, 1, [first])]))
        job.engine.feed(Text([], [PromptPiece(job.slot, job.generation, job.run, 1, [first, second])]))
    job.say("x").finish()


SHOWN = [
    None,
    {
        "6": {"logprob": -2.5, "rank": 7, "decoded_token": "b", "bytes": [98]},
        "9": {"logprob": -0.5, "rank": 1, "decoded_token": "\\xf0\\x9f", "bytes": [0xF0, 0x9F]},
    },
    {"7": {"logprob": -9999.0, "rank": 1, "decoded_token": "c", "bytes": [99]}},
]


async def test_a_chat_has_them_beside_its_choices(house: House) -> None:
    house.engine.on_submit = tell
    async with house.post("/v1/chat/completions", {**CHAT, "prompt_logprobs": 1, "n": 2}) as response:
        body = await response.json()
    assert body["prompt_logprobs"] == SHOWN
    assert "prompt_logprobs" not in body["choices"][0]
    assert [job.submit.params.prompt_logprobs for job in house.engine.jobs] == [1, None]


async def test_a_completion_has_them_in_each_choice_also_of_the_best(house: House) -> None:
    def script(job: Job) -> None:
        job.logprob = [-3.0, -0.5][job.submit.params.choice]
        tell(job)

    house.engine.on_submit = script
    async with house.post("/v1/completions", {**TEXT, "prompt_logprobs": 0, "best_of": 2}) as response:
        body = await response.json()
    assert [choice["prompt_logprobs"] for choice in body["choices"]] == [SHOWN] and "prompt_logprobs" not in body


@pytest.mark.parametrize("value", [None, False])
async def test_who_does_not_ask_hears_nothing_of_it(house: House, value: Any) -> None:
    house.engine.on_submit = tell
    async with house.post("/v1/completions", {**TEXT, "prompt_logprobs": value}) as response:
        assert "prompt_logprobs" not in (await response.json())["choices"][0]


async def test_a_repeated_key_gets_the_same(house: House) -> None:
    house.engine.on_submit = tell
    bodies = []
    for _ in range(2):
        body = {**CHAT, "prompt_logprobs": 1}
        async with house.post("/v1/chat/completions", body, headers={"Idempotency-Key": "k"}) as response:
            bodies.append((await response.json())["prompt_logprobs"])
    assert bodies == [SHOWN, SHOWN] and len(house.engine.jobs) == 1
    (answer,) = house.engine.desk.answers.ended.values()
    assert answer.scores_bytes > 0, "what is kept is counted"


@pytest.mark.sdk
async def test_the_sdk_has_them_with_the_end(house: House) -> None:
    house.engine.on_submit = tell
    async with AsyncClient(house.places["zmq"]) as client:
        done = await client.chat(MESSAGES, prompt_logprobs=1, n=2)
        assert done.prompt_scores == [
            PromptScored(6, -2.5, b"b", 7, [Candidate(9, -0.5, HALF)]),
            PromptScored(7, float("-inf"), b"c", 1, [Candidate(7, float("-inf"), b"c")]),
        ]
        assert (await client.chat(MESSAGES)).prompt_scores == []


async def test_the_blocking_sdk_has_them_too(house: House) -> None:
    house.engine.on_submit = tell

    def ask() -> list[int]:
        with Client(house.places["zmq"]) as client, client.stream(prompt="x", prompt_logprobs=1) as stream:
            list(stream)
            return [scored.rank for scored in stream.prompt_scores]

    assert await house.engine.reception.loop.run_in_executor(None, ask) == [7, 1]


VALIDATOR = Validator(CARD, Limits(prompt_logprobs_max=5))


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize(
    "fields",
    [
        *({"prompt_logprobs": bad} for bad in (-1, 6, 1_000_000_000, True, 1.5, "2", [1])),
        {"prompt_logprobs": 2, "stream": True},
    ],
)
def test_what_cannot_be_is_refused_by_name(kind: str, fields: dict[str, Any]) -> None:
    body = {"chat": CHAT, "completion": TEXT}[kind]
    with pytest.raises(Refused) as refused:
        {"chat": VALIDATOR.chat, "completion": VALIDATOR.completion}[kind](json.dumps({**body, **fields}).encode())
    assert (refused.value.failure.status, refused.value.failure.param) == (400, "prompt_logprobs")


@pytest.mark.parametrize(("fields", "param"), [({"prompt_logprobs": 1}, "prompt_logprobs")])
def test_a_response_has_no_place_for_them(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as refused:
        VALIDATOR.response(json.dumps({"model": "model-1", "input": "hi", **fields}).encode())
    assert refused.value.failure.param == param


def test_an_echo_is_refused_by_name() -> None:
    with pytest.raises(Refused) as refused:
        VALIDATOR.completion(json.dumps({**TEXT, "echo": True, "logprobs": 1}).encode())
    assert refused.value.failure.param == "echo"
