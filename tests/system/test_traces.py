"""A trace is a request's story: every state, in the process that owned it, and no time unexplained."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from baton.engine.states import STATES
from tests.system.server import Server

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def trace(server: Server, *arguments: str) -> str:
    """What ``baton trace`` prints about this server; empty while the request is not on record."""
    command = [sys.executable, "-m", "baton", "trace", *arguments]
    done = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=server.environment
    )
    out, err = await done.communicate()
    assert done.returncode == 0 or "nothing on record" in err.decode(), err.decode()
    return out.decode()


async def stored(server: Server, request_id: str) -> list[dict[str, Any]]:
    """The spans of a finished request, once the processes have written them."""
    async with asyncio.timeout(10):
        while True:
            if not (printed := await trace(server, request_id, "--json")):
                continue
            document = json.loads(printed)
            spans = [s for r in document["resourceSpans"] for scope in r["scopeSpans"] for s in scope["spans"]]
            if {"closed", "flushing", "text_completion"} <= {span["name"] for span in spans}:
                return spans


async def test_a_streamed_request_shows_every_state_in_its_process_under_one_root() -> None:
    async with Server("--worker", "scripted", environment={"BATON_SCRIPTED_STEP_MS": "5"}) as server:
        chunks = []
        ask = {"prompt": "a story", "max_tokens": 20, "ignore_eos": True, "model": "smollm2-135m", "stream": True}
        headers = {"traceparent": PARENT}
        async with server.session.post(f"{server.url}/v1/completions", json=ask, headers=headers) as response:
            chunks = [line async for line in response.content if line.startswith(b"data: {")]
        request_id = json.loads(chunks[0][6:])["id"]
        spans = await stored(server, request_id)

        (root,) = [span for span in spans if span["name"] == "text_completion"]
        assert (root["traceId"], root["parentSpanId"]) == tuple(PARENT.split("-")[1:3])
        children = [span for span in spans if span["name"] in STATES]
        expected = ["received", "tokenizing", "queued", "prefilling", "decoding", "flushing", "closed"]
        children.sort(key=lambda span: int(span["startTimeUnixNano"]))
        assert [span["name"] for span in children] == expected
        for span in children:
            assert (span["traceId"], span["parentSpanId"]) == (root["traceId"], root["spanId"])
            owner = {a["key"]: a["value"] for a in span["attributes"]}["baton.owner"]["stringValue"]
            assert owner.startswith(STATES[span["name"]][0].name.lower())
        covered = sum(int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"]) for span in children)
        wall = int(root["endTimeUnixNano"]) - int(root["startTimeUnixNano"])
        assert 0.95 * wall <= covered <= 1.001 * wall

        waterfall = await trace(server, "last")
        assert "100.0 %" in waterfall and "20 steps" in waterfall


async def test_a_request_that_lived_through_a_death_tells_of_it() -> None:
    async with Server("--worker", "scripted", environment={"BATON_SCRIPTED_STEP_MS": "5"}) as server:
        events = server.stream(prompt=[1, 2], max_tokens=100, ignore_eos=True)
        first = await anext(events)
        server.kill("scheduler")
        assert [event async for event in events][-1]["choices"][0]["finish_reason"] == "length"
        spans = await stored(server, first["id"])
        (dead,) = [span for span in spans if span["name"] in STATES and span["status"].get("code") == 2]
        assert "scheduler-0#1 died" in dead["status"]["message"]
        assert [span["name"] for span in spans].count("tokenizing") == 2
