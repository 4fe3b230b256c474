"""What the doors' tests share: a real server on a free port before an engine double, and a check for leaked tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.engine.limits import Limits
from baton.frontends.doors import Doors
from baton.frontends.status import Gauges, Sources, Status
from baton.workers.config import Settings
from tests.frontends.double import Engine


@dataclass
class House:
    """A frontend in one process: the doors, and the double behind them."""

    engine: Engine
    doors: Doors
    places: dict[str, str]
    status: Status
    client: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.places["http"]

    def post(self, path: str, body: dict[str, Any], **rest: Any) -> Any:
        """An aiohttp request context for a JSON body."""
        return self.client.post(self.url + path, json=body, **rest)


@asynccontextmanager
async def opened(directory: Path, limits: Limits | None = None, **settings: Any) -> AsyncIterator[House]:
    limits = limits or Limits()
    engine = Engine(limits)
    doors = Doors()
    engine.observe = doors.observe
    house = House(engine, doors, {}, Status(True, "ready"), aiohttp.ClientSession())
    chosen = Settings(port=0, limits=limits, **settings)
    sources = Sources(lambda: house.status, lambda: Gauges(3, 4, 100, 50, 25))
    before = asyncio.all_tasks()
    house.places = await doors.start(engine.reception, chosen, sources, directory)
    try:
        yield house
        engine.check()
    finally:
        await house.client.close()
        await doors.stop(0)
        engine.close()
        await asyncio.sleep(0)
        left = {task for task in asyncio.all_tasks() - before - {asyncio.current_task()} if not task.done()}
        assert not left, f"tasks leaked: {left}"


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with opened(tmp_path) as house:
        yield house


Opened = Callable[..., Any]
