"""How long a step takes, learned from the steps that were taken; and whether moving blocks is cheaper than computing.

    seconds(step) = a + b * tokens + c * context

``tokens`` is what the step computes; ``context`` is the sum over those tokens of the positions each attends to. Fitted
online by recursive least squares with exponential forgetting, on the error relative to the time seen, so that short and
long steps weigh alike and a hiccup of the machine weighs least of all. Knows no clock: it is told.
"""

from __future__ import annotations

from baton.engine.limits import Limits

#: one old step weighs this much less than the next; about 200 steps are remembered
_FORGETTING = 0.995
#: an error this many times the usual one counts no more than that (Huber's rule, with the mean absolute error as scale)
_OUTLIER = 3.0
_USUAL_ERROR_MIN = 0.01
_USUAL_ERROR_PACE = 0.05
#: so many steps make a fit that can call a step an outlier; so many outliers in a row, and the machine has changed
_TRUSTED_AFTER = 8
#: variance of the coefficients, in units of their prior, before any data: a prior wrong by 1000 is outweighed at once
_PRIOR_VARIANCE = 1e6
_SECONDS_MIN = 1e-9

Vector = list[float]


def causal_context(start: int, tokens: int) -> int:
    """Positions that ``tokens`` tokens from position ``start`` on attend to: each to itself and all before it."""
    return tokens * start + tokens * (tokens + 1) // 2


class StepTime:
    """Invariant: the coefficients in use are finite and never negative, so more work is never predicted to be faster.

    Before any data it answers with the prior of the limits (``step_prior_s``, ``token_prior_s``, ``context_prior_s``).
    """

    def __init__(self, limits: Limits) -> None:
        self.steps = 0
        # inputs are scaled by the prior, so that all three coefficients are about 1 and one variance fits them
        self._scale = (limits.step_prior_s, limits.token_prior_s, limits.context_prior_s)
        self._theta: Vector = [1.0, 1.0, 1.0]
        self._used = (0.0, 0.0, 0.0)
        self._cov: list[Vector] = []
        self._usual_error = 1.0
        self._strikes = self._since_forgotten = 0
        self._forget_all()
        self._mark()

    def observe(self, tokens: int, context: int, seconds: float) -> None:
        """A step of ``tokens`` tokens attending to ``context`` positions took ``seconds`` (> 0, else it is no time)."""
        if not seconds > _SECONDS_MIN or seconds == float("inf"):
            return
        scale, theta = self._scale, self._theta
        x = [scale[0] / seconds, tokens * scale[1] / seconds, context * scale[2] / seconds]
        error = 1.0 - (theta[0] * x[0] + theta[1] * x[1] + theta[2] * x[2])
        self._strikes = self._strikes + 1 if abs(error) > _OUTLIER * self._usual_error else 0
        if self._strikes > _TRUSTED_AFTER:
            self._forget_all()
        bound = _OUTLIER * self._usual_error
        self._usual_error += _USUAL_ERROR_PACE * (min(abs(error), bound) - self._usual_error)
        self._usual_error = max(self._usual_error, _USUAL_ERROR_MIN)
        self._since_forgotten += 1
        if self._since_forgotten > _TRUSTED_AFTER:
            error = max(-bound, min(bound, error))
        self._update(x, error)
        self.steps += 1
        self._mark()

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """(seconds a step, seconds a token, seconds an attended position)."""
        return self._used

    def predict(self, tokens: int, context: int) -> float:
        """Seconds that a step of ``tokens`` tokens attending to ``context`` positions takes."""
        a, b, c = self._used
        return a + b * tokens + c * context

    def recompute_s(self, length: int, chunk_tokens: int) -> float:
        """Seconds to compute ``length`` tokens anew in steps of ``chunk_tokens``, had they the steps to themselves."""
        assert chunk_tokens > 0
        a, b, c = self._used
        return a * -(-length // chunk_tokens) + b * length + c * causal_context(0, length)

    def _update(self, x: Vector, error: float) -> None:
        """One step of recursive least squares; directions that the data do not excite keep a bounded variance."""
        p, (x0, x1, x2) = self._cov, x
        px = [row[0] * x0 + row[1] * x1 + row[2] * x2 for row in p]
        gain = _FORGETTING + px[0] * x0 + px[1] * x1 + px[2] * x2
        for i, row in enumerate(p):
            step = px[i] / gain
            self._theta[i] += step * error
            for j in range(i, 3):
                p[j][i] = row[j] = (row[j] - step * px[j]) / _FORGETTING
        largest = max(p[0][0], p[1][1], p[2][2])
        if not min(p[0][0], p[1][1], p[2][2]) > 0.0:  # rounding has eaten a variance: it is not known any more
            self._forget_all()
        elif largest > _PRIOR_VARIANCE:  # forgetting without news would let it grow for ever (wind-up)
            shrink = _PRIOR_VARIANCE / largest
            for row in p:
                row[:] = [one * shrink for one in row]

    def _mark(self) -> None:
        """What ``predict`` uses. A negative coefficient is nothing physical: the best fit with it at 0 is taken."""
        theta, p = self._theta, self._cov
        for _ in range(2):
            if (lowest := min(theta)) >= 0.0:
                break
            worst = theta.index(lowest)
            step = lowest / p[worst][worst]
            theta = [one - p[i][worst] * step for i, one in enumerate(theta)]
            theta[worst] = 0.0
        theta = [one if one > 0.0 else 0.0 for one in theta]
        self._theta, scale = theta, self._scale
        self._used = (theta[0] * scale[0], theta[1] * scale[1], theta[2] * scale[2])

    def _forget_all(self) -> None:
        self._cov = [[_PRIOR_VARIANCE if i == j else 0.0 for j in range(3)] for i in range(3)]
        self._usual_error = 1.0
        self._strikes = 0
        self._since_forgotten = 0


class Transfer:
    """Seconds to move KV blocks between device and host, learned from moves; the limits have the prior."""

    def __init__(self, block_bytes: int, limits: Limits) -> None:
        assert block_bytes > 0
        self.block_bytes = block_bytes
        self._seconds_per_byte = 1.0 / limits.swap_prior_bytes_per_s
        self.moves = 0

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth in use."""
        return 1.0 / self._seconds_per_byte

    def observe(self, blocks: int, seconds: float) -> None:
        """``blocks`` blocks were moved, one way, in ``seconds``; the first move replaces the prior."""
        if blocks <= 0 or not seconds > _SECONDS_MIN or seconds == float("inf"):
            return
        seen = seconds / (blocks * self.block_bytes)
        if self.moves:  # a hiccup counts like a move that took four times as long
            seen = max(min(seen, 4 * self._seconds_per_byte), self._seconds_per_byte / 4)
            seen = self._seconds_per_byte + 0.1 * (seen - self._seconds_per_byte)
        self._seconds_per_byte = seen
        self.moves += 1

    def swap_s(self, blocks: int) -> float:
        """Seconds to move ``blocks`` blocks out and in again."""
        return 2 * blocks * self.block_bytes * self._seconds_per_byte
