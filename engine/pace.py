"""The pace of the steps: how long they take, and how much of a prompt goes into one for it to be no longer.

Holds the model of step time and what is in the step at hand; ``engine.budget`` has the arithmetic. It knows no clock,
and it costs nothing where no prompt is to be computed.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.engine.budget import Chunk, Load, chunk_tokens
from baton.engine.limits import Limits
from baton.engine.sequence import Sequence
from baton.engine.steptime import StepTime


class Pace:
    """Invariant: without a target, or with nobody who decodes, a prompt is cut by the step's budget alone."""

    def __init__(self, target_ms: float, limits: Limits) -> None:
        self.limits = limits
        self.target_s = target_ms / 1e3
        self.step_time = StepTime(limits)
        self._load: Load | None = None
        self._most_s = 0.0

    def begin(self, decoding: Mapping[Sequence, int], prompts: int) -> None:
        """The step at hand has these rows, of one token each; ``prompts`` want to be in it besides, or to go on.

        It may take the target. Where that is less than some times what its decodes alone take, it may take those: on a
        slow machine, else, prompts would be starved for a target that nothing can meet. How many times depends on how
        many wait for each that decodes; in a long queue, for each of a few.
        """
        self._load = None
        if not self.target_s or not decoding:
            return
        rows, limits = len(decoding), self.limits
        self._load = load = Load(rows, rows, rows + sum(seq.planned for seq in decoding))
        alone_s = self.step_time.predict(load.tokens, load.context)
        slowdown = max(1.0, prompts / min(rows, limits.prefill_decodes_max)) * limits.prefill_slowdown
        slowdown = min(slowdown, max(limits.prefill_slowdown, limits.prefill_slowdown_max))
        self._most_s = max(self.target_s, slowdown * alone_s)

    @property
    def tight(self) -> bool:
        """Whether the step at hand is to be short for somebody's sake."""
        return self._load is not None

    def cut(self, seq: Sequence, start: int, wanted: int, budget: int, block_tokens: int) -> int:
        """How many of the ``wanted`` tokens from position ``start`` on the step takes, of ``budget`` that are left."""
        if self._load is None:
            return min(budget, wanted)
        chunk = Chunk(start, wanted, seq.held_back_steps)
        count = chunk_tokens(chunk, self._load, budget, self._most_s, self.step_time, block_tokens, self.limits)
        seq.held_back_steps = 0 if count else seq.held_back_steps + 1
        self._load.add(start, count)
        return count
