"""The operations between a step's matrix products in as few torch operators as there are, for bfloat16 on a CPU.

With one row an operator's dispatch takes longer than its arithmetic, so fewer of them is what makes a step fast: views
and buffers are made once a step and not in every layer, keys and values are fetched together, and attention reads them
as they are held. Types change by copies into such buffers, for operators that take two types make theirs anew.
Each operation is tested against ``kernels.reference``. Rows are independent of each other, but in the products between.
Nothing here knows a model's weights, a request or a file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.reference import Group, Ragged


def quarter_blocks(keys: int, block_size: int) -> int:
    """Blocks gathered for one query over ``keys`` keys: the next of 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20 ...

    A function of ``keys`` alone, as ``reference.padded_blocks`` is; at most a quarter is gathered in vain.
    """
    blocks = -(-keys // block_size)
    unit = 1 << max(0, (blocks - 1).bit_length() - 3)
    return -(-blocks // unit) * unit


def interleaved(matrix: Tensor, heads: int, head_dim: int) -> Tensor:
    """A matrix ``[in, out]`` whose first ``heads * head_dim`` columns give the pairs ``(i, i + head_dim/2)`` of each
    head side by side, as ``LeanStep`` turns them; the scores of queries and keys so ordered are the same.
    """
    turned, rest = matrix[:, : heads * head_dim], matrix[:, heads * head_dim :]
    pairs = turned.reshape(-1, heads, 2, head_dim // 2).transpose(2, 3)
    return torch.cat((pairs.reshape(turned.shape), rest), 1)


@dataclass(frozen=True, slots=True)
class Attended:
    """A group's share of a step's buffers."""

    blocks: Tensor  # those of its keys, then those of its values
    fetched: Tensor  # [blocks, block_size, kv_heads, head_dim], both in one
    queries: Tensor  # as attention takes them, and keys and values, too
    keys: Tensor
    values: Tensor
    mask: Tensor | None
    seen: Tensor  # its place in what the step's queries saw


class LeanStep:
    """The buffers of one step, of ``tokens`` tokens; what a method returns is good until it is called again.

    ``states`` is the residual sum, float32 ``[tokens, hidden]``.
    """

    def __init__(
        self, ragged: Ragged, angles: Tensor, pool: Tensor, heads: int, hidden: int, intermediate: int, eps: float
    ) -> None:
        """``angles`` are those of ``reference.rope`` as complex numbers, ``[tokens, head_dim / 2]``; ``pool`` is any
        layer's ``[2 * blocks, block_size, kv_heads, head_dim]``, first the blocks of keys and then those of values.
        """
        tokens = len(ragged.positions)
        block_size, kv_heads, head_dim = pool.shape[1:]
        # The length of such a row is the root of the sum of squares and of eps for each of them.
        self._rows = torch.full((tokens, hidden + 1), math.sqrt(hidden * eps))
        self.states = self._rows[:, :hidden]
        self._length, self._scratch = torch.empty(tokens, 1), torch.empty(tokens, hidden)
        self._normed = torch.empty(tokens, hidden, dtype=torch.bfloat16)
        self._gate_up = torch.empty(tokens, 2 * intermediate)
        self._gate, self._up = self._gate_up.chunk(2, 1)
        self._activated = torch.empty(tokens, intermediate, dtype=torch.bfloat16)
        self._wide = torch.empty(tokens, heads + 2 * kv_heads, head_dim)
        pairs = self._wide.view(*self._wide.shape[:2], head_dim // 2, 2)[:, : heads + kv_heads]
        self._pairs, self._angles = torch.view_as_complex(pairs), angles[:, None]
        self._heads = torch.empty(self._wide.shape, dtype=torch.bfloat16)
        self._kv = self._heads[:, heads:].view(tokens, 2, kv_heads, head_dim)
        self._slots = torch.stack((ragged.slots, ragged.slots + len(pool) // 2 * block_size), 1)
        self._seen = torch.empty(tokens, heads * head_dim, dtype=torch.bfloat16)
        most = 2 * max(len(group.blocks) for group in ragged.groups)
        fetched = torch.empty(most, *pool.shape[1:], dtype=torch.bfloat16)
        self._groups = [self._attended(group, fetched, len(pool) // 2) for group in ragged.groups]

    def _attended(self, group: Group, fetched: Tensor, blocks: int) -> Attended:
        kv_heads, head_dim = fetched.shape[2:]
        tokens = slice(group.first, group.first + group.sequences * group.queries)
        fetched = fetched[: 2 * len(group.blocks)]
        keys, values = fetched.view(2, group.sequences, -1, kv_heads, head_dim)[:, :, : group.keys].transpose(2, 3)
        queries = self._heads[tokens, : -2 * kv_heads]
        seen = self._seen[tokens].view(queries.shape)
        if group.queries == 1:  # the heads that share a key stand in for queries, so that each key is read once
            shape = (group.sequences, kv_heads, -1, head_dim)
            queries, seen = queries.view(shape), seen.view(shape)
        else:
            queries, seen = queries.transpose(0, 1)[None], seen.transpose(0, 1)[None]
        both = torch.cat((group.blocks, group.blocks + blocks))
        return Attended(both, fetched, queries, keys, values, group.mask, seen)

    def normed(self, weight: Tensor) -> Tensor:
        """``reference.rms_norm`` of the states, bfloat16; ``weight`` is the norm's times the root of ``hidden``."""
        torch.linalg.vector_norm(self._rows, 2, -1, True, out=self._length)
        torch.div(self.states, self._length, out=self._scratch).mul_(weight)
        return self._normed.copy_(self._scratch)

    def add(self, product: Tensor) -> None:
        """Add a product, bfloat16 ``[tokens, hidden]``, to the states."""
        self.states.add_(self._scratch.copy_(product))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``reference.silu_mul`` of bfloat16 ``[tokens, 2 * intermediate]``, and as exact."""
        self._gate_up.copy_(gate_up)
        return self._activated.copy_(functional.silu(self._gate, True).mul_(self._up))

    def attention(self, qkv: Tensor, pool: Tensor) -> Tensor:
        """Turn queries and keys, store keys and values in ``pool``, and attend: ``[tokens, heads * head_dim]``.

        ``qkv`` is the product with ``interleaved`` weights, bfloat16. As ``reference.rope``, ``store_kv`` and
        ``paged_attention``, in that order; sums are in float32, weights of values are rounded to bfloat16.
        """
        self._wide.copy_(qkv.view(self._wide.shape))
        self._pairs.mul_(self._angles)
        self._heads.copy_(self._wide)
        pool.flatten(0, 1).index_put_((self._slots,), self._kv)
        for group in self._groups:
            torch.index_select(pool, 0, group.blocks, out=group.fetched)
            group.seen.copy_(
                functional.scaled_dot_product_attention(
                    group.queries,
                    group.keys,
                    group.values,
                    attn_mask=group.mask,
                    is_causal=group.mask is None,
                    enable_gqa=group.queries.shape[1] != group.keys.shape[1],
                )
            )
        return self._seen
