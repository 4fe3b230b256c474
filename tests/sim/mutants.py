"""Defects, one a rule: each is put into a production module and must be caught by the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import baton.engine.detokenizer as detokenizer
import baton.engine.frontend as frontend
import baton.engine.scheduler as scheduler
from baton.engine.answers import Answer, Answers
from baton.engine.desk import DeskCore
from baton.engine.effects import Gone, TokenRecord
from baton.engine.ownership import Ownership
from baton.engine.sequence import End
from baton.engine.stopping import StopScanner
from baton.engine.worker import WorkerCore
from baton.ipc.frames import Life
from tests.sim.memory_mutants import MEMORY

Patch = pytest.MonkeyPatch
FrontendCore, SchedulerCore = frontend.FrontendCore, scheduler.SchedulerCore
DetokenizerCore = detokenizer.DetokenizerCore


def cancel_frees_at_once(patch: Patch) -> None:
    """A cancelled sequence is finished, and its blocks freed, while a step names it."""

    def finish_ended(self: Any, now_ns: int, out: list[Any]) -> None:
        ready, self.ended = self.ended, []
        for seq in ready:
            seq.in_flight = 0
            self._finish(seq, now_ns, out)

    patch.setattr(SchedulerCore, "_finish_ended", finish_ended)


def a_stale_hand_over_is_accepted(patch: Patch) -> None:
    """A frame is taken whatever the row says, as long as it is the same request."""
    patch.setattr(Ownership, "may_take", lambda self, key: self.board.row(key.slot).generation == key.generation)


def a_slow_owner_is_taken_for_dead(patch: Patch) -> None:
    """A frontend seizes before the owner is reaped."""
    look = FrontendCore._look

    def impatient(self: Any, stream: Any, now_ns: int, out: list[Any]) -> None:
        row = self.board.row(stream.slot)
        if row.role != self.me.role and row.taken and now_ns - row.since_ns > 20_000_000:
            self._seize(stream, row, self.me, now_ns, out)
        else:
            look(self, stream, now_ns, out)

    patch.setattr(FrontendCore, "_look", impatient)


def delivered_past_the_end(patch: Patch) -> None:
    """The detokenizer goes on decoding past an end flag."""
    patch.setattr(detokenizer, "ending", lambda flags, length, max_tokens: None)
    patch.setattr(scheduler, "ending", lambda flags, length, most: "length" if length >= most else None)


def the_generation_is_forgotten(patch: Patch) -> None:
    """A record and a text count for whatever request has the slot now."""

    def counts(record: TokenRecord, generation: int, run: int, length: int) -> bool:
        return record.position == length and record.run == run

    patch.setattr(scheduler, "counts", counts)
    patch.setattr(detokenizer, "counts", counts)
    patch.setattr(FrontendCore, "_stream", lambda self, slot, generation: self.streams.get(slot))


def resubmitted_without_delivered_ids(patch: Patch) -> None:
    """A request begins its next life from nothing."""
    submit = FrontendCore._submit

    def forgetful(self: Any, stream: Any, held: Any, now_ns: int, out: list[Any]) -> None:
        submit(self, stream, held, now_ns, out)
        out[-1] = msgspec.structs.replace(out[-1], frame=msgspec.structs.replace(out[-1].frame, delivered=[]))

    patch.setattr(FrontendCore, "_submit", forgetful)


def rolled_back_without_draining(patch: Patch) -> None:
    """The scheduler forgets what a dead worker had committed."""

    roll = SchedulerCore._roll_back

    def roll_back(self: Any, *arguments: Any) -> Any:
        self.ring.read()
        return roll(self, *arguments)

    patch.setattr(SchedulerCore, "_roll_back", roll_back)


def leased_without_draining(patch: Patch) -> None:
    """A new detokenizer is leased the tokens the scheduler happens to know, and the rest is skipped."""
    life = SchedulerCore._life

    def lease(self: Any, event: Any, now_ns: int, out: list[Any]) -> None:
        drain, self._drain = self._drain, lambda now_ns, out: None
        life(self, event, now_ns, out)
        self._drain = drain

    patch.setattr(SchedulerCore, "_life", lease)


def no_recall(patch: Patch) -> None:
    """What a dead sender had not sent is waited for, for ever."""
    patch.setattr(Ownership, "recall", lambda *arguments: None)


def cancel_word_unread_when_taking(patch: Patch) -> None:
    """A cancel that comes between two owners is heard by neither."""
    taken = SchedulerCore._handed

    def deaf(self: Any, event: Any, now_ns: int, out: list[Any]) -> None:
        cancelled, self.hands.cancelled = self.hands.cancelled, lambda held: False
        taken(self, event, now_ns, out)
        self.hands.cancelled = cancelled

    patch.setattr(SchedulerCore, "_handed", deaf)


def old_text_is_delivered(patch: Patch) -> None:
    """Text of a run that was given up counts."""
    text = FrontendCore._text

    def credulous(self: Any, piece: Any, now_ns: int, out: list[Any]) -> None:
        stream = self._stream(piece.slot, piece.generation)
        run = max(piece.run, stream.submitted + 1) if stream is not None else piece.run
        text(self, msgspec.structs.replace(piece, run=run), now_ns, out)

    patch.setattr(FrontendCore, "_text", credulous)


def plans_for_any_worker(patch: Patch) -> None:
    """A worker runs plans that were made for the one before it."""
    apply = WorkerCore.apply

    def gullible(self: Any, plan: Any) -> Any:
        return apply(self, msgspec.structs.replace(plan, incarnations=self.group))

    patch.setattr(WorkerCore, "apply", gullible)


def a_rank_stays_in_its_old_group(patch: Patch) -> None:
    """A rank that lives does not notice that another was replaced."""
    patch.setattr(WorkerCore, "join", lambda self, group: None)


def who_comes_back_begins_anew(patch: Patch) -> None:
    """A client that comes back gets the whole answer again, whatever it has."""
    attach = DeskCore._attach

    def forgetful(self: Any, visitor: Any, answer: Any, after: int, now_ns: int, out: list[Any]) -> None:
        attach(self, visitor, answer, 0, now_ns, out)

    patch.setattr(DeskCore, "_attach", forgetful)


def one_cancels_for_all(patch: Patch) -> None:
    """A cancel by one client of an answer ends it for the others."""

    def listener(self: Any, answer: Any, visitor: Any, event: Any, now_ns: int, out: list[Any]) -> None:
        if isinstance(event, Gone):
            self._front(Gone(answer.door, event.reason, True), now_ns, out)
        heard(self, answer, visitor, event, now_ns, out)

    heard = DeskCore._listener
    patch.setattr(DeskCore, "_listener", listener)


def every_repeat_runs(patch: Patch) -> None:
    """A repeated key begins a request of its own, under the name of the first."""
    add = Answers.add

    def twice(self: Any, answer: Any) -> None:
        add(self, answer)
        self.by_key.clear()

    patch.setattr(Answers, "add", twice)


def nobody_is_waited_for_in_vain(patch: Patch) -> None:
    """Whoever does not come back is waited for, for ever."""
    patch.setattr(Answers, "overdue", lambda self, answer, now_ns: False)


def the_dead_go_on_listening(patch: Patch) -> None:
    """A frontend that died is still spoken to, and its answers go on."""
    patch.setattr(DeskCore, "_look_round", lambda self, now_ns, out: None)


def relays_are_heard_twice(patch: Patch) -> None:
    """What another frontend says is believed however often it comes."""
    relayed = DeskCore._relayed

    def gullible(self: Any, frame: Any, now_ns: int, out: list[Any]) -> None:
        self._last.clear()
        relayed(self, frame, now_ns, out)

    patch.setattr(DeskCore, "_relayed", gullible)


def credit_without_a_reader(patch: Patch) -> None:
    """What is made while nobody listens counts as taken, so the request runs on for nobody."""
    add = Answer.add

    def taken(self: Any, effect: Any, now_ns: int) -> None:
        add(self, effect, now_ns)
        self.taken = max(self.taken, len(self.token_ids))

    patch.setattr(Answer, "add", taken)


# ------------------------------------------------------------------------ defects that were here once


def text_begins_without_the_prompt(patch: Patch) -> None:
    """Text overtakes Admitted, and the door begins with no prompt ids."""
    text = FrontendCore._text

    def eager(self: Any, piece: Any, now_ns: int, out: list[Any]) -> None:
        stream = self._stream(piece.slot, piece.generation)
        if stream is not None and stream.finish is None and not stream.orphan and piece.run > stream.submitted:
            self._begin(stream, stream.prompt_ids or [], now_ns, out)
        text(self, piece, now_ns, out)

    patch.setattr(FrontendCore, "_text", eager)


def length_before_the_end_id(patch: Patch) -> None:
    """A resubmission that is at its end id and at max_tokens ends by length."""
    set_end = SchedulerCore._set_end

    def confuse(self: Any, seq: Any, end: Any, now_ns: int, out: list[Any]) -> None:
        if end.reason == "stop" and end.stop_reason is None and end.length >= (seq.max_tokens or 1 << 30):
            end = End("length", end.length)
        set_end(self, seq, end, now_ns, out)

    patch.setattr(SchedulerCore, "_set_end", confuse)


def death_notices_unread(patch: Patch) -> None:
    """A worker dies between its commit and the bell, and the detokenizer never looks at the ring."""
    handle = DetokenizerCore.handle
    patch.setattr(
        DetokenizerCore,
        "handle",
        lambda self, event, now_ns: [] if isinstance(event, Life) else handle(self, event, now_ns),
    )


def a_crash_widens_the_window(patch: Patch) -> None:
    """A new life is granted a whole window on top of what the client has not read."""
    handed = SchedulerCore._handed

    def generous(self: Any, event: Any, now_ns: int, out: list[Any]) -> None:
        credit = len(event.delivered) + self.limits.mailbox_tokens_max
        handed(self, msgspec.structs.replace(event, credit=credit), now_ns, out)

    patch.setattr(SchedulerCore, "_handed", generous)


# ------------------------------------------------------------------------ what ends an answer


def the_minimum_is_forgotten(patch: Patch) -> None:
    """An answer may end before it has as many tokens as its client wants at least."""
    forget = scheduler.sampling_of
    patch.setattr(scheduler, "sampling_of", lambda *args: msgspec.structs.replace(forget(*args), min_tokens=0))


def a_stop_string_ends_before_the_minimum(patch: Patch) -> None:
    """Stop strings are heeded from the first token on."""
    feed = StopScanner.feed
    patch.setattr(StopScanner, "feed", lambda self, text, heed=True: feed(self, text))


def the_end_has_no_name(patch: Patch) -> None:
    """Nobody is told which token ended the answer."""
    patch.setattr(scheduler, "stop_token", lambda token, params, ends: None)


def a_client_s_ends_are_the_model_s(patch: Patch) -> None:
    """Who ignores the model's end has no end of his own either."""
    blend = scheduler.sampling_of

    def ignorant(params: Any, ends: Any) -> Any:
        return msgspec.structs.replace(blend(params, ends), end_ids=() if params.ignore_eos else ends)

    patch.setattr(scheduler, "sampling_of", ignorant)


