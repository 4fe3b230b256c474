"""The pool against a model that knows what every slot of memory holds: random lives of sequences, looked at often."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.engine.blocks import BlockPool, Move
from baton.engine.prefix import Chain

BLOCK = 4
ROOTS = (b"a" * 32, b"b" * 32)
WHICH = st.integers(0, 5)
#: what a slot holds: the root and all tokens up to its own, from which keys and values follow
Slot = tuple[bytes, tuple[int, ...]]
PROMPTS = st.builds(
    lambda head, tail: [0] * head + tail, st.sampled_from([3, 4, 8, 12]), st.lists(st.integers(0, 1), max_size=2)
)


@dataclass(eq=False)
class Life:
    """A sequence as a batcher keeps it; ``computed`` of its tokens are in ``blocks``, or in ``hosts`` when swapped."""

    chain: Chain
    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    registered: int = 0
    hosts: list[int] = field(default_factory=list)

    def slot(self, position: int) -> Slot:
        return self.chain.root, tuple(self.tokens[: position + 1])


class Pool(RuleBasedStateMachine):
    """What a batcher may do, in any order; the model carries out the moves and writes the slots."""

    @initialize(total=st.integers(3, 12), host_total=st.integers(0, 6))
    def begin(self, total: int, host_total: int) -> None:
        self.pool = BlockPool(total, BLOCK, host_total=host_total)
        self.memory: list[list[Slot | None]] = [[None] * BLOCK for _ in range(total)]
        self.host: list[list[Slot | None]] = [[None] * BLOCK for _ in range(host_total)]
        self.all: list[Life] = []
        self.queried = self.hit = 0

    # ------------------------------------------------------------------------------------ rules

    @rule(prompt=PROMPTS, root=st.sampled_from((ROOTS[0], ROOTS[0], *ROOTS)), steps=st.sampled_from([9, 9, 3, 0]))
    def start(self, prompt: list[int], root: bytes, steps: int) -> None:
        """A new sequence, or one that was preempted; it mostly runs some steps at once."""
        chain = Chain(root, BLOCK, prompt)
        life = Life(chain, prompt, [])
        pool, found = self.pool, self.pool.match(chain)
        assert found == self.expected_match(life)
        fresh = pool.blocks_for(len(prompt)) - len(found)
        copied = len(found) * BLOCK == len(prompt)
        if not pool.fits(found, fresh + copied):
            return
        life.computed = pool.adopt(chain, found)
        life.blocks = found
        life.registered = life.computed // BLOCK
        life.blocks.extend(pool.allocate(fresh))
        self.queried += len(prompt)
        self.hit += life.computed
        self.all.append(life)
        for step in range(steps):
            self.compute(len(self.all) - 1, 5)
            self.extend(len(self.all) - 1, step % 2)

    @precondition(lambda self: self.all)
    @rule(which=WHICH, count=st.sampled_from([1, 5, 99, 99]))
    def compute(self, which: int, count: int) -> None:
        """A chunk, or all that is left; the last block may be shared, then it is copied first."""
        life = self.all[which % len(self.all)]
        if life.hosts:
            return
        end = min(life.computed + count, len(life.tokens))
        touched = range(life.computed // BLOCK, self.pool.blocks_for(end))
        for number in touched:
            if not self.pool.available and not self.alone(life.blocks[number]):
                return
            life.blocks[number] = self.pool.writable(life.blocks[number])
        self.launch()
        for position in range(life.computed, end):
            block = life.blocks[position // BLOCK]
            assert self.pool.holders(block) == 1 and self.found_at(block) is None, "a block is written that others read"
            self.memory[block][position % BLOCK] = life.slot(position)
        life.computed = end
        self.register(life)

    def register(self, life: Life) -> None:
        """Blocks that are full now get their names; one that was shared already has it, or never may."""
        for number in range(life.registered, life.computed // BLOCK):
            block, link = life.blocks[number], life.chain.link(number)
            taken = link.identity in self.pool._index
            assert self.pool.register(block, link) == (not taken)
        life.registered = life.computed // BLOCK

    @precondition(lambda self: self.all)
    @rule(which=WHICH, token=st.integers(0, 1))
    def extend(self, which: int, token: int) -> None:
        """A token is sampled; its block may be missing."""
        life = self.all[which % len(self.all)]
        if life.hosts or life.computed < len(life.tokens):
            return
        missing = self.pool.blocks_for(len(life.tokens) + 1) - len(life.blocks)
        if missing > self.pool.available:
            return
        life.tokens.append(token)
        life.blocks.extend(self.pool.allocate(missing))

    @precondition(lambda self: self.all)
    @rule(which=WHICH)
    def fork(self, which: int) -> None:
        """Another choice of the same prompt goes on from here."""
        life = self.all[which % len(self.all)]
        tokens = list(life.tokens)
        twin = Life(Chain(life.chain.root, BLOCK, tokens), tokens, list(life.blocks), life.computed, life.registered)
        if not life.hosts:
            self.pool.share(twin.blocks)
            self.all.append(twin)

    @precondition(lambda self: self.all)
    @rule(which=WHICH)
    def expect(self, which: int) -> None:
        """What the next chunk fills is announced."""
        life = self.all[which % len(self.all)]
        if life.hosts:
            return
        for number in range(life.registered, life.chain.full):
            if self.alone(life.blocks[number]):
                self.pool.expect(life.blocks[number], life.chain.link(number))

    @precondition(lambda self: self.all)
    @rule(which=WHICH)
    def end(self, which: int) -> None:
        """It has its last token, is cancelled, or is preempted and will start anew."""
        life = self.all.pop(which % len(self.all))
        self.pool.release(life.blocks)
        self.pool.host.release(life.hosts)

    @precondition(lambda self: self.all)
    @rule(which=WHICH)
    def swap_out(self, which: int) -> None:
        life = self.all[which % len(self.all)]
        if life.hosts or len(life.blocks) > self.pool.host.free:
            return
        life.hosts = self.pool.swap_out(life.blocks)

    @precondition(lambda self: self.all)
    @rule(which=WHICH)
    def swap_in(self, which: int) -> None:
        life = self.all[which % len(self.all)]
        if not life.hosts or len(life.hosts) > self.pool.available:
            return
        life.blocks = self.pool.swap_in(life.hosts)

    def launch(self) -> None:
        """A plan goes out: its moves are carried out in order."""
        for kind, source, destination in self.pool.take_moves():
            origin = self.host if kind == Move.IN else self.memory
            target = self.host if kind == Move.OUT else self.memory
            target[destination] = list(origin[source])

    @rule(luck=st.integers(0, 19))
    def worker_dies(self, luck: int) -> None:
        if luck < 19:
            return
        while self.all:
            self.end(0)
        self.pool.clear()
        assert self.pool.free == self.pool.total and not self.pool.cached
        assert self.pool.host.free == self.pool.host.total
        self.memory = [[None] * BLOCK for _ in self.memory]

    # ------------------------------------------------------------------------------------ what must hold

    def alone(self, block: int) -> bool:
        return self.pool.holders(block) == 1 and self.found_at(block) is None

    def found_at(self, block: int) -> bytes | None:
        """The name that leads to a block."""
        return next((identity for identity, where in self.pool._index.items() if where == block), None)

    def expected_match(self, life: Life) -> list[int]:
        """Block by block, what holds exactly the right tokens and has a name."""
        self.launch()
        found: list[int] = []
        for number in range(len(life.tokens) // BLOCK):
            wanted = [life.slot(position) for position in range(number * BLOCK, (number + 1) * BLOCK)]
            named = [block for block in set(self.pool._index.values()) if self.memory[block] == wanted]
            assert len(named) <= 1, "two blocks of one name"
            if not named:
                break
            found += named
        return found

    @invariant()
    def every_block_is_free_held_or_cached(self) -> None:
        pool = self.pool
        holders = [0] * pool.total
        for life in self.all:
            assert len(set(life.blocks)) == len(life.blocks)
            for block in life.blocks:
                holders[block] += 1
        assert holders == [pool.holders(block) for block in range(pool.total)]
        held = sum(count > 0 for count in holders)
        named = set(pool._index.values())
        cached = {block for block in named if not holders[block]}
        free = set(pool._free)
        assert len(free) == len(pool._free) == pool.free and len(cached) == pool.cached
        assert pool.free + held + pool.cached == pool.total and pool.available == pool.free + pool.cached
        assert not free & named and not any(holders[block] for block in free)
        hosts = [host for life in self.all for host in life.hosts]
        assert len(set(hosts)) == len(hosts) == pool.host.total - pool.host.free

    @invariant()
    def memory_is_as_promised(self) -> None:
        self.launch()
        for life in self.all:
            assert not (life.blocks and life.hosts)
            places, memory = (life.hosts, self.host) if life.hosts else (life.blocks, self.memory)
            for position in range(life.computed):
                assert memory[places[position // BLOCK]][position % BLOCK] == life.slot(position)
            assert 0 <= len(places) * BLOCK - len(life.tokens) < BLOCK, "more than the rest of one block is wasted"
        for identity, block in self.pool._index.items():
            link = self.pool._links[block]
            assert link is not None and link.identity == identity
            last = self.memory[block][-1]
            assert last is not None, "a block has a name and was never written"
            root, tokens = last
            true = Chain(root, BLOCK, tokens)
            assert true.tokens % BLOCK == 0 and true.link(true.full - 1) == link, (
                "a block's name is not that of its tokens"
            )
            assert [slot and slot[1] for slot in self.memory[block]] == [
                tokens[: len(tokens) - BLOCK + 1 + place] for place in range(BLOCK)
            ]

    @invariant()
    def bookkeeping_is_bounded(self) -> None:
        pool = self.pool
        assert len(pool._leaves) == sum(pool._queued) <= pool.total
        assert sum(pool._children.values()) == pool.cached
        assert len(pool._pending) == len(pool._expected) <= pool.total - pool.available
        assert all(pool.holders(block) for block in pool._expected)
        assert (pool.counts.queries, pool.counts.hits) == (self.queried, self.hit)

    def teardown(self) -> None:
        """Whatever happened, all of it can be had again."""
        if hasattr(self, "all"):
            while self.all:
                self.end(0)
            taken = self.pool.allocate(self.pool.total)
            assert sorted(taken) == [*range(self.pool.total)] and not self.pool._index and not self.pool._children


USUAL = settings(max_examples=25, stateful_step_count=50, deadline=None)
DEEP = settings(max_examples=4000, stateful_step_count=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class TestPool(Pool.TestCase):  # type: ignore[misc,name-defined]
    """Some histories each time."""

    settings = USUAL


@pytest.mark.full
@pytest.mark.timeout(3600)
class TestPoolDeeply(Pool.TestCase):  # type: ignore[misc,name-defined]
    """Many."""

    settings = DEEP
