"""The C++ kernels' single operations, called with tensors, and in plain torch what they are to compute."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.native import BF16, INT8, PANEL, Q4, Q8, Matrix, Team
from baton.kernels.packing import GROUP_GGUF, GROUP_INT8, Blocks, pack

UNTOUCHED = -77.0  # stands beyond what a kernel may write


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_weight(kind: int, out: int, inputs: int, seed: int = 0) -> Tensor | Blocks:
    """A random matrix as such kernels get it."""
    if kind in (BF16, INT8):
        return randn(out, inputs, seed=seed) / inputs**0.5
    random = torch.Generator().manual_seed(seed)
    low, high = (-128, 128) if kind == Q8 else (0, 16)
    q = torch.randint(low, high, (out, inputs), generator=random).to(torch.int8 if kind == Q8 else torch.uint8)
    d = ((torch.rand(out, inputs // GROUP_GGUF, generator=random) + 0.1) / 100).half()
    return Blocks(q, d, (d * -7.5 + 0.01).half() if kind == Q4 else None)


def dequantised(kind: int, weight: Tensor | Blocks) -> Tensor:
    """The numbers that a matrix held as ``kind`` stands for, float64."""
    if isinstance(weight, Blocks):
        return weight.dequantised().double()
    if kind == BF16:
        return weight.bfloat16().double()
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().double() * scale.double()


def as_multiplied(kind: int, x: Tensor) -> Tensor:
    """bfloat16 activations as a matrix of ``kind`` is multiplied with them: quantised in groups; float64."""
    if kind == BF16:
        return x.double()
    group = GROUP_INT8 if kind == INT8 else GROUP_GGUF
    grouped = functional.pad(x.float(), (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    most = grouped.abs().amax(2, keepdim=True)
    by = torch.full_like(most, 127) / most  # a number by a tensor would be rounded twice
    q = (grouped * torch.where(most > 0, by, 0.0)).round()
    return (q.double() * (most / 127).double()).flatten(1)[:, : x.shape[1]]


@dataclass
class Linear:
    """A packed matrix to multiply with."""

    library: ctypes.CDLL
    kind: int
    weight: Tensor | Blocks

    def __post_init__(self) -> None:
        self.out, self.inputs = self.weight.shape
        self._panels = pack(self.kind, self.weight)
        self._matrix = Matrix(self.kind, self.out, self.inputs, 0, self._panels.data_ptr())
        assert self._panels.data_ptr() % 64 == 0

    def __call__(self, team: Team, x: Tensor) -> Tensor:
        """``x`` bfloat16 ``[rows, in]``: float32 ``[rows, out]``; the padding must be zero where ``x`` is finite."""
        width = -(-self.out // PANEL) * PANEL
        found = self._call(self.library.baton_linear, team, x, torch.full((len(x) + 1, width), UNTOUCHED))
        padding = found[x.isfinite().all(1), self.out :]
        assert not padding.any()
        return found[:, : self.out]

    def silu(self, team: Team, x: Tensor) -> Tensor:
        """``silu(gate) * up`` in bfloat16 ``[rows, out / 2]``."""
        out = torch.full((len(x) + 1, self.out // 2), UNTOUCHED, dtype=torch.bfloat16)
        return self._call(self.library.baton_silu_linear, team, x, out)

    def _call(self, function: Callable[..., None], team: Team, x: Tensor, out: Tensor) -> Tensor:
        x = x.contiguous()
        assert x.dtype == torch.bfloat16
        matrix = ctypes.byref(self._matrix)
        workspace = torch.empty(self.library.baton_linear_workspace_bytes(matrix, len(x)), dtype=torch.uint8)
        function(team.handle, matrix, x.data_ptr(), out.data_ptr(), len(x), workspace.data_ptr())
        assert bool((out[-1] == UNTOUCHED).all()), "written beyond the last row"
        return out[:-1]
