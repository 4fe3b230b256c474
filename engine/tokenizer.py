"""The tokenizer's core: takes a submitted request, has its prompt encoded, checks it against the context, hands it on.

Rendering and encoding are the shell's (effect ``Encode``, event ``Encoded``). It never sees text it could decide by.
"""

from __future__ import annotations

import msgspec

from baton.engine.effects import Effect, Encode, Encoded, Send
from baton.engine.limits import Limits
from baton.engine.ownership import Board, Held, Ownership
from baton.ipc.frames import (
    Address,
    Cancel,
    CancelAck,
    Closed,
    Failure,
    Halt,
    Handed,
    Life,
    Prompt,
    Recall,
    Returned,
    Role,
    Submit,
)


class TokenizerCore:
    """Invariant: every request taken leaves by exactly one hand-over, to the scheduler or home."""

    def __init__(
        self, me: Address, board: Board, context_tokens_max: int, token_bytes_max: int, limits: Limits
    ) -> None:
        """``token_bytes_max`` is the length of the longest token: no text has fewer tokens than its bytes over that."""
        self.me = me
        self.context_tokens_max = context_tokens_max
        self.token_bytes_max = token_bytes_max
        self.limits = limits
        self.hands = Ownership(board, me, limits.request_spans_max)
        self.pending: dict[int, tuple[Held, Submit]] = {}

    def start(self, now_ns: int) -> list[Effect]:
        """A tokenizer begins empty."""
        return []

    def handle(self, event: object, now_ns: int) -> list[Effect]:
        """One event in, effects out."""
        out: list[Effect] = []
        match event:
            case Submit():
                self._submit(event, now_ns, out)
            case Encoded():
                entry = self.pending.get(event.slot)
                if entry is not None and entry[0].generation == event.generation:
                    del self.pending[event.slot]
                    self._encoded(*entry, event, now_ns, out)
            case Cancel():
                out.append(Send(Role.FRONTEND, event.home, CancelAck(event.slot, event.generation)))
                entry = self.pending.get(event.slot)
                if entry is not None and entry[0].generation == event.generation:
                    del self.pending[event.slot]
                    self._end(*entry, "cancelled", None, now_ns, out)
            case Recall():
                key = self.hands.recall(event.key, event.trace, event.home, now_ns, out)
                if key is not None:
                    out.append(Send(Role.FRONTEND, event.home, Returned(key, event.trace)))
            case Life() | Halt():
                pass
            case _:
                raise AssertionError(f"no such event for a tokenizer: {event!r}")
        return out

    def _submit(self, event: Submit, now_ns: int, out: list[Effect]) -> None:
        held = self.hands.take(event.key, event.trace)
        if held is None:
            return
        if self.hands.cancelled(held):
            self._end(held, event, "cancelled", None, now_ns, out)
        elif event.prompt.token_ids is not None and not event.params.bad_words:
            encoded = Encoded(held.slot, held.generation, event.prompt.token_ids, None)
            self._encoded(held, event, encoded, now_ns, out)
        elif (least := -(-prompt_bytes(event.prompt) // self.token_bytes_max)) >= self.context_tokens_max:
            limit = self.context_tokens_max  # nothing so large is worth encoding
            message = f"the prompt has at least {least} tokens, the context of this model has {limit}"
            code = "context_length_exceeded"
            failure = Failure(400, "invalid_request_error", message, _field(event.prompt), code)
            self._end(held, event, "refused", failure, now_ns, out)
        else:
            self.pending[held.slot] = (held, event)
            out.append(Encode(held.slot, held.generation, event.prompt, event.params.bad_words))

    def _encoded(self, held: Held, submit: Submit, event: Encoded, now_ns: int, out: list[Effect]) -> None:
        if self.hands.cancelled(held):
            self._end(held, submit, "cancelled", None, now_ns, out)
            return
        tokens, asked = len(event.token_ids), submit.params.max_tokens
        failure = event.failure or self._too_long(tokens, asked, _field(submit.prompt)) or self._too_bad(event.bad_ids)
        failure = failure or self._too_much(tokens, submit.params.prompt_logprobs)
        if failure is not None:
            self._end(held, submit, "refused", failure, now_ns, out)
            return
        key = self.hands.give(held, Role.SCHEDULER, 0, "queued", now_ns, out)
        prompt_ids, delivered, params = event.token_ids, submit.delivered, submit.params
        if event.bad_ids:
            params = msgspec.structs.replace(params, bad_ids=event.bad_ids)
        what = (submit.terms, params, prompt_ids, delivered, submit.credit, submit.begun)
        handed = Handed(key, submit.home, submit.trace, *what)
        out.append(Send(Role.SCHEDULER, 0, handed))

    def _too_long(self, tokens: int, asked: int | None, field: str) -> Failure | None:
        limit = self.context_tokens_max
        if tokens == 0:
            return Failure(400, "invalid_request_error", "the prompt has no tokens", field, "empty_prompt")
        if tokens >= limit:
            message = f"the prompt has {tokens} tokens, the context of this model has {limit} and the answer needs one"
        elif asked is not None and tokens + asked > limit:
            total = tokens + asked
            message = (
                f"{tokens} prompt tokens and max_tokens {asked} make {total}, the context of this model has {limit}"
            )
        else:
            return None
        return Failure(400, "invalid_request_error", message, field, "context_length_exceeded")

    def _too_bad(self, bad_ids: tuple[tuple[int, ...], ...]) -> Failure | None:
        count, limit = sum(map(len, bad_ids)), self.limits.bad_words_tokens_max
        if count <= limit:
            return None
        message = f"the bad_words have {count} tokens, with and without a leading space, the limit is {limit}"
        return Failure(400, "invalid_request_error", message, "bad_words")

    def _too_much(self, tokens: int, top: int | None) -> Failure | None:
        """All log-probabilities of one prompt must fit where they are kept until its answer ends."""
        count, limit = (tokens - 1) * (1 + (top or 0)), self.limits.scores_per_request_max
        if top is None or count <= limit:
            return None
        message = f"prompt_logprobs {top} for {tokens} prompt tokens are {count} values, the limit is {limit}"
        return Failure(400, "invalid_request_error", message, "prompt_logprobs")

    def _end(
        self, held: Held, submit: Submit, reason: str, failure: Failure | None, now_ns: int, out: list[Effect]
    ) -> None:
        home = submit.home.index
        key = self.hands.give(held, Role.FRONTEND, home, "closed", now_ns, out)
        closed = Closed(key, submit.trace, len(submit.delivered), reason, None, "", failure)
        out.append(Send(Role.FRONTEND, home, closed))

    def story(self) -> str:
        """Every request whose prompt is being encoded, a line each, for dumps."""
        return "".join(f"slot {slot}: {held}\n" for slot, (held, _) in self.pending.items())


def _field(prompt: Prompt) -> str:
    """What the client calls its prompt."""
    return "messages" if prompt.messages is not None else "prompt"


def prompt_bytes(prompt: Prompt) -> int:
    """Bytes of a prompt's text; what a template adds does not count."""
    if prompt.messages is None:
        return len((prompt.text or "").encode())
    contents = (message.get("content") for message in prompt.messages)
    return sum(len(content.encode()) for content in contents if isinstance(content, str))
