"""The paged pool of keys and values: one tensor per layer and kind, in blocks of 16 tokens; and its like on the host.

It only holds memory and moves it; which block belongs to whom is the scheduler's affair (``engine/blocks.py``).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from baton.engine.blocks import Move
from baton.kernels.upload import upload
from baton.workers.model.config import ModelConfig
from baton.workers.model.huge import huge_bytes

BLOCK_SIZE = 16
RESERVE_BYTES = 256 << 20  # of available memory, left to everything else
STAGING_BYTES = 16 << 20  # moved at a time, so that a long sequence needs no second pool beside the first

#: (source, destination)
Pairs = Sequence[tuple[int, int]]


class MemoryBudgetError(Exception):
    """The pool asked for does not fit; one line: what it needs, what there is, the largest that fits."""


class SwapDamaged(Exception):
    """A host block does not hold what was put there; one line that names it. What depends on it must be recomputed."""


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
    """Keys and values of every layer, ``[blocks, block_size, kv_heads, head_dim]`` each; its size never changes.

    ``host_blocks`` more are kept in host memory, pinned where the pool itself is on a device. With ``verify`` each
    block has a checksum while it is there.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        blocks: int,
        device: torch.device,
        *,
        host_blocks: int = 0,
        verify: bool = False,
    ) -> None:
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
        beside = blocks * each if device.type == "cpu" else 0  # not touched yet, so it still counts as available
        _check_host(host_blocks, each, available_bytes(torch.device("cpu")), beside)
        self.block_shape = (config.layers, 2, BLOCK_SIZE, config.kv_heads, config.head_dim)
        shape = (config.layers, 2, blocks, *self.block_shape[2:])
        self._pool = _zeros(blocks * each, device).view(dtype).view(shape)
        self._host = _host_zeros(host_blocks * each, device).view(dtype).view(host_blocks, *self.block_shape)
        self._sums: dict[int, int] | None = {} if verify else None
        self._staged = max(1, STAGING_BYTES // each)
        self.keys: list[Tensor] = list(self._pool[:, 0])
        self.values: list[Tensor] = list(self._pool[:, 1])
        #: of each layer ``[2 * blocks, block_size, kv_heads, head_dim]``: the blocks of keys, then those of values
        self.both: list[Tensor] = list(self._pool.flatten(1, 2))
        self.layout = KvLayout(
            block_size=BLOCK_SIZE,
            blocks=blocks,
            bytes_per_block=each,
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=str(dtype).removeprefix("torch."),
        )

    @property
    def host_blocks(self) -> int:
        """Blocks in host memory."""
        return self._host.shape[0]

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero ``blocks`` in every layer, as a sequence must have it that begins to write them.

        Attention reads the unwritten rest of a block under a mask, and what cannot be masked are the
        infinities a former owner may have left there.
        """
        if blocks:
            self._pool.index_fill_(2, self._numbers(blocks), 0.0)

    def move(self, moves: Iterable[tuple[int, int, int]]) -> None:
        """Carry out ``(kind, source, destination)`` (see ``engine.blocks.Move``) as if one after the other."""
        for kind, run in groupby(moves, lambda move: move[0]):
            pairs = [(source, destination) for _, source, destination in run]
            match Move(kind):
                case Move.COPY:
                    self.copy(pairs)
                case Move.OUT:
                    self.swap_out(pairs)
                case Move.IN:
                    self.swap_in(pairs)

    def copy(self, pairs: Pairs) -> None:
        """Copy blocks within the pool, all layers at once, as if one after the other."""
        for sources, destinations in self._batches(pairs, self.layout.blocks, self.layout.blocks, within=True):
            self._pool.index_copy_(2, self._numbers(destinations), self._gather(sources))

    def swap_out(self, pairs: Pairs) -> None:
        """Copy blocks to host blocks."""
        for sources, destinations in self._batches(pairs, self.layout.blocks, self.host_blocks):
            staged = self._gather(sources).movedim(2, 0).contiguous()
            for block, destination in zip(staged, destinations, strict=True):
                self._host[destination].copy_(block, non_blocking=self._sums is None)
            if self._sums is not None:
                self._sums.update({block: self._sum(block) for block in destinations})

    def swap_in(self, pairs: Pairs) -> None:
        """Copy host blocks back to blocks; with ``verify``, ``SwapDamaged`` where one is not what was swapped out."""
        for sources, destinations in self._batches(pairs, self.host_blocks, self.layout.blocks):
            for source in sources if self._sums is not None else ():
                self._check(source)
            staged = torch.empty((len(sources), *self.block_shape), dtype=self._pool.dtype, device=self._pool.device)
            for block, source in zip(staged, sources, strict=True):
                block.copy_(self._host[source], non_blocking=True)
            self._pool.index_copy_(2, self._numbers(destinations), staged.movedim(0, 2))

    def _batches(
        self, pairs: Pairs, sources: int, destinations: int, within: bool = False
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Pairs that can be moved at once: none reads or writes what an earlier one of its batch has written."""
        batch: dict[int, int] = {}  # destination -> source
        for source, destination in pairs:
            assert 0 <= source < sources, f"block {source} is moved, there are {sources}"
            assert 0 <= destination < destinations, f"block {destination} is moved to, there are {destinations}"
            if len(batch) == self._staged or destination in batch or (within and source in batch):
                yield list(batch.values()), list(batch)
                batch = {}
            batch[destination] = source
        if batch:
            yield list(batch.values()), list(batch)

    def _numbers(self, blocks: Sequence[int]) -> Tensor:
        return upload(blocks, self._pool.device)

    def _gather(self, blocks: list[int]) -> Tensor:
        return self._pool.index_select(2, self._numbers(blocks))

    def _sum(self, block: int) -> int:
        return zlib.crc32(self._host[block].view(torch.uint8).numpy().data)

    def _check(self, block: int) -> None:
        assert self._sums is not None
        expected = self._sums.get(block)
        if expected is None:
            raise SwapDamaged(f"host block {block} is swapped in, and nothing was swapped out to it")
        if (found := self._sum(block)) != expected:
            raise SwapDamaged(f"host block {block} has checksum {found:08x}, {expected:08x} was swapped out to it")


def _check_host(blocks: int, each: int, available: int, beside: int) -> None:
    fitting = max(available - beside - RESERVE_BYTES, 0) // each
    if blocks > fitting:
        raise MemoryBudgetError(
            f"the swap space of {blocks} blocks needs {blocks * each} bytes of host memory, {available} are available"
            f"{f', {beside} of them for the KV pool' if beside else ''}; "
            f"up to {fitting} blocks ({fitting * each} bytes) fit"
        )


def _host_zeros(size: int, device: torch.device) -> Tensor:
    """Zeroed bytes on the host, pinned where they travel to a device."""
    if device.type == "cpu":
        return _zeros(size, device) if size else torch.empty(0, dtype=torch.uint8)
    return torch.zeros(size, dtype=torch.uint8, pin_memory=size > 0)


def _zeros(size: int, device: torch.device) -> Tensor:
    """Zeroed bytes; on the CPU in huge pages."""
    return huge_bytes(size) if device.type == "cpu" else torch.zeros(size, dtype=torch.uint8, device=device)


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
