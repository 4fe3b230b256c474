"""Thousands of short requests leave every process as large as the first hundreds did."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from tests.system.server import Server

pytestmark = pytest.mark.alone

REQUESTS, AT_ONCE, WARM_UP = 2000, 16, 600
GROWTH_BYTES_MAX = 4 << 20


async def test_memory_is_flat_over_two_thousand_requests() -> None:
    # A small trace store, so that its bound is reached while warming up.
    async with Server("--worker", "scripted") as server:
        numbers = iter(range(REQUESTS + WARM_UP))

        async def ask(count: int) -> None:
            for _ in range(count):
                await server.complete(prompt=f"prompt number {next(numbers)}", max_tokens=8)

        def sizes() -> dict[str, int]:
            return {name: psutil.Process(place.pid).memory_info().rss for name, place in server.places().items()}

        await asyncio.gather(*(ask(WARM_UP // AT_ONCE) for _ in range(AT_ONCE)))
        before = sizes()
        await asyncio.gather(*(ask(REQUESTS // AT_ONCE) for _ in range(AT_ONCE)))
        grown = {name: size - before[name] for name, size in sizes().items()}
        assert max(grown.values()) < GROWTH_BYTES_MAX, grown
        await server.idle(1)
