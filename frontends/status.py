"""What the doors show of the server's state. They read it from callables that the process's main passes in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Status:
    """The answer of ``/ready``: whether new requests are served, the state in one word, and details for people."""

    ready: bool
    state: str
    detail: dict[str, str | int | float] = field(default_factory=dict)


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


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the doors read from, at the time they are asked; ``totals`` are what every frontend counts in, by index."""

    status: Callable[[], Status]
    gauges: Callable[[], Gauges]
    totals: Sequence[memoryview]
    index: int = 0
