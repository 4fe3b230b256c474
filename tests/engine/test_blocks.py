"""The pool of blocks: a block has one holder, and none is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.blocks import BlockPool


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
