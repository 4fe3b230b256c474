"""Matrices in the order in which the C++ kernels read them (``cpu/abi.h``), made with torch.

A matrix is ``[out, in]``. What comes back is bytes, ``[panels, bytes of a panel]``: 32 outputs a panel, the last one
filled up with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.native import BF16, INT8, PANEL, Q4, Q8

GROUP_INT8 = 64
GROUP_GGUF = 32


@dataclass(frozen=True, slots=True)
class Blocks:
    """A GGUF tensor of 32-weight blocks as it comes: weight = ``d * q + m`` (Q4) or ``d * q`` (Q8).

    ``q`` is uint8 ``[out, in]`` of 0..15, or int8; ``d`` and ``m`` are float16 ``[out, in / 32]``, ``m`` None for Q8.
    """

    q: Tensor
    d: Tensor
    m: Tensor | None

    @property
    def kind(self) -> int:
        """``BatonKind``."""
        return Q8 if self.m is None else Q4

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.q.shape[0], self.q.shape[1]

    def rows(self, order: Tensor) -> Blocks:
        """The same rows in another order."""
        return Blocks(self.q[order], self.d[order], None if self.m is None else self.m[order])

    def dequantised(self) -> Tensor:
        """float32 ``[out, in]``."""
        d = self.d.float().repeat_interleave(GROUP_GGUF, 1)
        return self.q.float() * d + (0.0 if self.m is None else self.m.float().repeat_interleave(GROUP_GGUF, 1))


def stack(parts: list[Blocks]) -> Blocks:
    """Matrices of one kind under one another."""
    m = None if parts[0].m is None else torch.cat([part.m for part in parts if part.m is not None])
    return Blocks(torch.cat([part.q for part in parts]), torch.cat([part.d for part in parts]), m)


def interleave(count: int) -> Tensor:
    """The order of ``2 * count`` rows, gates then ups, that puts 16 of each in turn; ``count`` a multiple of 16."""
    rows = torch.arange(2 * count).view(2, count // 16, 16)
    return rows.transpose(0, 1).reshape(-1)


def pack(kind: int, weight: Tensor | Blocks) -> Tensor:
    """The panels of a matrix held as ``kind``; ``Blocks`` come as their own."""
    if isinstance(weight, Blocks):
        assert kind == weight.kind
        return _pack_q8(weight) if weight.m is None else _pack_q4(weight)
    return _pack_int8(weight) if kind == INT8 else _pack_bf16(weight)


def kind_of(weights: str, weight: Tensor | Blocks) -> int:
    """``BatonKind`` of a matrix where ``--weights`` says ``weights``."""
    if isinstance(weight, Blocks):
        return weight.kind
    return INT8 if weights == "int8" else BF16


def _whole_panels(values: Tensor) -> Tensor:
    return functional.pad(values, (0, 0, 0, -values.shape[0] % PANEL))


def _bytes(values: Tensor, panels: int) -> Tensor:
    return values.contiguous().view(torch.uint8).view(panels, -1)


def _pack_bf16(weight: Tensor) -> Tensor:
    weight = _whole_panels(weight.to(torch.bfloat16))
    panels = weight.shape[0] // PANEL
    return _bytes(weight.view(panels, PANEL, -1, 2).transpose(1, 2), panels)


def _fours(unsigned: Tensor, panels: int) -> Tensor:
    """``[out, in]`` of bytes as ``[panels, in / 4, 32, 4]``."""
    return unsigned.view(panels, PANEL, -1, 4).transpose(1, 2)


def _pack_int8(weight: Tensor) -> Tensor:
    weight = _whole_panels(weight.float())
    panels = weight.shape[0] // PANEL
    scale = weight.abs().amax(1) / 127
    q = (weight / scale.clamp_min(1e-30)[:, None]).round_().clamp_(-127, 127)
    q = functional.pad(q, (0, -q.shape[1] % GROUP_INT8))
    values = _bytes(_fours((q + 128).to(torch.uint8), panels), panels)
    return torch.cat((values, _bytes(scale, panels)), 1)


def _scales(values: Tensor, panels: int) -> Tensor:
    """float16 ``[out, groups]`` as bytes ``[panels, groups, 64]``."""
    grouped = _whole_panels(values).view(panels, PANEL, -1).transpose(1, 2).contiguous()
    return grouped.view(torch.uint8).view(panels, -1, 2 * PANEL)


def _pack_q8(blocks: Blocks) -> Tensor:
    q = _whole_panels(blocks.q)
    panels = q.shape[0] // PANEL
    values = _fours((q.int() + 128).to(torch.uint8), panels).contiguous()
    d = _scales(blocks.d, panels)
    return torch.cat((values.view(panels, d.shape[1], -1), d), 2).view(panels, -1)


def _pack_q4(blocks: Blocks) -> Tensor:
    assert blocks.m is not None
    q = _whole_panels(blocks.q)
    panels = q.shape[0] // PANEL
    # panel, half of the columns, column, group, half of the inputs, four, input
    apart = q.view(panels, 2, 16, -1, 2, 4, 4).permute(0, 3, 4, 1, 5, 2, 6)
    d, m = _scales(blocks.d, panels), _scales(blocks.m, panels)
    nibbles = (apart[:, :, 0] | (apart[:, :, 1] << 4)).contiguous().view(panels, d.shape[1], -1)
    return torch.cat((nibbles, d, m), 2).view(panels, -1)
