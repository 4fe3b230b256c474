"""Numbers that are not finite, through every process: the request ends with an error, is counted, and ends alone."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.system.server import Server

SEED = 7
SCRIPTED = {"BATON_WORKER": "scripted", "BATON_SCRIPTED_FAULTY_SEED": str(SEED)}


async def test_a_request_with_invalid_logits_ends_alone_and_is_counted() -> None:
    async with Server(environment=SCRIPTED) as server:

        async def ask(seed: int) -> tuple[int, dict[str, Any]]:
            body = {"model": "smollm2-135m", "prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True}
            async with server.session.post(f"{server.url}/v1/completions", json={**body, "seed": seed}) as response:
                return response.status, await response.json()

        async with asyncio.timeout(30):
            bad, good = await asyncio.gather(ask(SEED), ask(SEED + 1))
            async with server.session.get(f"{server.url}/metrics") as response:
                page = await response.text()
    assert (bad[0], bad[1]["error"]["code"]) == (500, "invalid_logits")
    assert (good[0], good[1]["usage"]["completion_tokens"]) == (200, 8)
    lines = page.splitlines()
    assert "baton_invalid_logits_total 1.0" in lines and 'baton_requests_total{reason="error"} 1.0' in lines
