"""The C++ products against float64, whatever the weights' kind, the shape and the threads; rows are independent."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from baton.kernels.native import BF16, INT8, Q4, Q8, Team
from baton.kernels.packing import Blocks, interleave
from tests.kernels.native_calls import Linear, as_multiplied, dequantised, randn, some_weight

KINDS = pytest.mark.parametrize("kind", [BF16, INT8, Q8, Q4], ids=["bf16", "int8", "q8", "q4"])
ROWS = (1, 2, 3, 5, 12, 13, 33, 97, 200)
#: of what the products' magnitudes sum up to: float32 sums of up to 1536 inputs in one order
SUMMED = 5e-6
#: two roundings to bfloat16 at most: of the result, and of what is a half of it away
ROUNDED = 2**-8

#: outputs, inputs: panels that are not full, groups of int8 that are not full, narrow and wide
SHAPES = [(1, 32), (20, 64), (33, 96), (100, 576), (160, 1536), (64, 96)]


def activations(rows: int, inputs: int, seed: int = 1) -> Tensor:
    """Rows of very different sizes; the one before the last is zero."""
    x = randn(rows, inputs, seed=seed) * torch.logspace(-3, 3, rows)[:, None]
    if rows > 1:
        x[-2] = 0
    return x.bfloat16()


def assert_product(found: Tensor, x: Tensor, weight: Tensor) -> None:
    """``found`` is ``x @ weight`` of float64 up to the order of its sums."""
    bound = SUMMED * (x.abs() @ weight.abs().T) + 1e-30
    assert bool(((found.double() - x @ weight.T).abs() <= bound).all())


@KINDS
@pytest.mark.parametrize(("out", "inputs"), SHAPES)
def test_a_product_is_that_of_dequantised_weights_and_quantised_activations(
    native_library: ctypes.CDLL, teams: list[Team], kind: int, out: int, inputs: int
) -> None:
    linear, x = Linear(native_library, kind, some_weight(kind, out, inputs)), activations(max(ROWS), inputs)
    found = linear(teams[1], x)
    assert_product(found, as_multiplied(kind, x), dequantised(kind, linear.weight))
    assert not found[-2].any()


@KINDS
@pytest.mark.parametrize(("out", "inputs"), SHAPES)
def test_a_row_is_the_same_bit_for_bit_alone_and_among_any_number_of_rows_and_threads(
    native_library: ctypes.CDLL, teams: list[Team], kind: int, out: int, inputs: int
) -> None:
    linear, x = Linear(native_library, kind, some_weight(kind, out, inputs)), activations(max(ROWS), inputs)
    alone = torch.cat([linear(teams[0], row[None]) for row in x])
    for team in teams:
        for rows in ROWS:
            assert torch.equal(linear(team, x[:rows]), alone[:rows])
            assert torch.equal(linear(team, x[-rows:]), alone[-rows:])


def gate_and_up(kind: int, count: int, inputs: int) -> tuple[Tensor | Blocks, Tensor | Blocks]:
    """Both, gates first; and as the kernels want them, 16 of each in turn."""
    plain = some_weight(kind, 2 * count, inputs)
    order = interleave(count)
    return plain, plain.rows(order) if isinstance(plain, Blocks) else plain[order]


@KINDS
@pytest.mark.parametrize(("count", "inputs"), [(16, 32), (48, 96), (80, 64), (96, 576)])
def test_gates_close_what_goes_up(
    native_library: ctypes.CDLL, teams: list[Team], kind: int, count: int, inputs: int
) -> None:
    plain, turned = gate_and_up(kind, count, inputs)
    linear, x = Linear(native_library, kind, turned), activations(max(ROWS), inputs)
    gate, up = (as_multiplied(kind, x) @ dequantised(kind, plain).T).chunk(2, 1)
    alone = torch.cat([linear.silu(teams[0], row[None]) for row in x])
    torch.testing.assert_close(alone.double(), gate * gate.sigmoid() * up, rtol=ROUNDED, atol=1e-5)
    for team in teams:
        for rows in ROWS:
            assert torch.equal(linear.silu(team, x[:rows]), alone[:rows])


@KINDS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rows", [3, 13])
def test_a_row_that_is_not_finite_spoils_itself_and_no_other(
    native_library: ctypes.CDLL, teams: list[Team], kind: int, bad: float, rows: int
) -> None:
    count, inputs = 48, 96
    linear = Linear(native_library, kind, gate_and_up(kind, count, inputs)[1])
    clean = activations(rows, inputs)
    spoilt = clean.clone()
    spoilt[0, 41] = bad
    for function in (linear, linear.silu):
        before, after = function(teams[1], clean), function(teams[1], spoilt)
        assert torch.equal(before[1:], after[1:])
        assert not after[0].isfinite().any()


@KINDS
def test_what_nothing_finer_than_its_scale_is_left_of_is_zero(
    native_library: ctypes.CDLL, teams: list[Team], kind: int
) -> None:
    x = torch.full((1, 64), 1e-37, dtype=torch.bfloat16)
    assert bool((Linear(native_library, kind, some_weight(kind, 32, 64))(teams[0], x).abs() < 1e-35).all())
    zeros = torch.zeros(32, 64) if kind in (BF16, INT8) else some_weight(kind, 32, 64)
    if isinstance(zeros, Blocks):
        zeros = Blocks(zeros.q, zeros.d * 0, None if zeros.m is None else zeros.m * 0)
    assert not Linear(native_library, kind, zeros)(teams[0], activations(5, 64)).any()
