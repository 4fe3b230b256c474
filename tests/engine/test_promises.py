"""The ledger's promises over the real pool of blocks, with shared prefixes, copies on write and evictions."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.admission import Admission, Ask
from baton.engine.blocks import BlockPool
from baton.engine.ledger import Ledger, Memory
from baton.engine.limits import Limits
from baton.engine.predictor import LengthPredictor
from baton.engine.prefix import Chain

LIMITS = Limits()
BLOCK = 4


@dataclass
class Life:
    """A request that ends after ``length`` output tokens. ``named`` of its blocks have a name in the pool."""

    ask: Ask
    length: int
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    named: int = 0

    def __post_init__(self) -> None:
        self.chain = Chain(b"root", BLOCK, self.prompt, self.output)


def seat(desk: Admission, pool: BlockPool, life: Life) -> bool:
    """As a batcher does: find the prefix, ask for a promise, share, copy what is to be written, take the rest."""
    found = pool.match(life.chain)
    whole = len(found) * BLOCK == len(life.prompt)  # then the last block is written once more
    kept = sum(pool.holders(block) > 0 for block in found) - (whole and pool.holders(found[-1]) > 0 if found else 0)
    if not desk.seat(life.ask, 0, kept):
        return False
    pool.adopt(life.chain, found)
    life.blocks, life.named = found, len(found)
    if whole and found:
        found[-1] = pool.writable(found[-1])
        life.named -= 1
    life.blocks += pool.allocate(pool.blocks_for(len(life.prompt)) - len(life.blocks))
    desk.hold(life.ask, len(life.blocks))
    return True


def name(pool: BlockPool, life: Life) -> None:
    """What is full by now is found by those that come later."""
    while life.named < life.chain.full:
        pool.register(life.blocks[life.named], life.chain.link(life.named))
        life.named += 1


shapes = st.tuples(st.integers(0, 3), st.integers(1, 24), st.integers(1, 16), st.integers(1, 16))


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 24), st.lists(shapes, min_size=1, max_size=25))
def test_under_reserve_the_pool_always_has_what_was_promised(
    total: int, wishes: list[tuple[int, int, int, int]]
) -> None:
    pool = BlockPool(total, BLOCK)
    desk = Admission("reserve", Ledger(pool, Memory(), LIMITS), LengthPredictor(LIMITS), LIMITS)
    lives = [
        Life(Ask(slot, prompt, most), min(length, most), [family] * prompt)
        for slot, (family, prompt, most, length) in enumerate(wishes)
    ]
    waiting = [life for life in lives if desk.arrive(life.ask, 0) is None]
    running: list[Life] = []
    while waiting or running:
        while waiting and seat(desk, pool, waiting[0]):
            running.append(waiting.pop(0))
            name(pool, running[-1])
        assert running, "somebody waits and nobody runs"
        for life in list(running):
            if len(life.blocks) < pool.blocks_for(life.ask.tokens + 1):
                life.blocks += pool.allocate(1)  # which asserts that there is one
            life.output.append(life.ask.slot)
            life.ask.output_tokens += 1
            desk.hold(life.ask, len(life.blocks))
            name(pool, life)
            assert pool.total - pool.available + desk.ledger.growth_blocks <= pool.total
            if len(life.output) == life.length:
                pool.release(life.blocks)
                desk.ended(life.ask, 0)
                running.remove(life)
    assert pool.available == pool.total and not desk.ledger.busy
