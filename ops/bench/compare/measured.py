"""What one workload at one server in one round came to, and the whole comparison as it is written to JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

import msgspec

from baton.ops.bench.compare.usage import Usage
from baton.ops.bench.report import Objectives, Report, Spread, spread
from baton.ops.bench.stream import Outcome


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One workload, one server, one round.

    ``rate`` is that of a random arrival, ``load`` its share of ``capacity``, which is the server's own in this round.
    ``report.itl_ms`` are the gaps between deltas, as a reader sees them, and goodput is judged by these; ``token_ms``
    are times a token, see ``token_gaps``.
    """

    server: str
    round: int
    workload: str
    rate: float | None
    load: float | None
    capacity: float | None
    report: Report
    token_ms: Spread | None
    usage: Usage

    @property
    def outside_us_per_token(self) -> float | None:
        """CPU time outside the model's process, in µs, for each token of an answer."""
        tokens = self.report.output_tokens
        return self.usage.outside_cpu_s / tokens * 1e6 if tokens else None

    @property
    def timeout_share(self) -> float:
        """The part of the requests that was given up."""
        return self.report.timeouts / self.report.requests


class Start(msgspec.Struct, frozen=True):
    """How long a server took until it was ready, in a round."""

    server: str
    round: int
    start_s: float


class Described(msgspec.Struct, frozen=True):
    """A server as it was measured."""

    name: str
    version: str
    command: list[str]
    environment: dict[str, str]


class Comparison(msgspec.Struct, kw_only=True):
    """The whole: grows by a workload at a time, so that what was measured is kept whatever comes after."""

    machine: dict[str, str]
    requests: str
    timeout_s: float
    objectives: Objectives
    rounds: int
    servers: list[Described] = []
    starts: list[Start] = []
    measured: list[Measured] = []

    def workloads(self) -> list[str]:
        """All that were measured, in their order."""
        return list(dict.fromkeys(one.workload for one in self.measured))

    def names(self) -> list[str]:
        """The servers that anything was measured at, in their order."""
        return list(dict.fromkeys(one.server for one in self.measured))

    def of(self, server: str, workload: str) -> list[Measured]:
        """All rounds of one server and workload."""
        return [one for one in self.measured if (one.server, one.workload) == (server, workload)]


def token_gaps(outcome: Outcome) -> Iterator[float]:
    """Seconds a token took, token by token: a gap before a delta of k tokens is k of them, each the k-th part.

    k is what the server told as token ids, else the mean tokens per delta of the answer by the server's own count.
    """
    mean = max(1.0, outcome.tokens / outcome.deltas) if outcome.deltas else 1.0
    for gap, size in zip(outcome.gaps_s, outcome.sizes, strict=True):
        tokens = size or mean
        yield from repeat(gap / tokens, round(tokens))


def token_times(outcomes: Sequence[Outcome]) -> Spread | None:
    """The distribution of ``token_gaps`` over all successful answers."""
    return spread(gap for one in outcomes if one.error is None for gap in token_gaps(one))
