"""Whom a worker greets, and with which group."""

from __future__ import annotations

import pytest

from baton.engine.effects import Send
from baton.engine.worker import WorkerCore
from baton.ipc.frames import Address, Halt, KVLayout, Life, Role, Submit, WorkerHello
from baton.workers.gpu import Greeter

HELLO = WorkerHello(Address(Role.WORKER, "m", 0, 0, 1), 0, (1, 1), KVLayout(4, 8, 1, 1, 1, 1, "float32"), "w", 32, 64)


def test_it_greets_again_when_a_scheduler_or_another_rank_is_new_and_joins_the_group_of_the_moment() -> None:
    lives = [1, 1]
    core = WorkerCore(0, (1, 1), 4)
    greeter = Greeter(HELLO, core, lambda: tuple(lives))
    assert greeter.start(0) == [Send(Role.SCHEDULER, 0, HELLO)]
    assert greeter.handle(Life(Role.SCHEDULER, 0, 2), 0) == [Send(Role.SCHEDULER, 0, HELLO)]
    lives[1] = 2
    (again,) = greeter.handle(Life(Role.WORKER, 1, 2), 0)
    assert isinstance(again, Send)
    assert isinstance(again.frame, WorkerHello)
    assert again.frame.group == core.group == (1, 2)


def test_others_are_not_greeted() -> None:
    greeter = Greeter(HELLO, WorkerCore(0, (1, 1), 4), lambda: (1, 1))
    assert greeter.handle(Life(Role.TOKENIZER, 0, 2), 0) == []
    assert greeter.handle(Halt("over"), 0) == []
    with pytest.raises(AssertionError, match="no such event"):
        greeter.handle(Submit, 0)
