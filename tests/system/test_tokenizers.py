"""Several tokenizers of one server: requests are spread over them, and none is lost with one of them."""

from __future__ import annotations

import asyncio
import signal

from baton.ipc.frames import Role
from tests.system.server import Server

FLAGS = ("--worker", "scripted", "--tokenizers", "2")
ASK = {"prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}


def at(server: Server) -> list[int]:
    """Which tokenizer each request is with that is being encoded."""
    return sorted(view.row.index for view in server.board_rows() if view.row.role == Role.TOKENIZER)


async def test_requests_are_spread_and_one_that_outlives_its_tokenizer_is_tried_at_the_next() -> None:
    environment = {"BATON_LIMITS__RESTARTS_MAX": "50", "BATON_LIMITS__HUNG_S_MAX": "60"}
    async with Server(*FLAGS, environment=environment) as server:
        assert {"tokenizer", "tokenizer-1"} <= server.places().keys()
        whole = [await server.complete(seed=seed, **ASK) for seed in range(4)]
        for role in ("tokenizer", "tokenizer-1"):
            server.kill(role, signal.SIGSTOP)
        asked = [asyncio.create_task(server.complete(seed=seed, **ASK)) for seed in range(4)]
        async with asyncio.timeout(10):
            while at(server) != [0, 0, 1, 1]:
                await asyncio.sleep(0.01)
        answers = await asyncio.gather(*asked)  # the stopped are seen, killed and replaced
        for answer, same in zip(answers, whole, strict=True):
            assert answer["choices"][0]["token_ids"] == same["choices"][0]["token_ids"]
        assert [server.places()[name].incarnation for name in ("tokenizer", "tokenizer-1")] == [2, 2]
