"""Idempotency keys at every door: one request a key, one answer for all who send it, a conflict for another body."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.engine.limits import Limits
from baton.frontends.client import AsyncClient, RequestFailed
from baton.frontends.keeping import digests
from tests.frontends.conftest import House, opened
from tests.frontends.double import admit, play
from tests.frontends.talk import CHAT, PATHS, TEXT, events, raw

KEY = {"Idempotency-Key": "k-1"}


@pytest.mark.parametrize(("path", "body"), [*PATHS, ("/v1/responses", {"model": "model-1", "input": "hi"})])
async def test_a_repeat_gets_the_first_ones_answer_while_it_runs_and_after(
    house: House, path: str, body: dict[str, Any]
) -> None:
    house.engine.on_submit = admit
    first = asyncio.create_task(post(house, path, body))
    job = await house.engine.job()
    second = asyncio.create_task(post(house, path, body))
    await house.engine.until(lambda: len(house.engine.desk.heard) == 2)
    job.say("a", "b").finish()
    answers = [await first, await second, await post(house, path, body)]
    assert answers[0] == answers[1] == answers[2]
    assert len(house.engine.jobs) == 1 and len({answer["id"] for answer in answers}) == 1
    await house.engine.empty()
    assert len(house.engine.accounts) == 1


async def post(house: House, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A whole answer under the key."""
    async with house.post(path, body, headers=KEY) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        assert response.headers["X-Baton-Request-Id"] == answer["id"].rpartition("-")[2].rpartition("_")[2]
        return answer


async def test_a_streamed_repeat_has_every_token_from_the_start(house: House) -> None:
    house.engine.on_submit = admit
    body = {**TEXT, "stream": True}
    async with raw(house, "/v1/completions", {**body}) as (_, writer):
        writer.close()  # one without a key, to be sure that it is not taken for it
    (await house.engine.job()).cancelled.set()
    async with house.post("/v1/completions", body, headers=KEY) as one:
        job = await house.engine.job()
        job.say("a")
        async with house.post("/v1/completions", body, headers=KEY) as two:
            job.say("b").finish(tail="!")
            got = [await events(one), await events(two)]
        texts = ["".join(event["choices"][0]["text"] for event in stream[:-1]) for stream in got]
        assert texts == ["ab!", "ab!"]
        assert got[0][0]["id"] == got[1][0]["id"] and got[0][0]["created"] == got[1][0]["created"]
        async with house.post("/v1/completions", TEXT, headers=KEY) as whole:
            assert (await whole.json())["choices"][0]["text"] == "ab!", "how it travels is not what it says"
    await house.engine.empty()


async def test_another_body_or_endpoint_is_a_conflict_that_names_the_field(house: House) -> None:
    house.engine.on_submit = play("a")
    await post(house, "/v1/chat/completions", CHAT)
    for path, body, field in (
        ("/v1/chat/completions", {**CHAT, "max_tokens": 7}, "max_tokens"),
        ("/v1/completions", TEXT, "endpoint"),
    ):
        async with house.post(path, body, headers=KEY) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"], error["param"]) == (409, "idempotency_conflict", "idempotency_key")
            assert field in error["message"]


async def test_order_and_space_in_a_body_say_nothing(house: House) -> None:
    one = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "seed": 1, "stream": true}'
    two = b'{"seed":1,"messages":[{"content":"hi","role":"user"}],"model":"m","typo":3}'
    assert digests("chat.completions", one) == digests("chat.completions", two)
    assert digests("chat.completions", one) != digests("chat.completions", two.replace(b"hi", b"ho"))


