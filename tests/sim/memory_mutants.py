"""Defects of seats, blocks and swap space, one a rule; ``mutants`` lists them with the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton.engine.admission import Admission
from baton.engine.batcher import Batcher
from baton.engine.blocks import BlockPool
from baton.engine.preemption import Preemption

Patch = pytest.MonkeyPatch


def the_admitted_are_sent_away(patch: Patch) -> None:
    """Who was admitted by an owner that died is told to come back another time."""
    arrive = Admission.arrive
    patch.setattr(Admission, "arrive", lambda self, ask, now_ns, begun=False: arrive(self, ask, now_ns))


def shared_blocks_are_written(patch: Patch) -> None:
    """Who writes into a block that others have, or that has a name, makes no copy."""
    patch.setattr(BlockPool, "writable", lambda self, block: block)


def named_before_it_is_computed(patch: Patch) -> None:
    """A block is found by its name as soon as somebody is about to fill it."""
    register = BlockPool.register

    def expect(self: Any, block: int, link: Any) -> None:
        if self._links[block] is None:
            register(self, block, link)

    def late(self: Any, block: int, link: Any) -> bool:
        return self._links[block] is not None or register(self, block, link)

    patch.setattr(BlockPool, "expect", expect)
    patch.setattr(BlockPool, "register", late)


def preempted_blocks_are_kept(patch: Patch) -> None:
    """A preempted sequence believes that its cache is still there."""
    restore = Preemption.restore

    def believe(self: Any, seq: Any, pool: Any) -> bool:
        if seq.held.state != "preempted" or seq.host_blocks:
            return restore(self, seq, pool)
        pool.share(seq.blocks)
        seq.computed = seq.planned = seq.tokens - 1
        return True

    patch.setattr(Preemption, "restore", believe)


def swapped_in_from_wrong_places(patch: Patch) -> None:
    """Host blocks come back in another order than they went."""
    swap_in = BlockPool.swap_in
    patch.setattr(BlockPool, "swap_in", lambda self, hosts: swap_in(self, hosts[1:] + hosts[:1]))


def moves_after_the_rows(patch: Patch) -> None:
    """A plan's moves are carried out with the plan after it."""
    take = BlockPool.take_moves

    def late(self: Any) -> Any:
        now, self.late = getattr(self, "late", []), take(self)
        return now

    patch.setattr(BlockPool, "take_moves", late)


def host_blocks_outlive_their_request(patch: Patch) -> None:
    """Who ends while swapped out keeps its host blocks."""
    patch.setattr(Preemption, "forget", lambda self, seq, pool: seq.host_blocks.clear())


def host_blocks_outlive_their_worker(patch: Patch) -> None:
    """What a dead worker kept on the host is believed to be there still."""
    forget = Preemption.forget

    def faithful(self: Any, seq: Any, pool: Any) -> None:
        if pool is not None:
            forget(self, seq, pool)

    patch.setattr(Preemption, "forget", faithful)


def paused_keep_everything(patch: Patch) -> None:
    """Slow clients hold blocks and seats, and nothing runs."""
    patch.setattr(Batcher, "_paused", lambda self: [])


MEMORY: list[Callable[[Patch], None]] = [
    the_admitted_are_sent_away,
    shared_blocks_are_written,
    named_before_it_is_computed,
    preempted_blocks_are_kept,
    swapped_in_from_wrong_places,
    moves_after_the_rows,
    host_blocks_outlive_their_request,
    host_blocks_outlive_their_worker,
    paused_keep_everything,
]
