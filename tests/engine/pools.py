"""A pool of counts for tests of what only counts blocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counts:
    """As many blocks as are said to be held and cached."""

    total: int
    block_tokens: int = 16
    held: int = 0
    cached: int = 0

    @property
    def available(self) -> int:
        return self.total - self.held
