"""Who computes what in the next step, and whose blocks make room: continuous batching over paged blocks.

There is no prefill phase: a step is a set of (sequence, tokens to compute) within one token budget. Decodes go first,
then chunks of running prompts, then new work in the order of the line (``engine.seating``). When blocks or seats run
out a sequence that waits for its client gives way, else the youngest of the lowest class (``engine.victims``): it comes
back ahead of all later work (``engine.preemption``). One that a step in flight names leaves when that step has landed;
whoever needs its blocks sits out until then.
"""

from __future__ import annotations

from collections.abc import Collection

from baton.engine.blocks import BlockPool
from baton.engine.buggify import buggify
from baton.engine.effects import Effect
from baton.engine.limits import Limits
from baton.engine.ownership import Ownership
from baton.engine.pace import Pace
from baton.engine.policies import Policies
from baton.engine.preemption import WAYS, Preemption, own_blocks
from baton.engine.prefix import PrefixCounts
from baton.engine.seating import Seating, freed_blocks, held_blocks, memory_of
from baton.engine.sequence import Sequence
from baton.ipc.frames import WorkerHello

Chosen = dict[Sequence, int]


class Batcher:
    """Invariant: a sequence is in ``waiting`` or in ``running``, never both. Only running ones
    hold blocks, and only waiting ones host blocks.

    ``waiting`` is in the order of the policy, ``running`` in the order in which seats were taken.
    """

    def __init__(self, hands: Ownership, limits: Limits, policies: Policies) -> None:
        self.hands = hands
        self.limits = limits
        self.seating = Seating(policies, limits)
        self.waiting = self.seating.line
        self.pace = Pace(policies.itl_target_ms, limits)
        self.running: dict[Sequence, None] = {}
        self.suspects: dict[Sequence, None] = {}  # a worker died over them; each runs alone until it gains a token
        self.pool: BlockPool | None = None
        self.prefix_counts = PrefixCounts()  # of all pools
        self.forgotten: list[int] = []  # slots the workers may forget with the next plan
        self.preemption = Preemption(limits, self.pace.step_time)
        self.tokens_per_row = 1  # so many a step may yield for one sequence
        self._arrivals = 0
        # while a step is chosen:
        self._spare = 0  # free blocks that nobody was promised
        self._coming: int | None = None  # blocks that come back when steps land, less what was promised of them

    @property
    def preemptions(self) -> int:
        """How often anybody gave way."""
        return self.preemption.counts.total()

    @property
    def gauges(self) -> tuple[int, ...]:
        """What the board shows, in the order of its names for it."""
        pool = self.pool
        blocks = (pool.total, pool.free, pool.cached) if pool is not None else (0, 0, 0)
        tokens, found = pool.capacity_tokens if pool is not None else 0, self.prefix_counts
        gave_way = (self.preemption.counts[way] for way in WAYS)
        held = (len(self.running), len(self.waiting), *blocks, *gave_way, tokens)
        promised = self.seating.promised() if pool is not None else (0, 0, 0, 0)
        return (*held, found.queries, found.hits, found.evictions, *promised)

    def greeted(self, pool: BlockPool, ranks: Collection[WorkerHello]) -> None:
        """Workers are there, with an empty cache."""
        self.pool = pool
        self.seating.greeted(pool, memory_of(ranks))
        self.preemption.greeted(ranks)
        self.tokens_per_row = min(hello.tokens_per_row_max for hello in ranks)

    def add(self, seq: Sequence, now_ns: int) -> None:
        """A new sequence; it waits."""
        self._arrivals += 1
        seq.arrival, seq.arrived_ns = self._arrivals, now_ns
        self.waiting.add(seq)

    def choose(self, flying: int, now_ns: int, out: list[Effect]) -> Chosen:
        """The next step: sequences with the number of their tokens to compute; their blocks are allocated.

        ``flying`` steps are under way.
        """
        assert self.pool is not None
        self._spare, self._coming = self.pool.available, None
        decodes, chunks = self._ready(now_ns, out)
        suspect = next((seq for seq in self.suspects if self.may_run(seq, now_ns)), None)
        if suspect is not None:
            if flying:
                return {}
            if alone := self._alone(suspect, now_ns, out):
                return alone
        budget = 1 if buggify("small step") else self.limits.step_tokens_max
        chosen, before = Chosen(), self.preemptions
        for seq in decodes:
            if not budget:
                break
            if seq in self.running and not seq.leaving and self._make_room(seq, chosen, now_ns, out):
                chosen[seq] = 1
                budget -= 1
        if chunks or self.waiting:
            self.pace.begin(chosen, len(chunks) + len(self.waiting))
        for seq in chunks:
            if not budget:
                break
            if seq in self.running and not seq.leaving:
                count = self.pace.cut(seq, seq.planned, seq.wanted, budget, self.pool.block_tokens)
                if count:
                    chosen[seq] = count
                    budget -= count
        calm = self.preemptions == before and self._coming is None
        if budget and self.waiting and (calm or not (chosen or flying)):
            self._take_in(chosen, budget, bool(flying), now_ns, out)
        return chosen

    def may_run(self, seq: Sequence, now_ns: int) -> bool:
        """Whether it could be in a step, if there is room: it goes on, or is begun in time."""
        return seq.has_credit and seq.end is None and (seq in self.running or not seq.too_late(now_ns))

    def _ready(self, now_ns: int, out: list[Effect]) -> tuple[list[Sequence], list[Sequence]]:
        """Who could go on: those at one token each, and those in their prompts.

        A sequence past its client's credit keeps its blocks and spends no compute.
        """
        decodes, chunks = list[Sequence](), list[Sequence]()
        for seq in self.running:
            if seq.end is not None or seq.leaving:
                continue
            made = len(seq.output) + seq.pending
            if made >= seq.credit:
                if not seq.in_flight:
                    self.hands.move(seq.held, "paused", now_ns, out)
                continue
            wanted = len(seq.handed.prompt_ids) + made - seq.planned
            if seq.held.state == "paused":
                self.hands.move(seq.held, "decoding" if wanted == 1 else "prefilling", now_ns, out)
            if (seq.max_tokens is not None and made >= seq.max_tokens) or seq in self.suspects:
                continue
            (decodes if wanted == 1 else chunks).append(seq)
        return decodes, chunks

    def _take_in(self, chosen: Chosen, budget: int, flying: bool, now_ns: int, out: list[Effect]) -> None:
        """New work for what is left of the budget, in its order; the first that finds no place ends it.

        Whoever needs a prefix that is being computed just now waits for it, and lets others go first.
        """
        seated, before = [], self.preemptions
        for seq in self.waiting:
            if seq.end is not None or not seq.has_credit or seq in self.suspects or seq.too_late(now_ns):
                continue
            if (chosen or flying) and self._waits_for_prefix(seq, now_ns):
                continue
            count = self._first_chunk(seq, budget)
            if not count or (chosen and buggify("no room")) or not self._make_way(seq, now_ns, out):
                break
            self._sit_down(seq)
            seated.append(seq)
            chosen[seq] = count = min(count, seq.wanted)
            budget -= count
            if not budget or self.preemptions != before:
                break
        for seq in seated:
            self.waiting.remove(seq)

    def _first_chunk(self, seq: Sequence, budget: int) -> int:
        """How many tokens a waiting sequence may begin with."""
        assert self.pool is not None
        if not self.pace.tight:
            return budget
        size = self.pool.block_tokens
        start = min(len(self._found(seq)[0]) * size, seq.tokens - 1)
        return self.pace.cut(seq, start, seq.tokens - start, budget, size)

    def _alone(self, seq: Sequence, now_ns: int, out: list[Effect]) -> Chosen:
        """A step of one suspect: if the worker dies of it again, it is known of what."""
        if seq in self.running:
            if not self._make_room(seq, {}, now_ns, out):
                return {}
            if seq.held.state == "paused":
                self.hands.move(seq.held, "decoding" if seq.wanted == 1 else "prefilling", now_ns, out)
        elif self._make_way(seq, now_ns, out):
            self.waiting.remove(seq)
            self._sit_down(seq)
        else:
            return {}
        return {seq: min(self.limits.step_tokens_max, seq.wanted)}

    def _waits_for_prefix(self, seq: Sequence, now_ns: int) -> bool:
        """Whether the next block it needs is being computed for somebody else; for a while that is waited for."""
        assert self.pool is not None
        if seq.chain is None or not seq.prefix_reads or seq.host_blocks or not self.pool.awaited(seq.chain):
            return False
        seq.awaiting_ns = seq.awaiting_ns or now_ns
        return now_ns - seq.awaiting_ns < self.limits.prefix_wait_s_max * 1e9

    def _found(self, seq: Sequence) -> tuple[list[int], int]:
        """The blocks it can begin with, and how many fresh ones it needs besides for all of its tokens.

        Where every token is there, the last block is copied: the last token is computed again, to sample after it.
        """
        pool, chain = self.pool, seq.chain
        assert pool is not None
        found = pool.match(chain) if chain is not None and seq.prefix_reads else []
        whole = len(found) * pool.block_tokens >= seq.tokens
        return found, pool.blocks_for(seq.tokens) - len(found) + whole

    def _sit_down(self, seq: Sequence) -> None:
        """Into the batch, with blocks for all of its tokens; those that hold what it begins with need no computing."""
        pool, chain = self.pool, seq.chain
        assert pool is not None
        self.running[seq] = None
        found, fresh = self._found(seq)
        seq.blocks.extend(found)
        seq.registered = len(found)
        if self.preemption.restore(seq, pool):
            fresh -= len(seq.blocks) - len(found)
            self._register(seq)
        elif chain is not None and seq.prefix_reads:
            seq.computed = seq.planned = pool.adopt(chain, found)
            if seq.held.state == "queued":
                seq.cached_tokens = min(seq.computed, seq.prompt_tokens)
        if seq.computed < len(found) * pool.block_tokens:
            seq.blocks[-1] = pool.writable(seq.blocks[-1])
            fresh -= 1
        seq.blocks.extend(pool.allocate(fresh))
        self.seating.hold(seq)
        if chain is not None:
            for number in range(seq.registered, chain.full):
                pool.expect(seq.blocks[number], chain.link(number))

    def _register(self, seq: Sequence) -> None:
        """What is full and computed can be found from now on; after an end nothing more than was surely computed."""
        pool, chain = self.pool, seq.chain
        if pool is None or chain is None:
            return
        sure = min(seq.computed, chain.tokens - 1 if seq.end is not None else chain.tokens)
        full = sure // pool.block_tokens
        while seq.registered < full:
            pool.register(seq.blocks[seq.registered], chain.link(seq.registered))
            seq.registered += 1

    def landed(self, seq: Sequence, now_ns: int, out: list[Effect]) -> None:
        """A step that named the sequence has landed: if it was the last, and it leaves, it leaves now."""
        if self.pool is not None and seq.computed >= (seq.registered + 1) * self.pool.block_tokens:
            self._register(seq)
        if seq.leaving and not seq.in_flight and seq.end is None:
            self._preempt(seq, now_ns, out)

    def remove(self, seq: Sequence, now_ns: int) -> None:
        """The sequence has ended: out of the queue or the batch, its blocks freed."""
        if seq in self.running:
            del self.running[seq]
            self._drop_blocks(seq)
        else:
            self.preemption.forget(seq, self.pool)
        self.seating.ended(seq, now_ns)
        self.suspects.pop(seq, None)

    def roll_back(self, now_ns: int, out: list[Effect]) -> None:
        """The cache is gone with its worker, and what it kept on the host: what ran waits again in front, in its order,
        with the tokens it has.
        """
        lost = [seq for seq in self.running if seq.end is None]
        for seq in self.running:
            self._drop_blocks(seq)
        for seq in lost:
            self.hands.move(seq.held, "preempted", now_ns, out)
            self.seating.lost(seq)
        for seq in self.waiting:
            self.preemption.forget(seq, None)
        self.running = {seq: None for seq in self.running if seq.end is not None}
        self.forgotten.clear()
        self.pool = None

    def _make_room(self, seq: Sequence, chosen: Chosen, now_ns: int, out: list[Effect]) -> bool:
        """Blocks for all of its tokens. False: it sits this step out, since what it needs is still on its way back, or
        since it is itself the one to give way.
        """
        pool = self.pool
        assert pool is not None
        missing = max(0, -(-seq.tokens // pool.block_tokens) - len(seq.blocks))
        crowded = bool(chosen) and buggify("crowded out") and not self.preemption.protected(seq)
        if missing > self._spare or crowded:
            short, coming = max(1, missing - self._spare), 0 if crowded else self._returning()
            for victim in self.preemption.victims(seq, self.running, short, coming, pool):
                chosen.pop(victim, None)
                self._send_away(victim, now_ns, out)
            if seq.leaving or seq not in self.running:
                return False
            if missing > self._spare:
                self._promise(missing)
                return False
        if missing:
            self._spare -= missing
            seq.blocks.extend(pool.allocate(missing))
            self.seating.hold(seq)
        if self.tokens_per_row > 1:
            self._look_ahead(seq, pool)
        return True

    def _returning(self) -> int:
        """Blocks that come back, without anybody's doing, once the steps under way have landed."""
        assert self.pool is not None
        if self._coming is None:
            going = (seq for seq in self.running if seq.leaving or seq.end is not None or seq.is_whole)
            self._coming = sum(own_blocks(seq, self.pool) for seq in going)
        return self._coming

    def _promise(self, missing: int) -> None:
        """These blocks, there or coming, are for one that sits this step out."""
        free = min(missing, self._spare)
        self._spare -= free
        self._coming = self._returning() - (missing - free)

    def _look_ahead(self, seq: Sequence, pool: BlockPool) -> None:
        """Blocks to spare for the tokens a step may yield beyond one; it yields what there is room for.

        Never beyond the last token the sequence may have, so that nobody holds more than was promised to it.
        """
        most = len(seq.handed.prompt_ids) + (seq.max_tokens or 0)
        wanted = pool.blocks_for(min(seq.tokens + self.tokens_per_row - 1, most)) - len(seq.blocks)
        if wanted > 0 and self._spare > 0:
            spare = min(wanted, self._spare)
            self._spare -= spare
            seq.blocks.extend(pool.allocate(spare))
            self.seating.hold(seq)

    def _make_way(self, seq: Sequence, now_ns: int, out: list[Effect]) -> bool:
        """A promise and a seat for a waiting sequence; paused ones give way, so that no slow client holds up another:
        but not in vain, and not where what is coming back is enough.
        """
        pool, seats = self.pool, self.limits.running_requests_max
        assert pool is not None
        if self._seat(seq, now_ns):
            return True
        paused = self._paused()
        if not paused or len(self.running) - len(paused) >= seats:
            return False
        found, fresh = self._found(seq)
        copied = len(found) + fresh > pool.blocks_for(seq.tokens)
        coming, freed = self._returning(), freed_blocks(pool, paused)
        if coming and self.seating.could_seat(seq, held_blocks(pool, found, copied), coming):
            return False
        if not self.seating.could_seat(seq, held_blocks(pool, found, copied, paused), freed, paused):
            return False
        while paused:
            self._preempt(paused.pop(), now_ns, out)
            if self._seat(seq, now_ns):
                return True
        return False

    def _seat(self, seq: Sequence, now_ns: int) -> bool:
        """A seat, and a promise, if there are room and seats for it."""
        pool = self.pool
        assert pool is not None
        if len(self.running) >= self.limits.running_requests_max:
            return False
        found, fresh = self._found(seq)
        copied = len(found) + fresh > pool.blocks_for(seq.tokens)
        return pool.fits(found, fresh) and self.seating.seat(seq, held_blocks(pool, found, copied), now_ns)

    def _paused(self) -> list[Sequence]:
        """Whose clients have no room; no step names them any more."""
        return [seq for seq in self.running if seq.held.state == "paused" and seq.end is None]

    def _send_away(self, seq: Sequence, now_ns: int, out: list[Effect]) -> None:
        """Preempt, at once or as soon as no step in flight names it."""
        assert self.pool is not None
        own = own_blocks(seq, self.pool)
        if seq.in_flight:
            self._coming = self._returning() + own
            seq.leaving = True
        else:
            self._spare += own
            self._preempt(seq, now_ns, out)

    def _preempt(self, seq: Sequence, now_ns: int, out: list[Effect]) -> None:
        """Out of the batch and into the queue."""
        assert self.pool is not None
        del self.running[seq]
        self.preemption.save(seq, self.pool)
        self._drop_blocks(seq)
        self.hands.move(seq.held, "preempted", now_ns, out)
        self.seating.leave(seq, now_ns, len(seq.host_blocks))

    def _drop_blocks(self, seq: Sequence) -> None:
        """The one place where blocks are freed."""
        assert not seq.in_flight, f"blocks of slot {seq.held.slot} freed while a step names it"
        if self.pool is not None:
            self.pool.release(seq.blocks)
        if seq.started:
            self.forgotten.append(seq.held.slot)
        seq.started, seq.leaving = False, False
        seq.computed, seq.planned, seq.told_blocks, seq.registered, seq.awaiting_ns = 0, 0, 0, 0, 0
