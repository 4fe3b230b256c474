"""The operations in few operators against the reference, in bfloat16, on shapes nothing divides."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from baton.kernels.lean import LeanStep, interleaved, quarter_blocks
from baton.kernels.reference import (
    Part,
    Ragged,
    paged_attention,
    plan_ragged,
    rms_norm,
    rope,
    silu_mul,
    store_kv,
)

CPU = torch.device("cpu")
BLOCK_SIZE, EPS = 16, 1e-5
#: (heads, kv_heads, head_dim)
SHAPES = [(9, 3, 64), (4, 4, 80), (6, 2, 128), (5, 1, 10)]
#: whole prompts and parts of some, and rows that decode, alone and several of one width
STEPS = {
    "one decodes": ([99], [1]),
    "one begins": ([0], [1]),
    "several decode": ([36, 0, 15, 99, 31, 16, 43, 300], [1] * 8),
    "a prompt": ([0], [37]),
    "all of it": ([0, 36, 0, 16, 15, 99, 5, 0, 31, 40], [7, 1, 1, 5, 1, 1, 33, 16, 2, 1]),
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(found: Tensor, exact: Tensor, tolerance: float = 2**-7) -> None:
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact.float(), rtol=tolerance, atol=tolerance)


class Case:
    """A step over a pool that holds numbers everywhere, in blocks that lie anywhere."""

    def __init__(
        self,
        starts: list[int],
        counts: list[int],
        shape: tuple[int, int, int],
        hidden: int = 33,
        intermediate: int = 17,
    ) -> None:
        self.hidden, self.intermediate = hidden, intermediate
        self.heads, self.kv_heads, self.head_dim = shape
        tables = [-(-(s + c) // BLOCK_SIZE) for s, c in zip(starts, counts, strict=True)]
        self.blocks = sum(tables) + 2
        order = list(range(self.blocks))
        random.Random(1).shuffle(order)
        self.parts = [
            Part(s, c, [order.pop() for _ in range(n)]) for s, c, n in zip(starts, counts, tables, strict=True)
        ]
        self.pool = randn(2 * self.blocks, BLOCK_SIZE, self.kv_heads, self.head_dim, seed=2).bfloat16()
        self.ragged = plan_ragged(self.parts, BLOCK_SIZE, CPU, quarter_blocks)
        self.tokens = sum(counts)
        self.angles = self.ragged.positions[:, None] * 100.0 ** -(torch.arange(self.head_dim // 2) / self.head_dim)
        self.step = self.lean(self.ragged, self.angles)

    def lean(self, ragged: Ragged, angles: Tensor) -> LeanStep:
        sizes = self.heads, self.hidden, self.intermediate
        return LeanStep(ragged, torch.polar(torch.ones(()), angles), self.pool, *sizes, EPS)

    def qkv(self) -> tuple[Tensor, Tensor]:
        """What a product gives with plain weights, and with interleaved ones."""
        plain = randn(self.tokens, (self.heads + 2 * self.kv_heads) * self.head_dim, seed=3).bfloat16()
        return plain, interleaved(plain, self.heads + self.kv_heads, self.head_dim)

    def interleaved_pool(self) -> Tensor:
        """The pool as it is if its keys, too, came of interleaved weights."""
        rows = interleaved(self.pool.flatten(2).flatten(0, 1), self.kv_heads, self.head_dim).view(self.pool.shape)
        return torch.cat((rows[: self.blocks], self.pool[self.blocks :]))


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 576), (3, 7), (5, 129)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_norm(tokens: int, hidden: int, scale: float) -> None:
    step = Case([0], [tokens], (2, 1, 4), hidden).step
    weight = randn(hidden, seed=1)
    x = step.states.copy_(randn(tokens, hidden) * scale)
    near(step.normed(weight * math.sqrt(hidden)), rms_norm(x, weight, EPS, torch.bfloat16), 2**-8)


def test_norm_of_zero_is_zero() -> None:
    step = Case([0], [2], (2, 1, 4), 8).step
    step.states.zero_()
    assert not step.normed(torch.ones(8)).any()


@pytest.mark.parametrize(("tokens", "intermediate"), [(1, 1), (3, 1536), (7, 11)])
def test_silu_mul_is_the_references(tokens: int, intermediate: int) -> None:
    x = (randn(tokens, 2 * intermediate) * 10).bfloat16()
    step = Case([0], [tokens], (2, 1, 4), intermediate=intermediate).step
    assert torch.equal(step.silu_mul(x), silu_mul(x))


def test_a_product_is_added() -> None:
    step = Case([0], [3], (2, 1, 4), 7).step
    before, product = step.states.copy_(randn(3, 7)).clone(), randn(3, 7, seed=1).bfloat16()
    step.add(product)
    assert torch.equal(step.states, before + product)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_turns_stores_and_attends_as_the_reference_does(name: str, shape: tuple[int, int, int]) -> None:
    case = Case(*STEPS[name], shape)
    plain, ours = case.qkv()
    k_pool, v_pool = case.pool[: case.blocks].clone(), case.pool[case.blocks :].clone()
    pool = case.interleaved_pool()
    before = pool.clone()
    found = case.step.attention(ours, pool)

    heads = plain.view(case.tokens, -1, case.head_dim)
    q, k, v = heads.split([case.heads, case.kv_heads, case.kv_heads], 1)
    cos, sin = case.angles.cos(), case.angles.sin()
    cos, sin = torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)
    store_kv(rope(k, cos, sin), v, k_pool, v_pool, case.ragged.slots)
    near(found, paged_attention(rope(q, cos, sin), k_pool, v_pool, case.ragged).flatten(1), 2**-6)

    assert torch.equal(pool[case.blocks :], v_pool), "values are stored as they are"
    case.pool[: case.blocks] = k_pool
    near(pool[: case.blocks], case.interleaved_pool()[: case.blocks], 2**-7)
    written = torch.zeros(case.blocks * BLOCK_SIZE, dtype=torch.bool)
    written[case.ragged.slots] = True
    same = (pool == before).flatten(2).all(2).view(2, -1)
    assert same[:, ~written].all(), "no other place is touched"


def test_what_a_former_owner_left_in_other_blocks_reaches_nobody() -> None:
    case = Case(*STEPS["several decode"], (9, 3, 64))
    _, ours = case.qkv()
    expected = case.step.attention(ours, case.pool.clone()).clone()
    pool = case.pool.clone()
    mine = {block for part in case.parts for block in part.table}
    for block in set(range(case.blocks)) - mine:
        pool[[block, case.blocks + block]] = torch.nan
    assert torch.equal(case.step.attention(ours, pool), expected)


def test_a_row_is_the_same_bit_for_bit_whoever_is_in_its_step() -> None:
    case = Case(*STEPS["several decode"], (9, 3, 64))
    _, ours = case.qkv()
    together = case.step.attention(ours, case.pool.clone()).clone()
    for i, part in enumerate(case.parts):
        step = case.lean(plan_ragged([part], BLOCK_SIZE, CPU, quarter_blocks), case.angles[i : i + 1])
        assert torch.equal(step.attention(ours[i : i + 1], case.pool.clone())[0], together[i])


def test_quarter_blocks_cover_and_waste_no_more_than_a_quarter() -> None:
    found = [quarter_blocks(keys, 1) for keys in range(1, 2000)]
    assert all(keys <= blocks <= max(keys, 1.25 * keys) for keys, blocks in enumerate(found, 1))
    assert sorted(set(found))[:14] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24]
    assert quarter_blocks(33, 16) == 3