@pytest.mark.parametrize("key", ["", "a b", "ü", "x" * 256])
async def test_a_key_that_is_none_is_refused_by_name(house: House, key: str) -> None:
    async with house.post("/v1/chat/completions", CHAT, headers={"Idempotency-Key": key}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "Idempotency-Key"


async def test_the_request_goes_on_for_those_who_stay_and_ends_with_the_last(house: House) -> None:
    house.engine.on_submit = admit
    one = asyncio.create_task(post(house, "/v1/chat/completions", CHAT))
    job = await house.engine.job()
    two = asyncio.create_task(post(house, "/v1/chat/completions", CHAT))
    await house.engine.until(lambda: len(house.engine.desk.heard) == 2)
    one.cancel()
    await house.engine.until(lambda: len(house.engine.desk.heard) == 1)
    job.say("a")
    assert not job.cancelled.is_set()
    two.cancel()
    await asyncio.wait_for(job.cancelled.wait(), 5)
    await house.engine.empty()


async def test_a_refusal_is_not_kept(tmp_path: Path) -> None:
    async with opened(tmp_path) as house:
        house.engine.on_submit = admit
        house.engine.core.draining = True
        async with house.post("/v1/chat/completions", CHAT, headers=KEY) as response:
            assert response.status == 503
        house.engine.core.draining = False
        house.engine.on_submit = play("a")
        assert (await post(house, "/v1/chat/completions", CHAT))["choices"][0]["message"]["content"] == "a"


@pytest.mark.sdk
async def test_the_sdk_repeats_by_key(house: House) -> None:
    house.engine.on_submit = play("a", "b")
    async with AsyncClient(house.places["zmq"]) as client:
        one = await client.complete("hi", idempotency_key="k-1")
        two = await client.complete("hi", idempotency_key="k-1")
        assert (one.text, one.request_id) == (two.text, two.request_id) == ("ab", one.request_id)
        with pytest.raises(RequestFailed) as conflict:
            await client.complete("ho", idempotency_key="k-1")
        assert (conflict.value.status, conflict.value.code) == (409, "idempotency_conflict")
    async with house.post("/v1/completions", TEXT, headers=KEY) as response:
        assert (await response.json())["id"] == f"cmpl-{one.request_id}", "whichever door it comes through"
    assert len(house.engine.jobs) == 1


async def test_a_socket_repeats_by_key_and_hears_the_first_ones_id(house: House) -> None:
    house.engine.on_submit = play("a", "b")
    create = {"type": "response.create", "model": "model-1", "input": "hi", "idempotency_key": "k-1"}
    async with house.client.ws_connect(house.places["websocket"]) as socket:
        got: list[list[dict[str, Any]]] = []
        for stream_id in ("x", "y"):
            await socket.send_json({**create, "stream_id": stream_id})
            got.append([])
            while not got[-1] or got[-1][-1]["type"] != "response.completed":
                got[-1].append(await asyncio.wait_for(socket.receive_json(), 5))
        await socket.send_json({**create, "input": "ho", "stream_id": "z"})
        error = await asyncio.wait_for(socket.receive_json(), 5)
    assert {event["response_id"] for stream in got for event in stream} == {got[0][0]["response_id"]}
    assert [{event["stream_id"] for event in stream} for stream in got] == [{"x"}, {"y"}]
    ends = [stream[-1] for stream in got]
    assert ends[0]["response"] == ends[1]["response"] and ends[0]["sequence_number"] == ends[1]["sequence_number"]
    assert (error["type"], error["status"], error["code"]) == ("error", 409, "idempotency_conflict")
    assert error["stream_id"] == "z" and len(house.engine.jobs) == 1


async def test_many_repeats_at_once_are_limited(tmp_path: Path) -> None:
    async with opened(tmp_path, Limits(listeners_per_answer_max=2)) as house:
        house.engine.on_submit = admit
        tasks = [asyncio.create_task(post(house, "/v1/chat/completions", CHAT)) for _ in range(2)]
        await house.engine.until(lambda: len(house.engine.desk.heard) == 2)
        async with house.post("/v1/chat/completions", CHAT, headers=KEY) as response:
            assert response.status == 429 and response.headers["Retry-After"]
        (await house.engine.job()).say("a").finish()
        await asyncio.gather(*tasks)
