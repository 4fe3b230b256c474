"""Links over real sockets: order, back-pressure without loss, bad peers, and places whose process changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from baton.engine.limits import Limits
from baton.ipc.board import Board
from baton.ipc.frames import PROTOCOL_VERSION, Address, AnyFrame, CancelAck, Envelope, Role
from baton.ipc.link import LinkGap
from baton.ipc.zmq_link import ZmqLinks

LIMITS = Limits(inbox_frames_max=8, inbox_batch_frames_max=4, frame_bytes_max=4096)
WAIT_S = 20


def address(role: Role, incarnation: int = 1) -> Address:
    return Address(role, "m", 0, 0, incarnation)


class End:
    """One process's links, what they delivered and what they reported."""

    def __init__(self, directory: Path, role: Role, incarnation: int = 1, limits: Limits = LIMITS) -> None:
        self.frames: list[AnyFrame] = []
        self.reports: list[str] = []
        self._news = asyncio.Event()
        board = Board.format(bytearray(Board.size(1, 8)), 1, 8)
        self.links = ZmqLinks(directory, address(role, incarnation), limits, board, self._deliver, self._report)

    def _deliver(self, frame: AnyFrame) -> None:
        self.frames.append(frame)
        self._news.set()

    def _report(self, event: str, detail: str) -> None:
        self.reports.append(event)
        self._news.set()

    async def until(self, good: Any) -> None:
        """Wait until ``good()``, looking whenever something was delivered or reported."""
        async with asyncio.timeout(WAIT_S):
            while not good():
                self._news.clear()
                await self._news.wait()


class Stranger:
    """A raw socket that says whatever it likes to the frontend."""

    def __init__(self, directory: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.PUSH)
        self.socket.connect(f"ipc://{directory}/frontend-0.sock")

    def say(self, data: bytes) -> None:
        self.socket.send(data)

    def frame(self, number: int, slot: int = 0, incarnation: int = 1, version: int = PROTOCOL_VERSION) -> None:
        sender = address(Role.TOKENIZER, incarnation)
        self.say(msgspec.msgpack.encode(Envelope(version, sender, number, CancelAck(slot, 0))))

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("l")


@pytest.fixture
async def frontend(directory: Path) -> AsyncIterator[End]:
    end = End(directory, Role.FRONTEND)
    yield end
    end.links.close()


@pytest.fixture
async def tokenizer(directory: Path) -> AsyncIterator[End]:
    end = End(directory, Role.TOKENIZER)
    yield end
    end.links.close()


@pytest.fixture
async def stranger(directory: Path) -> AsyncIterator[Stranger]:
    made = Stranger(directory)
    yield made
    made.close()


def slots(end: End) -> list[int]:
    return [frame.slot for frame in end.frames if isinstance(frame, CancelAck)]


def burst(end: End, first: int, count: int) -> None:
    for number in range(first, first + count):
        end.links.send(Role.FRONTEND, 0, CancelAck(number, 0))


async def test_a_burst_far_beyond_every_queue_arrives_whole_and_in_order(frontend: End, tokenizer: End) -> None:
    burst(tokenizer, 0, 5000)
    peer = tokenizer.links._peers[(Role.FRONTEND, 0)]
    assert peer.waiting, "nothing was ever held back"
    await frontend.until(lambda: len(frontend.frames) == 5000)
    assert slots(frontend) == list(range(5000))
    assert not peer.waiting


async def test_others_of_the_loop_have_their_turn_during_a_burst(frontend: End, tokenizer: End) -> None:
    burst(tokenizer, 0, 1000)
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        if len(frontend.frames) < 1000:
            asyncio.get_running_loop().call_soon(turn)

    turn()
    await frontend.until(lambda: len(frontend.frames) == 1000)
    assert turns >= 1000 // LIMITS.inbox_batch_frames_max


async def test_frames_wait_for_a_place_that_is_not_filled_yet(directory: Path, tokenizer: End) -> None:
    burst(tokenizer, 0, 300)
    late = End(directory, Role.FRONTEND)
    await late.until(lambda: len(late.frames) == 300)
    assert slots(late) == list(range(300))
    late.links.close()


async def test_a_receiver_that_never_comes_is_a_bounded_wait(directory: Path) -> None:
    end = End(directory, Role.TOKENIZER, limits=msgspec.structs.replace(LIMITS, outbox_frames_max=50))
    with pytest.raises(AssertionError, match="takes no frames"):
        burst(end, 0, 200)
    end.links.close()


async def test_a_successor_hears_what_is_sent_after_it_came(directory: Path, tokenizer: End) -> None:
    first = End(directory, Role.FRONTEND)
    burst(tokenizer, 0, 10)
    await first.until(lambda: len(first.frames) == 10)
    first.links.close()
    second = End(directory, Role.FRONTEND, 2)
    burst(tokenizer, 10, 10)
    await second.until(lambda: 19 in slots(second))
    assert slots(second) == sorted(slots(second))
    second.links.close()


async def test_a_sender_of_a_new_incarnation_counts_from_one(directory: Path, frontend: End) -> None:
    for incarnation in (1, 2):
        sender = End(directory, Role.TOKENIZER, incarnation)
        burst(sender, 10 * incarnation, 3)
        await frontend.until(lambda count=3 * incarnation: len(frontend.frames) == count)
        sender.links.close()
    await frontend.until(lambda: len(frontend.frames) == 6)
    assert slots(frontend) == [10, 11, 12, 20, 21, 22]


async def test_malformed_and_foreign_frames_are_dropped_counted_and_reported(frontend: End, stranger: Stranger) -> None:
    for junk in (b"", b"junk", b"\x91" * 3000, msgspec.msgpack.encode([1, 2])):
        stranger.say(junk)
    stranger.frame(1, version=PROTOCOL_VERSION + 1)
    stranger.frame(1, slot=7)
    await frontend.until(lambda: frontend.frames)
    assert slots(frontend) == [7]
    assert frontend.reports == ["malformed_frame"] * 4 + ["foreign_frame"]
    assert frontend.links.counts == {"malformed_frames": 4, "foreign_frames": 1}


async def test_a_frame_beyond_the_limit_costs_its_sender_the_connection_and_nobody_else(
    directory: Path, frontend: End, tokenizer: End, stranger: Stranger
) -> None:
    stranger.say(bytes(LIMITS.frame_bytes_max + 1))
    burst(tokenizer, 0, 20)
    await frontend.until(lambda: len(frontend.frames) == 20)
    assert slots(frontend) == list(range(20))


async def test_late_frames_of_a_dead_sender_are_counted_and_delivered(frontend: End, stranger: Stranger) -> None:
    """Whether they still mean something is for the row to say."""
    stranger.frame(1, incarnation=2, slot=1)
    stranger.frame(9, incarnation=1, slot=2)
    stranger.frame(2, incarnation=2, slot=3)
    await frontend.until(lambda: len(frontend.frames) == 3)
    assert slots(frontend) == [1, 2, 3]
    assert frontend.links.counts == {"frames_of_the_dead": 1}


async def test_a_gap_between_two_living_processes_is_an_error(frontend: End, stranger: Stranger) -> None:
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.set_result(context["exception"]))
    stranger.frame(1)
    stranger.frame(3)
    assert isinstance(await asyncio.wait_for(failed, WAIT_S), LinkGap)
    assert len(frontend.frames) == 1
