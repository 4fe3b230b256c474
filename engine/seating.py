"""Seats: who waits for one, in what order, and what a sequence is promised when it sits down.

The queue before the batch, between the batcher, which says what is there, and the pure parts that decide: the line
(``engine.order``), the promises (``engine.admission``) and what is known of answers' lengths. It touches no block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from baton.engine.admission import Admission, Ask
from baton.engine.blocks import BlockPool
from baton.engine.ledger import Ledger, Memory
from baton.engine.limits import Limits
from baton.engine.order import WaitingLine
from baton.engine.policies import Policies
from baton.engine.predictor import LengthPredictor, sampling_class
from baton.engine.sequence import Sequence
from baton.ipc.frames import Failure, WorkerHello


class Seating:
    """Invariant: a sequence is in ``line`` from its arrival until it is seated, and again from when it gave way.

    There is no ``admission`` before the first workers are there; whoever comes until then is asked after when they are.
    """

    def __init__(self, policies: Policies, limits: Limits) -> None:
        self.policies = policies
        self.limits = limits
        self.line = WaitingLine[Sequence](policies.order, limits)
        self.admission: Admission | None = None

    def greeted(self, pool: BlockPool, memory: Memory) -> None:
        """Workers are there, with an empty pool. Those that had seats come back before anybody new, as soon as their
        clients have room for more.
        """
        ledger = Ledger(pool, memory, self.limits)
        if self.admission is None:
            self.admission = Admission(self.policies.admission, ledger, LengthPredictor(self.limits), self.limits)
            return
        returning = [seq for seq in self.line if seq.resumed and seq.has_credit and seq.end is None]
        self.admission.begin_anew(ledger, (self._ask(seq) for seq in returning))

    def arrive(self, seq: Sequence, pool: BlockPool, now_ns: int) -> Failure | None:
        """A sequence in the line asks for a seat, of these workers for the first time; or why it gets none."""
        assert self.admission is not None and seq.max_tokens is not None
        if seq.ask is not None:
            return self.admission.never(seq.ask)
        terms, params = seq.handed.terms, seq.handed.params
        key = (terms.tenant, terms.model, sampling_class(params.temperature, params.max_tokens))
        seq.ask = Ask(seq.slot, seq.prompt_tokens, seq.max_tokens, key, len(seq.output))
        failure = self.admission.arrive(seq.ask, now_ns, begun=seq.handed.begun)
        if failure is None:
            seq.work_tokens = self.admission.work_tokens(seq.ask)
            if self.policies.order == "prefix" and seq.chain is not None:
                seq.prefix_tokens = len(pool.match(seq.chain)) * pool.block_tokens
            self.line.moved(seq)
        return failure

    def seat(self, seq: Sequence, held: int, now_ns: int) -> bool:
        """Promise it what it needs, if that can be kept; ``held`` of its blocks others hold already. It stays in the
        line until it is taken out.
        """
        assert self.admission is not None
        return self.admission.seat(self._ask(seq), now_ns, held)

    def could_seat(self, seq: Sequence, held: int, freed: int, leaving: Collection[Sequence] = ()) -> bool:
        """Whether it could be, if ``leaving`` were gone and ``freed`` blocks free."""
        assert self.admission is not None
        return self.admission.could_seat(self._ask(seq), held, [other.slot for other in leaving], freed)

    def hold(self, seq: Sequence) -> None:
        """Its block table has grown."""
        assert self.admission is not None
        self.admission.hold(self._ask(seq), len(seq.blocks))

    def leave(self, seq: Sequence, now_ns: int, swapped_blocks: int) -> None:
        """It gives way, and is in the line again, before all that never had a seat."""
        assert self.admission is not None
        seq.resumed = True
        self.admission.leave(self._ask(seq), now_ns, seq.has_credit, swapped_blocks)
        self.line.add(seq)

    def lost(self, seq: Sequence) -> None:
        """Its worker is gone, and its seat; it is in the line again, before all that never had one."""
        seq.resumed = True
        self.line.add(seq)

    def ended(self, seq: Sequence, now_ns: int) -> None:
        """It is over, seated or not; one that waits is taken out of the line."""
        if seq in self.line:
            self.line.remove(seq)
        if self.admission is None or seq.ask is None:
            return
        ask, end = self._ask(seq), seq.end
        if end is not None and end.length is not None:
            ask.output_tokens = min(ask.output_tokens, end.length)
        self.admission.ended(ask, now_ns, end is not None and end.reason in ("stop", "length"))

    def promised(self) -> tuple[int, int, int, int]:
        """Blocks: growth of the seated, needed to come back, headroom, swapped out."""
        assert self.admission is not None
        ledger = self.admission.ledger
        return ledger.growth_blocks, ledger.resume_blocks, ledger.headroom_blocks, ledger.swapped_blocks

    def _ask(self, seq: Sequence) -> Ask:
        """What it asks for, as it is now."""
        ask = seq.ask
        assert ask is not None, f"slot {seq.slot} asked for nothing"
        ask.output_tokens, ask.preemptions = seq.made, seq.preemptions
        return ask


def memory_of(ranks: Collection[WorkerHello]) -> Memory:
    """What the workers of a group have together, each rank a part of every block."""
    return Memory(
        block_bytes=sum(hello.layout.block_bytes for hello in ranks),
        weights_bytes=sum(hello.weights_bytes for hello in ranks),
        workspace_bytes=sum(hello.workspace_bytes for hello in ranks),
        swap_blocks=min(hello.host_blocks for hello in ranks),
    )


def held_blocks(pool: BlockPool, found: list[int], copied: bool, leaving: Collection[Sequence] = ()) -> int:
    """How many of the ``found`` blocks are held by others than ``leaving``; not the last where it is to be ``copied``.

    Blocks that are only cached are no discount: they are taken out of what could be evicted.
    """
    theirs = Counter(block for other in leaving for block in other.blocks)
    shared = found[:-1] if copied else found
    return sum(pool.holders(block) > theirs[block] for block in shared)


def freed_blocks(pool: BlockPool, leaving: Collection[Sequence]) -> int:
    """Blocks that nobody holds once all of ``leaving`` are gone."""
    theirs = Counter(block for other in leaving for block in other.blocks)
    return sum(pool.holders(block) == count for block, count in theirs.items())