def what_stops_is_never_shown(patch: Patch) -> None:
    """The stop string is cut off though its client wants to see it."""
    init = StopScanner.__init__
    patch.setattr(StopScanner, "__init__", lambda self, stops, include=False: init(self, stops))


#: every mutant; each must be caught within ``SEEDS``
MUTANTS: list[Callable[[Patch], None]] = [
    cancel_frees_at_once,
    a_stale_hand_over_is_accepted,
    a_slow_owner_is_taken_for_dead,
    delivered_past_the_end,
    the_generation_is_forgotten,
    resubmitted_without_delivered_ids,
    rolled_back_without_draining,
    leased_without_draining,
    no_recall,
    cancel_word_unread_when_taking,
    old_text_is_delivered,
    a_rank_stays_in_its_old_group,
    plans_for_any_worker,
    who_comes_back_begins_anew,
    one_cancels_for_all,
    every_repeat_runs,
    nobody_is_waited_for_in_vain,
    the_dead_go_on_listening,
    relays_are_heard_twice,
    credit_without_a_reader,
    text_begins_without_the_prompt,
    length_before_the_end_id,
    death_notices_unread,
    a_crash_widens_the_window,
    the_minimum_is_forgotten,
    a_stop_string_ends_before_the_minimum,
    the_end_has_no_name,
    a_client_s_ends_are_the_model_s,
    what_stops_is_never_shown,
    *MEMORY,
]
SEEDS = range(200)
