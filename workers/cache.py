"""The paged pool of keys and values: one tensor per layer and kind, in blocks of 16 tokens.

It only holds memory; which block belongs to whom is the scheduler's affair.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from baton.workers.model.config import ModelConfig

BLOCK_SIZE = 16
RESERVE_BYTES = 256 << 20  # of available memory, left to everything else


class MemoryBudgetError(Exception):
    """The pool asked for does not fit; one line: what it needs, what there is, the largest that fits."""


class KvLayout(msgspec.Struct, frozen=True):
    """What another process must know of the pool: its geometry. ``bytes_per_block`` spans all layers."""

    block_size: int
    blocks: int
    bytes_per_block: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str


def bytes_per_block(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return 2 * config.layers * BLOCK_SIZE * config.kv_heads * config.head_dim * dtype.itemsize


def blocks_for_bytes(config: ModelConfig, dtype: torch.dtype, kv_bytes: int) -> int:
    """How many blocks ``kv_bytes`` hold."""
    return kv_bytes // bytes_per_block(config, dtype)


class KvPool:
    """Keys and values of every layer, ``[blocks, block_size, kv_heads, head_dim]`` each; its size never
    changes.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, blocks: int, device: torch.device) -> None:
        each = bytes_per_block(config, dtype)
        available = available_bytes(device)
        fitting = max(available - RESERVE_BYTES, 0) // each
        if blocks < 1:
            raise MemoryBudgetError(f"the KV cache is too small: one block takes {each} bytes, up to {fitting} fit")
        if blocks > fitting:
            raise MemoryBudgetError(
                f"the KV pool of {blocks} blocks needs {blocks * each} bytes, {available} are available; "
                f"from 1 to {fitting} blocks ({fitting * each} bytes) fit"
            )
        shape = (config.layers, 2, blocks, BLOCK_SIZE, config.kv_heads, config.head_dim)
        self._pool = _zeros(blocks * each, device).view(dtype).view(shape)
        self.keys: list[Tensor] = list(self._pool[:, 0])
        self.values: list[Tensor] = list(self._pool[:, 1])
        self.layout = KvLayout(
            block_size=BLOCK_SIZE,
            blocks=blocks,
            bytes_per_block=each,
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=str(dtype).removeprefix("torch."),
        )

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero ``blocks`` in every layer, as a sequence must have it that begins to write them.

        Attention reads the unwritten rest of a block under a mask, and what cannot be masked are the
        infinities a former owner may have left there.
        """
        if blocks:
            self._pool.index_fill_(2, torch.tensor(blocks, device=self._pool.device), 0.0)


def _zeros(size: int, device: torch.device) -> Tensor:
    """Zeroed bytes; on the CPU, huge pages (where there are) that the kernel zeroes when first touched."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without huge pages
        region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8)


def available_bytes(device: torch.device) -> int:
    """Memory this process may still take: the device's, or the least of the machine's and its control
    group's.
    """
    if device.type != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists() and (limit := (group / "memory.max").read_text().strip()) != "max":
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(counts["inactive_file"])  # less what can be dropped
        available = min(available, int(limit) - used)
    return max(available, 0)
