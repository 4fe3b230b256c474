"""The C++ kernels' attention on a pool of its own: what a former owner left in it, and parts that go on in it."""

from __future__ import annotations

import copy
import ctypes
import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.kernels.native import Layer, Model, Step, Team
from baton.kernels.reference import Part, paged_attention, plan_ragged, rope, store_kv
from tests.kernels.native_calls import UNTOUCHED, randn

BLOCK = 16
CPU = torch.device("cpu")


def native_keys(pool: Tensor) -> Tensor:
    """``[blocks, 16, kv_heads, head_dim]`` as the kernels lay keys out (``cpu/abi.h``)."""
    return pool.unflatten(3, (-1, 2)).permute(0, 2, 3, 1, 4).contiguous()


def native_values(pool: Tensor) -> Tensor:
    """The same of values."""
    return pool.unflatten(1, (-1, 2)).permute(0, 3, 1, 4, 2).contiguous()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two bfloat16 tensors are equal, NaNs too."""
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


class Attention:
    """A pool in which nothing was written, full of what is not finite, and the kernels that work on it."""

    def __init__(
        self, library: ctypes.CDLL, kv_heads: int, group: int, head_dim: int, blocks: int, scale: float = 1.0
    ) -> None:
        self.library, self.kv_heads, self.heads, self.head_dim = library, kv_heads, kv_heads * group, head_dim
        self.scale = scale
        self.frequencies = 10000.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2))
        self.width = -(-(self.heads + 2 * kv_heads) * head_dim // 32) * 32
        self.k = torch.full((blocks, BLOCK, kv_heads, head_dim), torch.nan, dtype=torch.bfloat16)
        self.k[:, ::3] = torch.inf
        self.v = self.k.clone()
        self.publish()

    def publish(self) -> None:
        """Bring what stands in ``k`` and ``v`` before the kernels."""
        self.keys, self.values = native_keys(self.k), native_values(self.v)

    def fork(self) -> Attention:
        """The same pool once more."""
        other = copy.copy(self)
        other.keys, other.values = self.keys.clone(), self.values.clone()
        return other

    def hold(self, table: Sequence[int], count: int, seed: int) -> None:
        """The first ``count`` tokens of a sequence were computed by earlier steps, as these would have left them."""
        for pool, first in ((self.k, 0), (self.v, 1)):
            known = randn(count, self.kv_heads, self.head_dim, seed=2 * seed + first).bfloat16()
            at = torch.arange(count)
            pool[torch.tensor(table, dtype=torch.int64)[at // BLOCK], at % BLOCK] = known
        if count % BLOCK:
            self.v[table[count // BLOCK], count % BLOCK :] = 0

    def fused(self, tokens: int, seed: int = 0) -> Tensor:
        """Queries, keys and values side by side, bfloat16 ``[tokens, width]``."""
        return randn(tokens, self.width, seed=seed).bfloat16()

    def rotated(self, fused: Tensor, positions: Tensor) -> Tensor:
        """What the reference makes of it."""
        angles = positions[:, None] * self.frequencies
        cos, sin = (torch.cat((t, t), 1) for t in (angles.cos() * self.scale, angles.sin() * self.scale))
        sin[:, : self.head_dim // 2] *= -1
        q, k, v = self.apart(fused)
        turned = rope(torch.cat((q, k), 1), cos, sin)
        return torch.cat(
            (turned.flatten(1), v.flatten(1), fused[:, (self.heads + 2 * self.kv_heads) * self.head_dim :]), 1
        )

    def apart(self, fused: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, ``[tokens, heads, head_dim]`` each."""
        heads = fused[:, : (self.heads + 2 * self.kv_heads) * self.head_dim].unflatten(1, (-1, self.head_dim))
        return heads.split((self.heads, self.kv_heads, self.kv_heads), 1)

    def store(self, fused: Tensor, parts: Sequence[Part]) -> Tensor:
        """``baton_rope_store``: the rotated ``fused``; keys and values enter the pool."""
        fused = fused.clone()
        self._call(None, self.library.baton_rope_store, fused, parts)
        return fused

    def attend(self, team: Team, fused: Tensor, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        """``baton_attention``: its answer, ``[tokens, heads, head_dim]``, and the rotated ``fused``."""
        fused = fused.clone()
        out = torch.full((len(fused) + 1, self.heads, self.head_dim), UNTOUCHED, dtype=torch.bfloat16)
        self._call(team, self.library.baton_attention, fused, parts, out)
        assert bool((out[-1] == UNTOUCHED).all()), "written beyond the last row"
        return out[:-1], fused

    def expected(self, fused: Tensor, parts: Sequence[Part]) -> Tensor:
        """What ``attend`` is to answer to a rotated ``fused``, float32; ``k`` and ``v`` are written."""
        ragged = plan_ragged(parts, BLOCK, CPU)
        q, k, v = self.apart(fused)
        for part in parts:
            begun = part.table[-(-part.start // BLOCK) : -(-(part.start + part.count) // BLOCK)]
            self.v[list(begun)[-1:], (part.start + part.count) % BLOCK or BLOCK :] = 0
        store_kv(k, v, self.k, self.v, ragged.slots)
        return paged_attention(q.float(), *(p.nan_to_num(0, 0, 0).float() for p in (self.k, self.v)), ragged)

    def holds_what_is_expected(self) -> bool:
        """Whether the kernels' pool is that of ``k`` and ``v``, bit for bit."""
        return same_bits(self.keys, native_keys(self.k)) and same_bits(self.values, native_values(self.v))

    def _call(self, team: Team | None, function: object, fused: Tensor, parts: Sequence[Part], *out: Tensor) -> None:
        assert callable(function)
        layer = (Layer * 1)(Layer(keys=self.keys.data_ptr(), values=self.values.data_ptr()))
        model = Model(
            *(1, 32, 32, self.heads, self.kv_heads, self.head_dim, 32),
            rope_scale=self.scale,
            rope_frequencies=self.frequencies.data_ptr(),
            layer=layer,
        )
        counts = np.array([part.count for part in parts])
        tables = np.array([len(part.table) for part in parts])
        part = np.stack((counts.cumsum() - counts, counts, [p.start for p in parts], tables.cumsum() - tables), 1)
        part, blocks = part.astype(np.int32), np.concatenate([part.table for part in parts]).astype(np.int32)
        assert len(fused) == counts.sum()
        need = self.library.baton_workspace_bytes(model, len(fused), 0, team.threads if team else 1)
        workspace = torch.empty(need, dtype=torch.uint8)
        step = Step(tokens=len(fused), parts=len(parts), part=part.ctypes.data, blocks=blocks.ctypes.data)
        step.workspace = workspace.data_ptr()
        before = () if team is None else (team.handle,)
        function(*before, fused.data_ptr(), *(o.data_ptr() for o in out), model, step, 0)


def shuffled(spans: Sequence[tuple[int, int]], spare: int = 3, seed: int = 0) -> tuple[list[Part], int]:
    """Parts of (start, count), each over blocks from anywhere in a pool; and the blocks there are."""
    tables = [-(-(start + count) // BLOCK) for start, count in spans]
    order = list(range(sum(tables) + spare))
    random.Random(seed).shuffle(order)
    parts = [
        Part(start, count, [order.pop() for _ in range(need)])
        for (start, count), need in zip(spans, tables, strict=True)
    ]
    return parts, sum(tables) + spare
