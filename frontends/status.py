"""What the doors show of the server's state. They read it from callables that the process's main passes in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Status:
    """The answer of ``/ready``: whether new requests are served, the state in one word, and details for people.

    ``start_ms`` is how long each phase of each process's (last) start took.
    """

    ready: bool
    state: str
    detail: dict[str, str | int | float] = field(default_factory=dict)
    start_ms: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gauges:
    """What the engine holds at this moment, for ``/metrics``; 0 tokens of KV cache are not known yet."""

    requests_running: int = 0
    requests_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    kv_blocks_cached: int = 0
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    kv_tokens_total: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    prefix_evictions_blocks: int = 0
    ledger_growth: int = 0
    ledger_resume: int = 0
    ledger_headroom: int = 0
    ledger_swapped: int = 0
    restarts: Mapping[tuple[str, int], int] = field(default_factory=dict)  # of each process, by role and index

    @property
    def ledger(self) -> dict[str, int]:
        """Where every block of the pool is or will be, by the line of the ledger. ``unpromised`` below 0: blocks that
        were promised twice, so that somebody will have to give way.
        """
        available = self.kv_blocks_free + self.kv_blocks_cached
        promised = self.ledger_growth + self.ledger_resume + self.ledger_headroom
        return {
            "held": self.kv_blocks_total - available,
            "cached": self.kv_blocks_cached,
            "growth": self.ledger_growth,
            "resume": self.ledger_resume,
            "headroom": self.ledger_headroom,
            "unpromised": available - promised,
            "swapped": self.ledger_swapped,
        }


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the doors read from, at the time they are asked; ``totals`` are what every frontend counts in, by index."""

    status: Callable[[], Status]
    gauges: Callable[[], Gauges]
    totals: Sequence[memoryview]
    index: int = 0
