"""How long an answer will be, as a bound that holds nine times in ten, from the answers that were given before.

For each (tenant, model, sampling class) the last finished lengths are kept. The point prediction L' is the median of
those whose prompts were about as long; how far each length went past its own prediction, max(0, L - L'), is its score;
and the ceil((1 - alpha)(n + 1))-th smallest score is added to L' (split conformal prediction over a sliding window, the
one-sided form of MAPS, arXiv 2609.15359). As far as the past is like the future, a length exceeds its bound with
probability alpha at most. A length is scored against what was predictable before it: nothing looks ahead.

Says nothing (None) while a key has too little history. Knows no request: it is told lengths.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from math import ceil

from baton.engine.limits import Limits

#: lengths a bucket of prompts needs to have a median of its own; below it that of the whole key is used
_BUCKET_MIN = 8

#: (tenant, model, sampling class)
Key = tuple[str, str, str]


def sampling_class(temperature: float, max_tokens: int | None) -> str:
    """Names requests alike in how they are sampled: greedy or not, and about how long they may become."""
    kind = "greedy" if temperature < 1e-5 else "sampled"
    return f"{kind}-{max_tokens.bit_length() if max_tokens is not None else 'any'}"


def prompt_bucket(prompt_tokens: int) -> int:
    """Prompts of one bucket differ in length by a factor of about 1.4: two buckets an octave."""
    bits = prompt_tokens.bit_length()
    return 2 * bits + (prompt_tokens >> (bits - 2) & 1 if bits >= 2 else 0)


class LengthPredictor:
    """Invariant: at most ``limits.predictor_keys_max`` keys, the least used forgotten first, and at most
    ``limits.predictor_lengths_max`` lengths a key. Both operations take O(log n) comparisons.
    """

    def __init__(self, limits: Limits, alpha: float = 0.1) -> None:
        assert 0 < alpha < 1
        self.limits = limits
        self.alpha = alpha
        self._histories: OrderedDict[Key, _History] = OrderedDict()

    def __len__(self) -> int:
        return len(self._histories)

    def bound(self, key: Key, prompt_tokens: int, max_tokens: int, produced: int = 0) -> int | None:
        """Output tokens this request will hardly exceed: at least ``produced`` + 1, at most ``max_tokens``.

        ``produced`` is what it has made already: the bound is then over those of the past that went on from there, so
        asking again never gives less than it has. None where too little is known.
        """
        history = self._histories.get(key)
        if history is None:
            return None
        self._histories.move_to_end(key)
        if len(history.scores) < self.limits.predictor_lengths_min:
            return None
        upper = history.upper(prompt_bucket(prompt_tokens), produced, self.alpha)
        return min(max_tokens, max(upper, produced + 1))

    def observe(self, key: Key, prompt_tokens: int, output_tokens: int) -> None:
        """A request of this key has ended after ``output_tokens``, of itself or at its ``max_tokens``."""
        history = self._histories.get(key)
        if history is None:
            history = self._histories[key] = _History()
            if len(self._histories) > self.limits.predictor_keys_max:
                self._histories.popitem(last=False)
        self._histories.move_to_end(key)
        history.add(prompt_bucket(prompt_tokens), output_tokens, self.limits.predictor_lengths_max)


class _History:
    """The last lengths of one key, in order of coming and sorted: all, by bucket of prompts, and their scores."""

    __slots__ = ("buckets", "lengths", "recent", "scores")

    def __init__(self) -> None:
        self.recent: deque[tuple[int, int, int | None]] = deque()  # (bucket, length, score)
        self.lengths: list[int] = []
        self.buckets: dict[int, list[int]] = {}
        self.scores: list[int] = []

    def point(self, bucket: int) -> int | None:
        """The median of what came of such prompts."""
        own = self.buckets.get(bucket, ())
        known = own if len(own) >= _BUCKET_MIN else self.lengths
        return known[(len(known) - 1) // 2] if known else None

    def upper(self, bucket: int, produced: int, alpha: float) -> int:
        """The bound, given that ``produced`` tokens are there. Past all that was ever seen it doubles."""
        point = self.point(bucket)
        assert point is not None
        first = bisect_right(self.scores, produced - point) if produced else 0
        left = len(self.scores) - first
        if not left:
            return 2 * produced
        rank = min(left, ceil((1 - alpha) * (left + 1)))
        return point + self.scores[first + rank - 1]

    def add(self, bucket: int, length: int, most: int) -> None:
        point = self.point(bucket)
        score = None if point is None else max(0, length - point)
        self.recent.append((bucket, length, score))
        insort(self.lengths, length)
        insort(self.buckets.setdefault(bucket, []), length)
        if score is not None:
            insort(self.scores, score)
        if len(self.recent) > most:
            self._forget(*self.recent.popleft())

    def _forget(self, bucket: int, length: int, score: int | None) -> None:
        own = self.buckets[bucket]
        del self.lengths[bisect_left(self.lengths, length)]
        del own[bisect_left(own, length)]
        if not own:
            del self.buckets[bucket]
        if score is not None:
            del self.scores[bisect_left(self.scores, score)]
