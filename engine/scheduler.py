"""The scheduler's core: takes requests, plans one step after the other, counts every token, ends what has ended.

A sequence is ended only when no step in flight names it; then it goes to the detokenizer. What runs in a step is the
batcher's to choose. This module knows no tensor, no text and no clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from baton.engine.batch import sampling_of
from baton.engine.batcher import Batcher, Chosen
from baton.engine.blocks import BlockPool
from baton.engine.buggify import buggify
from baton.engine.effects import Doorbell, Effect, Plan, Row, Send, Start, StepDone, TokenRecord, TokenRing
from baton.engine.flight import Flight, Flights
from baton.engine.limits import Limits
from baton.engine.ownership import Ownership, SchedulerBoard
from baton.engine.policies import Policies
from baton.engine.prefix import Chain, root
from baton.engine.sequence import End, Sequence
from baton.engine.stopping import counts, ending, no_token, stop_token
from baton.ipc.frames import (
    Address,
    Admitted,
    Cancel,
    CancelAck,
    Closed,
    Credit,
    Failure,
    Flush,
    Halt,
    Handed,
    Life,
    Recall,
    Returned,
    Role,
    StopFound,
    WorkerHello,
)


class SchedulerCore:
    """Invariants: a slot has at most one sequence, each is in the batcher once, and ends only when no step names it."""

    def __init__(
        self,
        me: Address,
        board: SchedulerBoard,
        ring: TokenRing,
        end_ids: tuple[int, ...],
        limits: Limits,
        policies: Policies | None = None,
    ) -> None:
        self.me = me
        self.board = board
        self.ring = ring
        self.end_ids = end_ids
        self.context_tokens_max = 0
        self.weights: str | None = None  # what the first worker held, every later one must
        self.limits = limits
        self.policies = policies or Policies()
        self.hands = Ownership(board, me, limits.request_spans_max)
        self.sequences: dict[int, Sequence] = {}
        self.batcher = Batcher(self.hands, limits, self.policies)
        self.ended: list[Sequence] = []
        self.ranks: dict[int, WorkerHello] = {}
        # the upper half is ours alone, so that no step of an earlier life is taken for one of this
        self.flights = Flights(me.incarnation << 32, limits.step_span_links_max)
        # lost to deaths of which no news has come yet: it will say whose fault they were
        self.unexplained: list[Flight] = []
        self.counts: Counter[str] = Counter()

    def start(self, now_ns: int) -> list[Effect]:
        """Skip what the ring holds of an earlier life: no sequence of it is ours."""
        self.ring.read()
        return []

    def handle(self, event: object, now_ns: int) -> list[Effect]:
        """One event in, effects out; afterwards whatever has ended is handed on and the next step is planned."""
        out: list[Effect] = []
        landed = False
        match event:
            case Doorbell():
                landed = self._drain(now_ns, out)
            case Handed():
                self._handed(event, now_ns, out)
            case StopFound():
                seq = self._sequence(event.slot, event.generation)
                if seq is not None and seq.run == event.run and seq.end is None:
                    self._set_end(seq, End("stop", event.length, event.text), now_ns, out)
            case Credit():
                seq = self._sequence(event.slot, event.generation)
                if seq is not None and seq.run == event.run:
                    seq.credit = max(seq.credit, event.position)
            case Cancel():
                out.append(Send(Role.FRONTEND, event.home, CancelAck(event.slot, event.generation)))
                seq = self._sequence(event.slot, event.generation)
                if seq is not None and seq.end is None and self.hands.cancelled(seq.held):
                    self._set_end(seq, End("cancelled"), now_ns, out)
            case Recall():
                key = self.hands.recall(event.key, event.trace, event.home, now_ns, out)
                if key is not None:
                    out.append(Send(Role.FRONTEND, event.home, Returned(key, event.trace)))
            case WorkerHello():
                self._hello(event, now_ns, out)
            case Life():
                self._life(event, now_ns, out)
            case Halt():
                pass
            case _:
                raise AssertionError(f"no such event for a scheduler: {event!r}")
        self._finish_ended(now_ns, out)
        self._plan(landed, now_ns, out)
        self.board.set_gauges(self.batcher.gauges)
        return out

    # -------------------------------------------------------------------------------- coming in

    def _handed(self, event: Handed, now_ns: int, out: list[Effect]) -> None:
        held = self.hands.take(event.key, event.trace)
        if held is None:
            return
        p = event.params
        sampling = sampling_of(p, self.end_ids)
        base = len(event.delivered)
        seq = Sequence(held, event, sampling, list(event.delivered), base, event.credit, [0.0] * base, p.max_tokens)
        assert held.slot not in self.sequences, f"slot {held.slot} taken twice"
        self.sequences[held.slot] = seq
        self.batcher.add(seq, now_ns)
        if self.hands.cancelled(held):
            self._set_end(seq, End("cancelled"), now_ns, out)
        elif base and event.delivered[-1] in sampling.end_ids:
            self._set_end(seq, End("stop", base, stop_token(event.delivered[-1], p, self.end_ids)), now_ns, out)
        else:
            self._admit(seq, now_ns, out)

    def _admit(self, seq: Sequence, now_ns: int, out: list[Effect]) -> None:
        """Into the queue, or refused: what can never fit, what finds the queue full. Waits for the workers' hello."""
        pool = self.batcher.pool
        if pool is None or seq.end is not None:
            return
        if self.policies.prefix_cache:
            beginning = root(seq.handed.terms, self.weights or "", share_between_tenants=self.policies.share_prefixes)
            seq.chain = Chain(beginning, pool.block_tokens, seq.handed.prompt_ids, seq.output)
        wanted = seq.handed.terms.weights_digest
        if seq.max_tokens is None:  # as many as there is room for, but one at least
            seq.max_tokens = max(1, min(self.context_tokens_max, pool.capacity_tokens) - seq.prompt_tokens)
        failure = self.batcher.seating.arrive(seq, pool, now_ns)
        if failure is not None:
            self._refuse(seq, failure)
            self.counts[failure.code or ""] += 1
        elif wanted and wanted != self.weights:
            message = "the weights this request was admitted for are not served any more"
            failure = Failure(503, "server_error", message, None, "weights_changed")
            self._refuse(seq, failure)
        elif seq.base and seq.base >= seq.max_tokens:
            self._end(seq, End("length", seq.base))
        elif not seq.admitted:
            seq.admitted = True
            admitted = Admitted(seq.slot, seq.held.generation, seq.run, seq.handed.prompt_ids)
            out.append(Send(Role.FRONTEND, seq.handed.home.index, admitted))

    def _refuse(self, seq: Sequence, failure: Failure) -> None:
        """Refused; one whose client was told that it is admitted ends with an error, by the usual way."""
        self._end(seq, End("error" if seq.handed.begun or seq.admitted else "refused", len(seq.output), None, failure))

    # -------------------------------------------------------------------------------- workers and peers

    def _hello(self, event: WorkerHello, now_ns: int, out: list[Effect]) -> None:
        group = tuple(self.board.live(Role.WORKER, rank) for rank in range(len(event.group)))
        if event.group != group or event.address.incarnation != group[event.rank]:
            self.counts["stale_hellos"] += 1  # it greets again when it hears who was replaced
            return
        known = self.ranks.get(event.rank)
        if known is not None and known.group == group:
            return
        self.weights = self.weights or event.weights_digest
        assert event.weights_digest == self.weights, "a worker came back with other weights"
        if any(hello.group != group for hello in self.ranks.values()):
            self.unexplained += self._roll_back(now_ns, out)
        self.ranks[event.rank] = event
        if len(self.ranks) == len(group):
            blocks = min(hello.layout.blocks for hello in self.ranks.values())
            hosts = min(hello.host_blocks for hello in self.ranks.values())
            found = self.batcher.prefix_counts
            pool = BlockPool(blocks, event.layout.block_tokens, host_total=hosts, counts=found)
            self.batcher.greeted(pool, self.ranks.values())
            self.context_tokens_max = event.context_tokens_max
            for seq in list(self.sequences.values()):
                self._admit(seq, now_ns, out)

    def _life(self, event: Life, now_ns: int, out: list[Effect]) -> None:
        """Somebody was replaced; by whom, the life table says."""
        live = self.board.live(event.role, event.index)
        if event.role == Role.WORKER:
            groups = [hello.group for hello in self.ranks.values()]
            if any(event.index < len(group) and group[event.index] < live for group in groups):
                self.unexplained += self._roll_back(now_ns, out)
            if event.fault:
                self._suspect(self.unexplained)
            self.unexplained = []
        elif event.role == Role.DETOKENIZER:
            self._drain(now_ns, out)
            for seq in self.sequences.values():
                if seq.leased_to and seq.leased_to < live:
                    self._lease(seq, out)

    def _roll_back(self, now_ns: int, out: list[Effect]) -> list[Flight]:
        """A rank is gone, and the cache with it: count what was committed, then begin again from those tokens.

        The steps that will not land any more.
        """
        self._drain(now_ns, out)
        lost = self.flights.drop()
        self.ranks.clear()
        self.batcher.roll_back(now_ns, out)
        return lost

    def _suspect(self, lost: list[Flight]) -> None:
        """The worker died over these steps and nobody did it: their sequences run alone until each has gained a token.

        All of them: a worker may have begun the second step before the first was committed.
        """
        rows = dict.fromkeys(seq for flight in lost for seq, _, _ in flight.rows)
        for seq in rows:
            if seq.end is not None:
                continue
            self.batcher.suspects[seq] = None
            seq.lone_deaths += len(rows) == 1
            if seq.lone_deaths >= self.limits.lone_deaths_max:
                message = f"the worker died {seq.lone_deaths} times over this request alone; it is not tried again"
                failure = Failure(500, "server_error", message, None, "poisoned")
                self._end(seq, End("error", len(seq.output), None, failure))
                self.counts["poisoned"] += 1

    def _lease(self, seq: Sequence, out: list[Effect]) -> None:
        incarnation = self.board.live(Role.DETOKENIZER, 0)
        seq.leased_to = incarnation
        out.append(Send(Role.DETOKENIZER, 0, seq.lease(incarnation)))

    # -------------------------------------------------------------------------------- tokens

    def _drain(self, now_ns: int, out: list[Effect]) -> bool:
        """Count what was committed; whether a step of ours has landed."""
        landed = False
        for done in self.ring.read():
            self._count(done, now_ns, out)
            flight = None
            if done.incarnation == self._rank0():
                flight = self.flights.land(done, self.batcher.tokens_per_row)
            if flight is not None:
                landed = True
                for seq, _, _ in flight.rows:
                    self.batcher.landed(seq, now_ns, out)
                took_s = self.flights.report(flight, len(done.records), now_ns, out)
                if not flight.moves:
                    self.batcher.pace.step_time.observe(flight.tokens, flight.context, took_s)
        return landed

    def _rank0(self) -> int:
        hello = self.ranks.get(0)
        return hello.address.incarnation if hello is not None else 0

    def _count(self, done: StepDone, now_ns: int, out: list[Effect]) -> None:
        for prompt in done.prompts:
            if (seq := self.sequences.get(prompt.slot)) is None or not seq.tell_prompt(prompt):
                self.counts["skipped_prompts"] += 1
        for record in done.records:
            seq = self.sequences.get(record.slot)
            if seq is None or not self._is_next(seq, record):
                self.counts["skipped_records"] += 1
                continue
            length = len(seq.output)
            what = ending(record.flags, length + 1, seq.max_tokens)
            if what == "error":
                failure = no_token(record.flags)
                self._end(seq, seq.end or End("error", length, None, failure))
                self.counts[failure.code or ""] += 1
                continue
            stop = stop_token(record.token, seq.handed.params, self.end_ids) if what == "stop" else None
            seq.output.append(record.token)
            seq.logprobs.append(record.logprob)
            if seq.sampling.top_logprobs:
                seq.tops.append(record.tops)
            if seq.lone_deaths or self.batcher.suspects:
                seq.lone_deaths = 0
                self.batcher.suspects.pop(seq, None)
            self.board.count(record.slot, len(seq.handed.prompt_ids), length + 1)
            if seq.end is None:
                if what is not None:
                    self._end(seq, End(what, length + 1, stop))
                elif seq.held.state != "decoding" and seq.started:
                    # else it is a word from before a rank was lost, which the detokenizer believes, too
                    self.hands.move(seq.held, "decoding", now_ns, out)
            elif seq.end.length is None and what is not None:  # where it would have ended, it ends all the same
                seq.end = End("stop", length + 1, stop) if what == "stop" else replace(seq.end, length=length + 1)

    def _is_next(self, seq: Sequence, record: TokenRecord) -> bool:
        """Whether a record is the sequence's next token, and before its end."""
        length, end = len(seq.output), seq.end
        if end is not None and end.length is not None and length >= end.length:
            return False
        return counts(record, seq.held.generation, seq.held.epoch, length) and not seq.prompt_due

    # -------------------------------------------------------------------------------- ending

    def _set_end(self, seq: Sequence, end: End, now_ns: int, out: list[Effect]) -> None:
        """Decide that a sequence ends; running work is ``aborting`` until no step names it."""
        self._end(seq, end)
        if seq.in_flight:
            self.hands.move(seq.held, "aborting", now_ns, out)

    def _end(self, seq: Sequence, end: End) -> None:
        if seq.end is None:
            self.ended.append(seq)
        seq.end = end

    def _finish_ended(self, now_ns: int, out: list[Effect]) -> None:
        if self.ended:
            ready = [seq for seq in self.ended if not seq.in_flight]
            self.ended = [seq for seq in self.ended if seq.in_flight]
            for seq in ready:
                self._finish(seq, now_ns, out)

    def _finish(self, seq: Sequence, now_ns: int, out: list[Effect]) -> None:
        """Free what the sequence held and hand it to the detokenizer, which flushes and closes it."""
        end, held, handed = seq.end, seq.held, seq.handed
        assert end is not None
        self.batcher.remove(seq, now_ns)
        del self.sequences[held.slot]
        length = end.length if end.length is not None else len(seq.output)
        home = handed.home.index
        if end.reason == "refused":
            key = self.hands.give(held, Role.FRONTEND, home, "closed", now_ns, out)
            closed = Closed(key, held.trace, length, "refused", None, "", end.failure, handed.prompt_ids)
            out.append(Send(Role.FRONTEND, home, closed))
            return
        live = self.board.live(Role.DETOKENIZER, 0)
        if seq.output and seq.leased_to != live:
            self._lease(seq, out)
        run = seq.run
        key = self.hands.give(held, Role.DETOKENIZER, 0, "flushing", now_ns, out)
        why = (length, end.reason, end.stop_reason, end.failure)
        flush = Flush(key, handed.home, held.trace, run, seq.base, *why, handed.prompt_ids, seq.cached_tokens)
        out.append(Send(Role.DETOKENIZER, 0, flush))

    # -------------------------------------------------------------------------------- planning

    def _plan(self, landed: bool, now_ns: int, out: list[Effect]) -> None:
        """Plan a step if none is in flight. Ahead of one that is, only when another has just landed: so whoever
        comes while an idle engine's first step runs is in the second.
        """
        foreseen = landed and self.batcher.tokens_per_row == 1  # else nobody knows where the next step begins
        most = self.limits.steps_in_flight_max if foreseen else 1
        while len(self.flights) < most and self.batcher.pool is not None:
            chosen = self.batcher.choose(len(self.flights), now_ns, out)
            if not chosen:
                break
            self._launch(chosen, now_ns, out)

    def _launch(self, chosen: Chosen, now_ns: int, out: list[Effect]) -> None:
        """Write the step into a plan: leases first, then what the workers do not know yet."""
        starts, rows, flight = [], [], []
        live = self.board.live(Role.DETOKENIZER, 0)
        for seq, count in chosen.items():
            held = seq.held
            if seq.leased_to != live or buggify("lease again"):
                self._lease(seq, out)
            if not seq.started:
                seq.started = True
                tokens = seq.handed.prompt_ids + seq.output
                starts.append(Start(held.slot, held.generation, seq.run, tokens, seq.prompt_tokens, seq.sampling_now))
                self.hands.move(held, "prefilling", now_ns, out)
            sample = seq.planned + count == seq.tokens
            told, seq.told_blocks = seq.told_blocks, len(seq.blocks)
            rows.append(Row(held.slot, seq.planned, count, seq.blocks[told:], sample))
            flight.append((seq, count, sample))
        incarnations = tuple(self.ranks[rank].address.incarnation for rank in sorted(self.ranks))
        assert self.batcher.pool is not None
        moves = [(int(kind), source, target) for kind, source, target in self.batcher.pool.take_moves()]
        step = self.flights.launch(flight, bool(moves), now_ns)
        out.append(Plan(incarnations, step, self.batcher.forgotten, starts, rows, moves))
        self.batcher.forgotten = []

    def _sequence(self, slot: int, generation: int) -> Sequence | None:
        seq = self.sequences.get(slot)
        return seq if seq is not None and seq.held.generation == generation else None

    def story(self) -> str:
        """The ledger, the steps in flight, then every request held, a line each, for dumps."""
        admission = self.batcher.seating.admission
        head = f"{admission.ledger.table()}\n" if admission is not None else ""
        for flight in self.flights.under_way:
            head += f"step {flight.step} in flight: {[(seq.held.slot, count) for seq, count, _ in flight.rows]}\n"
        return head + "".join(f"slot {slot}: {seq}\n" for slot, seq in self.sequences.items())
