"""Who computes what in the next step, and whose blocks make room: continuous batching over paged blocks.

There is no prefill phase: a step is a set of (sequence, tokens to compute) within one token budget. Decodes go first,
then chunks of running prompts, then new work, first come first served. When blocks or seats run out a paused sequence
gives way, else the youngest: its blocks are dropped and its tokens computed again, ahead of all later work.
"""

from __future__ import annotations

from collections import deque

from baton.engine.blocks import BlockPool
from baton.engine.buggify import buggify
from baton.engine.effects import Effect
from baton.engine.limits import Limits
from baton.engine.ownership import Ownership
from baton.engine.sequence import Sequence

Chosen = list[tuple[Sequence, int]]


class Batcher:
    """Invariant: a sequence is in ``waiting`` or in ``running``, never both, and only running ones hold blocks."""

    def __init__(self, hands: Ownership, limits: Limits) -> None:
        self.hands = hands
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.pool: BlockPool | None = None
        self.forgotten: list[int] = []  # slots the workers may forget with the next plan
        self.preemptions = 0
        self.tokens_per_row = 1  # so many a step may yield for one sequence

    def choose(self, now_ns: int, out: list[Effect]) -> Chosen:
        """The next step: sequences with the number of their tokens to compute; their blocks are allocated."""
        pool = self.pool
        assert pool is not None
        self._pause_or_resume(now_ns, out)
        suspect = next((seq for seq in [*self.running, *self.waiting] if seq.suspect and seq.has_credit), None)
        if suspect is not None and (alone := self._alone(suspect, now_ns, out)):
            return alone
        budget = 1 if buggify("small step") else self.limits.step_tokens_max
        chosen, before = Chosen(), self.preemptions
        ready = [seq for seq in self.running if seq.held.state != "paused" and not seq.suspect]
        for seq in [seq for seq in ready if seq.wanted == 1]:
            if budget and seq in self.running and self._make_room(seq, chosen, now_ns, out):
                chosen.append((seq, 1))
                budget -= 1
        for seq in [seq for seq in ready if seq.wanted > 1]:
            count = min(budget, seq.wanted)
            if count and seq in self.running:
                chosen.append((seq, count))
                budget -= count
        while budget and self.preemptions == before:
            first = next((seq for seq in self.waiting if seq.has_credit and not seq.suspect), None)
            if first is None or (chosen and buggify("no room")) or not self._make_way(first, now_ns, out):
                break
            self._seat(first)
            count = min(budget, first.tokens)
            chosen.append((first, count))
            budget -= count
        return chosen

    def _alone(self, seq: Sequence, now_ns: int, out: list[Effect]) -> Chosen:
        """A step of one suspect: if the worker dies of it again, it is known of what."""
        if seq in self.running:
            if not self._make_room(seq, Chosen(), now_ns, out):
                return []
        elif self._make_way(seq, now_ns, out):
            self._seat(seq)
        else:
            return []
        return [(seq, min(self.limits.step_tokens_max, seq.wanted))]

    def _seat(self, seq: Sequence) -> None:
        """From the queue into the batch, with blocks for all of its tokens."""
        pool = self.pool
        assert pool is not None
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.blocks.extend(pool.allocate(pool.blocks_for(seq.tokens)))

    def remove(self, seq: Sequence) -> None:
        """The sequence has ended: out of the queue or the batch, its blocks freed."""
        if seq in self.running:
            self.running.remove(seq)
            self._drop_blocks(seq)
        else:
            self.waiting.remove(seq)

    def roll_back(self, now_ns: int, out: list[Effect]) -> None:
        """The cache is gone with its worker: what ran waits again in front, in its order, with the tokens it has."""
        lost = [seq for seq in self.running if seq.end is None]
        for seq in self.running:
            seq.in_flight = False
            self._drop_blocks(seq)
        for seq in lost:
            self.hands.move(seq.held, "preempted", now_ns, out)
        self.running = [seq for seq in self.running if seq.end is not None]
        self.waiting.extendleft(reversed(lost))
        self.forgotten.clear()
        self.pool = None

    def _pause_or_resume(self, now_ns: int, out: list[Effect]) -> None:
        """A sequence past its client's credit keeps its blocks and spends no compute."""
        for seq in self.running:
            if not seq.has_credit:
                self.hands.move(seq.held, "paused", now_ns, out)
            elif seq.held.state == "paused":
                self.hands.move(seq.held, "decoding" if seq.wanted == 1 else "prefilling", now_ns, out)

    def _make_room(self, seq: Sequence, chosen: Chosen, now_ns: int, out: list[Effect]) -> bool:
        """Blocks for all of its tokens; paused ones give way, then the youngest, which may be itself (False)."""
        pool = self.pool
        assert pool is not None
        missing = pool.blocks_for(seq.tokens) - len(seq.blocks)
        crowded = bool(chosen) and buggify("crowded out")
        while pool.free < missing or crowded:
            crowded = False
            paused = self._paused()
            youngest = paused[-1] if paused else self.running[-1]
            chosen[:] = [entry for entry in chosen if entry[0] is not youngest]
            self._preempt(youngest, now_ns, out)
            if youngest is seq:
                return False
        if missing > 0:
            seq.blocks.extend(pool.allocate(missing))
        self._look_ahead(seq, pool)
        return True

    def _look_ahead(self, seq: Sequence, pool: BlockPool) -> None:
        """Blocks to spare for the tokens a step may yield beyond one; it yields what there is room for.

        Never beyond the last token the sequence may have, so that nobody holds more than was promised to it.
        """
        most = len(seq.handed.prompt_ids) + (seq.max_tokens or 0)
        wanted = pool.blocks_for(min(seq.tokens + self.tokens_per_row - 1, most)) - len(seq.blocks)
        if wanted > 0:
            seq.blocks.extend(pool.allocate(min(wanted, pool.free)))

    def _make_way(self, seq: Sequence, now_ns: int, out: list[Effect]) -> bool:
        """Blocks and a seat for a waiting sequence; paused ones give way, so that no slow client holds up another."""
        pool, paused = self.pool, self._paused()
        assert pool is not None
        needed, seats = pool.blocks_for(seq.tokens), self.limits.running_requests_max
        reclaimable = sum(len(other.blocks) for other in paused)
        if pool.free + reclaimable < needed or len(self.running) - len(paused) >= seats:
            return False
        while pool.free < needed or len(self.running) >= seats:
            self._preempt(paused.pop(), now_ns, out)
        return True

    def _paused(self) -> list[Sequence]:
        return [seq for seq in self.running if seq.held.state == "paused"]

    def _preempt(self, seq: Sequence, now_ns: int, out: list[Effect]) -> None:
        self.running.remove(seq)
        self._drop_blocks(seq)
        seq.preemptions += 1
        self.preemptions += 1
        self.hands.move(seq.held, "preempted", now_ns, out)
        self.waiting.appendleft(seq)

    def _drop_blocks(self, seq: Sequence) -> None:
        """The one place where blocks are freed."""
        assert not seq.in_flight, f"blocks of slot {seq.held.slot} freed while a step names it"
        if self.pool is not None:
            self.pool.release(seq.blocks)
        if seq.started:
            self.forgotten.append(seq.held.slot)
        seq.started, seq.computed, seq.told_blocks = False, 0, 0
