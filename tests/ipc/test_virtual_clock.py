"""Time that jumps, and processes that can be frozen and killed between two callbacks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from baton.ipc.virtual_clock import Asleep, Compartment, Killed, VirtualLoop

HOUR = 3600.0


def play(work: Coroutine[Any, Any, Any]) -> VirtualLoop:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(work)
    finally:
        loop.bury()
    return loop


def compartment() -> tuple[Compartment, list[Exception]]:
    errors: list[Exception] = []
    return Compartment("p", errors.append), errors


def test_an_hour_takes_no_time_and_is_an_hour() -> None:
    began = time.monotonic()
    assert play(asyncio.sleep(HOUR)).now_ns() == int(HOUR * 1e9)
    assert time.monotonic() - began < 1


def test_timers_come_in_order_and_never_early() -> None:
    seen: list[tuple[int, int]] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)

        def come(delay_ns: int) -> None:
            seen.append((delay_ns, loop.now_ns()))

        for delay_ns in (30, 10, 10, 1_000_000_007):
            loop.call_later(delay_ns / 1e9, come, delay_ns)
        await asyncio.sleep(2)

    play(work())
    assert [delay_ns for delay_ns, _ in seen] == [10, 10, 30, 1_000_000_007]
    assert all(at_ns >= delay_ns for delay_ns, at_ns in seen)


def test_waiting_for_what_never_comes_is_an_error() -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Asleep):
        play(work())


def test_a_frozen_process_goes_on_where_it_stood_and_misses_nothing() -> None:
    seen: list[float] = []

    async def ticks() -> None:
        for _ in range(3):
            await asyncio.sleep(1)
            seen.append(asyncio.get_running_loop().time())

    async def work() -> None:
        process, _ = compartment()
        process.run(asyncio.get_running_loop().create_task, ticks())
        await asyncio.sleep(1.5)
        process.freeze()
        await asyncio.sleep(10)
        assert seen == [1.0]
        process.thaw()
        await asyncio.sleep(10)

    play(work())
    assert seen == [1.0, 11.5, 12.5]


def test_a_killed_process_runs_no_more_not_even_what_is_in_finally() -> None:
    seen: list[str] = []

    async def life() -> None:
        try:
            await asyncio.sleep(HOUR)
        finally:
            seen.append("finally")

    async def work() -> None:
        process, _ = compartment()
        process.run(asyncio.get_running_loop().create_task, life())
        process.run(asyncio.get_running_loop().call_later, 1, seen.append, "timer")
        await asyncio.sleep(0.5)
        process.kill()
        await asyncio.sleep(2 * HOUR)
        assert seen == []

    play(work())


def test_what_a_callback_raises_goes_to_its_own_process_and_a_suicide_is_its_end() -> None:
    async def work() -> None:
        process, errors = compartment()
        loop = asyncio.get_running_loop()

        def fail() -> None:
            raise ValueError

        def end() -> None:
            raise Killed

        process.run(loop.call_soon, fail)
        await asyncio.sleep(0)
        assert [type(error) for error in errors] == [ValueError] and not process.dead
        process.run(loop.call_soon, end)
        await asyncio.sleep(0)
        assert process.dead

    play(work())


def test_what_is_left_of_a_process_is_known() -> None:
    async def work() -> None:
        process, _ = compartment()
        loop = asyncio.get_running_loop()
        timer = process.run(loop.call_later, 5, print)
        task = process.run(loop.create_task, asyncio.sleep(3))
        assert len(process.left()) == 2
        timer.cancel()
        await task
        assert process.left() == []

    play(work())
