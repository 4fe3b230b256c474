"""The detokenizer's core: reads every token, turns the leased ones into text, finds stop strings, flushes the end.

While the scheduler owns a request this process only holds a lease; it decides nothing, it *reports* a stop string.
It emits nothing past an end flag or a stop string. All pieces of one event for one frontend travel in one frame.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.engine.batch import INVALID_FLAG
from baton.engine.buggify import buggify
from baton.engine.effects import Doorbell, Effect, Send, TokenRecord, TokenRing
from baton.engine.limits import Limits
from baton.engine.ownership import Board, Held, Ownership
from baton.engine.scores import PromptRecord, news, unpack, unpack_entries
from baton.engine.stopping import counts, ending
from baton.engine.text import TextState, TokenTable
from baton.ipc.frames import (
    Address,
    Cancel,
    CancelAck,
    Candidate,
    Closed,
    Flush,
    Halt,
    Lease,
    Life,
    Piece,
    PromptPiece,
    PromptScored,
    Recall,
    Returned,
    Role,
    Scored,
    StopFound,
    Text,
)


@dataclass(slots=True)
class Leased:
    """One lease. ``seen`` output tokens are known, ``sent`` of them have left as text, ``park`` is where it ends.

    Of ``prompt_told`` tokens of the prompt, beginning with its second, everything was told.
    """

    lease: Lease
    state: TextState
    seen: int = 0
    sent: int = 0
    prompt_told: int = 0
    park: int | None = None
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    scores: list[Scored] = field(default_factory=list)

    @property
    def prompt_due(self) -> bool:
        """Whether something of the prompt was asked for and is not known: no token counts before that."""
        asked = self.lease.params.prompt_logprobs is not None
        return asked and self.prompt_told < self.lease.prompt_tokens - 1


class DetokenizerCore:
    """Invariant: for each lease, ``sent <= seen`` and the text sent is that of tokens ``base .. sent``."""

    def __init__(self, me: Address, board: Board, ring: TokenRing, table: TokenTable, limits: Limits) -> None:
        self.me = me
        self.board = board
        self.ring = ring
        self.table = table
        self.hands = Ownership(board, me, limits.request_spans_max)
        self.leases: dict[int, Leased] = {}
        self.early: dict[int, list[TokenRecord | PromptRecord]] = {}
        self.flushing: dict[int, tuple[Held, Flush]] = {}
        self._touched: dict[int, Leased] = {}

    def start(self, now_ns: int) -> list[Effect]:
        """A detokenizer begins empty; the scheduler leases it everything anew."""
        return []

    def handle(self, event: object, now_ns: int) -> list[Effect]:
        """One event in, effects out."""
        out: list[Effect] = []
        match event:
            case Doorbell():
                self._drain(now_ns, out)
            case Lease():
                self._lease(event, now_ns, out)
            case Flush():
                held = self.hands.take(event.key, event.trace)
                if held is not None:
                    self.flushing[held.slot] = (held, event)
                    self._drain(now_ns, out)
                    self._try_close(held.slot, now_ns, out)
            case Cancel():
                out.append(Send(Role.FRONTEND, event.home, CancelAck(event.slot, event.generation)))
            case Recall():
                key = self.hands.recall(event.key, event.trace, event.home, now_ns, out)
                if key is not None:
                    out.append(Send(Role.FRONTEND, event.home, Returned(key, event.trace)))
            case Life():
                self._drain(now_ns, out)  # a worker that died between its commit and the bell rang nobody
                self._drop_dead_leases()
            case Halt():
                pass
            case _:
                raise AssertionError(f"no such event for a detokenizer: {event!r}")
        self._emit(out)
        return out

    # -------------------------------------------------------------------------------- leases and records

    def _lease(self, event: Lease, now_ns: int, out: list[Effect]) -> None:
        old = self.leases.get(event.slot)
        if event.incarnation != self.me.incarnation:
            self.hands.counts["foreign_leases"] += 1
            return
        if old is not None and (old.lease.generation, old.lease.run) >= (event.generation, event.run):
            self.hands.counts["old_leases"] += 1
            return
        leased = Leased(event, TextState(self.table, event.params), sent=event.base)
        self.leases[event.slot] = leased
        self._tell_prompt(leased, event.prompt_scores, out)
        count = len(event.token_ids)
        logprobs, tops = event.logprobs or [0.0] * count, event.tops or [b""] * count
        for token, logprob, top in zip(event.token_ids, logprobs, tops, strict=True):
            self._push(leased, token, 0, logprob, top, out)
        for record in self.early.pop(event.slot, ()):
            self._record(record, out)
        self._try_close(event.slot, now_ns, out)

    def _drain(self, now_ns: int, out: list[Effect]) -> None:
        for done in self.ring.read():
            for prompt in done.prompts:
                self._record(prompt, out)
            for record in done.records:
                self._record(record, out)
                if record.slot in self.flushing:
                    self._try_close(record.slot, now_ns, out)

    def _record(self, record: TokenRecord | PromptRecord, out: list[Effect]) -> None:
        leased = self.leases.get(record.slot)
        if leased is not None and isinstance(record, TokenRecord) and self._is_next(leased, record):
            self._push(leased, record.token, record.flags, record.logprob, record.tops, out)
        elif leased is None or (leased.lease.generation, leased.lease.run) < (record.generation, record.run):
            if self._alive(record.slot, record.generation, record.run):
                early = self.early.setdefault(record.slot, [])
                if early and (early[0].generation, early[0].run) != (record.generation, record.run):
                    early.clear()
                early.append(record)
            else:
                self.hands.counts["skipped_records"] += 1
        elif isinstance(record, PromptRecord):
            lease, top = leased.lease, leased.lease.params.prompt_logprobs
            self._tell_prompt(leased, news(record, lease.generation, lease.run, leased.prompt_told, top), out)
        else:
            self.hands.counts["skipped_records"] += 1

    def _is_next(self, leased: Leased, record: TokenRecord) -> bool:
        """Whether a record is the lease's next token."""
        lease = leased.lease
        return counts(record, lease.generation, lease.run, leased.seen) and not leased.prompt_due

    def _alive(self, slot: int, generation: int, run: int) -> bool:
        """Whether the board shows this run alive, so that its lease, or its end, must still be on its way."""
        row = self.board.row(slot)
        if row.generation != generation or row.incarnation != self.board.live(row.role, row.index):
            return False
        at_scheduler = row.role == Role.SCHEDULER and row.epoch == run
        return at_scheduler or (row.role == Role.DETOKENIZER and row.epoch == run + 1)

    def _drop_dead_leases(self) -> None:
        """What a dead scheduler leased ends nowhere. One that comes later stays until the slot's next lease."""
        for slot, leased in list(self.leases.items()):
            if not self._alive(slot, leased.lease.generation, leased.lease.run):
                del self.leases[slot]
        for slot, early in list(self.early.items()):
            if not early or not self._alive(slot, early[0].generation, early[0].run):
                del self.early[slot]

    def _push(self, leased: Leased, token: int, flags: int, logprob: float, tops: bytes, out: list[Effect]) -> None:
        """Count one token; decode it unless the text ended before it."""
        if flags & INVALID_FLAG:
            leased.park = leased.seen if leased.park is None else leased.park
            return
        position = leased.seen
        leased.seen += 1
        if leased.park is not None:
            return
        lease = leased.lease
        text = leased.state.push(token)
        if position >= lease.base:
            leased.ids.append(token)
            leased.texts.append(text)
            if lease.params.logprobs:
                leased.logprobs.append(logprob)
                leased.scores.append(self._scored(token, tops))
            self._touched[lease.slot] = leased
        hit = leased.state.hit
        if hit is not None:
            leased.park = leased.seen
            stop = StopFound(lease.slot, lease.generation, lease.run, leased.seen, hit)
            out.append(Send(Role.SCHEDULER, 0, stop))
        elif ending(flags, leased.seen, lease.params.max_tokens) is not None:
            leased.park = leased.seen

    def _tell_prompt(self, leased: Leased, entries: bytes, out: list[Effect]) -> None:
        """Send what is new of the prompt, at once, so that it is there before any text."""
        lease, top = leased.lease, leased.lease.params.prompt_logprobs
        if not entries or top is None:
            return
        bytes_of, told = self.table.bytes_of, list[PromptScored]()
        for rank, ((token, logprob), *others) in unpack_entries(entries, top):
            likeliest = [Candidate(other, score, bytes_of(other)) for other, score in others]
            told.append(PromptScored(token, logprob, bytes_of(token), rank, likeliest))
        piece = PromptPiece(lease.slot, lease.generation, lease.run, leased.prompt_told + 1, told)
        leased.prompt_told += len(told)
        out.append(Send(Role.FRONTEND, lease.home.index, Text([], [piece])))

    def _scored(self, token: int, tops: bytes) -> Scored:
        """The bytes behind a token's log-probability, and behind those of the likeliest ones in its place."""
        bytes_of = self.table.bytes_of
        return Scored(bytes_of(token), [Candidate(other, score, bytes_of(other)) for other, score in unpack(tops)])

    # -------------------------------------------------------------------------------- text out, and the end

    def _emit(self, out: list[Effect]) -> None:
        """Send what was decoded, one frame a frontend; the token that completes a stop string waits for the end."""
        if not self._touched:
            return
        frames: dict[int, list[Piece]] = {}
        for leased in self._touched.values():
            lease = leased.lease
            upto = len(leased.ids) - (leased.state.hit is not None)
            if upto > 0 and buggify("alone"):
                out.append(Send(Role.FRONTEND, lease.home.index, Text([self._piece(leased, upto)])))
            elif upto > 0:
                frames.setdefault(lease.home.index, []).append(self._piece(leased, upto))
        self._touched.clear()
        out.extend(Send(Role.FRONTEND, home, Text(pieces)) for home, pieces in frames.items())

    def _piece(self, leased: Leased, upto: int) -> Piece:
        lease, start = leased.lease, leased.sent
        leased.sent += upto
        ids, texts, logprobs, scores = leased.ids, leased.texts, leased.logprobs, leased.scores
        if upto == len(ids):  # as mostly: all there is leaves
            leased.ids, leased.texts, leased.logprobs, leased.scores = [], [], [], []
        else:
            leased.ids, leased.texts = ids[upto:], texts[upto:]
            leased.logprobs, leased.scores = logprobs[upto:], scores[upto:]
            del ids[upto:], texts[upto:], logprobs[upto:], scores[upto:]
        return Piece(lease.slot, lease.generation, lease.run, start, ids, texts, logprobs, scores)

    def _try_close(self, slot: int, now_ns: int, out: list[Effect]) -> None:
        """Close a flushing request once everything up to its length was read."""
        if slot not in self.flushing:
            return
        held, flush = self.flushing[slot]
        leased = self.leases.get(slot)
        if leased is not None and (leased.lease.generation, leased.lease.run) != (held.generation, flush.run):
            leased = None
        if leased is None and flush.length > flush.base:
            return
        if leased is not None and leased.seen < flush.length:
            return
        length, reason, stop_reason, tail, failure = flush.length, flush.reason, flush.stop_reason, "", flush.failure
        if leased is not None:
            hit = leased.state.hit
            if hit is not None and leased.park is not None and leased.park <= length:
                length, reason, stop_reason, failure = leased.park, "stop", hit, None
            upto = min(length - leased.sent, len(leased.ids))
            self._touched.pop(slot, None)
            if upto > 0:
                out.append(Send(Role.FRONTEND, flush.home.index, Text([self._piece(leased, upto)])))
            tail = leased.state.finish()
            del self.leases[slot]
        del self.flushing[slot]
        key = self.hands.give(held, Role.FRONTEND, flush.home.index, "closed", now_ns, out)
        why = (length, reason, stop_reason, tail, failure)
        closed = Closed(key, flush.trace, *why, flush.prompt_ids, flush.cached_tokens)
        out.append(Send(Role.FRONTEND, flush.home.index, closed))

    def story(self) -> str:
        """Every lease and every request being flushed, a line each, for dumps."""
        leases = (
            f"slot {slot}: seen {leased.seen} sent {leased.sent} {leased.lease}\n"
            for slot, leased in self.leases.items()
        )
        flushing = (f"slot {slot}: {held} {flush}\n" for slot, (held, flush) in self.flushing.items())
        return "".join([*leases, *flushing])
