"""The frontend's core: claims rows, submits requests, delivers their text once, and closes them.

It keeps a lease on every request it opened: parameters, prompt ids and delivered ids, enough to submit the request
again when its owner dies. It never tokenises, schedules or detokenises, and it knows no socket: doors speak to it in
events (``Open``, ``Taken``, ``Gone``, ``Answered``) and hear from it in effects (``Begin``, ``Deliver``, ``Finish``).
"""

from __future__ import annotations

from baton.engine.buggify import buggify
from baton.engine.effects import Answered, Begin, Deliver, Effect, Finish, Gone, Open, Send, Taken, Tick, Wake
from baton.engine.limits import Limits
from baton.engine.ownership import BoardRow, Held, HomeBoard, Ownership, state_span
from baton.engine.states import STATE_NAMES
from baton.engine.stream import FULL, LOST, STOPPING, Stream, out_of_time, settle, unknown
from baton.ipc.frames import (
    Address,
    Admitted,
    Cancel,
    CancelAck,
    Closed,
    Credit,
    Drained,
    Failure,
    Halt,
    Key,
    Life,
    Piece,
    Prompt,
    PromptPiece,
    Recall,
    Returned,
    Role,
    Serving,
    Submit,
    Text,
)


class FrontendCore:
    """Invariant: a row of this slice that is not free has a ``Stream`` here, and each stream ends with one Finish."""

    def __init__(self, me: Address, board: HomeBoard, slots: range, limits: Limits) -> None:
        self.me = me
        self.board = board
        self.limits = limits
        self.hands = Ownership(board, me, limits.request_spans_max)
        self.streams: dict[int, Stream] = {}
        self.doors: dict[int, Stream] = {}
        self.free = list(reversed(slots))
        self.slots = slots
        self.draining = False
        self.halted: str | None = None

    def start(self, now_ns: int) -> list[Effect]:
        """Adopt what a dead predecessor left in the slice: cancel it, and see it to its end."""
        out: list[Effect] = [self._next_sweep(now_ns)]
        for slot in self.slots:
            row = self.board.row(slot)
            if not row.role:
                continue
            _, trace = self.board.identity(slot)
            stream = Stream(slot, row.generation, None, None, trace, orphan=True, cancel_reason="cancelled")
            self.streams[slot] = stream
            self.free.remove(slot)
            self.board.set_cancel(slot, row.generation)
            self._nudge(stream, out)
        self._sweep(now_ns, out)
        return out

    def handle(self, event: object, now_ns: int) -> list[Effect]:
        """One event in, effects out. Frames that name nothing of ours are dropped; they are late, not wrong."""
        out: list[Effect] = []
        match event:
            case Text():
                for prompt in event.prompts:
                    if (stream := self._hearer(prompt)) is not None:
                        stream.tell_prompt(prompt)
                for piece in event.pieces:
                    self._text(piece, now_ns, out)
            case Taken():
                self._taken(event, now_ns, out)
            case Open():
                self._open(event, now_ns, out)
            case Admitted():
                stream = self._stream(event.slot, event.generation)
                if stream is not None and stream.finish is None and event.run > stream.submitted:
                    self._begin(stream, event.prompt_ids, now_ns, out)
                    self._runs(stream, event.run, out)
            case Closed():
                self._closed(event, now_ns, out)
            case Answered():
                self._answered(event, now_ns, out)
            case Gone():
                self._gone(event, now_ns, out)
            case Returned():
                stream = self._stream(event.key.slot, event.key.generation)
                held = self.hands.take(event.key, event.trace)
                if stream is not None and held is not None:
                    self._resubmit(stream, held, now_ns, out)
            case CancelAck():
                self.hands.counts["cancels_acknowledged"] += 1
            case Life():
                self._sweep(now_ns, out)
            case Tick(name="sweep"):
                self._sweep(now_ns, out)
                out.append(self._next_sweep(now_ns))
            case Serving():
                self.draining = event.draining
                self._check_drained(out)
            case Halt():
                self._halt(event, now_ns, out)
            case _:
                raise AssertionError(f"no such event for a frontend: {event!r}")
        return out

    # -------------------------------------------------------------------------------- opening and submitting

    def _open(self, event: Open, now_ns: int, out: list[Effect]) -> None:
        doors = (event.door, *event.siblings)
        refusal = STOPPING if self.draining or self.halted else FULL if len(self.free) < len(doors) else None
        if refusal is not None:
            out.extend(Finish(door, "refused", None, "", 0, 0, refusal) for door in doors)
            return
        family: list[Stream] = []
        for choice, door in enumerate(doors):
            self._claim(event, choice, door, family, now_ns, out)

    def _claim(self, event: Open, choice: int, door: int, family: list[Stream], now_ns: int, out: list[Effect]) -> None:
        slot = self.free.pop()
        generation = self.board.row(slot).generation
        trace = event.trace
        self.board.claim(slot, event.request_id, trace)
        held = Held(slot, generation, 0, "received", event.received_ns, trace)
        self.hands.write(held, self.me, taken=True)
        stream = Stream(slot, generation, door, event, trace, progress_ns=now_ns, choice=choice, family=family)
        stream.prompt_ids = event.prompt.token_ids
        family.append(stream)
        self.streams[slot] = self.doors[door] = stream
        self._submit(stream, held, now_ns, out)

    def _submit(self, stream: Stream, held: Held, now_ns: int, out: list[Effect]) -> None:
        opened = stream.opened
        assert opened is not None
        index = self.hands.spread(Role.TOKENIZER, stream.slot + stream.lives - 1)
        key = self.hands.give(held, Role.TOKENIZER, index, "tokenizing", now_ns, out)
        stream.held, stream.submitted = None, key.epoch
        stream.granted = stream.taken + self.limits.mailbox_tokens_max
        prompt = opened.prompt if stream.prompt_ids is None else Prompt(token_ids=stream.prompt_ids)
        stream.early.clear()
        what, so_far = (opened.terms, stream.params(opened.params), prompt), list(stream.delivered)
        submit = Submit(key, self.me, stream.trace, *what, so_far, stream.granted, stream.began)
        out.append(Send(Role.TOKENIZER, index, submit))

    def _resubmit(self, stream: Stream, held: Held, now_ns: int, out: list[Effect]) -> None:
        """Start the request's next life from the delivered ids, unless it was cancelled or has died too often."""
        stream.held = held
        if stream.orphan or stream.cancel_reason is not None:
            self._close(stream, now_ns, out, stream.cancel_reason or "cancelled", None, "", None)
        elif stream.lives >= self.limits.lives_max:
            self._close(stream, now_ns, out, "error", None, "", LOST)
        else:
            stream.lives += 1
            self._submit(stream, held, now_ns, out)

    def _begin(self, stream: Stream, prompt_ids: list[int], now_ns: int, out: list[Effect]) -> None:
        """The prompt's ids are known: the door may begin, and text that came before them is delivered."""
        if not stream.began:
            stream.began, stream.prompt_ids = True, prompt_ids
            if stream.door is not None:
                out.append(Begin(stream.door, prompt_ids))
            for piece in stream.early:
                self._text(piece, now_ns, out)
            stream.early.clear()

    def _runs(self, stream: Stream, run: int, out: list[Effect]) -> None:
        if run > stream.run:
            stream.run = run
            self._grant(stream, out)

    # -------------------------------------------------------------------------------- text, credit, the end

    def _hearer(self, piece: Piece | PromptPiece) -> Stream | None:
        stream = self._stream(piece.slot, piece.generation)
        if stream is None or stream.orphan or stream.finish is not None or piece.run <= stream.submitted:
            self.hands.counts["old_text"] += 1
            return None
        return stream

    def _text(self, piece: Piece, now_ns: int, out: list[Effect]) -> None:
        stream = self._hearer(piece)
        if stream is None:
            return
        if not stream.began:
            stream.early.append(piece)  # Admitted, which brings the prompt's ids, is on its way from the scheduler
            return
        delivered, known = stream.delivered, len(stream.delivered)
        if piece.start != known:
            piece = unknown(piece, known)
        ids = piece.token_ids
        if not ids:
            return
        self._runs(stream, piece.run, out)
        if not known:
            stream.first_token_ns = now_ns
        if stream.taken == known:
            stream.progress_ns = now_ns
        delivered += ids
        self.board.set_delivered(stream.slot, len(delivered))
        if stream.door is not None:
            out.append(Deliver(stream.door, ids, piece.texts, piece.logprobs, piece.scores))
        else:
            stream.taken = len(delivered)

    def _taken(self, event: Taken, now_ns: int, out: list[Effect]) -> None:
        stream = self.doors.get(event.door)
        if stream is None or event.position <= stream.taken:
            return
        stream.taken, stream.progress_ns = event.position, now_ns
        self._grant(stream, out)

    def _grant(self, stream: Stream, out: list[Effect]) -> None:
        """Extend the credit once half of it is used up."""
        window = self.limits.mailbox_tokens_max
        if stream.run > stream.submitted and stream.taken + window >= stream.granted + window // 2:
            more = 1 if buggify("small credit") else window
            stream.granted = max(stream.granted, stream.taken + more)
            out.append(Send(Role.SCHEDULER, 0, Credit(stream.slot, stream.generation, stream.run, stream.granted)))

    def _closed(self, event: Closed, now_ns: int, out: list[Effect]) -> None:
        stream = self._stream(event.key.slot, event.key.generation)
        held = self.hands.take(event.key, event.trace)
        if stream is None or held is None:
            return
        stream.held, stream.cached_tokens = held, event.cached_tokens
        if event.reason == "refused":
            stream.prompt_ids = stream.prompt_ids or event.prompt_ids
        elif event.prompt_ids:
            self._begin(stream, event.prompt_ids, now_ns, out)
        known = len(stream.delivered)
        assert stream.orphan or event.length == known, f"ended at {event.length}, delivered {known}"
        reason = event.reason
        if reason == "cancelled" and stream.cancel_reason is not None:
            reason = stream.cancel_reason
        self._close(stream, now_ns, out, reason, event.stop_reason, event.tail, event.failure)

    def _close(
        self,
        stream: Stream,
        now_ns: int,
        out: list[Effect],
        reason: str,
        stop_reason: str | int | None,
        tail: str,
        failure: Failure | None,
    ) -> None:
        held = stream.held
        assert held is not None
        if held.state != "closed":
            self.hands.move(held, "closed", now_ns, out)
        if stream.cancel_reason is not None:
            stream.release_ns = now_ns - stream.cancelled_ns
        prompt_tokens = len(stream.prompt_ids or [])
        door = stream.door if stream.door is not None else -1
        why = (reason, stop_reason, tail, len(stream.delivered), prompt_tokens, failure)
        stream.finish = Finish(door, *why, stream.cached_tokens, stream.prompt_scores)
        if stream.door is not None:
            out.append(stream.finish)
            stream.progress_ns = now_ns
        else:
            self._forget(stream, now_ns, None, out)

    def _answered(self, event: Answered, now_ns: int, out: list[Effect]) -> None:
        stream = self.doors.get(event.door)
        if stream is not None and stream.finish is not None:
            self._forget(stream, now_ns, event.error, out)

    def _forget(self, stream: Stream, now_ns: int, error: str | None, out: list[Effect]) -> None:
        """Write the account, close the root span, free the row. The request is no more."""
        held = stream.held
        assert held is not None and stream.finish is not None
        self.hands.leave(held, now_ns, out, error)
        self.board.write(stream.slot, BoardRow(generation=stream.generation + 1))
        del self.streams[stream.slot]
        if stream.door is not None:
            del self.doors[stream.door]
        self.free.append(stream.slot)
        out.extend(settle(stream, now_ns))
        self._check_drained(out)

    def attend(self, door: int, present: bool, now_ns: int) -> None:
        """Whether anybody listens at a door that is open."""
        stream = self.doors.get(door)
        if stream is not None:
            stream.absent, stream.progress_ns = not present, now_ns

    # -------------------------------------------------------------------------------- cancel, sweep, drain

    def _gone(self, event: Gone, now_ns: int, out: list[Effect]) -> None:
        stream = self.doors.get(event.door)
        if stream is None:
            return
        if not event.wants_end:
            del self.doors[event.door]
            stream.door = None
            if stream.finish is not None:
                self._forget(stream, now_ns, event.reason, out)
                return
        self._cancel(stream, event.reason, now_ns, out)

    def _cancel(self, stream: Stream, reason: str, now_ns: int, out: list[Effect]) -> None:
        """Rule 5: the word first, the row second, the nudge third. Repeats change nothing."""
        if stream.finish is not None or stream.cancel_reason is not None:
            return
        stream.cancel_reason, stream.cancelled_ns = reason, now_ns
        self.board.set_cancel(stream.slot, stream.generation)
        self._nudge(stream, out)

    def _nudge(self, stream: Stream, out: list[Effect]) -> None:
        row = self.board.row(stream.slot)
        if row.role != self.me.role:
            out.append(Send(Role(row.role), row.index, Cancel(stream.slot, stream.generation, self.me.index)))

    def _sweep(self, now_ns: int, out: list[Effect]) -> None:
        for stream in list(self.streams.values()):
            if stream.finish is None:
                self._look(stream, now_ns, out)
            self._check_time(stream, now_ns, out)

    def _look(self, stream: Stream, now_ns: int, out: list[Effect]) -> None:
        """Rules 3 and 4: seize from the reaped, recall what a reaped sender may not have sent."""
        row = self.board.row(stream.slot)
        live = self.board.live(row.role, row.index)
        sender_reaped = not row.taken and row.from_incarnation < self.board.live(row.from_role, row.from_index)
        key = Key(stream.slot, row.generation, row.epoch)
        if row.incarnation < live:
            dead = Address(Role(row.role), self.me.model, self.me.replica, row.index, row.incarnation)
            self._seize(stream, row, dead, now_ns, out)
        elif row.role == self.me.role:
            if sender_reaped:  # what it sent home may have died with it; if not, it will be of an old epoch
                dead = Address(
                    Role(row.from_role), self.me.model, self.me.replica, row.from_index, row.from_incarnation
                )
                self._seize(stream, row, dead, now_ns, out)
        elif sender_reaped and stream.recalled < row.epoch:
            stream.recalled = row.epoch
            out.append(Send(Role(row.role), row.index, Recall(key, self.me.index, stream.trace)))

    def _seize(self, stream: Stream, row: BoardRow, dead: Address, now_ns: int, out: list[Effect]) -> None:
        state = STATE_NAMES[row.state]
        error = f"{dead} died"
        out.append(state_span(state, stream.trace, row.since_ns, now_ns, str(dead), (), error))
        held = Held(stream.slot, row.generation, row.epoch + 1, "received", now_ns, stream.trace, stream.lives)
        self.hands.write(held, self.me, taken=True)
        self._resubmit(stream, held, now_ns, out)

    def _check_time(self, stream: Stream, now_ns: int, out: list[Effect]) -> None:
        """Bounds of time and stalled readers. A client that does not even take its end is forgotten."""
        if stream.opened is None:
            return
        if stream.finish is not None:
            waited_s = (now_ns - stream.progress_ns) / 1e9
            if waited_s > self.limits.answer_s_max and stream.door is not None:
                self._forget(stream, now_ns, "the client did not take its answer", out)
            return
        reason = out_of_time(stream, stream.opened, STATE_NAMES[self.board.row(stream.slot).state], now_ns, self.limits)
        if reason is not None:
            self._cancel(stream, reason, now_ns, out)

    def _halt(self, event: Halt, now_ns: int, out: list[Effect]) -> None:
        """The engine is gone for good: every waiting client gets its error now, and every request its account."""
        self.halted = event.reason
        failure = Failure(503, "server_error", event.reason, None, "engine_stopped")
        for stream in self.streams.values():
            if stream.finish is None:
                door = stream.door if stream.door is not None else -1
                sizes = (len(stream.delivered), len(stream.prompt_ids or []))
                stream.finish = Finish(door, "error", None, "", *sizes, failure)
                if stream.door is not None:
                    out.append(stream.finish)
            out.extend(settle(stream, now_ns))
        self.doors.clear()
        self.streams.clear()

    def _check_drained(self, out: list[Effect]) -> None:
        if self.draining and not self.streams:
            out.append(Send(Role.SUPERVISOR, 0, Drained(self.me)))

    def _next_sweep(self, now_ns: int) -> Wake:
        lateness = 5 if buggify("late sweep") else 1
        return Wake(now_ns + lateness * int(self.limits.sweep_interval_s * 1e9), "sweep")

    def _stream(self, slot: int, generation: int) -> Stream | None:
        stream = self.streams.get(slot)
        return stream if stream is not None and stream.generation == generation else None

    def story(self) -> str:
        """Every request this frontend answers for, a line each, for dumps."""
        return "".join(f"slot {slot}: {self.board.row(slot)} {stream}\n" for slot, stream in self.streams.items())
