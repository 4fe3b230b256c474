"""The worker's core: what one rank keeps per slot, plans applied to it, and the records a step yields.

It knows no tensor: a runner (the real one or the scripted one) turns ``StepRow`` into ``Sampled``. Every rank applies
every plan; rank 0 alone writes records.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.batch import INVALID_FLAG, History, Sampled, Sampling, StepRow
from baton.engine.effects import Plan, StepDone, TokenRecord


@dataclass(slots=True)
class SlotState:
    """One sequence as the worker knows it; ``blocks`` is its block table."""

    generation: int
    run: int
    tokens: list[int]
    prompt_tokens: int
    sampling: Sampling
    blocks: list[int]


class WorkerCore:
    """Invariant: after a plan, each of its rows names a slot whose table covers the row."""

    def __init__(self, rank: int, group: tuple[int, ...], block_tokens: int) -> None:
        """``group`` is the incarnation of every rank, this one's among them."""
        self.rank = rank
        self.incarnation = group[rank]
        self.group = group
        self.block_tokens = block_tokens
        self.slots: dict[int, SlotState] = {}
        self.scheduler = 0
        self.dropped_plans = 0

    def join(self, group: tuple[int, ...]) -> None:
        """Another rank was replaced: what was begun with the one before is over, the cache counts as empty."""
        if group != self.group:
            self.group = group
            self.slots.clear()

    def apply(self, plan: Plan) -> list[StepRow] | None:
        """The rows to compute, or None where the plan was made for another group of ranks."""
        if plan.incarnations != self.group:
            self.dropped_plans += 1
            return None
        if plan.step >> 32 != self.scheduler:  # another scheduler knows nothing of what an earlier one started
            self.scheduler = plan.step >> 32
            self.slots.clear()
        for slot in plan.ends:
            self.slots.pop(slot, None)
        for s in plan.starts:
            tokens = list(s.token_ids)
            self.slots[s.slot] = SlotState(s.generation, s.run, tokens, s.prompt_tokens, s.sampling, [])
        rows = []
        for row in plan.rows:
            state = self.slots[row.slot]
            state.blocks.extend(row.blocks)
            end = row.start + row.count
            assert len(state.blocks) * self.block_tokens >= end, f"slot {row.slot}: table too short for {end} tokens"
            assert end <= len(state.tokens), f"slot {row.slot}: asked for {end} of {len(state.tokens)} tokens"
            position = len(state.tokens) - state.prompt_tokens
            tokens = state.tokens[row.start : end]
            sampling = state.sampling
            history = History(state.tokens, state.prompt_tokens) if sampling.needs_history else None
            rows.append(StepRow(row.slot, tokens, row.start, state.blocks, row.sample, position, sampling, history))
        return rows

    def commit(self, plan: Plan, rows: list[StepRow], sampled: list[Sampled]) -> StepDone:
        """Append the sampled tokens to their slots; the records that tell the readers so."""
        records = []
        results = iter(sampled)
        for row in rows:
            if not row.sample:
                continue
            result, state = next(results), self.slots[row.slot]
            for position, one in enumerate((result, *result.more), row.position):
                if not one.flags & INVALID_FLAG:
                    state.tokens.append(one.token)
                name = (row.slot, state.generation, state.run)
                records.append(TokenRecord(*name, position, one.token, one.flags, one.logprob, one.tops))
        return StepDone(self.incarnation, plan.step, records)
