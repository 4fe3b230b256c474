"""The pool of blocks: what is shared is not written, what is cached is found and gives way, and none is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.blocks import BlockPool, HostPool, Move
from baton.engine.prefix import Chain, Link, PrefixCounts

ROOT = b"r" * 32


@given(st.integers(1, 20), st.lists(st.integers(0, 7), max_size=40))
def test_free_and_held_make_the_whole(total: int, sizes: list[int]) -> None:
    pool, holders = BlockPool(total, 4), list[list[int]]()
    for size in sizes:
        if size <= pool.free:
            holders.append(pool.allocate(size))
        elif holders:
            pool.release(holders.pop(0))
        held = [block for blocks in holders for block in blocks]
        assert len(set(held)) == len(held)
        assert pool.free + len(held) == total
    for blocks in holders:
        pool.release(blocks)
    assert pool.free == total


@given(st.integers(0, 1000), st.integers(1, 64))
def test_blocks_for_covers_the_tokens_and_no_more(tokens: int, block_tokens: int) -> None:
    blocks = BlockPool(1, block_tokens).blocks_for(tokens)
    assert blocks * block_tokens >= tokens > (blocks - 1) * block_tokens


def test_releasing_twice_releases_once() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(3)
    pool.release(blocks)
    pool.release(blocks)
    assert pool.free == 4


def test_a_block_that_is_not_held_cannot_be_freed() -> None:
    pool = BlockPool(4, 4)
    stolen = list(blocks := pool.allocate(2))
    pool.release(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(stolen)


def test_more_than_is_free_cannot_be_taken() -> None:
    with pytest.raises(AssertionError, match="asked"):
        BlockPool(4, 4).allocate(5)


# ------------------------------------------------------------------------------------ sharing and copy on write


def test_a_shared_block_is_free_when_the_last_has_let_go() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(2)
    twin = list(blocks)
    pool.share(twin)
    assert [pool.holders(block) for block in twin] == [2, 2]
    pool.release(blocks)
    assert pool.free == 2
    pool.release(twin)
    assert pool.free == 4


def test_a_free_block_cannot_be_shared() -> None:
    with pytest.raises(AssertionError, match="is free"):
        BlockPool(4, 4).share([0])


def test_a_block_of_ones_own_is_written_in_place() -> None:
    pool = BlockPool(4, 4)
    (block,) = pool.allocate(1)
    assert pool.writable(block) == block and pool.take_moves() == []


def test_the_first_to_write_a_shared_block_copies_it_and_the_last_does_not() -> None:
    pool = BlockPool(4, 4)
    (block,) = pool.allocate(1)
    pool.share([block])
    fresh = pool.writable(block)
    assert fresh != block and pool.take_moves() == [(Move.COPY, block, fresh)] and pool.take_moves() == []
    assert (pool.holders(block), pool.holders(fresh)) == (1, 1)
    assert pool.writable(block) == block


def test_a_registered_block_is_not_written_by_its_only_holder_either() -> None:
    pool = BlockPool(4, 4)
    chain, blocks = computed(pool, [1, 2, 3, 4])
    fresh = pool.writable(blocks[0])
    assert fresh != blocks[0] and pool.cached == 1 and pool.match(chain) == blocks


def test_what_nobody_holds_is_not_written() -> None:
    with pytest.raises(AssertionError, match="written by nobody"):
        BlockPool(4, 4).writable(0)


# ------------------------------------------------------------------------------------ names


def computed(pool: BlockPool, tokens: list[int], root: bytes = ROOT) -> tuple[Chain, list[int]]:
    """A sequence that has computed its tokens and registered its full blocks; it holds them still."""
    chain = Chain(root, pool.block_tokens, tokens)
    found = pool.match(chain)
    pool.share(found)
    blocks = found + pool.allocate(pool.blocks_for(len(tokens)) - len(found))
    for number in range(len(found), chain.full):
        pool.register(blocks[number], chain.link(number))
    return chain, blocks


def test_what_a_sequence_leaves_is_found_by_who_begins_alike() -> None:
    pool = BlockPool(8, 4)
    _, blocks = computed(pool, [*range(10)])
    first = blocks[:2]
    pool.release(blocks)
    assert (pool.free, pool.cached, pool.available) == (6, 2, 8)
    chain = Chain(ROOT, 4, [*range(8), 99, 98])
    found = pool.match(chain)
    assert found == first and pool.adopt(chain, found) == 8
    assert (pool.free, pool.cached) == (6, 0)
    assert (pool.counts.queries, pool.counts.hits) == (10, 8)


def test_it_is_found_while_its_first_holder_runs() -> None:
    pool = BlockPool(8, 4)
    _, blocks = computed(pool, [*range(8)])
    assert pool.match(Chain(ROOT, 4, [*range(6)])) == blocks[:1]


def test_one_token_is_left_to_compute_where_all_are_found() -> None:
    pool = BlockPool(8, 4)
    chain, blocks = computed(pool, [*range(8)])
    assert pool.adopt(chain, pool.match(chain)) == 7
    assert pool.writable(blocks[1]) not in blocks


def test_another_root_finds_nothing() -> None:
    pool = BlockPool(8, 4)
    computed(pool, [*range(8)])
    assert pool.match(Chain(b"s" * 32, 4, [*range(8)])) == []


def test_a_beginning_that_is_missing_hides_what_came_after_it() -> None:
    pool = BlockPool(8, 4)
    chain, blocks = computed(pool, [*range(8)])
    assert pool.match(Chain(ROOT, 4, [9, 9, 9, 9, 4, 5, 6, 7])) == []
    assert pool.match(chain) == blocks


@pytest.mark.parametrize("lie", ["content", "parent"])
def test_a_hit_is_believed_only_if_the_tokens_are_the_same(lie: str) -> None:
    """As if SHA-256 had collided: the name is right and what stands behind it is not."""
    pool = BlockPool(8, 4)
    chain = Chain(ROOT, 4, [*range(8)])
    true = chain.link(0)
    false = {
        "content": Link(true.identity, true.parent, b"x" * 16),
        "parent": Link(true.identity, b"p" * 32, true.content),
    }
    (block,) = pool.allocate(1)
    pool.register(block, false[lie])
    assert pool.match(chain) == []


def test_of_two_that_compute_the_same_the_second_keeps_its_own() -> None:
    pool = BlockPool(8, 4)
    chain, first = computed(pool, [*range(4)])
    second = pool.allocate(1)
    assert not pool.register(second[0], chain.link(0))
    assert pool.match(chain) == first
    assert pool.writable(second[0]) == second[0]
    pool.release(second)
    assert (pool.free, pool.cached) == (7, 0)
    pool.release(first)
    assert (pool.free, pool.cached) == (7, 1)


def test_a_block_has_one_name_and_somebody_who_computed_it() -> None:
    pool = BlockPool(8, 4)
    chain, blocks = computed(pool, [*range(8)])
    with pytest.raises(AssertionError, match="has a name already"):
        pool.register(blocks[0], chain.link(1))
    with pytest.raises(AssertionError, match="held by nobody"):
        pool.register(7 - blocks[0], chain.link(1))


# ------------------------------------------------------------------------------------ what is being computed


def test_who_needs_what_is_being_computed_may_wait_for_it() -> None:
    pool = BlockPool(8, 4)
    chain, other = Chain(ROOT, 4, [*range(12)]), Chain(ROOT, 4, [*range(8), 5, 5, 5, 5])
    blocks = pool.allocate(3)
    assert not pool.awaited(other)
    for number in range(3):
        pool.expect(blocks[number], chain.link(number))
    assert pool.awaited(other) and other.awaited == chain.link(1).identity
    pool.register(blocks[0], chain.link(0))
    assert pool.awaited(other)
    pool.register(blocks[1], chain.link(1))
    assert not pool.awaited(other) and pool.pending(chain.link(2).identity)
    assert pool.match(other) == blocks[:2]


def test_nobody_waits_for_what_was_given_up() -> None:
    pool = BlockPool(8, 4)
    chain, other = Chain(ROOT, 4, [*range(4)]), Chain(ROOT, 4, [*range(4)])
    blocks = pool.allocate(1)
    pool.expect(blocks[0], chain.link(0))
    assert pool.awaited(other)
    pool.release(blocks)
    assert not pool.awaited(other) and not pool.pending(chain.link(0).identity)


def test_the_first_to_compute_a_block_is_the_one_waited_for() -> None:
    pool = BlockPool(8, 4)
    chain = Chain(ROOT, 4, [*range(4)])
    first, second = pool.allocate(1), pool.allocate(1)
    pool.expect(first[0], chain.link(0))
    pool.expect(second[0], chain.link(0))
    pool.release(second)
    assert pool.pending(chain.link(0).identity)
    pool.register(first[0], chain.link(0))
    assert not pool.pending(chain.link(0).identity)
    third = pool.allocate(1)
    pool.expect(third[0], chain.link(0))
    assert not pool.pending(chain.link(0).identity), "what is here is not waited for"


# ------------------------------------------------------------------------------------ eviction


def test_free_blocks_go_first_then_the_longest_unused_leaf() -> None:
    pool = BlockPool(6, 4)
    old, blocks = computed(pool, [1] * 8)
    pool.release(blocks)
    new, blocks = computed(pool, [2] * 8)
    pool.release(blocks)
    assert (pool.free, pool.cached) == (2, 4)
    pool.allocate(2)
    assert (len(pool.match(old)), len(pool.match(new)), pool.counts.evictions) == (2, 2, 0)
    pool.allocate(1)
    assert (len(pool.match(old)), len(pool.match(new)), pool.counts.evictions) == (1, 2, 1)
    pool.allocate(2)
    assert (len(pool.match(old)), len(pool.match(new)), pool.counts.evictions) == (0, 1, 3)


def test_what_was_used_again_is_not_the_oldest_any_more() -> None:
    pool = BlockPool(4, 4)
    chains = []
    for token in (1, 2):
        chain, blocks = computed(pool, [token] * 8)
        pool.release(blocks)
        chains.append(chain)
    found = pool.match(chains[0])
    pool.adopt(chains[0], found)
    pool.release(found)
    pool.allocate(2)
    assert [len(pool.match(chain)) for chain in chains] == [2, 0]


def test_a_beginning_outlives_its_continuations_whoever_came_first() -> None:
    pool = BlockPool(5, 4)
    base = [7] * 4
    for token in (1, 2, 3, 4):
        _, blocks = computed(pool, [*base, *[token] * 4])
        pool.release(blocks)
    for left in (3, 2, 1):
        pool.allocate(1)
        chains = [Chain(ROOT, 4, [*base, *[token] * 4]) for token in (1, 2, 3, 4)]
        assert sum(len(pool.match(chain)) == 2 for chain in chains) == left
        assert all(pool.match(chain) for chain in chains)


def test_a_cached_beginning_goes_though_its_continuation_is_held_under_another_beginning() -> None:
    """The second of two that computed the same goes on alone; nothing hangs on the first's block."""
    pool = BlockPool(3, 4)
    chain = Chain(ROOT, 4, [*range(8)])
    first = pool.allocate(1)
    pool.register(first[0], chain.link(0))
    second = pool.allocate(2)
    assert not pool.register(second[0], chain.link(0)) and pool.register(second[1], chain.link(1))
    pool.release(first)
    assert pool.available == 1
    taken = pool.allocate(1)
    pool.release(second)
    assert (pool.cached, pool.match(chain)) == (1, []), "cached, and out of reach until its beginning is back"
    pool.register(taken[0], chain.link(0))
    assert len(pool.match(chain)) == 2
    pool.release(taken)
    pool.allocate(2)
    assert len(pool.match(chain)) == 1, "the child went first"


