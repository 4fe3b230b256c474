"""The worker's core: what one rank keeps per slot, plans applied to it, and the records a step yields.

It knows no tensor: a runner (the real one or the scripted one) turns ``StepRow`` into ``Sampled``. Every rank applies
every plan; rank 0 alone writes records.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.batch import END_FLAG, INVALID_FLAG, UNKNOWN, History, Sampled, Sampling, StepRow
from baton.engine.effects import Plan, Row, StepDone, TokenRecord
from baton.engine.scores import PromptRecord


@dataclass(slots=True)
class SlotState:
    """One sequence as the worker knows it; ``blocks`` is its block table.

    ``pending`` tokens are being sampled by steps that are not committed yet. Once it has ``ended`` its rows are passed
    over: they were planned before the end was known.
    """

    generation: int
    run: int
    tokens: list[int]
    prompt_tokens: int
    sampling: Sampling
    blocks: list[int]
    needs_history: bool
    pending: int = 0
    ended: bool = False


class WorkerCore:
    """Invariant: after a plan, each of its rows names a slot whose table covers the row."""

    def __init__(self, rank: int, group: tuple[int, ...], block_tokens: int) -> None:
        """``group`` is the incarnation of every rank, this one's among them."""
        self.rank = rank
        self.incarnation = group[rank]
        self.group = group
        self.block_tokens = block_tokens
        self.slots: dict[int, SlotState] = {}
        self.scheduler = 0  # the incarnation whose plans are obeyed
        self.mistrusted = -1  # and the last one whose are not: it left damage where a plan should have been
        self.dropped_plans = 0

    def join(self, group: tuple[int, ...]) -> None:
        """Another rank was replaced: what was begun with the one before is over, the cache counts as empty."""
        if group != self.group:
            self.group = group
            self.slots.clear()

    def apply(self, plan: Plan) -> list[StepRow] | None:
        """The rows to compute, or None where the plan was made for another group of ranks, or comes after one that was
        lost: plans are changes, so none is obeyed after a gap.
        """
        if plan.incarnations != self.group or plan.step >> 32 <= self.mistrusted:
            self.dropped_plans += 1
            return None
        if plan.step >> 32 != self.scheduler:  # another scheduler knows nothing of what an earlier one started
            self.scheduler = plan.step >> 32
            self.slots.clear()
        for slot in plan.ends:
            self.slots.pop(slot, None)
        for s in plan.starts:
            tokens = list(s.token_ids)
            history = s.sampling.needs_history
            self.slots[s.slot] = SlotState(s.generation, s.run, tokens, s.prompt_tokens, s.sampling, [], history)
        return [row for row in map(self._row, plan.rows) if row is not None]

    def mistrust(self, scheduler: int) -> None:
        """A plan of this incarnation of the scheduler was lost: what it plans from now on is dropped."""
        self.mistrusted = max(self.mistrusted, scheduler)

    def can_run_ahead(self, plan: Plan) -> bool:
        """Whether a plan may be applied before the step before it was committed.

        Not the first of another scheduler or for another group, and not where a choice depends on a token that the
        step before is still sampling.
        """
        if plan.step >> 32 != self.scheduler or plan.incarnations != self.group:
            return False
        states = (self.slots.get(row.slot) for row in plan.rows)
        return not any(state.pending and state.needs_history for state in states if state is not None)

    def _row(self, row: Row) -> StepRow | None:
        """What a row of a plan means here; None where its sequence has ended meanwhile."""
        state = self.slots[row.slot]
        state.blocks.extend(row.blocks)
        if state.ended:
            return None
        end, known = row.start + row.count, len(state.tokens)
        total = known + state.pending
        assert len(state.blocks) * self.block_tokens >= end, f"slot {row.slot}: table too short for {end} tokens"
        assert end <= total, f"slot {row.slot}: asked for {end} of {total} tokens"
        tokens = state.tokens[row.start : end] + [UNKNOWN] * (end - known)
        position = total - state.prompt_tokens
        state.pending += row.sample
        history = History(state.tokens, state.prompt_tokens) if state.needs_history else None
        asked = state.sampling.prompt_logprobs is not None
        targets = state.tokens[row.start + 1 : min(end + 1, state.prompt_tokens)] if asked else []
        what = (row.sample, position, state.sampling, history)
        return StepRow(row.slot, tokens, row.start, state.blocks, *what, targets=targets)

    def commit(self, plan: Plan, rows: list[StepRow], sampled: list[Sampled]) -> StepDone:
        """Append the sampled tokens to their slots; the records that tell the readers so. None is of a step
        after its end.
        """
        records, prompts = [], []
        results = iter(sampled)
        for row in rows:
            if row.targets:
                state = self.slots[row.slot]
                name = (row.slot, state.generation, state.run)
                prompts.append(PromptRecord(*name, row.start + 1, len(row.targets), row.prompt_scores))
            if not row.sample:
                continue
            result, state = next(results), self.slots[row.slot]
            state.pending -= 1
            if state.ended:
                continue
            for position, one in enumerate((result, *result.more), row.position):
                state.ended |= bool(one.flags & (END_FLAG | INVALID_FLAG))
                if not one.flags & INVALID_FLAG:
                    state.tokens.append(one.token)
                name = (row.slot, state.generation, state.run)
                records.append(TokenRecord(*name, position, one.token, one.flags, one.logprob, one.tops))
        return StepDone(self.incarnation, plan.step, records, prompts)
