"""The pool of KV blocks: who may write where in the cache, and what of the past is still in it. Numbers only.

Invariant: a block is free, held (by one sequence or several) or cached, and free + held + cached = total. A cached
block is held by nobody, is full, and can be found by what it holds; it goes when room is needed, longest unused first.
Which tensors these numbers mean is the worker's affair; what must be copied there is in ``moves``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from heapq import heappop, heappush

from baton.engine.prefix import Chain, Link, PrefixCounts


class Move(enum.IntEnum):
    """What a worker does with one block before the rows of a plan. The numbers go into plans."""

    COPY = 0  # from a device block to a device block
    OUT = 1  # from a device block to a host block
    IN = 2  # from a host block to a device block


class HostPool:
    """A free list of blocks in host memory. Invariant: free + held = total, and a block has one holder."""

    def __init__(self, total: int) -> None:
        assert total >= 0
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._held = bytearray(total)

    @property
    def free(self) -> int:
        """Host blocks nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` host blocks; the caller has checked ``free``."""
        assert 0 <= count <= len(self._free), f"{count} host blocks asked, {len(self._free)} free"
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._held[block] = 1
        return taken

    def release(self, blocks: list[int]) -> None:
        """Give host blocks back; the list is emptied."""
        for block in blocks:
            assert self._held[block], f"host block {block} freed twice"
            self._held[block] = 0
            self._free.append(block)
        blocks.clear()


class BlockPool:
    """``total`` blocks of ``block_tokens`` token slots each, and ``host_total`` more in host memory.

    A block is written only while one sequence holds it and no name leads to it; ``writable`` sees to that. Every
    operation takes O(log total) a block, and nothing kept here has more entries than there are blocks.
    """

    def __init__(
        self, total: int, block_tokens: int, *, host_total: int = 0, counts: PrefixCounts | None = None
    ) -> None:
        assert total > 0 and block_tokens > 0
        self.total = total
        self.block_tokens = block_tokens
        self.host = HostPool(host_total)
        self.counts = counts if counts is not None else PrefixCounts()
        #: (kind, source, destination), to be carried out in this order before the rows of the next plan: a block
        #: given away by one move may be taken by a later one
        self.moves: list[tuple[Move, int, int]] = []
        self._free = list(range(total - 1, -1, -1))
        self._held = [0] * total  # sequences that hold the block
        self._links: list[Link | None] = [None] * total  # what a block holds, while a name leads to it
        self._index: dict[bytes, int] = {}  # identity -> block
        self._children: dict[bytes, int] = {}  # identity -> its cached children
        self._cached = 0
        self._stamp = [0] * total  # when a cached block was let go
        self._clock = 0
        self._leaves: list[tuple[int, int]] = []  # heap of (stamp, block), an entry a block; checked when it comes up
        self._queued = bytearray(total)
        self._pending: dict[bytes, int] = {}  # identity -> block it is being computed in
        self._expected: dict[int, bytes] = {}  # the reverse

    @property
    def free(self) -> int:
        """Blocks that hold nothing anybody could want."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks nobody holds that can be found by what is in them."""
        return self._cached

    @property
    def available(self) -> int:
        """Blocks that ``allocate`` can give: the free ones, and the cached ones, which it evicts."""
        return len(self._free) + self._cached

    @property
    def capacity_tokens(self) -> int:
        """Token slots of the whole pool."""
        return self.total * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold ``tokens`` tokens."""
        return -(-tokens // self.block_tokens)

    def holders(self, block: int) -> int:
        """How many sequences hold a block."""
        return self._held[block]

    # -------------------------------------------------------------------------------- taking and giving back

    def fits(self, shared: Iterable[int], fresh: int) -> bool:
        """Whether ``fresh`` blocks could be allocated after ``shared`` were shared (which keeps cached ones)."""
        return self.available - sum(not self._held[block] for block in shared) >= fresh

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, evicting where too few are free; the caller has checked ``available``."""
        assert 0 <= count <= self.available, f"{count} blocks asked, {self.available} available"
        while len(self._free) < count:
            self._evict()
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            assert not self._held[block], f"block {block} was free and held"
            self._held[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more sequence holds each of these held or cached blocks (a fork, a prefix found)."""
        for block in blocks:
            if not self._held[block]:
                link = self._links[block]
                assert link is not None, f"block {block} is free and cannot be shared"
                self._cached -= 1
                self._orphan(link)
            self._held[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Give blocks back; the list is emptied, so that giving them back twice gives back nothing.

        A block that nobody holds any more is cached if it was registered, else free.
        """
        self._clock += 1
        for block in reversed(blocks):  # the end of a prefix is of less use than its beginning
            assert self._held[block], f"block {block} freed twice"
            self._held[block] -= 1
            if self._held[block]:
                continue
            self._unexpect(block)
            link = self._links[block]
            if link is None:
                self._free.append(block)
                continue
            self._cached += 1
            self._children[link.parent] = self._children.get(link.parent, 0) + 1
            self._stamp[block] = self._clock
            self._queue(block, link)
        blocks.clear()

    def writable(self, block: int) -> int:
        """A block to write to in place of ``block``, which the caller holds: copy on write.

        The same block where nobody else holds it and no name leads to it; else a fresh one, of which the caller has
        checked that it is ``available``; what is in ``block`` is copied to it by a move.
        """
        assert self._held[block], f"block {block} is written by nobody who holds it"
        if self._held[block] == 1 and self._links[block] is None:
            return block
        (fresh,) = self.allocate(1)
        self.moves.append((Move.COPY, block, fresh))
        self.release([block])
        return fresh

    def take_moves(self) -> list[tuple[Move, int, int]]:
        """The moves since the last call; they belong into the plan at hand."""
        moves, self.moves = self.moves, []
        return moves

    # -------------------------------------------------------------------------------- what blocks hold

    def match(self, chain: Chain) -> list[int]:
        """The longest beginning of ``chain`` whose blocks are here, held or cached, with the tokens compared."""
        blocks = []
        for number in range(chain.full):
            link = chain.link(number)
            block = self._index.get(link.identity)
            if block is None or self._links[block] != link:
                break
            blocks.append(block)
        return blocks

    def adopt(self, chain: Chain, blocks: list[int]) -> int:
        """A sequence begins with ``blocks``, just found by ``match``: how many tokens it need not compute.

        The last token it always must, for the next one is sampled after it. So where the blocks hold every token, one
        token less counts, and the last block is to be made ``writable`` first. Counts for the metrics.
        """
        tokens = min(len(blocks) * self.block_tokens, chain.tokens - 1)
        self.share(blocks)
        self.counts.queries += chain.tokens
        self.counts.hits += tokens
        return tokens

    def register(self, block: int, link: Link) -> bool:
        """A held block is full and its keys and values are computed: from now on it is found by its name.

        Where another block has that name already, False: this one stays its sequence's own and is freed with it.
        (To put the other in its place would change a table that workers have, for one block saved.)
        """
        assert self._held[block], f"block {block} is registered and held by nobody"
        assert self._links[block] is None, f"block {block} has a name already"
        self._unexpect(block)
        if link.identity in self._index:
            return False
        self._index[link.identity] = block
        self._links[block] = link
        return True

    def expect(self, block: int, link: Link) -> None:
        """A held block is about to be filled with this; who needs the same may wait. Registering or freeing ends it."""
        assert self._held[block], f"block {block} is expected and held by nobody"
        if link.identity not in self._pending and link.identity not in self._index:
            self._unexpect(block)
            self._pending[link.identity] = block
            self._expected[block] = link.identity

    def pending(self, identity: bytes) -> bool:
        """Whether a block of this identity is being computed."""
        return identity in self._pending

    def awaited(self, chain: Chain) -> bool:
        """Whether the part of ``chain`` that is not here yet begins with blocks that somebody is computing.

        Remembers in the chain the last of them, so that asking again while it is pending costs one look.
        """
        if chain.awaited in self._pending:
            return True
        chain.awaited = None
        for number in range(len(self.match(chain)), chain.full):
            identity = chain.link(number).identity
            if identity not in self._pending:
                break
            chain.awaited = identity
        return chain.awaited is not None

    def clear(self) -> None:
        """The contents are gone with the worker: cached blocks are free, held ones nameless, moves void."""
        self._free.extend(
            block for block in reversed(range(self.total)) if self._links[block] and not self._held[block]
        )
        self._links = [None] * self.total
        for table in (self._index, self._children, self._pending, self._expected, self._leaves, self.moves):
            table.clear()
        self._queued = bytearray(self.total)
        self._cached = 0

    # -------------------------------------------------------------------------------- to the host and back

    def swap_out(self, blocks: list[int]) -> list[int]:
        """Move a sequence's blocks to the host: their host blocks, of which the caller has checked ``host.free``.

        The blocks are released, so ``blocks`` is emptied; registered ones stay cached as long as there is room.
        """
        hosts = self.host.allocate(len(blocks))
        self.moves.extend((Move.OUT, block, host) for block, host in zip(blocks, hosts, strict=True))
        self.release(blocks)
        return hosts

    def swap_in(self, hosts: list[int]) -> list[int]:
        """Bring host blocks back into as many fresh blocks, which are ``available``; ``hosts`` is emptied."""
        blocks = self.allocate(len(hosts))
        self.moves.extend((Move.IN, host, block) for host, block in zip(hosts, blocks, strict=True))
        self.host.release(hosts)
        return blocks

    # -------------------------------------------------------------------------------- making room

    def _evict(self) -> None:
        """Free the cached block that was let go first among those without cached children."""
        while True:
            stamp, block = heappop(self._leaves)
            self._queued[block] = 0
            link = self._links[block]
            if self._held[block] or link is None or link.identity in self._children:
                continue  # in use again, or a child came; it is queued anew when that changes
            if self._stamp[block] != stamp:
                self._queue(block, link)
                continue
            del self._index[link.identity]
            self._links[block] = None
            self._cached -= 1
            self.counts.evictions += 1
            self._free.append(block)
            self._orphan(link)
            return

    def _orphan(self, link: Link) -> None:
        """A cached child of ``link.parent`` is cached no more; the parent may be a leaf now."""
        left = self._children[link.parent] - 1
        if left:
            self._children[link.parent] = left
            return
        del self._children[link.parent]
        block = self._index.get(link.parent)
        if block is not None and not self._held[block]:
            parent = self._links[block]
            assert parent is not None, f"block {block} is cached without a name"
            self._queue(block, parent)

    def _queue(self, block: int, link: Link) -> None:
        """Line a cached block up for eviction, unless it has cached children or stands there already."""
        if not self._queued[block] and link.identity not in self._children:
            self._queued[block] = 1
            heappush(self._leaves, (self._stamp[block], block))

    def _unexpect(self, block: int) -> None:
        identity = self._expected.pop(block, None)
        if identity is not None:
            del self._pending[identity]