def test_a_leaf_that_got_a_child_while_it_lay_cached_is_none_any_more() -> None:
    pool = BlockPool(3, 4)
    chain = Chain(ROOT, 4, [*range(8)])
    first, second = pool.allocate(1), pool.allocate(2)
    pool.register(first[0], chain.link(0))
    assert not pool.register(second[0], chain.link(0)) and pool.register(second[1], chain.link(1))
    pool.release(first)
    pool.release(second)
    pool.allocate(2)
    assert len(pool.match(chain)) == 1, "the child went first, though its beginning is unused for longer"


def test_room_is_counted_without_what_is_about_to_be_shared() -> None:
    pool = BlockPool(4, 4)
    chain, blocks = computed(pool, [*range(8)])
    pool.release(blocks)
    found = pool.match(chain)
    assert pool.available == 4 and pool.fits(found, 2) and not pool.fits(found, 3) and pool.fits([], 4)
    pool.share(found)
    assert pool.fits(found, 2) and not pool.fits(found, 3)


def test_after_the_workers_death_nothing_is_found_and_nothing_lost() -> None:
    pool = BlockPool(6, 4, host_total=2)
    chain, blocks = computed(pool, [*range(8)])
    pool.release(blocks)
    kept, held = computed(pool, [9] * 8)
    half = pool.allocate(1)
    pool.expect(half[0], Chain(ROOT, 4, [3] * 4).link(0))
    hosts = pool.swap_out(half)
    pool.clear()
    assert (pool.free, pool.cached, pool.moves) == (4, 0, [])
    assert pool.match(chain) == pool.match(kept) == []
    pool.release(held)
    pool.host.release(hosts)
    assert (pool.free, pool.host.free) == (6, 2)
    computed(pool, [*range(24)])
    assert pool.available == 0


