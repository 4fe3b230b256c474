"""What the doors' tests share: a real server on a free port before an engine double, and a check for leaked tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from baton.engine.limits import Limits
from baton.frontends.doors import Doors
from baton.frontends.status import Gauges, Sources, Status
from baton.ipc.board import TOTALS_WORDS
from baton.workers.config import Settings
from tests.frontends.double import Engine

LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The server runs on uvloop; the SDK also on asyncio's own loop."""
    return LOOPS


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On asyncio's own loop only what is marked ``sdk`` is run: no server is."""

    def idle(item: pytest.Item) -> bool:
        call = getattr(item, "callspec", None)
        return call is not None and LOOPS["asyncio"] in call.params.values() and not item.get_closest_marker("sdk")

    config.hook.pytest_deselected(items=[item for item in items if idle(item)])
    items[:] = [item for item in items if not idle(item)]


def words() -> memoryview:
    """What a frontend counts in, in plain memory."""
    return memoryview(bytearray(8 * TOTALS_WORDS)).cast("Q")


@dataclass
class House:
    """A frontend in one process: the doors, and the double behind them."""

    engine: Engine
    doors: Doors
    places: dict[str, str]
    status: Status
    sources: Sources
    client: aiohttp.ClientSession
    gauges: Gauges = field(default_factory=lambda: Gauges(3, 4, 100, 50, 25, 6, 7))

    @property
    def url(self) -> str:
        return self.places["http"]

    def post(self, path: str, body: dict[str, Any], **rest: Any) -> Any:
        """An aiohttp request context for a JSON body."""
        return self.client.post(self.url + path, json=body, **rest)


@asynccontextmanager
async def opened(directory: Path, limits: Limits | None = None, **settings: Any) -> AsyncIterator[House]:
    """Doors on a free port; afterwards every request must be accounted for and every task gone."""
    limits = limits or Limits()
    engine, doors, client = Engine(limits), Doors(), aiohttp.ClientSession()
    engine.observe = doors.observe
    sources = Sources(lambda: built.status, lambda: built.gauges, [words()])
    built = House(engine, doors, {}, Status(True, "ready"), sources, client)
    before = asyncio.all_tasks()
    try:
        built.places = await doors.start(
            engine.reception, Settings(port=0, limits=limits, **settings), sources, directory
        )
        yield built
    finally:
        await client.close()
        await doors.stop(0)
        engine.close()
    engine.check()
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=1)
    assert not left, f"tasks leaked: {left}"


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with opened(tmp_path) as house:
        yield house
