"""A client of the SDK whose server ends: the goodbye, what had not begun, and the next server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.frontends.client import AsyncClient, NotConnected
from tests.frontends.conftest import opened
from tests.frontends.double import play

pytestmark = pytest.mark.sdk

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


async def test_a_client_finds_its_server_again(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/door.sock"
    client = AsyncClient(address)
    for _ in range(2):
        async with opened(tmp_path, zmq=address) as house:
            house.engine.on_submit = play("a")
            assert (await client.chat(HI)).text == "a"
            await house.engine.empty()
    await client.close()


async def test_a_request_that_met_a_goodbye_is_sent_once_more(tmp_path: Path) -> None:
    client = AsyncClient(f"ipc://{tmp_path}/first.sock")
    async with opened(tmp_path, zmq=f"ipc://{tmp_path}/second.sock") as second:
        second.engine.on_submit = play("a")
        async with opened(tmp_path, zmq=f"ipc://{tmp_path}/first.sock") as first:
            answer = asyncio.create_task(client.chat(HI))
            await first.engine.job()
            client._address = f"ipc://{tmp_path}/second.sock"
        assert (await answer).text == "a"
        await second.engine.empty()
    await client.close()


async def test_a_server_that_said_goodbye_and_is_gone_is_said(tmp_path: Path) -> None:
    client = AsyncClient(f"ipc://{tmp_path}/door.sock")
    async with opened(tmp_path, zmq=f"ipc://{tmp_path}/door.sock") as house:
        answer = asyncio.create_task(client.chat(HI))
        await house.engine.job()
    with pytest.raises(NotConnected, match="shutting down"):
        await answer
    await client.close()
