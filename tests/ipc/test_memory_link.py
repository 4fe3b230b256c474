"""Links in memory behave as those over sockets do, and lose what a death loses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from baton.ipc.frames import AnyFrame, Credit, Role
from baton.ipc.memory_link import MemoryLinks, Network
from baton.ipc.virtual_clock import VirtualLoop
from tests.ipc.places import LIMITS, address, make_board

S = (Role.SCHEDULER, 0)


class Scene:
    """A network on a virtual clock; ``heard`` is what the scheduler's links handed on."""

    def __init__(self, delays_ns: list[int], lose_all: bool = True) -> None:
        self.loop = VirtualLoop()
        self.heard: list[int] = []
        self.delays_ns = delays_ns
        lose = (lambda waiting: waiting) if lose_all else (lambda waiting: 0)
        self.network = Network(self.loop, self.loop.now_ns, lambda *_: self.delays_ns.pop(0), lose)

    def connect(self, role: Role, incarnation: int = 1, index: int = 0) -> MemoryLinks:
        return self.network.connect(
            address(role, incarnation, index), LIMITS, make_board(), self._deliver, lambda *_: None
        )

    def _deliver(self, frame: AnyFrame) -> None:
        assert isinstance(frame, Credit)
        self.heard.append(frame.position)

    def play(self, script: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.loop.run_until_complete(script())
        self.loop.bury()


async def rest() -> None:
    """Everything on its way arrives."""
    await asyncio.sleep(1)


def credit(position: int) -> Credit:
    return Credit(0, 1, 1, position)


def test_a_wire_keeps_its_order_and_wires_overtake_each_other() -> None:
    scene = Scene([9000, 10, 500])

    async def script() -> None:
        one, two = scene.connect(Role.FRONTEND), scene.connect(Role.FRONTEND, index=1)
        scene.connect(Role.SCHEDULER)
        one.send(*S, credit(1))
        one.send(*S, credit(2))
        two.send(*S, credit(3))
        await rest()

    scene.play(script)
    assert scene.heard == [3, 1, 2]


def test_what_does_not_fit_the_inbox_waits_and_none_is_lost() -> None:
    scene = Scene([1] * 100)

    async def script() -> None:
        one = scene.connect(Role.FRONTEND)
        for position in range(50):
            one.send(*S, credit(position))
        scene.connect(Role.SCHEDULER)
        for position in range(50, 100):
            one.send(*S, credit(position))
        await rest()

    scene.play(script)
    assert scene.heard == list(range(100)) and scene.network.waiting() == 0


def test_a_killed_receiver_loses_its_inbox_and_its_successor_hears_what_comes_later() -> None:
    scene = Scene([1] * 10)

    async def script() -> None:
        one = scene.connect(Role.FRONTEND)
        scene.connect(Role.SCHEDULER)
        one.send(*S, credit(1))
        await rest()
        scene.network.kill(address(Role.SCHEDULER))
        one.send(*S, credit(2))
        await rest()
        scene.network.kill(address(Role.SCHEDULER))
        one.send(*S, credit(3))
        scene.connect(Role.SCHEDULER, 2)
        await rest()

    scene.play(script)
    assert scene.heard == [1, 3]


def test_a_killed_senders_frames_may_have_left_or_not() -> None:
    for lose_all, heard in ((True, []), (False, [1, 2])):
        scene = Scene([5, 5], lose_all)

        async def script(scene: Scene = scene) -> None:
            one = scene.connect(Role.FRONTEND)
            scene.connect(Role.SCHEDULER)
            one.send(*S, credit(1))
            one.send(*S, credit(2))
            scene.network.kill(address(Role.FRONTEND))
            await rest()

        scene.play(script)
        assert scene.heard == heard
