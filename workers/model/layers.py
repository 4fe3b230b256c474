"""Matrix products between activations in one dtype and weights held in another. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

FEW_ROWS = 2  # up to here a product reads weights faster than it could widen them
FEW_LOGIT_ROWS = 12
TABLE_ROWS = 2048  # rows of an embedding widened at a time
PACKED_FOR_ROWS = 32  # the size of product that oneDNN is asked to lay weights out for


@dataclass(frozen=True, slots=True)
class Held:
    """A weight as products want it: oneDNN's own layout where it has one for it, else as it was, ``[in, out]``."""

    plain: Tensor | None
    packed: Tensor | None


class Products:
    """Computes products in float32 or in the weights' own dtype, whichever is right and then fast.

    On a CPU with bfloat16 instructions products of bfloat16 are oneDNN's, whose layout of the weights is made once.
    Weights held in bfloat16 are widened, matrix by matrix, into one reusable float32 scratch when the activations are
    float32, and also for bfloat16 activations on a CPU that only emulates bfloat16 arithmetic. That costs a pass over
    the weights each step (0.2 ns a weight on two cores, 25 ms for 135M of them) and a scratch as large as the largest
    matrix; no float32 copy of the model is kept. As few and many rows take different ways, a bfloat16 row may differ
    in its last bits with the size of the step; sums are in float32 on either way.
    """

    def __init__(self, widest: int, device: torch.device, dtype: torch.dtype) -> None:
        """``widest`` is the largest matrix in weights, ``dtype`` that of activations."""
        native = bool(torch.cpu.get_capabilities().get("avx512_bf16", False))
        self._narrow_is_slow = device.type == "cpu" and not native
        packs: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self.packs = device.type == "cpu" and native and dtype == torch.bfloat16 and packs
        self._scratch = torch.empty(widest, dtype=torch.float32, device=device)

    def hold(self, weight: Tensor) -> Held:
        """A weight, ``[in, out]``, ready for products."""
        if self.packs and weight.dtype == torch.bfloat16:
            turned = weight.t().contiguous()
            return Held(None, torch.ops.mkldnn._reorder_linear_weight(turned, PACKED_FOR_ROWS))
        return Held(weight, None)

    def hold_table(self, table: Tensor) -> Held:
        """An embedding, ``[vocab, hidden]``, ready for logits."""
        if self.packs and table.dtype == torch.bfloat16:
            return Held(None, torch.ops.mkldnn._reorder_linear_weight(table, PACKED_FOR_ROWS))
        return Held(table, None)

    def project(self, x: Tensor, held: Held) -> Tensor:
        """``x @ weight`` for ``[tokens, in]`` and ``[in, out]``, in the dtype of ``x``."""
        if held.packed is not None:
            return _packed(x, held.packed)
        weight = _plain(held)
        if self._direct(x, weight, FEW_ROWS):
            return torch.mm(x, weight)
        return torch.mm(x.float(), self._widen(weight)).to(x.dtype)

    def logits(self, x: Tensor, held: Held) -> Tensor:
        """``x @ tableᵀ`` for ``[rows, hidden]`` and ``[vocab, hidden]``: float32 ``[rows, vocab]``."""
        if held.packed is not None:
            return _packed(x, held.packed).float()
        table = _plain(held)
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


def _packed(x: Tensor, packed: Tensor) -> Tensor:
    made: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
    return made


def _plain(held: Held) -> Tensor:
    assert held.plain is not None
    return held.plain
