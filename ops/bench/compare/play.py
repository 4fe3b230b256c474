"""Sends a workload's requests to one server as the workload says, and times the answers. The same for every server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter

import msgspec

from baton.ops.bench.compare.requests import Part, Request
from baton.ops.bench.compare.servers import Server
from baton.ops.bench.stream import Outcome, ask
from baton.ops.http import Target

Send = Callable[[int], Awaitable[Outcome]]


def body(server: Server, request: Request) -> bytes:
    """A request's JSON for a server: greedy, streamed, as long as it was asked for, with the server's own fields."""
    return msgspec.json.encode(
        {
            "model": server.served,
            "prompt": request.prompt if server.token_ids else request.text,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **server.request,
        }
    )


async def play(server: Server, where: Target, part: Part, rate: float | None, timeout_s: float) -> list[Outcome]:
    """Send all requests and wait for their ends: at random times at ``rate`` a second, or in the part's closed loop.

    The bodies are made before the first is sent.
    """
    bodies = [body(server, request) for request in part.requests]

    async def send(number: int) -> Outcome:
        # A token whose text is held back, as part of a character, is a token: silent chunks count.
        return await ask(where, bodies[number], timeout_s, part.requests[number].output_tokens, silent=True)

    if rate is None:
        return await closed_loop(send, len(bodies), part.workload.concurrency)
    began, at_s, tasks = perf_counter(), 0.0, []
    for number, request in enumerate(part.requests):
        at_s += request.gap / rate
        await asyncio.sleep(max(0.0, began + at_s - perf_counter()))
        tasks.append(asyncio.create_task(send(number)))
    return [await task for task in tasks]


async def closed_loop(send: Send, count: int, concurrency: int) -> list[Outcome]:
    """Each of ``concurrency`` sends one after the other until all are sent."""
    found: list[Outcome] = []
    left = iter(range(count))

    async def one_after_another() -> None:
        for number in left:
            found.append(await send(number))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(count, concurrency)):
            group.create_task(one_after_another())
    return found


def capacity(outcomes: Sequence[Outcome]) -> float:
    """Requests/s a closed loop kept up while it was full: from its start until its last request was sent.

    A request that is partly within that time counts with the part of its own time that is. Where all were sent before
    any had ended, it is their number over the whole time; 0 where none succeeded.
    """
    good = [one for one in outcomes if one.error is None]
    if not good:
        return 0.0
    began, last = min(one.started for one in outcomes), max(one.started for one in outcomes)
    if last <= min(one.ended for one in good):
        return len(good) / (max(one.ended for one in outcomes) - began)
    done = sum(min(1.0, max(0.0, last - one.started) / one.e2e_s) for one in good)
    return done / (last - began)
