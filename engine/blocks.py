"""The pool of KV blocks: who may write where in the cache. Numbers only; the tensors are the worker's.

Invariant: free + held = total, and a block is held by exactly one sequence.
"""

from __future__ import annotations


class BlockPool:
    """A free list of ``total`` blocks of ``block_tokens`` token slots each."""

    def __init__(self, total: int, block_tokens: int) -> None:
        assert total > 0 and block_tokens > 0
        self.total = total
        self.block_tokens = block_tokens
        self._free = list(range(total - 1, -1, -1))
        self._held = bytearray(total)

    @property
    def free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    @property
    def capacity_tokens(self) -> int:
        """Token slots of the whole pool."""
        return self.total * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold ``tokens`` tokens."""
        return -(-tokens // self.block_tokens)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks; the caller has checked ``free``."""
        assert 0 <= count <= len(self._free), f"{count} blocks asked, {len(self._free)} free"
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            assert not self._held[block], f"block {block} was free and held"
            self._held[block] = 1
        return taken

    def release(self, blocks: list[int]) -> None:
        """Give blocks back; the list is emptied, so that giving them back twice gives back nothing."""
        for block in blocks:
            assert self._held[block], f"block {block} freed twice"
            self._held[block] = 0
            self._free.append(block)
        blocks.clear()
