"""Links over real sockets: order, and noise from a stranger who found the socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from baton.ipc.frames import AnyFrame, Credit, Role
from baton.ipc.zmq_link import ZmqLinks
from tests.ipc.places import LIMITS, address, make_board


class Party:
    """One process's links, with what came in."""

    def __init__(self, folder: Path, role: Role) -> None:
        self.heard: list[AnyFrame] = []
        self.reported: list[str] = []
        self._came = asyncio.Event()
        self.links = ZmqLinks(folder, address(role), LIMITS, make_board(), self._deliver, self._report)

    def _deliver(self, frame: AnyFrame) -> None:
        self.heard.append(frame)
        self._came.set()

    def _report(self, event: str, detail: str) -> None:
        self.reported.append(event)
        self._came.set()

    async def until(self, frames: int, reports: int = 0) -> None:
        async with asyncio.timeout(10):
            while len(self.heard) < frames or len(self.reported) < reports:
                await self._came.wait()
                self._came.clear()


@pytest.fixture
async def parties(tmp_path: Path) -> AsyncIterator[tuple[Party, Party, Path]]:
    frontend, scheduler = Party(tmp_path, Role.FRONTEND), Party(tmp_path, Role.SCHEDULER)
    yield frontend, scheduler, tmp_path
    frontend.links.close()
    scheduler.links.close()


async def test_frames_arrive_in_order_however_many_do_not_fit(parties: tuple[Party, Party, Path]) -> None:
    frontend, scheduler, _ = parties
    sent = [Credit(0, 1, 1, position) for position in range(1000)]
    for frame in sent:
        frontend.links.send(Role.SCHEDULER, 0, frame)
    await scheduler.until(len(sent))
    assert scheduler.heard == sent


async def test_what_is_sent_before_anyone_listens_waits(tmp_path: Path) -> None:
    frontend = Party(tmp_path, Role.FRONTEND)
    for position in range(100):
        frontend.links.send(Role.SCHEDULER, 0, Credit(0, 1, 1, position))
    scheduler = Party(tmp_path, Role.SCHEDULER)
    await scheduler.until(100)
    frontend.links.close()
    scheduler.links.close()


async def test_a_strangers_noise_is_dropped_and_the_link_goes_on(parties: tuple[Party, Party, Path]) -> None:
    frontend, scheduler, folder = parties
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.PUSH)
    stranger.connect(f"ipc://{folder}/scheduler-0.sock")
    frontend.links.send(Role.SCHEDULER, 0, Credit(0, 1, 1, 1))
    for data in (b"", b"\xc1", b"x" * LIMITS.frame_bytes_max):
        stranger.send(data)
    await scheduler.until(1, reports=3)
    stranger.send(b"y" * (LIMITS.frame_bytes_max + 1))  # more than the socket takes: it hangs up on the stranger
    frontend.links.send(Role.SCHEDULER, 0, Credit(0, 1, 1, 2))
    await scheduler.until(2)
    assert scheduler.reported == ["malformed_frame"] * 3
    assert scheduler.links.counts["malformed_frames"] == 3
    stranger.close(linger=0)
    context.term()
