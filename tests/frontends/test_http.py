"""The HTTP door over real sockets: shapes, order, refusals, disconnects in every phase, slow readers, keep-alive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.engine.effects import Open
from baton.engine.limits import Limits
from baton.frontends.doors import Doors, StartError, listen
from baton.frontends.status import Gauges, Sources, Status
from baton.ipc.frames import Failure
from baton.workers.config import Settings
from tests.frontends.conftest import House, opened, words
from tests.frontends.double import Engine, Job, admit, play
from tests.frontends.talk import CHAT, PATHS, TEXT, events, raw

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


# ------------------------------------------------------------------------------------------------ answers


async def test_a_chat_is_answered(house: House) -> None:
    house.engine.on_submit = play("Hel", "lo", tail="!")
    async with house.post("/v1/chat/completions", CHAT) as response:
        body = await response.json()
    assert response.status == 200
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello!", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    counted = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert body["usage"] == {**counted, "prompt_tokens_details": {"cached_tokens": 0}}
    assert body["id"] == "chatcmpl-" + response.headers["X-Baton-Request-Id"]
    await house.engine.empty()


async def test_a_text_is_completed(house: House) -> None:
    house.engine.on_submit = play("a", "b", reason="length")
    async with house.post("/v1/completions", TEXT) as response:
        body = await response.json()
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    assert body["choices"][0]["text"] == "ab" and body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("usage", [True, False])
async def test_a_chat_is_streamed_in_openais_order(house: House, usage: bool) -> None:
    house.engine.on_submit = play("Hel", "", "lo", tail="!", reason="length")
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": usage}}
    async with house.post("/v1/chat/completions", body) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        got = await events(response)
    assert got.pop() == "[DONE]"
    if usage:
        last = got.pop()
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
        assert all(chunk["usage"] is None for chunk in got)
    else:
        assert all("usage" not in chunk for chunk in got)
    assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"].get("content") for chunk in got] == ["", "Hel", "lo", "!", None]
    assert [chunk["choices"][0]["finish_reason"] for chunk in got] == [None] * 4 + ["length"]
    assert {chunk["object"] for chunk in got} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in got}) == 1
    await house.engine.empty()


async def test_a_completion_is_streamed(house: House) -> None:
    house.engine.on_submit = play("a", "", "b")
    body = {**TEXT, "stream": True, "stream_options": {"include_usage": True}}
    async with house.post("/v1/completions", body) as response:
        got = await events(response)
    assert [chunk["choices"][0]["text"] for chunk in got[:-2]] == ["a", "b", ""]
    assert got[-2]["choices"] == [] and got[-2]["usage"]["total_tokens"] == 6 and got[-1] == "[DONE]"


async def test_ids_are_returned_once_for_the_prompt_and_with_each_chunk(house: House) -> None:
    house.engine.on_submit = play("a", "", "b", tail="c")
    for path, body in PATHS:
        async with house.post(path, {**body, "return_token_ids": True}) as response:
            whole = await response.json()
        assert whole["prompt_token_ids"] == [5, 6, 7] and whole["choices"][0]["token_ids"] == [10, 11, 12]
        async with house.post(path, {**body, "return_token_ids": True, "stream": True}) as response:
            got = await events(response)
        assert [chunk["prompt_token_ids"] for chunk in got[:-1] if "prompt_token_ids" in chunk] == [[5, 6, 7]]
        ids = [chunk["choices"][0].get("token_ids") for chunk in got[1:-1]]
        assert ids == [[10], [11], [12], [], None]


async def test_chat_logprobs_have_chats_shape(house: House) -> None:
    house.engine.on_submit = play("né", "")
    async with house.post("/v1/chat/completions", {**CHAT, "logprobs": True}) as response:
        content = (await response.json())["choices"][0]["logprobs"]["content"]
    assert content == [
        {"token": "né", "logprob": -0.5, "bytes": list("né".encode()), "top_logprobs": []},
        {"token": "", "logprob": -0.5, "bytes": [], "top_logprobs": []},
    ]
    async with house.post("/v1/chat/completions", {**CHAT, "logprobs": True, "stream": True}) as response:
        got = await events(response)
    assert [chunk["choices"][0]["logprobs"]["content"][0]["token"] for chunk in got[1:3]] == ["né", ""]


async def test_completion_logprobs_have_completions_shape(house: House) -> None:
    house.engine.on_submit = play("ab", "c")
    async with house.post("/v1/completions", {**TEXT, "logprobs": 0}) as response:
        whole = (await response.json())["choices"][0]["logprobs"]
    assert whole == {"tokens": ["ab", "c"], "token_logprobs": [-0.5, -0.5], "top_logprobs": None, "text_offset": [0, 2]}
    async with house.post("/v1/completions", {**TEXT, "logprobs": 0, "stream": True}) as response:
        got = await events(response)
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in got[:2]] == [[0], [2]]


async def test_a_stop_string_is_told(house: House) -> None:
    def script(job: Job) -> None:
        job.admit().say("a").finish("stop", stop_reason="END")

    house.engine.on_submit = script
    async with house.post("/v1/completions", {**TEXT, "stop": "END"}) as response:
        assert (await response.json())["choices"][0]["stop_reason"] == "END"


async def test_a_connection_serves_one_stream_after_the_other(house: House) -> None:
    house.engine.on_submit = play("a")
    async with raw(house, "/v1/chat/completions", {**CHAT, "stream": True}) as (reader, writer):
        for _ in range(3):
            answer = await asyncio.wait_for(reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n"), 5)
            assert answer.startswith(b"HTTP/1.1 200")
            data = json.dumps({**CHAT, "stream": True}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
        await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    await house.engine.empty()


async def test_a_small_pool_of_connections_serves_many_streams(house: House) -> None:
    house.engine.on_submit = play("a")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=2)) as client:

        async def one() -> Any:
            body = {**CHAT, "stream": True}
            async with client.post(house.url + "/v1/chat/completions", json=body) as response:
                return (await events(response))[-1]

        assert await asyncio.gather(*[one() for _ in range(100)]) == ["[DONE]"] * 100
    await house.engine.empty()


# ------------------------------------------------------------------------------------------------ headers and labels


async def test_the_clients_id_is_a_label_and_its_trace_goes_on(house: House) -> None:
    house.engine.on_submit = play("a")
    headers = {"X-Request-Id": "mine 1", "traceparent": PARENT}
    seen = set()
    for _ in range(2):
        async with house.post("/v1/chat/completions", {**CHAT, "temperatur": 1}, headers=headers) as response:
            assert response.headers["X-Request-Id"] == "mine1"
            assert response.headers["X-Ignored-Params"] == "temperatur"
            seen.add(response.headers["X-Baton-Request-Id"])
    assert len(seen) == 2
    await house.engine.empty()
    opened = next(event for event in house.engine.events if isinstance(event, Open))
    assert opened.parent == bytes.fromhex(PARENT[3:35] + PARENT[36:52] + "01")
    assert opened.trace[:16] == opened.parent[:16] and opened.trace[16:24] == opened.span_id != opened.parent[16:24]
    assert opened.attributes["baton.client_request_id"] == "mine1"
    assert opened.attributes["gen_ai.operation.name"] == "chat"
    assert opened.attributes["http.route"] == "/v1/chat/completions"


# ------------------------------------------------------------------------------------------------ refusals


async def test_refusals_have_openais_shape(house: House) -> None:
    for path, body in PATHS:
        async with house.post(path, {**body, "temperature": 9}) as response:
            assert response.status == 400
            error = (await response.json())["error"]
        assert error.keys() == {"message", "type", "param", "code"} and error["param"] == "temperature"
        async with house.post(path, {**body, "model": "other", "stream": True}) as response:
            assert response.status == 404 and (await response.json())["error"]["code"] == "model_not_found"
    async with house.client.post(house.url + "/v1/chat/completions", data=b"{") as response:
        assert response.status == 400 and (await response.json())["error"]["type"] == "invalid_request_error"
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/responses", 400),
    ):
        async with house.client.request(method, house.url + path) as response:
            assert response.status == status and "message" in (await response.json())["error"]
    assert not house.engine.jobs


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_over_the_limit_is_413(tmp_path: Path, chunked: bool) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    async with opened(tmp_path, Limits(body_bytes_max=1000)) as house:
        data = parts() if chunked else b" " * 10_000
        async with house.client.post(house.url + "/v1/chat/completions", data=data) as response:
            assert response.status == 413 and (await response.json())["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("stream", [True, False])
async def test_what_the_tokenizer_refuses_is_a_status_not_a_stream(house: House, stream: bool) -> None:
    failure = Failure(400, "invalid_request_error", "4097 tokens, 4096 fit", "messages", "context_length_exceeded")
    house.engine.on_submit = lambda job: job.refuse(failure)
    async with house.post("/v1/chat/completions", {**CHAT, "stream": stream}) as response:
        assert response.status == 400 and (await response.json())["error"]["param"] == "messages"
    await house.engine.empty()


@pytest.mark.parametrize("stream", [True, False])
async def test_the_schedulers_refusal_says_when_to_come_back(house: House, stream: bool) -> None:
    failure = Failure(429, "rate_limit_error", "9000 tokens wait", None, "queue_full", 17)
    house.engine.on_submit = lambda job: job.refuse(failure)
    async with house.post("/v1/chat/completions", {**CHAT, "stream": stream}) as response:
        assert response.status == 429 and response.headers["Retry-After"] == "17"
        assert (await response.json())["error"]["code"] == "queue_full"
    await house.engine.empty()


async def test_a_full_house_says_when_to_come_back(tmp_path: Path) -> None:
    async with opened(tmp_path) as house:
        house.engine.core.free.clear()
        async with house.post("/v1/chat/completions", CHAT) as response:
            assert response.status == 429 and response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["type"] == "rate_limit_error"


async def test_an_error_in_the_middle_is_an_event_without_an_end_mark(house: House) -> None:
    def script(job: Job) -> None:
        job.admit().say("half").finish("error", failure=Failure(500, "server_error", "it broke"))

    house.engine.on_submit = script
    async with house.post("/v1/chat/completions", {**CHAT, "stream": True}) as response:
        got = await events(response)
    assert response.status == 200 and got[-1]["error"]["message"] == "it broke" and "[DONE]" not in got
    async with house.post("/v1/chat/completions", CHAT) as response:
        assert response.status == 500 and (await response.json())["error"]["message"] == "it broke"
    await house.engine.empty()


@pytest.mark.parametrize("began", [True, False])
async def test_a_request_that_takes_too_long_times_out(tmp_path: Path, began: bool) -> None:
    async with opened(tmp_path, Limits(request_s_max=0.05, sweep_interval_s=0.02)) as house:
        house.engine.on_submit = admit if began else None
        async with house.post("/v1/chat/completions", CHAT) as response:
            assert response.status == 504 and (await response.json())["error"]["code"] == "timeout"
        await house.engine.empty()


async def test_an_error_of_ours_tells_no_details(house: House, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Status:
        raise RuntimeError("at 0x7f00 in /secret/path")

    house.status = Status(True, "ready")
    object.__setattr__(house.sources, "status", broken)
    async with house.client.get(house.url + "/ready") as response:
        text = await response.text()
    assert response.status == 500 and "0x" not in text and "/secret" not in text
    assert "secret" in caplog.text


async def test_pages_of_other_origins_may_not_post(house: House) -> None:
    headers = {"Origin": "http://evil.example"}
    async with house.post("/v1/chat/completions", CHAT, headers=headers) as response:
        assert response.status == 403
    house.engine.on_submit = play("a")
    async with house.post("/v1/chat/completions", CHAT, headers={"Origin": "http://localhost:3000"}) as response:
        assert response.status == 200


async def test_a_page_whose_name_was_pointed_here_may_not_post(house: House) -> None:
    port = house.url.rpartition(":")[2]
    for host, status in ((f"evil.example:{port}", 403), (f"127.0.0.1:{port}", 200)):
        house.engine.on_submit = play("a")
        headers = {"Origin": f"http://{host}", "Host": host}
        async with house.post("/v1/chat/completions", CHAT, headers=headers) as response:
            assert response.status == status


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
async def test_a_body_that_is_not_encoded_as_it_says_is_the_clients_mistake(house: House, encoding: str) -> None:
    """What the protocol's own parser refuses is answered by it, in plain text."""
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    async with house.client.post(house.url + "/v1/chat/completions", data=b"{}", headers=headers) as response:
        assert response.status == 400


