"""Matrix products between activations in one dtype and weights held in another. Knows no model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

FEW_ROWS = 2  # up to here a product reads weights faster than it could widen them
FEW_LOGIT_ROWS = 12
TABLE_ROWS = 2048  # rows of an embedding widened at a time


class Products:
    """Computes products in float32 or in the weights' own dtype, whichever is right and then fast.

    Weights held in bfloat16 are widened, matrix by matrix, into one reusable float32 scratch when the
    activations are float32, and also for bfloat16 activations on a CPU that only emulates bfloat16
    arithmetic. That costs a pass over the weights each step (0.2 ns a weight on two cores, 25 ms for 135M of
    them) and a scratch as large as the largest matrix; no float32 copy of the model is kept. As few and many
    rows take different ways, a bfloat16 row may differ in its last bits with the size of the step; sums are
    in float32 on either way.
    """

    def __init__(self, widest: int, device: torch.device) -> None:
        emulated = device.type == "cpu" and not torch.cpu.get_capabilities().get("avx512_bf16", False)
        self._narrow_is_slow = emulated
        self._scratch = torch.empty(widest, dtype=torch.float32, device=device)

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x @ weight`` for ``[tokens, in]`` and ``[in, out]``, in the dtype of ``x``."""
        if self._direct(x, weight, FEW_ROWS):
            return torch.mm(x, weight)
        return torch.mm(x.float(), self._widen(weight)).to(x.dtype)

    def logits(self, x: Tensor, table: Tensor) -> Tensor:
        """``x @ tableᵀ`` for ``[rows, hidden]`` and ``[vocab, hidden]``: float32 ``[rows, vocab]``."""
        if self._direct(x, table, FEW_LOGIT_ROWS):
            return functional.linear(x, table).float()
        columns = x.t().float().contiguous()
        out = torch.empty(table.shape[0], x.shape[0], device=x.device)
        for part, target in zip(torch.split(table, TABLE_ROWS), torch.split(out, TABLE_ROWS), strict=True):
            torch.mm(self._widen(part), columns, out=target)
        return out.t().contiguous()

    def _direct(self, x: Tensor, weight: Tensor, few: int) -> bool:
        if x.dtype != weight.dtype:
            return False
        return weight.dtype == torch.float32 or not self._narrow_is_slow or x.shape[0] <= few

    def _widen(self, weight: Tensor) -> Tensor:
        if weight.dtype == torch.float32:
            return weight
        return self._scratch[: weight.numel()].view(weight.shape).copy_(weight)
