"""Those who listen and do not read, where they could hold up others: on one socket, and to one kept answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from websockets.asyncio.client import connect

from baton.engine.limits import Limits
from tests.frontends.conftest import House, opened
from tests.frontends.double import Job, admit, play
from tests.frontends.talk import CHAT, TEXT, raw

LIMITS = Limits(stalled_s_max=0.3, sweep_interval_s=0.02)
BIG, PIECES = "x" * 10_000, 120
WAIT_S = 20


async def say_much(job: Job) -> None:
    """More than all buffers of a connection hold."""
    for _ in range(PIECES):
        if job.ended:
            return
        job.say(BIG)
        await asyncio.sleep(0)


async def quick(house: House) -> None:
    """Somebody else is served as ever."""
    house.engine.on_submit = play("quick")
    async with house.post("/v1/chat/completions", CHAT) as response:
        assert (await response.json())["choices"][0]["message"]["content"] == "quick"
    house.engine.on_submit = None


async def test_a_socket_that_nobody_reads_ends_its_responses_as_slow_and_holds_up_nobody(tmp_path: Path) -> None:
    async with asyncio.timeout(WAIT_S), opened(tmp_path, LIMITS) as house:
        async with connect(house.places["websocket"], max_queue=1, ping_interval=None, close_timeout=1) as socket:
            for lane in ("a", "b"):
                create = {"type": "response.create", "stream_id": lane, "model": "model-1", "input": "hi"}
                await socket.send(json.dumps(create))
            jobs = [(await house.engine.job()).admit() for _ in range(2)]
            await asyncio.gather(*(say_much(job) for job in jobs))
            await quick(house)
            await house.engine.empty()
        reasons = [account.reason for account in house.engine.accounts]
        assert sorted(reasons) in (
            ["slow_consumer", "slow_consumer", "stop"],
            ["disconnected", "slow_consumer", "stop"],
        )


async def test_one_listener_of_a_kept_answer_that_does_not_read_costs_the_others_nothing(tmp_path: Path) -> None:
    key = {"Idempotency-Key": "k"}
    async with asyncio.timeout(WAIT_S), opened(tmp_path, LIMITS) as house:
        house.engine.on_submit = admit
        body = {**TEXT, "stream": True}
        async with raw(house, "/v1/completions", body, key) as (_, writer):
            job = await house.engine.job()
            writer.transport.pause_reading()
            async with house.post("/v1/completions", body, headers=key) as response:
                await house.engine.until(lambda: len(house.engine.desk.heard) == 2)
                said = asyncio.create_task(response.read())
                (answer,) = house.engine.desk.answers.running.values()
                for number in range(1, PIECES + 1):  # as fast as the one that reads takes it
                    job.say(BIG)
                    await house.engine.until(lambda number=number: answer.taken == number)  # type: ignore[misc]
                await house.engine.until(lambda: len(house.engine.desk.heard) == 1)  # the stalled one is let go
                await quick(house)
                job.finish()
                text = await said
        assert text.count(b"x") >= PIECES * len(BIG) and b"[DONE]" in text
        assert [account.reason for account in house.engine.accounts] == ["stop", "stop"]
