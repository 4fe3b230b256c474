"""The shell: one event at a time, its effects before the next, timers that come back once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from baton.engine.effects import Doorbell, Effect, Note, Send, Span, Tick, Wake
from baton.ipc.clock import now_ns
from baton.ipc.frames import AnyFrame, CancelAck, Role
from baton.ipc.shell import Shell


class Script:
    """A core that says what it is told to and remembers what it heard."""

    def __init__(self, answer: Callable[[object], list[Effect]], at_start: tuple[Effect, ...] = ()) -> None:
        self.answer = answer
        self.at_start = at_start
        self.heard: list[object] = []

    def start(self, now_ns: int) -> list[Effect]:
        return list(self.at_start)

    def handle(self, event: object, now_ns: int) -> list[Effect]:
        self.heard.append(event)
        return self.answer(event)

    def story(self) -> str:
        return ""


class Outside:
    """Everything a shell is given, and a log of what it did with it."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.shell: Shell | None = None
        self.beats = 0
        self.failures: list[BaseException] = []

    def send(self, role: Role, index: int, frame: AnyFrame) -> None:
        self.log.append((role, index, frame))

    def beat(self) -> None:
        self.beats += 1

    def put_behind(self, core: Script) -> Shell:
        append = self.log.append
        self.shell = Shell(core, self, append, append, self.beat, self.failures.append, now_ns, {})
        return self.shell


def note(event: str) -> Note:
    return Note("info", event, {})


@pytest.fixture
async def outside() -> Outside:
    return Outside()


async def test_effects_are_carried_out_in_order_and_before_the_next_event(outside: Outside) -> None:
    span = Span("s", b"", 0, 1, {})
    send = Send(Role.SCHEDULER, 0, CancelAck(1, 2))
    core = Script(lambda event: [note(f"{event} one"), send, span, note(f"{event} two")])
    shell = outside.put_behind(core)
    shell.start()
    shell.feed("a")
    shell.feed("b")
    sent = (Role.SCHEDULER, 0, CancelAck(1, 2))
    assert outside.log == [note("a one"), sent, span, note("a two"), note("b one"), sent, span, note("b two")]
    assert outside.beats == 2


async def test_an_event_that_comes_up_during_another_waits_for_its_turn(outside: Outside) -> None:
    core = Script(lambda event: [note(f"{event} one"), note(f"{event} two")])
    shell = outside.put_behind(core)

    def echo(effect: Note) -> None:
        outside.log.append(effect)
        if effect.event == "a one":
            shell.feed("b")

    shell._perform[Note] = echo
    shell.start()
    shell.feed("a")
    assert outside.log == [note("a one"), note("a two"), note("b one"), note("b two")]


async def test_a_later_wake_of_the_same_name_replaces_the_earlier(outside: Outside) -> None:
    ticked = asyncio.Event()
    started = now_ns()

    def answer(event: object) -> list[Effect]:
        if event == Tick("last"):
            ticked.set()
        return []

    first = Wake(started, "sweep")
    second = Wake(started + 5_000_000, "sweep")
    core = Script(answer, (first, second, Wake(started + 20_000_000, "last")))
    outside.put_behind(core).start()
    await asyncio.wait_for(ticked.wait(), 10)
    assert core.heard == [Tick("sweep"), Tick("last")]


async def test_a_wake_in_the_past_comes_at_once_and_a_stopped_shell_hears_none(outside: Outside) -> None:
    ticked = asyncio.Event()
    core = Script(lambda event: [ticked.set() or note("tick")], (Wake(0, "now"), Wake(now_ns() + 10**15, "never")))  # type: ignore[func-returns-value]
    shell = outside.put_behind(core)
    shell.start()
    await asyncio.wait_for(ticked.wait(), 10)
    shell.stop()
    assert shell._timers == {}


async def test_what_fails_in_a_core_is_fatal(outside: Outside) -> None:
    def fail(event: object) -> list[Effect]:
        raise AssertionError("ours")

    shell = outside.put_behind(Script(fail))
    shell.start()
    with pytest.raises(AssertionError, match="ours"):
        shell.feed(Doorbell())
    assert [str(error) for error in outside.failures] == ["ours"]


async def test_an_effect_that_nobody_performs_is_fatal(outside: Outside) -> None:
    shell = outside.put_behind(Script(lambda event: [object()]))  # type: ignore[list-item]
    shell.start()
    with pytest.raises(KeyError):
        shell.feed(Doorbell())
    assert len(outside.failures) == 1
