"""The desk between the doors and the frontend's core: who listens to which answer, here or at another frontend.

A plain request passes through. One that is kept (a key, or a client that may come back) becomes an ``Answer`` with any
number of listeners; to the frontend's core it has one door, which never goes away before the last listener has. An
answer lives at one frontend, its home: a key hashes to it, a response id names it in its first byte. Doors elsewhere
speak to it in the same events and effects, carried by ``Relay`` frames between two known incarnations; when either
dies, the other ends what they had in common.
"""

from __future__ import annotations

import msgspec

from baton.engine.answers import Answer, Answers, Listener, Visitor, differences, home_of
from baton.engine.effects import (
    Answered,
    Attach,
    Begin,
    Deliver,
    DoorEffect,
    DoorEvent,
    Effect,
    Finish,
    Gone,
    Look,
    Named,
    Open,
    Seen,
    Send,
    Taken,
    Tick,
)
from baton.engine.frontend import FrontendCore
from baton.engine.limits import Limits
from baton.engine.ownership import HomeBoard
from baton.ipc.frames import Address, Failure, Halt, Life, Relay, Role

#: what a client is told
NOT_FOUND = Failure(404, "invalid_request_error", "no such response is kept here", "response_id", "response_not_found")
AHEAD = Failure(400, "invalid_request_error", "the response has not come that far", "starting_after", None)
CROWDED = Failure(429, "rate_limit_error", "too many clients follow this response", None, "overloaded")
LOST = Failure(503, "server_error", "the process that held the request died; ask again", None, "interrupted")
STOPPED = Failure(503, "server_error", "the server is shutting down", None, "shutting_down")

#: how often what has ended is looked through; there may be many thousands of them
_TIDY_NS = 1_000_000_000

_encode = msgspec.msgpack.Encoder().encode
_said: msgspec.msgpack.Decoder[DoorEvent | DoorEffect] = msgspec.msgpack.Decoder(DoorEvent | DoorEffect)


