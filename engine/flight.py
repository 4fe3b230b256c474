"""The steps that the workers were told to run and that have not landed yet, oldest first.

At most ``steps_in_flight_max`` are under way: while the workers run step *n*, step *n + 1* already lies in the plan
ring. This module knows which sequences a step names and what landing means for them; what is planned is the batcher's.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from baton.engine.effects import Effect, Span, StepDone
from baton.engine.sequence import Sequence


@dataclass(slots=True)
class Flight:
    """One step: each sequence in it with its tokens to compute, and whether a token is sampled after them."""

    step: int
    since_ns: int
    rows: list[tuple[Sequence, int, bool]]
    moves: bool  # blocks were moved before it, so that it took longer than its tokens do
    tokens: int = 0
    context: int = 0  # positions that its tokens attend to, all together


class Flights:
    """Invariant: a sequence's ``in_flight`` counts the flights here that name it, ``pending`` those that sample it."""

    def __init__(self, first_step: int, links_max: int) -> None:
        self.step = first_step
        self.links_max = links_max
        self.under_way: deque[Flight] = deque()
        self.landed_ns = 0

    def __len__(self) -> int:
        return len(self.under_way)

    def launch(self, rows: list[tuple[Sequence, int, bool]], moves: bool, now_ns: int) -> int:
        """Another step sets out; its number. Its tokens count as planned, and as pending where one is sampled."""
        self.step += 1
        flight = Flight(self.step, now_ns, rows, moves)
        self.under_way.append(flight)
        for seq, count, sample in rows:
            flight.tokens += count
            flight.context += count * seq.planned + count * (count + 1) // 2
            seq.in_flight += 1
            seq.planned += count
            seq.pending += sample
        return self.step

    def land(self, done: StepDone, tokens_per_row: int) -> Flight | None:
        """The oldest step, if it is the one that is done. Steps land in the order in which they set out."""
        if not self.under_way or self.under_way[0].step != done.step:
            return None
        flight = self.under_way.popleft()
        for seq, count, sample in flight.rows:
            seq.in_flight -= 1
            seq.computed += count
            seq.pending -= sample
        if tokens_per_row > 1:
            yielded = Counter(record.slot for record in done.records)
            for seq, _, _ in flight.rows:  # of several tokens of one step all but the last have been computed
                more = max(0, yielded[seq.held.slot] - 1)
                seq.computed += more
                seq.planned += more
        return flight

    def drop(self) -> list[Flight]:
        """None of them will land: their worker is gone. The batcher rolls the sequences back."""
        lost = list(self.under_way)
        self.under_way.clear()
        for flight in lost:
            for seq, _, sample in flight.rows:
                seq.in_flight -= 1
                seq.pending -= sample
        return lost

    def report(self, flight: Flight, sampled: int, now_ns: int, out: list[Effect]) -> float:
        """The span of a landed step, linked to its requests. It begins when the step before it was over; how long it
        took, in seconds.
        """
        began_ns, self.landed_ns = max(flight.since_ns, self.landed_ns), now_ns
        links = [seq.held.trace for seq, _, _ in flight.rows if seq.held.trace[24] & 1]
        if links:
            attributes: dict[str, str | int | float | bool] = {
                "baton.step": flight.step,
                "baton.rows": len(flight.rows),
                "baton.tokens": flight.tokens,
                "baton.sampled": sampled,
            }
            out.append(Span("step", b"", began_ns, now_ns, attributes, links=tuple(links[: self.links_max])))
        return (now_ns - began_ns) / 1e9
