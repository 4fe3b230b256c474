"""The sizes that an operator gives are those that a request meets."""

from __future__ import annotations

from tests.system.server import Server
from tests.system.test_traces import stored, trace

BLOCK_TOKENS = 16


async def test_a_small_cache_is_the_models_length_and_a_small_step_cuts_a_prompt() -> None:
    flags = ("--worker", "scripted", "--kv-blocks", "4", "--max-step-tokens", "5")
    async with Server(*flags, environment={"BATON_LIMITS__STEP_TOKENS_MAX": "7"}) as server:  # the flag goes before it
        async with server.session.get(f"{server.url}/v1/models") as response:
            (model,) = (await response.json())["data"]
        length = model["max_model_len"]
        assert length == 4 * BLOCK_TOKENS

        prompt = list(range(2, 22))
        answer = await server.complete(prompt=prompt, max_tokens=1)
        await stored(server, answer["id"])
        assert "4 steps" in await trace(server, "last")

        whole = await server.complete(prompt=prompt, max_tokens=length - len(prompt), ignore_eos=True)
        assert whole["usage"]["total_tokens"] == length
        more = {"model": model["id"], "prompt": prompt, "max_tokens": length - len(prompt) + 1}
        async with server.session.post(f"{server.url}/v1/completions", json=more) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (400, "kv_cache_exceeded")