def test_counters_outlive_the_pool() -> None:
    counts = PrefixCounts(queries=5)
    pool = BlockPool(4, 4, counts=counts)
    chain, _ = computed(pool, [*range(8)])
    pool.adopt(chain, pool.match(chain))
    assert (counts.queries, counts.hits) == (13, 7)


# ------------------------------------------------------------------------------------ host memory


def test_blocks_go_to_the_host_and_come_back() -> None:
    pool = BlockPool(4, 4, host_total=3)
    blocks = pool.allocate(3)
    were = list(blocks)
    hosts = pool.swap_out(blocks)
    places = list(hosts)
    assert (pool.free, pool.host.free, blocks) == (4, 0, [])
    back = pool.swap_in(hosts)
    assert (pool.free, pool.host.free, hosts) == (1, 3, [])
    outs = [(Move.OUT, block, host) for block, host in zip(were, places, strict=True)]
    assert pool.take_moves() == [*outs, *((Move.IN, host, block) for host, block in zip(places, back, strict=True))]


def test_what_is_swapped_out_stays_cached_while_there_is_room() -> None:
    pool = BlockPool(4, 4, host_total=3)
    chain, blocks = computed(pool, [*range(10)])
    were = blocks[:2]
    pool.swap_out(blocks)
    assert (pool.free, pool.cached, pool.match(chain)) == (2, 2, were)


def test_the_host_has_only_so_many_blocks() -> None:
    pool = BlockPool(4, 4, host_total=1)
    with pytest.raises(AssertionError, match="2 host blocks asked, 1 free"):
        pool.swap_out(pool.allocate(2))


def test_a_host_block_is_not_freed_twice() -> None:
    hosts = HostPool(2)
    stolen = list(taken := hosts.allocate(1))
    hosts.release(taken)
    hosts.release(taken)
    with pytest.raises(AssertionError, match="freed twice"):
        hosts.release(stolen)
