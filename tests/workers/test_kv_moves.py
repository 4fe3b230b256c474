"""Blocks copied within the pool, swapped to the host and back: with real tensors, as if one move after the other."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.blocks import Move
from baton.workers import cache
from baton.workers.cache import KvPool, MemoryBudgetError, SwapDamaged, available_bytes, bytes_per_block
from tests.workers.test_kv_pool import CONFIG, CPU

BLOCKS, HOSTS = 6, 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no device"))]


def numbered(dtype: torch.dtype = torch.float32, device: str = "cpu", verify: bool = True) -> KvPool:
    """A pool in which no two places hold the same number, up to the dtype's precision."""
    pool = KvPool(CONFIG, dtype, BLOCKS, torch.device(device), host_blocks=HOSTS, verify=verify)
    pool._pool.copy_(torch.randn(pool._pool.shape, generator=torch.Generator().manual_seed(1)))
    return pool


def contents(pool: KvPool) -> list[torch.Tensor]:
    """What each block holds, through the very views that the model computes with: ``[layers, 2, block, ...]``."""
    kept = torch.stack([torch.stack(pool.keys), torch.stack(pool.values)], 1)
    return [kept[:, :, block].clone().cpu() for block in range(BLOCKS)]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_takes_all_layers_and_touches_nothing_else(dtype: torch.dtype, device: str) -> None:
    pool = numbered(dtype, device)
    before = contents(pool)
    pool.copy([(0, 3), (5, 1)])
    pool.copy([])
    assert same(contents(pool), [before[0], before[5], before[2], before[0], before[4], before[5]])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_swapped_out_comes_back_bit_for_bit_wherever_it_is_put(
    dtype: torch.dtype, verify: bool, device: str
) -> None:
    pool = numbered(dtype, device, verify)
    before = contents(pool)
    pool.swap_out([(1, 2), (4, 0)])
    assert same(contents(pool), before)
    pool.clear([1, 4])
    pool.swap_in([(0, 1), (2, 5)])
    assert same(contents(pool), [before[0], before[4], before[2], before[3], torch.zeros_like(before[0]), before[1]])


NUMBERS = st.integers(0, HOSTS - 1)
MOVES = st.lists(st.tuples(st.sampled_from(Move), NUMBERS, NUMBERS), max_size=12)


@given(MOVES, st.integers(1, 3), st.booleans())
def test_moves_are_carried_out_as_if_one_after_the_other(
    moves: list[tuple[Move, int, int]], staged: int, verify: bool
) -> None:
    pool = numbered(verify=verify)
    pool._staged = staged
    blocks = contents(pool)
    everything = [(Move.OUT, number, number) for number in range(HOSTS)]  # so that all host blocks hold something
    hosts = blocks[:HOSTS]
    for kind, source, destination in moves:
        match kind:
            case Move.COPY:
                blocks[destination] = blocks[source]
            case Move.OUT:
                hosts[destination] = blocks[source]
            case Move.IN:
                blocks[destination] = hosts[source]
    pool.move([*everything, *moves])
    assert same(contents(pool), blocks)
    assert same([pool._host[host] for host in range(HOSTS)], hosts)


def test_moves_as_a_plan_carries_them_are_numbers() -> None:
    pool = numbered()
    before = contents(pool)
    pool.move([(0, 0, 1), (1, 1, 3), (2, 3, 2)])
    assert same(contents(pool)[:3], [before[0]] * 3)


def test_a_long_sequence_goes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "STAGING_BYTES", 2 * bytes_per_block(CONFIG, torch.float32) + 1)
    pool = numbered()
    assert pool._staged == 2
    before = contents(pool)
    pool.swap_out([(number, number) for number in range(4)])
    pool.clear(range(4))
    pool.swap_in([(number, number) for number in range(4)])
    assert same(contents(pool), before)


@pytest.mark.parametrize("bit", [0, 5])
def test_a_host_block_that_changed_is_not_taken_back(bit: int) -> None:
    pool = numbered()
    pool.swap_out([(0, 1), (2, 3)])
    pool._host[3].view(torch.uint8).view(-1)[7] ^= 1 << bit
    before = contents(pool)
    with pytest.raises(SwapDamaged, match=r"^host block 3 has checksum \w{8}, \w{8} was swapped out to it$"):
        pool.swap_in([(3, 4)])
    assert same(contents(pool), before)
    pool.swap_in([(1, 4)])
    assert torch.equal(contents(pool)[4], before[0])


def test_a_host_block_that_holds_nothing_is_not_taken_back() -> None:
    with pytest.raises(SwapDamaged, match="host block 2 is swapped in, and nothing was swapped out to it"):
        numbered().swap_in([(2, 0)])


def test_without_verification_nothing_is_summed() -> None:
    pool = numbered(verify=False)
    pool.swap_out([(0, 0)])
    pool._host[0].fill_(1.0)
    pool.swap_in([(0, 2)])
    assert bool((contents(pool)[2] == 1.0).all())


@pytest.mark.parametrize(
    "move",
    [(Move.COPY, BLOCKS, 0), (Move.COPY, 0, -1), (Move.OUT, 0, HOSTS), (Move.IN, HOSTS, 0), (Move.IN, 0, BLOCKS)],
)
def test_a_blocks_number_outside_the_pool_is_our_own_fault(move: tuple[Move, int, int]) -> None:
    pool = numbered()
    with pytest.raises(AssertionError, match="is moved"):
        pool.move([move])


def test_a_move_of_an_unknown_kind_is_our_own_fault() -> None:
    with pytest.raises(ValueError, match="is not a valid Move"):
        numbered().move([(3, 0, 0)])


def test_no_swap_space_is_asked_for_unless_it_is_wanted() -> None:
    pool = KvPool(CONFIG, torch.float32, 2, CPU)
    assert pool.host_blocks == 0
    with pytest.raises(AssertionError, match="there are 0"):
        pool.swap_out([(0, 0)])


@pytest.mark.parametrize("device", DEVICES)
def test_swap_space_that_does_not_fit_says_what_would(device: str) -> None:
    each, blocks = bytes_per_block(CONFIG, torch.float32), available_bytes(CPU)
    with pytest.raises(MemoryBudgetError) as caught:
        KvPool(CONFIG, torch.float32, 2, torch.device(device), host_blocks=blocks)
    text = str(caught.value)
    assert "\n" not in text and f"swap space of {blocks} blocks needs {blocks * each} bytes" in text
    found = re.search(r"up to (\d+) blocks", text)
    assert found and 0 < int(found[1]) < blocks


def test_on_the_cpu_pool_and_swap_space_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    each = bytes_per_block(CONFIG, torch.float32)
    monkeypatch.setattr(cache, "available_bytes", lambda device: cache.RESERVE_BYTES + 5 * each)
    assert KvPool(CONFIG, torch.float32, 3, CPU, host_blocks=2).host_blocks == 2
    with pytest.raises(MemoryBudgetError, match=rf"{3 * each} of them for the KV pool; up to 2 blocks \({2 * each} "):
        KvPool(CONFIG, torch.float32, 3, CPU, host_blocks=3)