async def test_connections_are_limited(tmp_path: Path) -> None:
    async with (
        opened(tmp_path, Limits(connections_max=1)) as house,
        raw(house, "/health", {}),
        house.client.get(house.url + "/health") as response,
    ):
        assert response.status == 503 and (await response.json())["error"]["code"] == "overloaded"


# ------------------------------------------------------------------------------------------------ the rest


async def test_models_are_listed(house: House) -> None:
    async with house.client.get(house.url + "/v1/models") as response:
        models = (await response.json())["data"]
    assert [(model["id"], model["object"], model["created"]) for model in models] == [
        ("model-1", "model", 1_700_000_000)
    ]
    async with house.client.get(house.url + "/v1/models/model-1") as response:
        assert await response.json() == models[0]
    async with house.client.get(house.url + "/v1/models/org/other") as response:
        assert response.status == 404


async def test_health_and_readiness_are_two_things(house: House) -> None:
    for status, code in ((Status(True, "ready"), 200), (Status(False, "recovering", {"worker-0": "restarting"}), 503)):
        house.status = status
        async with house.client.get(house.url + "/ready") as response:
            body = await response.json()
            assert response.status == code and body["state"] == status.state and body["detail"] == status.detail
        async with house.client.get(house.url + "/health") as response:
            assert response.status == 200


