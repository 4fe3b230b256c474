"""The frontend's lease on one request, and the account it closes with."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.engine.effects import Account, Finish, Open, Span
from baton.engine.ownership import Held
from baton.ipc.frames import Piece


@dataclass(slots=True)
class Stream:
    """The frontend's lease on one request. ``door`` is None once nobody listens; an orphan's opener is dead.

    While its clients are ``absent`` it is paused at the end of its credit, and nobody is called slow.
    """

    slot: int
    generation: int
    door: int | None
    opened: Open | None
    trace: bytes
    held: Held | None = None
    orphan: bool = False
    submitted: int = 0
    run: int = 0
    prompt_ids: list[int] | None = None
    delivered: list[int] = field(default_factory=list)
    early: list[Piece] = field(default_factory=list)
    began: bool = False
    granted: int = 0
    taken: int = 0
    progress_ns: int = 0
    first_token_ns: int = 0
    cancel_reason: str | None = None
    cancelled_ns: int = 0
    release_ns: int | None = None
    recalled: int = -1
    lives: int = 1
    finish: Finish | None = None
    absent: bool = False


def accounts(stream: Stream, opened: Open, finish: Finish, now_ns: int) -> tuple[Span, Account]:
    """The request's root span and its account: the one place from which bill, log, metrics and trace take numbers."""
    failure = finish.failure
    attributes = {
        **opened.attributes,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": opened.terms.model,
        "gen_ai.response.id": opened.request_id.hex(),
        "gen_ai.response.finish_reasons": finish.reason,
        "gen_ai.usage.input_tokens": finish.prompt_tokens,
        "gen_ai.usage.output_tokens": finish.completion_tokens,
        "baton.lives": stream.lives,
    }
    name = str(opened.attributes.get("gen_ai.operation.name", "request"))
    error = failure.message if failure is not None else None
    span = Span(
        name, opened.parent or b"", opened.received_ns, now_ns, attributes, error, span_id=stream.trace, server=True
    )
    account = Account(
        opened.request_id,
        stream.trace,
        opened.terms.model,
        opened.terms.tenant,
        finish.reason,
        finish.prompt_tokens,
        finish.completion_tokens,
        opened.received_ns,
        stream.first_token_ns,
        now_ns,
        stream.lives,
        failure.status if failure is not None else 200,
        stream.release_ns,
    )
    return span, account
