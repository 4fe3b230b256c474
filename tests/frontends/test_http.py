from __future__ import annotations

import json
from typing import Any

from tests.frontends.conftest import House
from tests.frontends.double import play

CHAT = {"model": "model-1", "messages": [{"role": "user", "content": "hi"}]}


async def events(response: Any) -> list[Any]:
    out: list[Any] = []
    async for line in response.content:
        if line.startswith(b"data: "):
            out.append(line[6:].strip().decode() if line.startswith(b"data: [") else json.loads(line[6:]))
    return out


async def test_a_chat_is_answered(house: House) -> None:
    house.engine.on_submit = play("Hel", "lo")
    async with house.post("/v1/chat/completions", CHAT) as response:
        body = await response.json()
    assert response.status == 200
    assert body["choices"][0]["message"]["content"] == "Hello"
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    await house.engine.empty()


async def test_a_chat_is_streamed_in_openais_order(house: House) -> None:
    house.engine.on_submit = play("Hel", "", "lo", tail="!", reason="length")
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    async with house.post("/v1/chat/completions", body) as response:
        got = await events(response)
    assert got[-1] == "[DONE]"
    texts = [chunk["choices"][0]["delta"].get("content") for chunk in got[:-2]]
    assert texts == ["", "Hel", "lo", "!", None]
    assert got[-3]["choices"][0]["finish_reason"] == "length"
    assert got[-2]["choices"] == [] and got[-2]["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in got[:-2])
    await house.engine.empty()
