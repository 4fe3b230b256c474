"""When a sequence ends, told the same way to everyone who reads the token ring.

The scheduler and the detokenizer both read every record; both call ``counts`` and ``ending``, so that they cannot
disagree about which tokens exist. Stop strings are the detokenizer's alone to find (it has the text); it reports them.
"""

from __future__ import annotations

from baton.engine.batch import END_FLAG, INVALID_FLAG
from baton.engine.effects import TokenRecord


def counts(record: TokenRecord, generation: int, run: int, length: int) -> bool:
    """Whether a record is the next token of (generation, run) with ``length`` output tokens so far."""
    return record.position == length and record.run == run and record.generation == generation


def ending(flags: int, length: int, max_tokens: int | None) -> str | None:
    """What a counted record ends: "error" (the token is no token), "stop" (an end id), "length", or None."""
    if flags & INVALID_FLAG:
        return "error"
    if flags & END_FLAG:
        return "stop"
    return "length" if max_tokens is not None and length >= max_tokens else None


class StopScanner:
    """Finds the first of several stop strings in text that comes in pieces.

    Text is held back only while its tail is a prefix of a stop string. Invariant: what was released never contains
    the beginning of a stop string that is found later.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self.held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """Take text, release what can no longer be part of a stop string; sets ``hit`` when one is complete."""
        if not self.stops:
            return text
        assert self.hit is None
        buffer = self.held + text
        found = [(at, stop) for stop in self.stops if (at := buffer.find(stop)) >= 0]
        if found:
            at, self.hit = min(found, key=lambda match: match[0])
            self.held = ""
            return buffer[:at]
        keep = max((_overlap(buffer, stop) for stop in self.stops), default=0)
        self.held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest tail of ``text`` that begins ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
