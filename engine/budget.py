"""How much of a prompt a step may take beside those that decode, so that their next token is not late.

Everybody who decodes in a step waits for the whole step. With a target for the inter-token latency (ITL) a chunk of
prefill is cut so that the step stays within it, by the step-time model (the idea is Sarathi-Serve's, arXiv 2403.02310,
section 4.3: a budget of tokens derived from the latency objective). Pure arithmetic: it chooses no request.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt, sqrt

from baton.engine.limits import Limits
from baton.engine.steptime import StepTime, causal_context


@dataclass(slots=True)
class Load:
    """What is in a step already: rows that decode, all tokens to compute, and the positions those attend to."""

    decodes: int = 0
    tokens: int = 0
    context: int = 0

    def add(self, start: int, tokens: int) -> None:
        """A row of ``tokens`` tokens from position ``start`` on is in the step; ``decodes`` the caller counts."""
        self.tokens += tokens
        self.context += causal_context(start, tokens)


@dataclass(slots=True, frozen=True)
class Chunk:
    """A prompt's wish: ``wanted`` tokens from position ``start`` on, held back for ``held_back_steps`` steps by now."""

    start: int
    wanted: int
    held_back_steps: int = 0


def chunk_tokens(
    chunk: Chunk,
    load: Load,
    left_tokens: int,
    target_s: float | None,
    model: StepTime,
    block_tokens: int,
    limits: Limits,
) -> int:
    """Tokens of ``chunk`` that the step takes: at most ``left_tokens`` (the step's token budget that is left), and few
    enough that the step stays within ``target_s`` by the model (None: no target).

    Where nobody decodes, the target binds nobody and the budget alone counts. A piece smaller than a block of
    ``block_tokens`` is not worth a row (0) unless it is all that is wanted or left. Whoever was held back
    ``limits.prefill_wait_steps_max`` times gets a block's worth whatever the target says: no prompt is starved by a
    target that cannot be met.
    """
    most = min(chunk.wanted, left_tokens)
    if most <= 0:
        return 0
    if target_s is None or load.decodes == 0:
        return most
    fits = min(most, _fitting(chunk.start, load, target_s, model))
    least = min(most, block_tokens)
    if fits >= least:
        return fits
    return least if chunk.held_back_steps >= limits.prefill_wait_steps_max else 0


def _fitting(start: int, load: Load, target_s: float, model: StepTime) -> int:
    """The largest n with predict(tokens + n, context + n * start + n (n + 1) / 2) <= target, 0 where there is none."""

    def seconds(n: int) -> float:
        return model.predict(load.tokens + n, load.context + causal_context(start, n))

    _, b, c = model.coefficients
    spare = target_s - seconds(0)
    if spare < 0:
        return 0
    linear, square = b + c * (start + 0.5), c / 2
    top = 1 << 40
    if square > 0:
        root = (sqrt(linear * linear + 4 * square * spare) - linear) / (2 * square)
    elif linear > 0:
        root = spare / linear
    else:
        return top
    n = int(min(root, float(top)))
    while n > 0 and seconds(n) > target_s:  # the root is exact but for rounding
        n -= max(1, isqrt(n) >> 16)
    return max(n, 0)
