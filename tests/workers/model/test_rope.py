"""Stretched rotary frequencies against values from an independent implementation."""

from __future__ import annotations

import msgspec
import pytest
import torch

from baton.workers.model.config import ModelConfig, RopeScaling
from baton.workers.model.rope import Rope, frequencies
from tests.workers.test_kv_pool import CONFIG


def config(theta: float, scaling: RopeScaling, head_dim: int = 64) -> ModelConfig:
    return msgspec.structs.replace(CONFIG, rope_theta=theta, rope_scaling=scaling, head_dim=head_dim)


def test_plain_frequencies_fall_geometrically() -> None:
    found, scale = frequencies(config(10000.0, RopeScaling("none")), None)
    assert scale == 1.0
    assert found.tolist() == pytest.approx([10000.0 ** (-i / 32) for i in range(32)], rel=1e-6)


def test_linear_scaling_divides_all() -> None:
    plain, _ = frequencies(config(10000.0, RopeScaling("none")), None)
    found, scale = frequencies(config(10000.0, RopeScaling("linear", 4.0)), None)
    assert torch.equal(found, plain / 4) and scale == 1.0


def test_factors_divide_each() -> None:
    plain, _ = frequencies(config(500000.0, RopeScaling("none")), None)
    factors = torch.linspace(1, 8, 32)
    found, scale = frequencies(config(500000.0, RopeScaling("factors")), factors)
    assert torch.equal(found, plain / factors) and scale == 1.0


@pytest.mark.parametrize(
    ("theta", "factor", "original", "expected_scale", "expected"),
    [
        (
            1e4,
            4.0,
            2048,
            1.13862944,
            [0.237137362, 0.0243252143, 0.00538461516, 0.000973008573, 3.33380376e-05],
        ),
        (
            1e6,
            16.0,
            4096,
            1.27725887,
            [0.115478203, 0.00246024318, 6.2500003e-05, 1.11142463e-05, 9.62454081e-08],
        ),
        (
            5e5,
            2.0,
            8192,
            1.06931472,
            [0.128687382, 0.00607722066, 0.000864241505, 0.000137124094, 1.50692904e-06],
        ),
    ],
)
def test_yarn(theta: float, factor: float, original: int, expected_scale: float, expected: list[float]) -> None:
    """Dimensions 5, 12, 16, 20 and 31 as Hugging Face transformers 5.24 computes them."""
    found, scale = frequencies(config(theta, RopeScaling("yarn", factor, original)), None)
    assert scale == pytest.approx(expected_scale)
    assert found[[5, 12, 16, 20, 31]].tolist() == pytest.approx(expected, rel=1e-5)


def test_tables_repeat_the_angles_and_negate_the_first_sines() -> None:
    rope = Rope(config(10000.0, RopeScaling("none")), None, torch.device("cpu"))
    cos, sin = rope.tables(torch.tensor([0, 3]))
    assert torch.equal(cos[0], torch.ones(64)) and not sin[0].any()
    assert torch.equal(cos[1, :32], cos[1, 32:]) and torch.equal(sin[1, :32], -sin[1, 32:])
    assert cos[1, 0].item() == pytest.approx(-0.98999, abs=1e-5)
