"""How a sequence gives way, and how it comes back: its blocks are forgotten, or wait in host memory.

Who gives way is said by ``engine.victims``, to which sequences are shown here; when somebody must is the batcher's to
notice. The blocks of a sequence go to the host all together, shared ones among them, so that its way back depends on
nobody else. When it comes back, those that are still found in the pool are shared again and only the rest is moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from baton.engine.blocks import BlockPool
from baton.engine.limits import Limits
from baton.engine.sequence import Sequence
from baton.engine.steptime import StepTime, Transfer
from baton.engine.victims import Way, cheaper_way, choose
from baton.ipc.frames import WorkerHello

WAYS: tuple[Way, ...] = ("recompute", "swap")


@dataclass(slots=True, frozen=True, eq=False)
class View:
    """A sequence as ``engine.victims`` looks at it; nothing is counted before it is asked for."""

    seq: Sequence
    pool: BlockPool

    @property
    def slot(self) -> int:
        """Its slot, which tells those apart that came at once."""
        return self.seq.held.slot

    @property
    def arrived_ns(self) -> int:
        """Its place among all that came."""
        return self.seq.arrival

    @property
    def priority(self) -> int:
        """Lower is more urgent."""
        return self.seq.handed.terms.priority

    @property
    def preemptions(self) -> int:
        """How often it gave way to others."""
        return self.seq.preemptions

    @property
    def own_blocks(self) -> int:
        """Blocks that nobody else holds."""
        return own_blocks(self.seq, self.pool)

    @property
    def paused(self) -> bool:
        """Whether it waits for its client."""
        return self.seq.held.state == "paused"


def own_blocks(seq: Sequence, pool: BlockPool) -> int:
    """Blocks of the sequence that nobody else holds: those that are to be had when it goes."""
    return sum(pool.holders(block) == 1 for block in seq.blocks)


class Preemption:
    """Invariant: host blocks are held by sequences that wait; they hold the first ``host_tokens`` tokens of each."""

    def __init__(self, limits: Limits, step_time: StepTime) -> None:
        self.limits = limits
        self.step_time = step_time
        self.transfer: Transfer | None = None
        self.counts: Counter[Way] = Counter()

    def greeted(self, ranks: Collection[WorkerHello]) -> None:
        """Workers are there. The slowest of them says how fast blocks move, or, where one did not measure it, the
        limits say what is believed.
        """
        block_bytes = max(hello.layout.block_bytes for hello in ranks)
        bytes_per_s = min(hello.swap_bytes_per_s for hello in ranks)
        self.transfer = Transfer(block_bytes, self.limits) if all(hello.host_blocks for hello in ranks) else None
        if self.transfer is not None and bytes_per_s:
            self.transfer.observe(1, block_bytes / bytes_per_s)

    def protected(self, seq: Sequence) -> bool:
        """Whether it has given way to others as often as it must."""
        return seq.preemptions >= self.limits.preemptions_per_request_max

    def victims(
        self, asking: Sequence, running: Iterable[Sequence], missing: int, coming: int, pool: BlockPool
    ) -> list[Sequence]:
        """Who gives ``missing`` blocks to ``asking``, which is running; ``asking`` itself where nobody else may, and
        nobody where ``coming`` blocks, on their way back, are enough.
        """
        verdict = choose(View(asking, pool), _able(running, asking, pool), missing, coming, self.limits)
        return [asking] if verdict.yields else [view.seq for view in verdict.victims]

    def save(self, seq: Sequence, pool: BlockPool) -> None:
        """The sequence leaves: what its blocks hold goes to the host, where that is the cheaper way back. Those that
        went there are its blocks no more.
        """
        assert not seq.host_blocks and not seq.in_flight
        needed, step_tokens = pool.blocks_for(seq.computed), self.limits.step_tokens_max
        way = cheaper_way(seq.computed, needed, pool.host.free, step_tokens, self.step_time, self.transfer)
        if way == "swap":
            moved, seq.blocks = seq.blocks[:needed], seq.blocks[needed:]
            seq.host_blocks, seq.host_tokens = pool.swap_out(moved), seq.computed
        self.counts[way] += 1
        seq.preemptions += seq.held.state != "paused"  # else its own client is to blame, and not to be rewarded for it

    def restore(self, seq: Sequence, pool: BlockPool) -> bool:
        """The sequence sits down again, with the blocks that were found to hold its beginning: those that it lacks come
        from the host, by moves of the next plan. False if it has none there that are of use. There is room.
        """
        hosts, found = seq.host_blocks, len(seq.blocks)
        useful = seq.host_tokens > found * pool.block_tokens
        if useful:
            pool.share(seq.blocks)
            seq.blocks.extend(pool.swap_in(hosts[found:]))
            del hosts[found:]
            seq.computed = seq.planned = seq.host_tokens
        self.forget(seq, pool)
        return useful

    def forget(self, seq: Sequence, pool: BlockPool | None) -> None:
        """Its host blocks are free; without a pool they are gone already, with the worker."""
        if pool is not None:
            pool.host.release(seq.host_blocks)
        seq.host_blocks.clear()
        seq.host_tokens = 0


def _able(running: Iterable[Sequence], asking: Sequence, pool: BlockPool) -> list[View]:
    """Those that may still be told to give way: the others are on their way out already."""
    return [
        View(seq, pool)
        for seq in running
        if seq is not asking and not (seq.leaving or seq.end is not None or seq.is_whole)
    ]
