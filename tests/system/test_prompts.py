"""Prompts of every size: small ones are encoded at once, large ones beside the loop, hopeless ones not at all."""

from __future__ import annotations

from tests.system.server import Server

WORD = " story"


async def test_a_large_prompt_is_encoded_like_a_small_one_and_a_hopeless_one_is_refused() -> None:
    async with Server("--worker", "scripted") as server:
        for words in (10, 5000):  # below and above what is encoded at once
            answer = await server.complete(prompt=WORD * words, max_tokens=1)
            ids = answer["prompt_token_ids"]
            assert answer["usage"]["prompt_tokens"] == len(ids) == words and len(set(ids)) == 1
        body = {"model": "smollm2-135m", "prompt": "x" * 1_000_000, "max_tokens": 1}
        async with server.session.post(f"{server.url}/v1/completions", json=body) as response:
            error = (await response.json())["error"]
        assert (response.status, error["param"], error["code"]) == (400, "prompt", "context_length_exceeded")
        assert "at least" in error["message"]
