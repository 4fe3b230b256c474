"""What there is, what is taken, and what is promised: memory as the scheduler counts it. Numbers only, never a tensor.

A block of the KV pool is held by somebody, cached (evictable), or free; the pool knows which. The ledger knows the
future: how far each seated request may still grow, and what those that gave way need to come back. Admission asks it
before it promises anything. Shared blocks are counted once, because what is held is read from the pool.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from baton.engine.limits import Limits


class Pool(Protocol):
    """The counts the ledger reads from the pool of KV blocks. ``available`` is free and cached blocks together."""

    @property
    def total(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def available(self) -> int: ...
    @property
    def cached(self) -> int: ...


@dataclass(slots=True, frozen=True)
class Memory:
    """Bytes of one worker as its hello states them, measured at start-up, and the blocks of its swap space."""

    block_bytes: int = 0
    weights_bytes: int = 0
    workspace_bytes: int = 0
    gather_bytes: int = 0
    swap_blocks: int = 0


@dataclass(slots=True)
class Entry:
    """One admitted request: its table has ``table_blocks`` blocks, and ``promised_blocks`` it may have in all."""

    promised_blocks: int
    table_blocks: int = 0
    resume_blocks: int = 0
    swapped_blocks: int = 0

    @property
    def growth_blocks(self) -> int:
        """Blocks it may still ask for."""
        return max(0, self.promised_blocks - self.table_blocks)


@dataclass(slots=True, frozen=True)
class Line:
    """One line of the ledger. ``blocks`` is None where the thing is not counted in blocks."""

    name: str
    blocks: int | None
    bytes: int


class Ledger:
    """Invariant: ``growth_blocks`` and ``resume_blocks`` are the sums over the entries; every change costs O(1).

    A slot is *seated* from ``seat`` to ``drop`` or ``leave``; whoever left may come back by ``seat``.
    """

    def __init__(self, pool: Pool, memory: Memory, limits: Limits) -> None:
        self.pool = pool
        self.memory = memory
        self.headroom_blocks = int(pool.total * limits.kv_headroom_share)
        self.growth_blocks = 0
        self.resume_blocks = 0
        self.swapped_blocks = 0
        self._seated: dict[int, Entry] = {}
        self._left: dict[int, Entry] = {}

    @property
    def held_blocks(self) -> int:
        """Blocks that somebody holds now, a shared one counted once."""
        return self.pool.total - self.pool.available

    @property
    def unpromised_blocks(self) -> int:
        """What is neither held, promised, needed by those that come back, nor headroom. Below 0: promised twice."""
        return self.pool.available - self.growth_blocks - self.resume_blocks - self.headroom_blocks

    @property
    def seated(self) -> int:
        """How many requests are seated."""
        return len(self._seated)

    @property
    def busy(self) -> bool:
        """Whether anybody is seated or is to come back."""
        return bool(self._seated or self._left)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold ``tokens`` tokens."""
        return -(-tokens // self.pool.block_tokens)

    def ever_fits(self, tokens: int) -> bool:
        """Whether a request of ``tokens`` tokens in all fits where nothing else is."""
        return self.blocks_for(tokens) <= self.pool.total

    def fits(
        self,
        slot: int,
        tokens: int,
        table_blocks: int = 0,
        margin_blocks: int = 0,
        leaving: Collection[int] = (),
        freed_blocks: int = 0,
    ) -> bool:
        """Whether ``tokens`` tokens in all can be promised now, ``table_blocks`` of whose blocks are held already.

        The request alone may have the whole pool; beside others the headroom and ``margin_blocks`` stay free. Whoever
        comes back competes with the seated only, anybody new also with all that are to come back. The seated slots
        in ``leaving`` count as gone, for good, and ``freed_blocks`` blocks as free.
        """
        needed = max(0, self.blocks_for(tokens) - table_blocks)
        spare = self.pool.available + freed_blocks - self.growth_blocks
        spare += sum(self._seated[other].growth_blocks for other in leaving)
        if len(self._seated) == len(leaving):
            return needed <= spare
        if slot not in self._left:
            spare -= self.resume_blocks
        return needed <= spare - self.headroom_blocks - margin_blocks

    def seat(self, slot: int, tokens: int, table_blocks: int = 0) -> None:
        """Promise ``tokens`` tokens in all to a request that takes its seat."""
        assert slot not in self._seated, f"slot {slot} seated twice"
        self._forget_left(slot)
        self._seated[slot] = entry = Entry(self.blocks_for(tokens), table_blocks)
        self.growth_blocks += entry.growth_blocks

    def hold(self, slot: int, table_blocks: int) -> None:
        """A seated request's table has ``table_blocks`` blocks now."""
        entry = self._seated[slot]
        before = entry.growth_blocks
        entry.table_blocks = table_blocks
        self.growth_blocks += entry.growth_blocks - before

    def promise(self, slot: int, tokens: int) -> None:
        """Promise a seated request ``tokens`` tokens in all from now on. Its table never exceeds its promise."""
        entry = self._seated[slot]
        before = entry.growth_blocks
        entry.promised_blocks = max(self.blocks_for(tokens), entry.table_blocks)
        self.growth_blocks += entry.growth_blocks - before

    def promised_tokens(self, slot: int) -> int:
        """Tokens a seated request was promised, rounded up to whole blocks."""
        return self._seated[slot].promised_blocks * self.pool.block_tokens

    def leave(self, slot: int, resume_tokens: int, swapped_blocks: int = 0) -> None:
        """A seated request gives way. It needs blocks for ``resume_tokens`` to come back: 0 where it need not soon."""
        entry = self._seated.pop(slot)
        self.growth_blocks -= entry.growth_blocks
        entry.table_blocks = 0
        entry.resume_blocks, entry.swapped_blocks = self.blocks_for(resume_tokens), swapped_blocks
        self.resume_blocks += entry.resume_blocks
        self.swapped_blocks += swapped_blocks
        self._left[slot] = entry

    def expect(self, slot: int, resume_tokens: int) -> None:
        """A request that was seated under another ledger is to come back; it needs blocks for ``resume_tokens``."""
        assert slot not in self._seated and slot not in self._left, f"slot {slot} is known already"
        self._left[slot] = entry = Entry(0, resume_blocks=self.blocks_for(resume_tokens))
        self.resume_blocks += entry.resume_blocks

    def drop(self, slot: int) -> None:
        """The request is over, or its worker is; harmless where the slot is unknown."""
        entry = self._seated.pop(slot, None)
        if entry is not None:
            self.growth_blocks -= entry.growth_blocks
        self._forget_left(slot)

    def _forget_left(self, slot: int) -> None:
        entry = self._left.pop(slot, None)
        if entry is not None:
            self.resume_blocks -= entry.resume_blocks
            self.swapped_blocks -= entry.swapped_blocks

    # -------------------------------------------------------------------------------- for people

    def lines(self) -> list[Line]:
        """Every line of the ledger: what there is in bytes, then where each block of the pool is or will be."""
        memory, pool = self.memory, self.pool

        def of_blocks(name: str, blocks: int) -> Line:
            return Line(name, blocks, blocks * memory.block_bytes)

        return [
            Line("weights", None, memory.weights_bytes),
            Line("workspace of a step", None, memory.workspace_bytes),
            Line("all-gather buffers", None, memory.gather_bytes),
            of_blocks("KV pool", pool.total),
            of_blocks("held", self.held_blocks),
            of_blocks("cached, evictable", pool.cached),
            of_blocks("growth of the admitted", self.growth_blocks),
            of_blocks("needed to come back", self.resume_blocks),
            of_blocks("headroom", self.headroom_blocks),
            of_blocks("unpromised", self.unpromised_blocks),
            of_blocks("swap space", memory.swap_blocks),
            of_blocks("swapped out", self.swapped_blocks),
        ]

    def table(self) -> str:
        """The ledger as text, one line each: name, blocks, bytes."""
        rows = [(one.name, "" if one.blocks is None else f"{one.blocks:,}", f"{one.bytes:,}") for one in self.lines()]
        rows.insert(0, ("", "blocks", "bytes"))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            f"{name:<{widths[0]}}  {blocks:>{widths[1]}}  {size:>{widths[2]}}" for name, blocks, size in rows
        )
