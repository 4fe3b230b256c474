"""Several choices of one request: admitted together or not at all, told apart by index, paid for once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from baton.engine.effects import Account, Span
from baton.engine.limits import Limits
from baton.frontends.client import AsyncClient, Client, RequestFailed
from baton.frontends.errors import Refused
from baton.frontends.validate import Validator
from baton.ipc.frames import Failure, Halt
from tests.frontends.conftest import House, opened
from tests.frontends.double import CARD, Engine, Job, admit, admit_and_say
from tests.frontends.talk import CHAT, TEXT, events

MESSAGES: Any = [{"role": "user", "content": "hi"}]


def by_choice(*texts: str, reasons: dict[int, str] | None = None) -> Callable[[Job], None]:
    """A script: choice i says so many tokens of its text as the text has letters."""

    def script(job: Job) -> None:
        choice = job.submit.params.choice
        job.admit().say(*texts[choice]).finish((reasons or {}).get(choice, "stop"), cached_tokens=2)

    return script


def settled(engine: Engine) -> tuple[Account, Span]:
    """The one account and the one root span of all that was asked."""
    (account,) = engine.accounts
    (root,) = [span for span in engine.spans if span.server]
    return account, root


async def test_a_chat_has_n_choices_and_one_account(house: House) -> None:
    house.engine.on_submit = by_choice("ab", "cde", "f", reasons={1: "length"})
    async with openai.AsyncOpenAI(base_url=house.url + "/v1", api_key="none") as api:
        done = await api.chat.completions.create(model="model-1", messages=MESSAGES, n=3, temperature=0)
    assert [(choice.index, choice.message.content) for choice in done.choices] == [(0, "ab"), (1, "cde"), (2, "f")]
    assert [choice.finish_reason for choice in done.choices] == ["stop", "length", "stop"]
    assert done.usage is not None and done.usage.prompt_tokens_details is not None
    used = (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.prompt_tokens_details.cached_tokens)
    assert used == (3, 6, 2)
    await house.engine.empty()
    account, root = settled(house.engine)
    assert (account.prompt_tokens, account.completion_tokens, account.cached_tokens) == used
    assert account.reason == "stop" and root.attributes["gen_ai.request.choice.count"] == 3
    assert {job.submit.trace for job in house.engine.jobs} == {account.trace}
    assert [job.submit.params.choice for job in house.engine.jobs] == [0, 1, 2]


async def test_choices_are_streamed_under_their_index(house: House) -> None:
    house.engine.on_submit = by_choice("ab", "cde")
    body = {**CHAT, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    async with house.post("/v1/chat/completions", body) as response:
        got = await events(response)
    assert got.pop() == "[DONE]"
    assert got.pop()["usage"]["completion_tokens"] == 5
    texts, reasons = {0: "", 1: ""}, {}
    for chunk in got:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        if choice["finish_reason"] is not None:
            assert choice["index"] not in reasons, "a choice ends once"
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == {0: "ab", 1: "cde"} and reasons == {0: "stop", 1: "stop"}
    assert len({chunk["id"] for chunk in got}) == 1
    await house.engine.empty()
    settled(house.engine)


async def test_completions_keep_their_offsets_apart(house: House) -> None:
    house.engine.on_submit = by_choice("ab", "cde")
    async with openai.AsyncOpenAI(base_url=house.url + "/v1", api_key="none") as api:
        done = await api.completions.create(model="model-1", prompt="x", n=2, logprobs=1)
    assert [choice.text for choice in done.choices] == ["ab", "cde"]
    offsets = [choice.logprobs.text_offset for choice in done.choices if choice.logprobs is not None]
    assert offsets == [[0, 1], [0, 1, 2]]


async def test_the_likeliest_of_best_of_are_given_and_all_are_paid_for(house: House) -> None:
    def script(job: Job) -> None:
        choice = job.submit.params.choice
        job.admit()
        job.logprob = [-3.0, -0.5, -1.0][choice]
        job.say(*"xyz"[choice] * 2).finish()

    house.engine.on_submit = script
    async with openai.AsyncOpenAI(base_url=house.url + "/v1", api_key="none") as api:
        done = await api.completions.create(model="model-1", prompt="x", n=2, best_of=3)
    found = [(choice.index, choice.text, choice.logprobs) for choice in done.choices]
    assert found == [(0, "yy", None), (1, "zz", None)]
    assert done.usage is not None and done.usage.completion_tokens == 6
    await house.engine.empty()
    assert settled(house.engine)[0].completion_tokens == 6


async def test_there_is_room_for_all_choices_or_for_none(tmp_path: Path) -> None:
    async with opened(tmp_path) as house:
        del house.engine.core.free[3:]
        house.engine.on_submit = admit
        first = asyncio.create_task(house.client.post(house.url + "/v1/completions", json={**TEXT, "n": 2}))
        await house.engine.job()
        await house.engine.job()
        async with house.post("/v1/completions", {**TEXT, "n": 2}) as response:
            assert response.status == 429 and response.headers["Retry-After"]
        assert len(house.engine.jobs) == 2
        for job in house.engine.jobs:
            job.finish()
        assert (await first).status == 200
        await house.engine.empty()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_all_its_choices(house: House, stream: bool) -> None:
    house.engine.on_submit = admit
    body = {**TEXT, "n": 3, "stream": stream}
    asked = asyncio.create_task(house.client.post(house.url + "/v1/completions", json=body))
    jobs = [await house.engine.job() for _ in range(3)]
    if stream:
        (await asked).close()
    else:
        asked.cancel()
    for job in jobs:
        await asyncio.wait_for(job.cancelled.wait(), 5)
    await house.engine.empty()
    assert settled(house.engine)[0].reason == "disconnected"


@pytest.mark.parametrize("stream", [True, False])
async def test_one_choice_that_fails_ends_them_all(house: House, stream: bool) -> None:
    broken = Failure(500, "server_error", "it broke", None, None)

    def script(job: Job) -> None:
        job.admit()
        if job.submit.params.choice == 1:
            job.say("x").finish("error", failure=broken)

    house.engine.on_submit = script
    async with house.post("/v1/completions", {**TEXT, "n": 3, "stream": stream}) as response:
        if stream:
            assert (await events(response))[-1]["error"]["message"] == "it broke"
        else:
            assert response.status == 500 and (await response.json())["error"]["message"] == "it broke"
    await house.engine.empty()
    assert [job.cancelled.is_set() for job in house.engine.jobs] == [True, False, True]
    account, root = settled(house.engine)
    assert account.completion_tokens == 1 and (account.reason, root.error) == ("error", "it broke")


async def test_a_choice_that_is_refused_refuses_the_request(house: House) -> None:
    house.engine.on_submit = lambda job: job.refuse(Failure(400, "invalid_request_error", "too long", "prompt"))
    async with house.post("/v1/completions", {**TEXT, "n": 2}) as response:
        assert response.status == 400 and (await response.json())["error"]["param"] == "prompt"
    await house.engine.empty()
    settled(house.engine)


async def test_a_halt_brings_one_account(house: House) -> None:
    house.engine.on_submit = admit
    asked = asyncio.create_task(house.client.post(house.url + "/v1/completions", json={**TEXT, "n": 2}))
    await house.engine.job()
    await house.engine.job()
    house.engine.feed(Halt("the engine is gone"))
    assert (await asked).status == 503
    settled(house.engine)


@pytest.mark.sdk
async def test_the_sdk_has_choices_and_deltas_know_theirs(house: House) -> None:
    house.engine.on_submit = by_choice("ab", "cde")
    async with AsyncClient(house.places["zmq"]) as client:
        done = await client.chat(MESSAGES, n=2)
        assert [(choice.index, choice.text, choice.finish_reason) for choice in done.choices] == [
            (0, "ab", "stop"),
            (1, "cde", "stop"),
        ]
        assert (done.text, done.usage.prompt_tokens, done.usage.completion_tokens) == ("ab", 3, 5)
        texts = {0: "", 1: ""}
        async with client.stream(prompt="x", n=2) as stream:
            async for delta in stream:
                texts[delta.index] += delta.text
        assert texts == {0: "ab", 1: "cde"} and [len(choice.token_ids) for choice in stream.choices] == [2, 3]
        assert (await client.chat(MESSAGES)).choices[0].text == "ab", "tags are not mixed up"
    await house.engine.empty()
    assert len(house.engine.accounts) == 3


@pytest.mark.sdk
async def test_leaving_an_sdk_stream_cancels_all_choices(house: House) -> None:
    house.engine.on_submit = admit_and_say
    async with AsyncClient(house.places["zmq"]) as client:
        async with client.stream(messages=MESSAGES, n=2) as stream:
            assert (await anext(stream)).text == "x"
        for job in house.engine.jobs:
            await asyncio.wait_for(job.cancelled.wait(), 5)
        await house.engine.empty()


@pytest.mark.sdk
async def test_an_sdk_request_fails_with_its_first_choice_that_does(house: House) -> None:
    def script(job: Job) -> None:
        job.admit()
        if job.submit.params.choice == 1:
            job.finish("error", failure=Failure(500, "server_error", "it broke", None, None))

    house.engine.on_submit = script
    async with AsyncClient(house.places["zmq"]) as client:
        with pytest.raises(RequestFailed, match="it broke"):
            await client.chat(MESSAGES, n=2)
        await asyncio.wait_for(house.engine.jobs[0].cancelled.wait(), 5)
        await house.engine.empty()


async def test_the_blocking_sdk_has_choices(house: House) -> None:
    house.engine.on_submit = by_choice("ab", "cde")

    def ask() -> list[str]:
        with Client(house.places["zmq"]) as client:
            return [choice.text for choice in client.chat(MESSAGES, n=2).choices]

    assert await house.engine.reception.loop.run_in_executor(None, ask) == ["ab", "cde"]


VALIDATOR = Validator(CARD, Limits(choices_max=8))
INPUT: dict[str, Any] = {"model": "model-1", "input": "hi"}


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        *(("chat", {"n": bad}, "n") for bad in (0, -1, 9, 5_000_000, 1.5, "2", True)),
        ("chat", {"n": 2, "best_of": 2}, "best_of"),
        *(("completion", {"best_of": bad}, "best_of") for bad in (0, 9, 5_000_000)),
        ("completion", {"n": 3, "best_of": 2}, "best_of"),
        ("completion", {"best_of": 2, "stream": True}, "best_of"),
        ("response", {"n": 2}, "n"),
        ("response", {"best_of": 2}, "best_of"),
    ],
)
def test_numbers_of_choices_that_cannot_be_are_refused_by_name(kind: str, fields: dict[str, Any], param: str) -> None:
    parse = {"chat": VALIDATOR.chat, "completion": VALIDATOR.completion, "response": VALIDATOR.response}[kind]
    body = {"chat": CHAT, "completion": TEXT, "response": INPUT}[kind]
    with pytest.raises(Refused) as refused:
        parse(json.dumps({**body, **fields}).encode())
    assert (refused.value.failure.status, refused.value.failure.param) == (400, param)


@pytest.mark.sdk
async def test_a_key_and_several_choices_do_not_go_together(house: House) -> None:
    async with house.post("/v1/completions", {**TEXT, "n": 2}, headers={"Idempotency-Key": "k"}) as response:
        assert response.status == 400 and (await response.json())["error"]["param"] == "n"
    async with AsyncClient(house.places["zmq"]) as client:
        with pytest.raises(RequestFailed) as failed:
            await client.chat(MESSAGES, n=2, resumable=True)
        assert failed.value.param == "n"
        with pytest.raises(RequestFailed) as failed:
            await client.complete("x", best_of=2)
        assert failed.value.param == "best_of"
    assert not house.engine.jobs
