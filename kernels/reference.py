"""Every operation of the model in plain torch: the truth other kernels are tested against, and the fallback.

The signatures are those the faster kernels keep: the tokens of all sequences of a step lie one after another
in one ragged batch, keys and values live in a paged pool, and a ``Ragged`` says which token belongs where.
Nothing here knows a model, a request or a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.upload import upload


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's share of a step: ``count`` tokens from position ``start``, over its block ``table``."""

    start: int
    count: int
    table: Sequence[int]


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that attend in one call: either several with one query each, or one with several queries."""

    first: int  # index of the group's first token in the step
    sequences: int
    queries: int  # a sequence
    keys: int  # a sequence, those gathered in vain included
    blocks: Tensor  # [sequences * blocks a sequence], the padded block tables one after another
    mask: Tensor | None  # additive, float32 [sequences, 1, queries, keys]; None: queries are all the keys


@dataclass(frozen=True, slots=True)
class Ragged:
    """Where the tokens of one step lie."""

    positions: Tensor  # [tokens], absolute within each sequence
    slots: Tensor  # [tokens], place in the pool: block * block_size + offset within the block
    groups: tuple[Group, ...]


def padded_blocks(keys: int, block_size: int) -> int:
    """Blocks gathered for one query over ``keys`` keys: the next power of two, a function of ``keys`` alone.

    So a sequence's arithmetic does not depend on how long its neighbours in the step are.
    """
    return 1 << (-(-keys // block_size) - 1).bit_length()


def plan_ragged(
    parts: Sequence[Part],
    block_size: int,
    device: torch.device,
    padded: Callable[[int, int], int] = padded_blocks,
) -> Ragged:
    """Lay out a step whose tokens follow one another in the order of ``parts``.

    Neighbours with a single token and the same padded length share a group: sort by ``padded`` to get few.
    """

    def kind(numbered: tuple[int, Part]) -> tuple[int, int]:
        index, part = numbered
        return (0, padded(part.start + 1, block_size)) if part.count == 1 else (1, index)

    positions: list[int] = []
    slots: list[int] = []
    groups: list[Group] = []
    for (chunk, width), run in groupby(enumerate(parts), kind):
        members = [part for _, part in run]
        first = len(positions)
        for part in members:
            span = range(part.start, part.start + part.count)
            assert part.count > 0 and span.stop <= len(part.table) * block_size, part
            positions.extend(span)
            slots.extend(part.table[p // block_size] * block_size + p % block_size for p in span)
        build = _prefill_group if chunk else _decode_group
        groups.append(build(first, members, width, block_size, device))
    return Ragged(upload(positions, device), upload(slots, device), tuple(groups))


def _decode_group(first: int, members: list[Part], width: int, block_size: int, device: torch.device) -> Group:
    keys = width * block_size
    lengths = upload([part.start + 1 for part in members], device)
    tables = []
    for part in members:
        own = list(part.table[: part.start // block_size + 1])
        # Padding repeats the sequence's first block: what is wrong there is wrong with that one alone.
        tables += own + own[:1] * (width - len(own))
    blocks = upload(tables, device)
    unseen = torch.arange(keys, device=device) >= lengths[:, None]
    mask = torch.zeros(unseen.shape, device=device).masked_fill_(unseen, float("-inf"))
    return Group(first, len(members), 1, keys, blocks, mask[:, None, None, :])


def _prefill_group(first: int, members: list[Part], _: int, block_size: int, device: torch.device) -> Group:
    (part,) = members
    keys = part.start + part.count
    blocks = upload(list(part.table[: -(-keys // block_size)]), device)
    mask = None
    if part.start > 0:
        ahead = torch.full((part.count, keys), float("-inf"), device=device)
        mask = ahead.triu_(part.start + 1)[None, None]
    return Group(first, 1, part.count, keys, blocks, mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """``x / sqrt(mean(x², last) + eps) * weight`` over float32 ``[tokens, hidden]``, rounded once, to
    ``dtype``.

    Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, eq. 4.
    """
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale).mul_(weight).to(dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs ``(i, i + head_dim/2)`` of ``[tokens, heads, head_dim]``; computed in float32.

    ``cos`` and ``sin`` are float32 ``[tokens, head_dim]``: the angles of a token twice, the sine's first half
    negated. Su et al., RoFormer, 2021, section 3.4.2, in the layout of rotated halves.
    """
    turned = torch.roll(x, x.shape[-1] // 2, -1)
    return (x * cos[:, None]).addcmul_(turned, sin[:, None]).to(x.dtype)


def silu_mul(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[tokens, 2 * intermediate]`` (gate first): ``[tokens, intermediate]``.

    Shazeer, GLU Variants Improve Transformer, 2020, section 2.
    """
    gate, up = x.float().chunk(2, -1)
    return (functional.silu(gate) * up).to(x.dtype)


def store_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """Write ``[tokens, kv_heads, head_dim]`` into the pools ``[blocks, block_size, kv_heads, head_dim]``."""
    k_pool.flatten(0, 1).index_copy_(0, slots, k)
    v_pool.flatten(0, 1).index_copy_(0, slots, v)


def paged_attention(q: Tensor, k_pool: Tensor, v_pool: Tensor, ragged: Ragged) -> Tensor:
    """Causal grouped-query attention of ``[tokens, heads, head_dim]`` over the pools; same shape and dtype
    back.

    ``softmax(q kᵀ / sqrt(head_dim)) v`` per sequence, accumulated in float32 whatever the pool holds. Places
    gathered in vain (a table's padding, the unwritten rest of a sequence's last block) are masked, but must
    hold finite numbers, for zero times infinity is not zero: a block is cleared when a sequence begins to
    write it. Vaswani et al., 2017, section 3.2.1; Ainslie et al., GQA, 2023.
    """
    out = torch.empty_like(q)
    kv_heads, head_dim = k_pool.shape[2:]
    for group in ragged.groups:
        tokens = slice(group.first, group.first + group.sequences * group.queries)
        shape = (group.sequences, -1, kv_heads, head_dim)
        k, v = (
            pool.index_select(0, group.blocks).view(shape)[:, : group.keys].transpose(1, 2).float()
            for pool in (k_pool, v_pool)
        )
        if group.queries == 1:  # the heads that share a key stand in for queries, so that each key is read once
            query = q[tokens].view(group.sequences, kv_heads, -1, head_dim).float()
            seen = functional.scaled_dot_product_attention(query, k, v, attn_mask=group.mask)
        else:
            query = q[tokens].transpose(0, 1)[None].float()
            seen = functional.scaled_dot_product_attention(
                query, k, v, attn_mask=group.mask, is_causal=group.mask is None, enable_gqa=True
            ).transpose(1, 2)
        out[tokens] = seen.reshape(-1, *q.shape[1:])
    return out
