"""What must be true of every history; judged from outside, from the script's own answers.

Owners, deliveries, ends, accounts, spans, blocks and left-overs. Whatever is wrong raises ``Broken``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from baton.engine.batch import StepRow
from baton.engine.desk import DeskCore
from baton.engine.detokenizer import DetokenizerCore
from baton.engine.effects import Account, Deliver, Finish, Named, Plan, Span, StepDone
from baton.engine.limits import Limits
from baton.engine.ownership import Held
from baton.engine.scheduler import SchedulerCore
from baton.engine.states import STATES
from baton.engine.stream import Stream
from baton.engine.tokenizer import TokenizerCore
from baton.ipc.board import RowView
from baton.ipc.frames import Cancel, Handed, Life, Role, Submit, Text
from baton.ipc.ring import CURSORS, WRITTEN
from tests.sim.script import PIECES, VOCAB, prompt_scores, whole

if TYPE_CHECKING:
    from tests.sim.clients import Client
    from tests.sim.processes import Process
    from tests.sim.world import World

OWNERS_EVERY_EVENTS = 6
DEFAULT = Limits()
CANCELS = ("cancelled", "deadline_exceeded", "slow_consumer")


#: ends that are no answer: whoever repeats the key begins anew, though others may not have heard of the end yet
BAD = ("error", "refused")


class Broken(Exception):
    """An oracle objects."""


class Oracles:
    """The judges of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.accounts: dict[bytes, Account] = {}
        self.spans: defaultdict[bytes, list[Span]] = defaultdict(list)
        self.roots: defaultdict[bytes, int] = defaultdict(int)
        self.steps = 0
        self.passed: Counter[int] = Counter()  # how often in a row a worker passed a slot over, as ended

    def check(self, good: bool, what: str) -> None:
        """Object unless ``good``."""
        if not good:
            raise Broken(what)

    # -------------------------------------------------------------------------------- while it runs

    def after(self, process: Process) -> None:
        """One owner: every record any live process holds is the one the board names."""
        if isinstance(process.core, SchedulerCore):
            self._busy(process.core)
            self._counted(process.core)
            self._placed(process.core)
        if self.world.events % OWNERS_EVERY_EVENTS:
            return
        for shown in self.world.board.rows():
            self._shown(shown)
        for place, other in self.world.live.items():
            if place[0] != Role.WORKER:
                for held in _held(other.core):
                    row = self.world.board.row(held.slot)
                    named = (row.generation, row.epoch, row.role, row.index, row.incarnation, row.taken)
                    mine = (held.generation, held.epoch, *place, other.incarnation, True)
                    self.check(named == mine, f"{place} holds slot {held.slot} as {mine}, the board says {named}")

    def before(self, process: Process, event: object) -> list[tuple[Stream, int]] | None:
        """What a frontend has of the requests for which text of an earlier life comes; ``heard`` looks again.

        None where the event says nothing of a cancel: it hands over what its receiver holds already.
        """
        if isinstance(event, Handed | Submit) and _running(process.core, event.key.slot):
            return None
        if not isinstance(event, Text):
            return []
        streams = [(process.core.front.streams.get(piece.slot), piece) for piece in event.pieces]
        named = [(stream, piece) for stream, piece in streams if stream and stream.generation == piece.generation]
        return [(stream, len(stream.delivered)) for stream, piece in named if piece.run <= stream.submitted]

    def heard(self, process: Process, event: object, told: list[tuple[Stream, int]] | None) -> None:
        """After an event: text of an earlier life gave nothing, and what was to be read was read: the cancel word by
        who takes a request or is nudged, the ring by the detokenizer that hears of a worker's end.
        """
        if isinstance(event, Life) and event.role == Role.WORKER and isinstance(process.core, DetokenizerCore):
            words = self.world.tokens.words
            self.check(words[CURSORS + 1] == words[WRITTEN], "a worker died, and its last tokens are not read")
        if told is None or not isinstance(event, Text | Handed | Submit | Cancel):
            return
        for stream, known in told:
            self.check(len(stream.delivered) == known, f"slot {stream.slot} gets text of a life that is over")
        if isinstance(event, Text):
            return
        about = event if isinstance(event, Cancel) else event.key
        for held in _running(process.core, about.slot):
            deaf = held.generation == about.generation and self.world.board.cancelled(held.slot, held.generation)
            self.check(not deaf, f"{process.place} goes on with slot {held.slot}, which was cancelled")

    def _busy(self, core: SchedulerCore) -> None:
        """While a worker is there, a request with room at its client is in a step, or another one is."""
        if not core.flights and core.batcher.pool is not None:
            now = self.world.now
            able = [seq.held.slot for seq in core.sequences.values() if core.batcher.may_run(seq, now)]
            self.check(not able, f"slots {able} could run and nothing does")

    def _shown(self, row: RowView) -> None:
        """What the board shows as sampled is never more than the true answer has."""
        client = self.world.clients[int.from_bytes(row.request_id[1:], "big")]
        most = len(client.answer.ids) if not client.wish.params.stop else row.sampled
        self.check(row.sampled <= most, f"{client}: {row.sampled} tokens are shown, the true answer has {most}")

    def _counted(self, core: SchedulerCore) -> None:
        """What the scheduler counts is the true answer, and nothing past its end unless only the text ends there."""
        for seq in core.sequences.values():
            request_id, _ = self.world.board.identity(seq.held.slot)
            client = self.world.clients[int.from_bytes(request_id[1:], "big")]
            truth, known = client.answer.ids, len(seq.output)
            if client.wish.params.stop:
                known = min(known, len(truth))
            self.check(seq.output[:known] == truth[:known], f"{client}: {seq.output} is counted, the truth is {truth}")

    def _placed(self, core: SchedulerCore) -> None:
        """A request's tokens are in one place, and each block of the host is free or one waiting request's."""
        pool, held = core.batcher.pool, [seq for seq in core.sequences.values() if seq.host_blocks]
        swapped = [block for seq in held for block in seq.host_blocks]
        both = [seq.held.slot for seq in held if seq.blocks or seq in core.batcher.running]
        self.check(not both, f"slots {both} run, and have blocks on the host")
        self.check(len(set(swapped)) == len(swapped), f"host blocks {swapped} have two holders")
        taken = pool.host.total - pool.host.free if pool is not None else 0
        self.check(len(swapped) == taken, f"{taken} host blocks are taken, {len(swapped)} are somebody's")

    def step(self, worker: int, plan: Plan, rows: list[StepRow]) -> None:
        """A step in flight: made for this worker; none of its blocks may be free or somebody else's meanwhile."""
        self.steps += 1
        self.check(plan.incarnations[0] == worker, f"worker #{worker} runs what was planned for {plan.incarnations}")
        computed = {row.slot for row in rows}
        for named in plan.rows:
            self.passed[named.slot] = 0 if named.slot in computed else self.passed[named.slot] + 1
            ahead = self.passed[named.slot] < self.world.shape.limits.steps_in_flight_max
            self.check(ahead, f"slot {named.slot} ended, and is planned again and again")
        table = {block for row in rows for block in row.blocks}
        holders = Counter(block for row in rows for block in row.blocks)
        size = self.world.shape.block_tokens
        for row in rows:
            written = row.blocks[row.start // size : -(-(row.start + len(row.tokens)) // size)]
            shared = [block for block in written if holders[block] > 1]
            self.check(not shared, f"blocks {shared} are written by slot {row.slot}, and others have them")
        scheduler = self.world.live.get((Role.SCHEDULER, 0))
        core: SchedulerCore | None = scheduler.core if scheduler is not None else None  # type: ignore[assignment]
        if core is not None and any(flight.step == plan.step for flight in core.flights.under_way):
            pool = core.batcher.pool
            assert pool is not None
            self.check(all(pool._held[block] for block in table), "a block was freed while a step names it")

    def sampled(self, done: StepDone) -> None:
        """A token that its client has is never sampled again."""
        board = self.world.board
        for record in done.records:
            if board.row(record.slot).generation == record.generation:
                request_id, _ = board.identity(record.slot)
                client = self.world.clients[int.from_bytes(request_id[1:], "big")]
                known = len(client.ids)
                self.check(record.position >= known, f"{client} has {known} tokens, {record} comes again")

    def named(self, client: Client, named: Named) -> None:
        """A kept request is told which answer it gets, and goes on exactly where its client is."""
        self.check(client.wish.kept, f"{client} is named and was not to be kept")
        before = client.named
        self.check(before is None or before.request_id == named.request_id, f"{client} gets the answer of another")
        owner = self.world.clients[int.from_bytes(named.request_id[1:], "big")]
        self.check(owner is client or owner.wish.key == client.wish.key, f"{client} gets the answer of {owner}")
        for other in self.world.clients if client.wish.key and not client.cancelled else ():
            same = other.wish.key == client.wish.key and other.named is not None and not other.cancelled
            if same and other.state == "open" and other.home == client.home and self.world.deaths == 0:
                ids = {named.request_id, other.named.request_id} if other.named is not None else {named.request_id}
                live = {row.request_id for row in self.world.board.rows()}
                void = any(id_ not in live and self._ending_of(id_) in BAD for id_ in ids)
                once = len(ids) == 1 or client.answer.reason in BAD or void
                self.check(once, f"{client} and {other} have one key and two requests")
        self.check(named.position == len(client.ids), f"{client} has {len(client.ids)} tokens, {named} comes")
        self.check(named.text == "".join(client.texts), f"{client} has {client.texts}, {named} comes")

    def _ending_of(self, request_id: bytes) -> str:
        """How a request that is over ended; one without an account was refused by its home, which had no row for it."""
        return self.accounts[request_id].reason if request_id in self.accounts else "refused"

    def delivered(self, client: Client, effect: Deliver) -> None:
        """What was delivered so far is the beginning of the true answer."""
        known = len(client.ids)
        answer = client.answer
        self.check(client.ids == answer.ids[:known], f"{client} got {client.ids}, the truth is {answer.ids}")
        self.check(len(effect.token_ids) == len(effect.texts), f"{client}: one text a token")
        self.check(answer.text.startswith("".join(client.texts)), f"{client} got {client.texts} of {answer.text!r}")
        shape = self.world.shape  # a step that begins within the window may end past it
        window = shape.limits.mailbox_tokens_max + shape.tokens_per_row_max - 1
        self.check(
            client.state != "open" or known - client.taken <= window, f"{client} has {known - client.taken} unread"
        )
        wanted = len(effect.token_ids) if client.wish.params.logprobs else 0
        self.check(len(effect.logprobs) == wanted, f"{client} got {len(effect.logprobs)} of {wanted} logprobs")
        self.check(len(effect.scores) == wanted, f"{client} got {len(effect.scores)} of {wanted} scores")
        for token, logprob, scored in zip(effect.token_ids, effect.logprobs, effect.scores, strict=False):
            top = [(other.token, other.logprob, other.piece) for other in scored.top]
            rivals = [(token + rank) % VOCAB for rank in range(client.wish.params.top_logprobs)]
            true = [(rival, logprob - rank, PIECES[rival]) for rank, rival in enumerate(rivals)]
            self.check((scored.piece, top) == (PIECES[token], true), f"{client} got {scored} with {token}")

    def finished(self, client: Client, finish: Finish) -> None:
        """The end is true: reason, stop string, text and numbers."""
        answer, reason = client.answer, finish.reason
        text = "".join(client.texts) + finish.tail
        told = f"{client} ended with {finish}, the truth is {answer}"
        if client.wish.kept and self._lost(client, finish):
            return
        self.check(finish.completion_tokens == len(client.ids), f"{told}: {len(client.ids)} tokens came")
        self._told_of_prompt(client, finish)
        if finish.failure is not None and finish.failure.code == "queue_full":
            few = self.world.shape.limits.queue_tokens_max < DEFAULT.queue_tokens_max
            self.check(reason == "refused" and few and client.began is None, f"{told}: it may not be sent away")
            return
        full = answer.reason != "refused" if client.wish.kept else not client.room
        if reason == "refused" and full:
            self.check(finish.failure is not None and finish.failure.status == 429, told)
            return
        if reason in CANCELS:
            self._cancelled(client, finish)
            skip = client.wish.params.skip_special_tokens
            self.check(text in (answer.text, whole(client.ids, skip)) or answer.text.startswith(text), told)
        else:
            self.check(reason == answer.reason and finish.stop_reason == answer.stop_reason, told)
            self.check(client.ids == answer.ids and text == answer.text, f"{told}, the text {text!r}")
        if reason == "refused" or (reason in CANCELS and client.began is None):
            self.check(finish.prompt_tokens in (0, len(client.wish.prompt_ids)), told)
        else:
            self.check(finish.prompt_tokens == len(client.wish.prompt_ids), told)
        self.check((finish.failure is not None) == (reason in ("refused", "error")), told)

    def _told_of_prompt(self, client: Client, finish: Finish) -> None:
        """What was told of the prompt is true, each token once; all of it where there was an output token."""
        truth, told = prompt_scores(client.wish), finish.prompt_scores
        alone = client.wish.kept and finish.reason in CANCELS  # its answer goes on for others, perhaps
        complete = finish.completion_tokens and not alone
        right = told == truth if complete else told == truth[: len(told)]
        self.check(right, f"{client} was told {told} of its prompt, the truth is {truth}")

    def _lost(self, client: Client, finish: Finish) -> bool:
        """Whether this end is that of an answer whose home died, or that was not waited for any longer."""
        code = finish.failure.code if finish.failure is not None else None
        if code == "response_not_found":
            late = client.away_ns / 1e9 > 0.9 * self.world.shape.limits.resume_s_max
            self.check(late or self.world.deaths > 0, f"{client} is back, nothing is kept")
        elif code == "interrupted":
            self.check(self.world.deaths > 0, f"{client} hears of a death, nobody died")
        return code in ("response_not_found", "interrupted")

    def _cancelled(self, client: Client, finish: Finish) -> None:
        allowed = {client.cancelled}
        if client.wish.kept:
            others = [other for other in self.world.clients if other.named and other.owner is client.owner]
            allowed |= {other.cancelled for other in others}
            allowed |= {"slow_consumer" for other in others if other.wish.reads != "fast"}
        if client.deadline_ns and self.world.now >= client.deadline_ns:
            allowed.add("deadline_exceeded")
        if client.wish.reads != "fast":
            allowed.add("slow_consumer")
        self.check(finish.reason in allowed, f"{client} ended as {finish.reason}, nobody asked for it")

    def span(self, span: Span) -> None:
        """Collect a finished span."""
        self.check(span.start_ns <= span.end_ns, f"a span runs backwards: {span}")
        if span.server:
            self.check(span.span_id is not None, "the root has the id that was promised")
            self.roots[(span.span_id or b"")[:16]] += 1
        elif span.name in STATES:
            self.spans[span.trace[:16]].append(span)

    def account(self, account: Account) -> None:
        """One account a request, and the numbers its client saw."""
        self.check(account.request_id not in self.accounts, f"a second account: {account}")
        self.accounts[account.request_id] = account
        client = self.world.clients[int.from_bytes(account.request_id[1:], "big")]
        if client.finish is not None and not client.wish.kept:
            seen = (client.finish.reason, client.finish.prompt_tokens, client.finish.completion_tokens)
            billed = (account.reason, account.prompt_tokens, account.completion_tokens)
            self.check(seen == billed, f"{client} saw {seen}, billed are {billed}")

    # -------------------------------------------------------------------------------- at the end

    def unfinished(self) -> str:
        """Who still waits for something; empty when all is over."""
        world = self.world
        waiting = [f"{c} is {c.state}" for c in world.clients if c.state in ("waiting", "open", "away")]
        rows = [f"{row.slot}: {row.row}" for row in world.board.rows()]
        down = [str(place) for place in world.places if place not in world.live]
        return "; ".join(waiting + rows + down)

    def at_the_end(self) -> None:
        """Nothing is left, and every story is whole."""
        world = self.world
        for place, process in world.live.items():
            if place[0] != Role.WORKER:
                left = _held(process.core)
                self.check(not left, f"{place} still holds {left}")
                self._empty(process.core)
        for client in world.clients:
            if client.state in ("ended", "gone"):
                self._told(client)

    def _empty(self, core: Any) -> None:
        match core:
            case DeskCore():
                front, answers = core.front, core.answers
                self.check(not front.streams and not front.doors, f"streams are left: {front.streams}")
                self.check(sorted(front.free) == list(front.slots), f"free slots are {front.free}")
                self.check(not core.heard, f"listeners are left: {core.heard}")
                self.check(not core.relays, f"relays are left: {core.relays}")
                self.check(not answers.running, f"answers still run: {answers.running}")
                self.check(answers.bytes == sum(answer.bytes for answer in answers.ended.values()), "bytes are off")
            case TokenizerCore():
                self.check(not core.pending, "requests are left with the tokenizer")
            case SchedulerCore():
                batcher = core.batcher
                self.check(not core.sequences and not core.ended, "sequences are left")
                self.check(not batcher.running and not batcher.waiting, "the batcher holds on to sequences")
                pool = batcher.pool
                self.check(pool is None or pool.available == pool.total, "blocks are lost")
                self.check(not core.flights or core.batcher.pool is None, "a step never landed")
            case DetokenizerCore():
                self.check(not core.flushing, "requests are left with the detokenizer")
                lone = self.world.deaths == 0 and not self.world.shape.repeats
                self.check(not lone or not (core.leases or core.early), "leases are left though nobody died")

    def _told(self, client: Client) -> None:
        """One account, one root, and state spans that follow each other without a hole (a death may tear one)."""
        alive = self.world.deaths == 0
        if not client.room or (client.wish.kept and client.named is None):
            return
        client = client.owner if client.wish.kept else client
        failure = client.finish.failure if client.finish is not None else None
        if failure is not None and failure.code == "overloaded":
            return  # its home frontend had no row for it
        if alive or client.request_id in self.accounts:
            self.check(client.request_id in self.accounts, f"{client} has no account")
            self.check(self.roots[client.trace[:16]] == 1, f"{client} has {self.roots[client.trace[:16]]} roots")
        spans = sorted(self.spans[client.trace[:16]], key=lambda span: (span.start_ns, span.end_ns))
        for before, after in pairwise(spans):
            gap = after.start_ns - before.end_ns
            self.check(gap == 0 if alive else gap >= 0, f"{client}: {before} and then {after}")


def _running(core: Any, slot: int) -> list[Held]:
    """The request of a slot, where a core holds it and has not decided that it ends."""
    match core:
        case TokenizerCore():
            return [core.pending[slot][0]] if slot in core.pending else []
        case SchedulerCore():
            seq = core.sequences.get(slot)
            return [seq.held] if seq is not None and seq.end is None else []
    return []


def _held(core: Any) -> list[Any]:
    """The requests a core holds."""
    match core:
        case DeskCore():
            return [stream.held for stream in core.front.streams.values() if stream.held is not None]
        case TokenizerCore():
            return [held for held, _ in core.pending.values()]
        case SchedulerCore():
            return [seq.held for seq in core.sequences.values()]
        case DetokenizerCore():
            return [held for held, _ in core.flushing.values()]
    raise AssertionError(core)