class DeskCore:
    """Invariant: a door is plain (the front knows it), a listener of an answer here, or relayed; never two of these."""

    def __init__(self, me: Address, board: HomeBoard, slots: range, limits: Limits, frontends: int = 1) -> None:
        self.me = me
        self.board = board
        self.limits = limits
        self.frontends = frontends
        self.front = FrontendCore(me, board, slots, limits)
        self.counts = self.front.hands.counts
        self.answers = Answers(limits)
        self.heard: dict[Visitor, Answer] = {}  # who listens to what
        self.relays: dict[int, tuple[int, int]] = {}  # a door here -> index and incarnation of the home elsewhere
        self._told: set[int] = set()  # those of them that have their end
        self._sent = 0
        self._last: dict[int, tuple[int, int]] = {}  # index of a frontend -> its incarnation, what it said last
        self._tidy_ns = 0
        self._doors = -1  # an answer's own door counts down; those of the doors count up

    def start(self, now_ns: int) -> list[Effect]:
        """See ``FrontendCore.start``: whatever a dead predecessor kept is lost with it."""
        return self.front.start(now_ns)

    def handle(self, event: object, now_ns: int) -> list[Effect]:
        """One event in, effects out."""
        out: list[Effect] = []
        match event:
            case Open() | Attach() | Look() | Gone() | Taken() | Answered():
                self._door(event, now_ns, out)
            case Relay():
                self._relayed(event, now_ns, out)
            case _:
                self._front(event, now_ns, out)
                if isinstance(event, Tick | Life):
                    self._look_round(now_ns, out)
                elif isinstance(event, Halt):
                    for door in list(self.relays):
                        self._end_relay(door, msgspec.structs.replace(STOPPED, message=event.reason), out)
        return out

    # -------------------------------------------------------------------------------- where an event belongs

    def _door(self, event: DoorEvent, now_ns: int, out: list[Effect]) -> None:
        """An event of a door of ours: it is for us, or for the home of its answer."""
        home = self.relays.get(event.door)
        if home is None:
            index = self._home(event)
            if index != self.me.index:
                home = self.relays[event.door] = (index, self.board.live(Role.FRONTEND, index))
        if home is None:
            self._visit((self.me.index, self.me.incarnation, event.door), event, now_ns, out)
            return
        self._send(*home, event, out)
        if isinstance(event, Answered) or (isinstance(event, Gone) and not event.wants_end):
            del self.relays[event.door]
            self._told.discard(event.door)

    def _home(self, event: DoorEvent) -> int:
        index = self.me.index
        if isinstance(event, Open) and event.keep is not None and event.keep.key:
            index = home_of(event.terms.tenant, event.keep.key, self.frontends)
        elif isinstance(event, Attach | Look) and event.request_id[0] < self.frontends:
            index = event.request_id[0]
        return index

    def _relayed(self, frame: Relay, now_ns: int, out: list[Effect]) -> None:
        """What another frontend's door, or the home of an answer, says; nothing is heard between other incarnations."""
        sender = frame.sender
        peer = (sender.index, sender.incarnation)
        if frame.receiver != self.me.incarnation or sender.incarnation < self.board.live(*sender.place):
            self.counts["stale_relays"] += 1
            return
        if (sender.incarnation, frame.number) <= self._last.get(sender.index, (0, 0)):
            self.counts["repeated_relays"] += 1
            return
        self._last[sender.index] = (sender.incarnation, frame.number)
        try:
            said = _said.decode(frame.said)
        except (msgspec.DecodeError, RecursionError):
            self.counts["malformed_relays"] += 1
            return
        if isinstance(said, DoorEvent):
            self._visit((*peer, said.door), said, now_ns, out)
        elif self.relays.get(said.door) == peer:
            if isinstance(said, Finish):
                self._told.add(said.door)
            out.append(said)

    def _visit(self, visitor: Visitor, event: DoorEvent, now_ns: int, out: list[Effect]) -> None:
        """An event of a door, wherever that is, about an answer or a plain request of ours."""
        match event:
            case Open(keep=None):
                self._front(event, now_ns, out)
            case Open():
                self._open(visitor, event, now_ns, out)
            case Attach() | Look():
                answer = self.answers.by_id.get(event.request_id)
                if answer is None:
                    self._refuse(visitor, NOT_FOUND, out)
                elif isinstance(event, Look):
                    text = "".join(answer.texts) + (answer.finish.tail if answer.finish is not None else "")
                    began = answer.prompt_ids is not None
                    so_far = (began, text, answer.finish, answer.logprobs, answer.scores)
                    seen = Seen(event.door, answer.request_id, answer.keep.memo, *so_far)
                    self._reply(visitor, seen, out)
                else:
                    answer.lost = max(0, answer.lost - 1)
                    self._attach(visitor, answer, event.after, now_ns, out)
            case _ if visitor in self.heard:
                self._listener(self.heard[visitor], visitor, event, now_ns, out)
            case _ if visitor[:2] == (self.me.index, self.me.incarnation):
                self._front(event, now_ns, out)

    # -------------------------------------------------------------------------------- answers and their listeners

    def _open(self, visitor: Visitor, event: Open, now_ns: int, out: list[Effect]) -> None:
        """A request that is kept: a new answer, or the one that its key names."""
        keep, tenant = event.keep, event.terms.tenant
        assert keep is not None
        known = self.answers.by_key.get((tenant, keep.key)) if keep.key else None
        if known is not None:
            different = differences(known.keep.digests, keep.digests)
            if different:
                message = f"the idempotency key was used for another request: {', '.join(different)} differs"
                conflict = Failure(409, "invalid_request_error", message, "idempotency_key", "idempotency_conflict")
                self._refuse(visitor, conflict, out)
                return
            known.resumable = known.resumable or keep.resumable
            self._attach(visitor, known, 0, now_ns, out)
            return
        self._doors -= 1
        answer = Answer(self._doors, event.request_id, tenant, keep, keep.resumable)
        self.answers.add(answer)
        self._attach(visitor, answer, 0, now_ns, out)
        self._front(msgspec.structs.replace(event, door=answer.door, keep=None), now_ns, out)

    def _attach(self, visitor: Visitor, answer: Answer, after: int, now_ns: int, out: list[Effect]) -> None:
        """One more listener, from output token ``after`` on."""
        if len(answer.listeners) >= self.limits.listeners_per_answer_max:
            self._refuse(visitor, CROWDED, out)
            return
        if after > len(answer.token_ids):
            if answer.finish is None:
                self._refuse(visitor, AHEAD, out)
                return
            after = len(answer.token_ids)
        if not answer.listeners:
            self.front.attend(answer.door, True, now_ns)
        answer.listeners[visitor] = listener = Listener(visitor, after, after, now_ns)
        self.heard[visitor] = answer
        before = ("".join(answer.texts[:after]), answer.logprobs[:after], answer.scores[:after])
        self._reply(visitor, Named(visitor[2], answer.request_id, answer.keep.memo, after, *before), out)
        if answer.prompt_ids is not None:
            self._reply(visitor, Begin(visitor[2], answer.prompt_ids), out)
        self._took(answer, after, now_ns, out)
        self._pump(answer, listener, out)

    def _listener(self, answer: Answer, visitor: Visitor, event: DoorEvent, now_ns: int, out: list[Effect]) -> None:
        """What a listener says: how far it is, that it has everything, that it wants no more, or that it is gone."""
        listener = answer.listeners[visitor]
        match event:
            case Taken(position=position):
                if listener.taken < position <= listener.sent:
                    listener.taken, listener.progress_ns = position, now_ns
                    self._took(answer, position, now_ns, out)
                    self._pump(answer, listener, out)
            case Gone(wants_end=True):
                alone = len(answer.listeners) == 1 and not self.answers.awaited(answer, now_ns)
                if answer.finish is None and alone:
                    self.answers.forget_key(answer)
                    self._front(Gone(answer.door, event.reason, True), now_ns, out)
                elif not listener.told:  # the others want it still
                    listener.told = True
                    self._reply(visitor, answer.end(listener, "cancelled"), out)
            case Answered() | Gone():
                del answer.listeners[visitor], self.heard[visitor]
                if isinstance(event, Gone) and event.reason == "disconnected":
                    answer.lost, answer.lost_ns = answer.lost + 1, now_ns
                if answer.finish is not None:
                    error = event.error if isinstance(event, Answered) else event.reason
                    self._front(Answered(answer.door, error), now_ns, out)
                if not answer.listeners:
                    self._deserted(answer, event, now_ns, out)

    def _deserted(self, answer: Answer, event: Answered | Gone, now_ns: int, out: list[Effect]) -> None:
        """Nobody listens any more: the answer waits, or nobody will ever want it."""
        answer.idle_ns = now_ns
        reason = event.reason if isinstance(event, Gone) else "disconnected"
        if answer.finish is None:
            if answer.resumable and (reason == "disconnected" or self.answers.awaited(answer, now_ns)):
                self.front.attend(answer.door, False, now_ns)
            else:
                self._abandon(answer, reason, now_ns, out)
        elif self.answers.overdue(answer, now_ns):
            self.answers.drop(answer)

    def _abandon(self, answer: Answer, reason: str, now_ns: int, out: list[Effect]) -> None:
        self.answers.drop(answer)
        self._front(Gone(answer.door, reason, False), now_ns, out)

    def _took(self, answer: Answer, position: int, now_ns: int, out: list[Effect]) -> None:
        """The fastest listener is the one that credit follows; the others read from the log."""
        if position > answer.taken:
            answer.taken = position
            self._front(Taken(answer.door, position), now_ns, out)

    def _pump(self, answer: Answer, listener: Listener, out: list[Effect]) -> None:
        for effect in answer.due(listener, self.limits.mailbox_tokens_max):
            self._reply(listener.visitor, effect, out)

    # -------------------------------------------------------------------------------- the front's effects

    def _front(self, event: object, now_ns: int, out: list[Effect]) -> None:
        """Let the frontend's core handle an event; what it says to an answer's door is for those who listen."""
        effects = self.front.handle(event, now_ns)
        if not self.answers.running:  # mostly nobody is to hear twice
            out += effects
            return
        for effect in effects:
            answer = self.answers.running.get(effect.door) if isinstance(effect, Begin | Deliver | Finish) else None
            if answer is None:
                out.append(effect)
            else:
                self._said(answer, effect, now_ns, out)

    def _said(self, answer: Answer, effect: Effect, now_ns: int, out: list[Effect]) -> None:
        match effect:
            case Begin():
                answer.prompt_ids = effect.prompt_ids
                for visitor, listener in answer.listeners.items():
                    if not listener.told:
                        self._reply(visitor, Begin(visitor[2], effect.prompt_ids), out)
            case Deliver():
                answer.add(effect, now_ns)
            case Finish():
                self.answers.end(answer, effect, now_ns)
        for listener in list(answer.listeners.values()):
            self._pump(answer, listener, out)
        if answer.finish is not None and not answer.listeners:
            self._front(Answered(answer.door), now_ns, out)

    # -------------------------------------------------------------------------------- time and death

    def _look_round(self, now_ns: int, out: list[Effect]) -> None:
        """End what nobody came back for, who stopped reading, and what was shared with a frontend that died."""
        for door, (index, incarnation) in list(self.relays.items()):
            if incarnation < self.board.live(Role.FRONTEND, index):
                self._end_relay(door, LOST, out)
        for visitor, answer in list(self.heard.items()):
            index, incarnation, door = visitor
            if incarnation < self.board.live(Role.FRONTEND, index):
                self._listener(answer, visitor, Gone(door, "disconnected", False), now_ns, out)
            else:
                self._check_pace(answer, answer.listeners[visitor], now_ns, out)
        for answer in list(self.answers.running.values()):
            if self.answers.overdue(answer, now_ns):
                self._abandon(answer, "disconnected", now_ns, out)
        if now_ns >= self._tidy_ns:
            self._tidy_ns = now_ns + _TIDY_NS
            for answer in list(self.answers.ended.values()):
                if self.answers.overdue(answer, now_ns):
                    self.answers.drop(answer)

    def _check_pace(self, answer: Answer, listener: Listener, now_ns: int, out: list[Effect]) -> None:
        """One that stopped reading hears so, unless the front sees to it: it is the only one, and the request runs."""
        alone = len(answer.listeners) == 1 and answer.finish is None
        stalled = listener.taken < listener.sent and now_ns - listener.progress_ns > self.limits.stalled_s_max * 1e9
        if stalled and not alone and not listener.told:
            listener.told = True
            self._reply(listener.visitor, answer.end(listener, "slow_consumer"), out)

    def _end_relay(self, door: int, failure: Failure, out: list[Effect]) -> None:
        """The other end is gone; a door has one end only."""
        del self.relays[door]
        if door in self._told:
            self._told.remove(door)
        else:
            out.append(Finish(door, "error", None, "", 0, 0, failure))

    def _refuse(self, visitor: Visitor, failure: Failure, out: list[Effect]) -> None:
        self._reply(visitor, Finish(visitor[2], "refused", None, "", 0, 0, failure), out)

    def _reply(self, visitor: Visitor, effect: DoorEffect, out: list[Effect]) -> None:
        index, incarnation, _ = visitor
        if (index, incarnation) == (self.me.index, self.me.incarnation):
            out.append(effect)
        else:
            self._send(index, incarnation, effect, out)

    def _send(self, index: int, incarnation: int, said: DoorEvent | DoorEffect, out: list[Effect]) -> None:
        self._sent += 1
        out.append(Send(Role.FRONTEND, index, Relay(self.me, incarnation, self._sent, _encode(said))))

    def story(self) -> str:
        """Every request and every kept answer, a line each, for dumps."""
        kept = (
            f"answer {answer.request_id.hex()}: {len(answer.token_ids)} tokens, taken {answer.taken}, "
            f"listeners {list(answer.listeners.values())}, finish {answer.finish}\n"
            for answer in [*self.answers.running.values(), *self.answers.ended.values()]
        )
        return self.front.story() + "".join(kept)