async def test_metrics_count_what_happened(house: House) -> None:
    house.engine.on_submit = play("a", "b")
    async with house.post("/v1/chat/completions", {**CHAT, "typo": 1}):
        pass
    async with house.post("/v1/chat/completions", {}):
        pass
    await house.engine.empty()
    async with house.client.get(house.url + "/metrics") as response:
        page = await response.text()
    for line in (
        "baton_requests_running 3.0",
        "baton_requests_waiting 4.0",
        "baton_kv_blocks_total 100.0",
        "baton_kv_blocks_free 50.0",
        "baton_kv_blocks_cached 25.0",
        'baton_preemptions_total{way="recompute"} 6.0',
        'baton_preemptions_total{way="swap"} 7.0',
        'baton_requests_total{reason="stop"} 1.0',
        'baton_requests_refused_total{door="http",status="400"} 1.0',
        'baton_ignored_parameters_total{door="http"} 1.0',
        "baton_prompt_tokens_total 3.0",
        "baton_completion_tokens_total 2.0",
        "baton_time_to_first_token_seconds_count 1.0",
        "baton_inter_token_seconds_count 1.0",
        "baton_request_seconds_count 1.0",
    ):
        assert line in page, line


async def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    taken = listen("127.0.0.1", 0, 1 << 17)
    port = taken.getsockname()[1]
    engine = Engine()
    sources = Sources(lambda: Status(True, "ready"), Gauges, [words()])
    with pytest.raises(StartError, match=f"127.0.0.1:{port}: the port is taken"):
        await Doors().start(engine.reception, Settings(port=port), sources, tmp_path)
    with pytest.raises(StartError, match="cannot listen on"):
        await Doors().start(engine.reception, Settings(host="203.0.113.7", port=0), sources, tmp_path)
    taken.close()
    engine.close()


async def test_stopping_lets_answers_end(tmp_path: Path) -> None:
    async with opened(tmp_path) as house:
        house.engine.on_submit = admit
        async with house.post("/v1/completions", {**TEXT, "stream": True}) as response:
            stopping = asyncio.create_task(house.doors.stop(5))
            job = await house.engine.job()
            job.say("late").finish()
            got = await events(response)
            assert got[0]["choices"][0]["text"] == "late" and got[-1] == "[DONE]"
            await asyncio.wait_for(stopping, 5)
