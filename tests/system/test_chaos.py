"""Processes behind the doors die at random while the real model answers: no token is lost or changed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from baton import AsyncClient
from tests.system.server import Server

pytestmark = pytest.mark.alone

BEHIND = ("tokenizer", "scheduler", "worker", "detokenizer")
PROMPTS = [f"{subject} {verb}" for subject in ("The sea", "A cat", "Rome", "Law") for verb in ("is", "was", "has")]
TOKENS, AT_ONCE, KILL_EVERY_S = 24, 8, 3.0


def ask(prompt: str) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}


async def over_http(server: Server, prompt: str) -> str:
    return "".join([chunk["choices"][0]["text"] async for chunk in server.stream(**ask(prompt)) if chunk["choices"]])


async def over_socket(server: Server, prompt: str) -> str:
    """The Responses door takes ids as an extension, so that no template comes between."""
    async with server.session.ws_connect(server.socket_url) as socket:
        body = {"model": "smollm2-135m", "max_output_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
        await socket.send_str(json.dumps({"type": "response.create", "input": server.ids[prompt], **body}))
        text = ""
        while True:
            event = json.loads((await socket.receive()).data)
            assert event["type"] not in ("error", "response.failed"), event
            if event["type"] == "response.output_text.delta":
                text += event["delta"]
            if event["type"] in ("response.completed", "response.incomplete"):
                return text


async def over_client(server: Server, prompt: str) -> str:
    async with AsyncClient(server.zmq) as client, client.stream(**ask(prompt)) as stream:
        return "".join([delta.text async for delta in stream])


DOORS = (over_http, over_socket, over_client)


async def disturb(server: Server, rng: random.Random, killed: list[str]) -> None:
    """Kill or stop one process behind the doors every few seconds, for ever."""
    while True:
        await asyncio.sleep(KILL_EVERY_S)
        role = rng.choice(BEHIND)
        place = server.places()[role]
        if place.pid > 1:
            number = rng.choice((signal.SIGKILL, signal.SIGSTOP))
            os.kill(place.pid, number)
            killed.append(f"{role} {number.name}")


def more(now: dict[str, Counter[str]], before: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
    """What is held beyond what was. Less is right: a new process opens a link when it first has something to say."""
    return {name: grown for name, held in now.items() if (grown := held - before[name])}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("requests", "seconds"), [(24, 30), pytest.param(300, 300, marks=pytest.mark.full)], ids=["short", "long"]
)
async def test_every_answer_is_that_of_an_undisturbed_run(
    requests: int, seconds: float, model_path: Path, tmp_path: Path
) -> None:
    rng = random.Random(requests)
    environment = {
        "BATON_LIMITS__RESTARTS_MAX": "1000",
        "BATON_LIMITS__LIVES_MAX": "1000",
        "XDG_STATE_HOME": str(tmp_path),
    }
    async with Server("--dtype", "float32", environment=environment) as server:
        expected = {}
        for prompt in PROMPTS:
            whole = await server.complete(**ask(prompt))
            server.ids[prompt] = whole["prompt_token_ids"]
            expected[prompt] = whole["choices"][0]["text"]
        before = server.holdings()
        done, killed = 0, list[str]()
        chaos = asyncio.create_task(disturb(server, rng, killed))
        end = asyncio.get_running_loop().time() + seconds

        async def client() -> None:
            nonlocal done
            while done < requests or asyncio.get_running_loop().time() < end:
                done += 1
                prompt, door = rng.choice(PROMPTS), rng.choice(DOORS)
                assert await door(server, prompt) == expected[prompt], (door.__name__, prompt, killed)

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
        chaos.cancel()
        assert done >= requests and len(killed) >= 3
        await server.until_ready()
        await server.hang_up()
        await server.idle(5)
        for _ in range(100):  # closed connections leave the loop a little later
            if not (grown := more(server.holdings(), before)):
                break
            await asyncio.sleep(0.1)
        assert not grown, f"after {killed}: {grown}"
        assert not list(server.board_rows())
