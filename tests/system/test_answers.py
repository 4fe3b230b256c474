"""The real model through every process: the reference's tokens, alone, all at once, and across a worker's death."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from baton import AsyncClient
from baton.engine.batch import Sampled, Sampling, StepRow
from baton.workers.cache import BLOCK_SIZE
from baton.workers.runner import Runner
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


@pytest.mark.asyncio(loop_scope="module")
async def test_a_prompt_is_told_of_through_every_process(server: Server) -> None:
    """The reference's prompt and answer as a prompt: each token of the answer was the likeliest in its place."""
    reference = REFERENCES[0]
    prompt = reference["prompt_ids"] + reference["output_ids"]
    ask = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    for _ in range(2):  # the second time its blocks are there, and are not read
        answer = await server.complete(**ask)
        told = answer["choices"][0]["prompt_logprobs"]
        assert told[0] is None and len(told) == len(prompt)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        said = [entry[str(token)] for token, entry in zip(prompt[1:], told[1:], strict=True)]
        answered = said[len(reference["prompt_ids"]) - 1 :]
        assert [entry["rank"] for entry in answered] == [1] * len(answered)
        assert [entry["logprob"] for entry in answered] == pytest.approx(reference["logprobs"], abs=1e-3)


def alone(runner: Runner, prompt: list[int], sampling: Sampling, count: int) -> list[Sampled]:
    """What one choice says where no process and no other choice is near."""
    ids, said, computed = list(prompt), list[Sampled](), 0
    blocks = list(range(-(-(len(prompt) + count) // BLOCK_SIZE)))
    while len(said) < count:
        row = StepRow(0, ids[computed:], computed, blocks, True, len(said), sampling)
        computed = len(ids)
        said += runner.step([row])
        ids.append(said[-1].token)
    return said


@pytest.mark.asyncio(loop_scope="module")
async def test_each_of_n_seeded_choices_says_what_it_says_alone_and_the_best_are_the_best(
    server: Server, model_path: Path
) -> None:
    prompt, count = REFERENCES[1]["prompt_ids"], 6
    runner = Runner(model_path, dtype="float32", weights="bfloat16", blocks=16, threads=1)
    sampling = Sampling(0.9, 0.95, 0, 77, ())
    truth = [alone(runner, prompt, msgspec.structs.replace(sampling, choice=choice), count) for choice in range(3)]
    ask = {"prompt": prompt, "max_tokens": count, "seed": 77, "temperature": 0.9, "top_p": 0.95, "ignore_eos": True}
    answer = await server.complete(**ask, n=3)
    ids = [[token.token for token in said] for said in truth]
    assert [choice["token_ids"] for choice in answer["choices"]] == ids and len({*map(tuple, ids)}) == 3
    assert answer["usage"]["completion_tokens"] == 3 * count and answer["usage"]["prompt_tokens"] == len(prompt)
    best = sorted(truth, key=lambda said: -sum(token.logprob for token in said))[:2]
    answer = await server.complete(**ask, n=2, best_of=3, logprobs=0)
    assert [choice["token_ids"] for choice in answer["choices"]] == [[token.token for token in said] for said in best]
    for choice, said in zip(answer["choices"], best, strict=True):
        expected = [token.logprob for token in said]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-3)
    assert answer["usage"]["completion_tokens"] == 3 * count
