"""The reference kernels against the plainest formulas, in float64, on shapes nothing divides."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from baton.kernels.reference import (
    Part,
    padded_blocks,
    paged_attention,
    plan_ragged,
    rms_norm,
    rope,
    silu_mul,
    store_kv,
)

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 576), (5, 129)])
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = randn(*shape) * 5, randn(shape[1], seed=1)
    exact = x.double()
    expected = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_close(rms_norm(x, weight, 1e-5, dtype), expected, dtype)


def test_rms_norm_of_zero_is_zero() -> None:
    assert not rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5, torch.float32).any()


@DTYPES
@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(1, 1, 2), (5, 12, 64), (3, 7, 10)])
def test_rope_turns_pairs_by_their_angles(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    x, angles = randn(tokens, heads, head_dim, dtype=dtype), randn(tokens, head_dim // 2, seed=1) * 9
    cos, sin = angles.cos(), angles.sin()
    first, second = x.double().chunk(2, -1)
    pairs = torch.complex(first, second) * torch.polar(torch.ones(()).double(), angles.double())[:, None]
    expected = torch.cat((pairs.real, pairs.imag), -1)
    assert_close(rope(x, torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), expected, dtype)


@DTYPES
@pytest.mark.parametrize(("tokens", "intermediate"), [(1, 1), (3, 1536), (7, 11)])
def test_silu_mul(tokens: int, intermediate: int, dtype: torch.dtype) -> None:
    x = randn(tokens, 2 * intermediate, dtype=dtype) * 10
    gate, up = x.double().chunk(2, -1)
    assert_close(silu_mul(x), gate / (1 + (-gate).exp()) * up, dtype)


@DTYPES
def test_store_kv_writes_its_slots_and_no_others(dtype: torch.dtype) -> None:
    k, v = randn(3, 2, 8, dtype=dtype), randn(3, 2, 8, dtype=dtype, seed=1)
    pools = [torch.zeros(4, 16, 2, 8, dtype=dtype) for _ in range(2)]
    store_kv(k, v, pools[0], pools[1], torch.tensor([17, 63, 0]))
    for pool, rows in zip(pools, (k, v), strict=True):
        flat = pool.view(64, 2, 8)
        assert torch.equal(flat[[17, 63, 0]], rows)
        assert int(flat.any(-1).any(-1).sum()) == 3


def test_padded_blocks_cover_and_depend_on_length_alone() -> None:
    for keys in range(1, 2000):
        blocks = padded_blocks(keys, 16)
        assert blocks * 16 >= keys and blocks & (blocks - 1) == 0 and (blocks == 1 or blocks * 8 < keys)


class Sequences:
    """Random sequences in a shuffled pool, their dense keys and values kept beside it."""

    def __init__(self, lengths: list[int], kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
        tables = [-(-length // block_size) for length in lengths]
        order = list(range(sum(tables) + 3))
        random.Random(0).shuffle(order)
        self.tables = [[order.pop() for _ in range(count)] for count in tables]
        shape = (sum(tables) + 3, block_size, kv_heads, head_dim)
        self.k_pool, self.v_pool = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self.k = [randn(n, kv_heads, head_dim, dtype=dtype, seed=i) for i, n in enumerate(lengths)]
        self.v = [randn(n, kv_heads, head_dim, dtype=dtype, seed=-i - 1) for i, n in enumerate(lengths)]
        for table, k, v in zip(self.tables, self.k, self.v, strict=True):
            for p in range(len(k)):
                self.k_pool[table[p // block_size], p % block_size] = k[p]
                self.v_pool[table[p // block_size], p % block_size] = v[p]


def naive_attention(q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
    """One query ``[heads, head_dim]`` at ``position`` over its sequence, head by head in float64."""
    share = q.shape[0] // k.shape[1]
    heads = []
    for head in range(q.shape[0]):
        keys, values = (t[: position + 1, head // share].double() for t in (k, v))
        heads.append((keys @ q[head].double() / math.sqrt(q.shape[1])).softmax(0) @ values)
    return torch.stack(heads)


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), [(9, 3, 64, 16), (4, 4, 10, 3), (5, 1, 8, 1)])
def test_paged_attention(heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    """Prefills whole and in part, decodes of very different lengths, and single first tokens, in one step."""
    starts, counts = [0, 36, 0, 16, 15, 99, 5, 0, 31], [7, 1, 1, 5, 1, 1, 33, 16, 2]
    sequences = Sequences([s + c for s, c in zip(starts, counts, strict=True)], kv_heads, head_dim, block_size, dtype)
    parts = [Part(*part) for part in zip(starts, counts, sequences.tables, strict=True)]
    ragged = plan_ragged(parts, block_size, CPU)
    q = randn(sum(counts), heads, head_dim, dtype=dtype, seed=77)
    out = paged_attention(q, sequences.k_pool, sequences.v_pool, ragged)
    assert ragged.positions.tolist() == [p.start + i for p in parts for i in range(p.count)]
    token = 0
    for part, k, v in zip(parts, sequences.k, sequences.v, strict=True):
        for i in range(part.count):
            assert_close(out[token], naive_attention(q[token], k, v, part.start + i), dtype)
            token += 1


@pytest.fixture
def one_thread() -> Iterator[None]:
    """How several threads share a product may depend on its size, and with it the last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_a_row_is_the_same_bit_for_bit_whoever_is_in_its_group() -> None:
    lengths = [20, 31, 17, 200, 3]
    sequences = Sequences(lengths, 3, 64, 16, torch.float32)
    parts = [Part(n - 1, 1, t) for n, t in zip(lengths, sequences.tables, strict=True)]
    q = randn(len(parts), 9, 64)
    together = paged_attention(q, sequences.k_pool, sequences.v_pool, plan_ragged(parts, 16, CPU))
    for i, part in enumerate(parts):
        alone = paged_attention(q[i : i + 1], sequences.k_pool, sequences.v_pool, plan_ragged([part], 16, CPU))
        assert torch.equal(alone[0], together[i])


def test_slots_follow_the_block_table() -> None:
    ragged = plan_ragged([Part(14, 4, [7, 2]), Part(0, 1, [5])], 16, CPU)
    assert ragged.slots.tolist() == [7 * 16 + 14, 7 * 16 + 15, 2 * 16, 2 * 16 + 1, 5 * 16]


def test_a_table_longer_than_needed_is_cut() -> None:
    table = list(range(9, 0, -1))
    (group,) = plan_ragged([Part(20, 1, table)], 16, CPU).groups
    assert group.blocks.tolist() == [9, 8] and group.keys == 32
