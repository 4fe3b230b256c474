"""The real model through every process: the reference's tokens, alone, all at once, and across a worker's death."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from baton import AsyncClient
from tests.system.server import Server

REFERENCES = json.loads((Path(__file__).parent.parent / "data" / "smollm2-135m-reference.json").read_text())[
    "references"
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(model_path: Path) -> AsyncIterator[Server]:
    async with Server("--dtype", "float32", environment={"BATON_LIMITS__RESTARTS_MAX": "50"}) as running:
        yield running


def asked(reference: dict[str, Any]) -> dict[str, Any]:
    """The request that a reference answers."""
    tokens = len(reference["output_ids"])
    return {"prompt": reference["prompt_ids"], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


@pytest.mark.asyncio(loop_scope="module")
async def test_all_references_at_once_are_equal_in_ids_and_close_in_log_probabilities(server: Server) -> None:
    ask = {"logprobs": 0, "skip_special_tokens": False}
    answers = await asyncio.gather(*(server.complete(**asked(one), **ask) for one in REFERENCES))
    for reference, answer in zip(REFERENCES, answers, strict=True):
        (choice,) = answer["choices"]
        assert choice["token_ids"] == reference["output_ids"]
        assert choice["text"] == reference["output_text"]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(reference["logprobs"], abs=1e-3)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_reference_by_its_messages_is_equal_over_the_client(server: Server) -> None:
    async with AsyncClient(server.zmq) as client:
        for reference in REFERENCES:
            if reference["kind"] != "chat":
                continue
            ask = asked(reference)
            ask["messages"] = [{"role": "user", "content": reference["message"]}]
            del ask["prompt"]
            async with client.stream(return_token_ids=True, **ask) as stream:
                ids = [token for delta in [delta async for delta in stream] for token in delta.token_ids]
            assert ids == reference["output_ids"]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_worker_costs_a_stream_no_token(server: Server) -> None:
    reference, ids = REFERENCES[0], []
    async for chunk in server.stream(**asked(reference), return_token_ids=True):
        for choice in chunk["choices"]:
            ids += choice.get("token_ids") or []
        if len(ids) == 8:
            server.kill("worker")
    assert ids == reference["output_ids"]
    assert server.places()["worker"].incarnation > 1
    await server.until_ready()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_likeliest_token_of_a_greedy_answer_is_the_chosen_one(server: Server) -> None:
    reference = REFERENCES[0]
    answer = await server.complete(**asked(reference), logprobs=3, skip_special_tokens=False)
    scores = answer["choices"][0]["logprobs"]
    assert scores["token_logprobs"] == pytest.approx(reference["logprobs"], abs=1e-3)
    for token, logprob, top in zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True):
        assert len(top) == 3 and max(top.values()) == top[token] == pytest.approx(logprob, abs=1e-4)
