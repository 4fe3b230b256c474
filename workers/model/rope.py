"""The angles of rotary position embeddings, with the ways of stretching them to longer contexts.

Sources: Su et al., RoFormer, 2021; Chen et al., Position Interpolation, 2023 (linear); Peng et al., YaRN,
2023, sections 3.2 to 3.4; frequency factors as GGUF files of Llama 3.1 carry them in ``rope_freqs.weight``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baton.workers.model.config import ModelConfig

YARN_BETA_FAST, YARN_BETA_SLOW = 32.0, 1.0  # rotations over the original context that bound YaRN's ramp


class Rope:
    """Turns positions into the cosines and sines that ``kernels.reference.rope`` takes."""

    def __init__(self, config: ModelConfig, factors: Tensor | None, device: torch.device) -> None:
        self.frequencies, self.scale = frequencies(config, factors)
        self.frequencies = self.frequencies.to(device)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, float32 ``[tokens, head_dim]``: the angles twice, the first half of the sine
        negated.
        """
        cos, sin = self._halves(positions)
        return torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)

    def complex_table(self, positions: Tensor) -> Tensor:
        """The same as complex numbers, ``[tokens, head_dim / 2]``: each pair times its number is the pair turned."""
        return torch.complex(*self._halves(positions))

    def _halves(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None] * self.frequencies
        return angles.cos() * self.scale, angles.sin() * self.scale


def frequencies(config: ModelConfig, factors: Tensor | None) -> tuple[Tensor, float]:
    """Radians a position, float32 ``[head_dim / 2]``, and the scale of both tables (1 but for YaRN)."""
    scaling, half = config.rope_scaling, config.head_dim // 2
    plain = 1.0 / config.rope_theta ** (torch.arange(half, dtype=torch.float32) / half)
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "factors":
        assert factors is not None
        return plain / factors, 1.0
    if scaling.kind == "yarn":
        return _yarn(plain, config), 0.1 * math.log(scaling.factor) + 1.0
    return plain, 1.0


def _yarn(plain: Tensor, config: ModelConfig) -> Tensor:
    """Fast dimensions keep their frequency, slow ones are interpolated, those between blended."""
    scaling, half = config.rope_scaling, config.head_dim // 2

    def dimension(rotations: float) -> float:
        turns = scaling.original_context / (rotations * 2 * math.pi)
        return half * math.log(turns) / math.log(config.rope_theta)

    low = max(math.floor(dimension(YARN_BETA_FAST)), 0)
    high = min(math.ceil(dimension(YARN_BETA_SLOW)), config.head_dim - 1)
    slow = ((torch.arange(half, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain * (1 - slow) + plain / scaling.factor * slow
